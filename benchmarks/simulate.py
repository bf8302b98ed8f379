"""The control of depth without a model or a clock: `python -m benchmarks.simulate`.

A stream says at each position of a text how many drafted tokens would be right, and what evidence the drafter has for each; a cost
curve says what a forward of each width takes, and what a drafted token takes. Each policy runs through both; the table gives its speed
over plain decoding. Deterministic. The curves are measured ones (two-core CPUs; see `README.md`), and a flat one as on an idle GPU.
Streams: stationary, changing, and cut from recordings of real drafts (`benchmarks.record`).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer

from assistgen import weights
from assistgen.control import DepthController, ForwardCosts, ShadowedDraft
from assistgen.drafters.base import Draft, Drafter, chance_of
from assistgen.drafters.ngram import NGramDrafter
from assistgen.drafters.suffix import SuffixDrafter

from .record import RECORDINGS
from .replay import Request
from .replay import recorded as answered


LIMIT = 15
CURVES: dict[str, dict[int, float]] = {  # width -> milliseconds of a target forward
    "1.5B bfloat16, AVX-512": {1: 264, 2: 216, 3: 241, 5: 246, 8: 267, 9: 276, 12: 303, 16: 340},
    "1.5B bfloat16, AMX": {1: 170, 2: 183, 3: 180, 4: 168, 5: 193, 8: 198, 12: 200, 16: 205},
    "135M float32, AVX-512": {1: 65, 2: 101, 3: 121, 5: 85, 9: 93, 16: 105},
    "1.5B bfloat16, AVX2, our products": {1: 277, 2: 301, 4: 308, 8: 377, 12: 528, 16: 773},
    "1.5B float32, AVX2, our products": {1: 468, 2: 650, 4: 579, 8: 817, 12: 975, 16: 1147},
    "1.5B bfloat16, AVX2": {1: 356, 2: 498, 3: 676, 4: 847, 5: 1008, 8: 1530, 12: 2208, 16: 2814},
    "1.5B float32, AVX2": {1: 698, 2: 1477, 3: 2154, 4: 2372, 5: 2468, 8: 2326, 12: 2443, 16: 2510},
    "flat": {1: 10, 16: 10.5},
}
FIXED = (1, 2, 3, 4, 5, 8, 11, 15)


@dataclass(frozen=True)
class Step:
    """What the drafter has at one position: evidence for each token that it would draft, and how many of them are right."""

    evidence: tuple[int, ...]
    right: int


@dataclass
class Round:
    """What came of a step: tokens drafted, verified, accepted; the forward's width; what it and the draft took, in milliseconds."""

    drafted: int
    verified: int
    accepted: int
    width: int
    forward_ms: float
    draft_ms: float


@dataclass
class Stream:
    """
    Attributes:
        steps (`Sequence[Step]`): by position of the text.
        draft_ms (`float`): what a drafted token costs; 0: nothing.
    """

    steps: Sequence[Step]
    draft_ms: float = 0.0


def cost(curve: dict[int, float], width: int) -> float:
    """Between measured widths, in proportion."""
    below = max(w for w in curve if w <= width)
    above = min((w for w in curve if w >= width), default=below)
    share = (width - below) / (above - below) if above > below else 0.0
    return curve[below] * (1 - share) + curve[above] * share


class Policy:
    """Chooses depths; the base class decodes plainly."""

    def begin(self, limit: int) -> int:
        """The most tokens to draft in this round."""
        return 0

    def goes_on(self, evidence: int) -> bool:
        """Whether another token is drafted after one with this evidence, where drafting costs time."""
        return True

    def depth(self, step: Step, drafted: int) -> tuple[int, int]:
        """How many of the drafted tokens are verified, in a forward of what width."""
        return drafted, drafted + 1

    def observe(self, at: int, step: Step, round_: Round) -> None:
        pass


class Fixed(Policy):
    def __init__(self, k: int):
        self.k = k

    def begin(self, limit: int) -> int:
        return min(self.k, limit)


class Heuristic(Policy):
    """transformers' schedule of that name, from 5."""

    k = 5

    def begin(self, limit: int) -> int:
        return min(self.k, limit)

    def observe(self, at: int, step: Step, round_: Round) -> None:
        if round_.drafted:
            self.k = self.k + 2 if round_.accepted == round_.drafted else max(1, self.k - 1)


class Confidence(Policy):
    """transformers' threshold of 0.4 on the drafter's own probability, at most 20 tokens."""

    def begin(self, limit: int) -> int:
        return limit

    def goes_on(self, evidence: int) -> bool:
        return chance_of(evidence) >= 0.4

    def depth(self, step: Step, drafted: int) -> tuple[int, int]:
        sure = next((i for i in range(drafted) if not self.goes_on(step.evidence[i])), drafted)
        return sure, sure + 1


class Tiers(Policy):
    """SGLang's adaptive tiers for one request: [1, 3, 5, 7], moved every 5 rounds by a moving average of the accepted length."""

    tiers = (1, 3, 5, 7)

    def __init__(self) -> None:
        self.tier, self.average, self.rounds = 1, 3.0, 0

    def begin(self, limit: int) -> int:
        return min(self.tiers[self.tier], limit)

    def observe(self, at: int, step: Step, round_: Round) -> None:
        self.average += 0.2 * (round_.accepted - self.average)
        self.rounds += 1
        if self.rounds > 10 and self.rounds % 5 == 0:
            if self.tier > 0 and self.average <= self.tiers[self.tier - 1] - 0.5 - 0.25:
                self.tier -= 1
            elif self.tier + 1 < len(self.tiers) and self.average > self.tiers[self.tier] - 0.5:
                self.tier += 1


class Adaptive(Policy):
    """`assistgen.control`."""

    def __init__(self, source: str = "drafter", draft_ms: float = 0.0):
        self.source, self.is_free, self._draft_ms = source, draft_ms == 0, draft_ms
        self.controller, self.costs = DepthController(), ForwardCosts()
        self._shadows: list[ShadowedDraft] = []
        self._limit = LIMIT

    def begin(self, limit: int) -> int:
        self._limit = limit
        self._plan = self.controller.plan(1, self.costs)
        if self.is_free:
            return limit
        self._reach: list[float] = []
        return self._plan.budget(self.source, limit).limit

    def goes_on(self, evidence: int) -> bool:
        self._plan.spent(self.source, 1, self._draft_ms / 1e3)
        self._reach.append((self._reach or [1.0])[-1] * self._plan.rate(self.source, evidence))
        return self._plan.goes_on(self.source, [self._reach])

    def _draft(self, at: int, step: Step, drafted: int) -> Draft:
        """Tokens are positions where they are right, -1 where not."""
        tokens = [at + i if i < step.right else -1 for i in range(drafted)]
        return Draft(tokens, self.source, step.evidence[:drafted] or (3,), is_free=self.is_free)

    def depth(self, step: Step, drafted: int) -> tuple[int, int]:
        k = self.controller.trim([self._draft(0, step, drafted)], self.costs)
        return k, self.controller.width(1, k, self._limit, self.costs)

    def observe(self, at: int, step: Step, round_: Round) -> None:
        self.costs.record(1, round_.width, round_.forward_ms / 1e3)
        draft, accepted = self._draft(at, step, round_.drafted), round_.accepted
        if draft.tokens and self.is_free:
            self._shadows.append(ShadowedDraft(draft))
        elif draft.tokens:
            for position in range(min(accepted + 1, round_.verified)):
                self.controller.observe(draft, position, position < accepted)
        committed = list(range(at, at + accepted + 1))
        self._shadows = [shadow for shadow in self._shadows if shadow.follow(committed, self.controller)]
        self.controller.end_round(self._plan, [draft.cut(round_.verified)], [accepted], round_.forward_ms / 1e3)


def run(policy: Policy, stream: Stream, curve: dict[int, float], noise: float = 0.0, seed: int = 0, first: int = 0) -> float:
    """
    Milliseconds a token from the text's position `first` on.

    Args:
        noise (`float`): forwards take up to so much more or less, as a share.
    """
    rng = random.Random(seed)
    at, spent, spent_at_first = 0, 0.0, 0.0
    length, reached = len(stream.steps), None
    while at < length:
        step = stream.steps[at]
        most = policy.begin(min(LIMIT, length - at - 1)) if at + 1 < length else 0
        drafted = 0
        while drafted < min(most, len(step.evidence)):
            drafted += 1
            if stream.draft_ms and not policy.goes_on(step.evidence[drafted - 1]):
                break
        verified, width = policy.depth(step, drafted)
        accepted = min(step.right, verified)
        draft_ms = drafted * stream.draft_ms
        forward_ms = cost(curve, width) * rng.uniform(1 - noise, 1 + noise)
        policy.observe(at, step, Round(drafted, verified, accepted, width, forward_ms, draft_ms))
        spent += draft_ms + forward_ms
        at += accepted + 1
        if reached is None and at >= first:
            reached, spent_at_first = at, spent
    return (spent - spent_at_first) / (length - (reached or 0)) if first else spent / length


def oracle(stream: Stream, curve: dict[int, float]) -> float:
    """The least that any policy could spend, by dynamic programming over the text: milliseconds a token."""
    length = len(stream.steps)
    least = [0.0] * (length + LIMIT + 2)
    for at in range(length - 1, -1, -1):
        step = stream.steps[at]
        deepest = min(LIMIT, len(step.evidence), length - at - 1)
        least[at] = min(
            min(cost(curve, width) for width in range(k + 1, LIMIT + 2)) + k * stream.draft_ms + least[at + min(k, step.right) + 1]
            for k in range(deepest + 1)
        )
    return least[0] / length


def of_bits(bits: Sequence[bool], evidence: Callable[[int], int], draft_ms: float = 0.0) -> Stream:
    """A drafter that is right at each position by itself: a draft is right up to the first position that isn't."""
    right = 0
    steps = []
    for at in range(len(bits) - 1, -1, -1):
        right = right + 1 if bits[at] else 0
        steps.append(Step(tuple(evidence(at + i) for i in range(min(LIMIT, len(bits) - at))), min(right, LIMIT)))
    return Stream(steps[::-1], draft_ms)


def stationary(rate: float, length: int = 4_000, seed: int = 0, draft_ms: float = 0.0) -> Stream:
    rng = random.Random(seed)
    return of_bits([rng.random() < rate for _ in range(length)], lambda at: 4, draft_ms)


def changing(rates: Sequence[float], period: int = 500, length: int = 6_000, seed: int = 0, draft_ms: float = 0.0) -> Stream:
    rng = random.Random(seed)
    return of_bits([rng.random() < rates[at // period % len(rates)] for at in range(length)], lambda at: 4, draft_ms)


def drafted(entry: dict[str, Any], draft: str) -> Iterator[tuple[list[int], list[int]]]:
    """At each place of a recorded answer but the first, what a draft model drafted there: tokens and their evidence."""
    chains = {chain["at"]: chain for chain in entry["chains"][draft]}
    current: dict[str, Any] = {"at": 0, "tokens": [], "evidence": []}
    for at in range(1, len(entry["output"])):
        current = chains.get(at, current)
        skipped = at - current["at"]
        yield current["tokens"][skipped:], current["evidence"][skipped:]


def recorded(entries: list[dict[str, Any]], draft: str, draft_ms: float, length: int = 2_000) -> Stream:
    """A draft model's chains over all recorded answers, end to end, repeated up to `length` tokens."""
    steps: list[Step] = []
    for entry in entries:
        output = entry["output"]
        for at, (tokens, evidence) in enumerate(drafted(entry, draft), start=1):
            right = next((i for i, token in enumerate(tokens) if output[at + i : at + i + 1] != [token]), len(tokens))
            steps.append(Step(tuple(evidence[: min(LIMIT, len(tokens))]), min(right, LIMIT)))
    return Stream([steps[i % len(steps)] for i in range(max(length, len(steps)))], draft_ms)


def guessed(requests: list[Request], make: Callable[[], Drafter], length: int = 2_000) -> Stream:
    """What a drafter without a model guesses at each place of recorded answers, end to end, repeated up to `length` tokens."""
    steps: list[Step] = []
    plan = DepthController("constant").plan(1, ForwardCosts())
    for prompt, output in requests:
        drafter = make()
        drafter.begin([prompt + output[:1]])
        for at in range(1, len(output)):
            draft = drafter.propose([0], [LIMIT], plan)[0]
            right = next((i for i, token in enumerate(draft.tokens) if output[at + i : at + i + 1] != [token]), len(draft.tokens))
            steps.append(Step(tuple(draft.evidence[min(i, len(draft.evidence) - 1)] for i in range(len(draft.tokens))), right))
            drafter.commit(0, [output[at]])
        drafter.end()
    return Stream([steps[i % len(steps)] for i in range(max(length, len(steps)))])


def policies(draft_ms: float) -> dict[str, Callable[[], Policy]]:
    fixed: dict[str, Callable[[], Policy]] = {f"fixed {k}": lambda k=k: Fixed(k) for k in FIXED}  # type: ignore[misc]
    return fixed | {
        "heuristic": Heuristic,
        "confidence": Confidence,
        "SGLang's tiers": Tiers,
        "adaptive": lambda: Adaptive(draft_ms=draft_ms),
    }


def streams(draft_ms: float) -> dict[str, Stream]:
    found = {f"stationary {rate}": stationary(rate, draft_ms=draft_ms) for rate in (0.0, 0.3, 0.6, 0.8, 0.95)}
    found["changing 0.95, 0"] = changing((0.95, 0.0), draft_ms=draft_ms)
    found["changing 0.9, 0.4, 0"] = changing((0.9, 0.4, 0.0), draft_ms=draft_ms)
    return found


def compare(stream: Stream, curve: dict[int, float]) -> dict[str, float]:
    """Speed over plain decoding by policy."""
    plain = cost(curve, 1)
    found = {name: plain / run(make(), stream, curve, noise=0.03) for name, make in policies(stream.draft_ms).items()}
    return found | {"oracle": plain / oracle(stream, curve)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(weights.locate("qwen2.5-coder-1.5b"))
    path = RECORDINGS / "qwen2.5-coder-1.5b.json"
    requests, entries = answered(tokenizer, path)[path.stem], json.loads(path.read_text())["recordings"]
    drafts = [draft for draft in entries[0]["chains"] if all(draft in entry["chains"] for entry in entries)]
    free = {f"recorded {drafter.name}": guessed(requests, drafter) for drafter in (NGramDrafter, SuffixDrafter)}
    results: dict[str, Any] = {}
    for curve_name, curve in CURVES.items():
        plain = cost(curve, 1)
        for draft_name, share in (("free drafts", 0.0), ("drafts at 0.25 of a plain step", 0.25)):
            print(f"\n{curve_name}, {draft_name}: speed over plain decoding")
            table = streams(share * plain) | ({} if share else free)
            if share:
                table |= {f"recorded {draft}": recorded(entries, draft, share * plain) for draft in drafts}
            rows = {name: compare(stream, curve) for name, stream in table.items()}
            results[f"{curve_name}, {draft_name}"] = rows
            for name, speeds in rows.items():
                best = max((speed, policy) for policy, speed in speeds.items() if policy.startswith("fixed"))
                rest = ", ".join(f"{policy} {speed:.2f}" for policy, speed in speeds.items() if not policy.startswith("fixed"))
                print(f"    {name:24.24s} best {best[1]:8s} {best[0]:.2f}, {rest}")
    print(json.dumps({"speed_over_plain": results}))


if __name__ == "__main__":
    main()
