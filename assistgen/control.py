"""How deep to speculate: acceptance estimated from what happened, cost measured in this process, the best use of the time taken.

A round of depth k brings `G(k)` tokens in `C(k)` seconds. With λ, the tokens a second that decoding makes at present, the best k is the one
with the largest `G(k) - λ·C(k)`: what it brings, less what would have been brought in its time anyway (renewal-reward). k = 0, a plain
step, is always one of the choices. Throughput as the aim follows goodput (arXiv 2406.14066). Plain numbers; no torch, no transformers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, ClassVar

from .drafters.base import Budget, Draft, chance_of


class ForwardCosts:
    """
    Seconds that one forward of a model takes, by the number of rows and by its width (tokens per row), as measured in this process; and
    what taking in a text takes.

    The curve is not monotone (two tokens can cost less than one, or twice as much), so nothing is assumed about it: a width that was
    never measured is taken to lie between the nearest measured ones, and an old measurement fades, so that it is made again. Only this:
    a machine that is slower than it was (others share it, or it is hot) is so at all widths, else a plain step measured in better times
    would make all that is measured now look dear.

    Args:
        widths (`Sequence[int]`, *optional*): a forward's width is padded to the next of these; none is wider.
        rows (`int`, *optional*): every forward is over so many rows, whatever the number of those that run.
    """

    SAMPLES = 9
    DRIFT_SAMPLES = 5
    """Forwards whose median says how slow the machine is now."""
    HALF_LIFE = 512
    """Forwards after which a measurement counts half, from"""
    OUT_OF_DATE = 4
    """so many half-lives on."""
    READ_DECAY = 0.8
    WORTH_FILLING = 0.98
    """A wider forward than needed has to cost less than this share."""

    def __init__(self, widths: Sequence[int] = (), rows: int | None = None) -> None:
        self._widths, self._rows = widths, rows
        self._shapes: dict[int, dict[int, _Shape]] = {}  # rows -> width -> what was measured
        self._forwards = 0
        self._drifts: deque[float] = deque(maxlen=self.DRIFT_SAMPLES)  # seconds over what was typical of the shape
        self._drift = 1.0  # what is kept is divided by it, what is told multiplied
        self._read = [0.0, 0.0]  # tokens of text taken in, and the seconds that it took; decayed

    def record(self, rows: int, width: int, seconds: float) -> None:
        self._forwards += 1
        widths = self._shapes.setdefault(self._rows or rows, {})
        shape = widths.get(width)
        if shape is None:
            shape = widths[width] = _Shape(deque(maxlen=self.SAMPLES))
            if width > 1:
                return  # the first forward of a new shape pays for the kernels' set-up, and would mislead for a long time
        if shape.samples:
            self._drifts.append(seconds / shape.typical)
            self._drift = sorted(self._drifts)[len(self._drifts) // 2]
        shape.samples.append(seconds / self._drift)
        shape.typical = sorted(shape.samples)[(len(shape.samples) - 1) // 2]  # of two the less: what disturbs a forward only adds
        shape.last = self._forwards

    def plain(self, rows: int) -> float | None:
        """Typical seconds of a plain step; `None` as long as none was measured."""
        shape = self._shapes.get(self._rows or rows, {}).get(1)
        return shape.typical * self._drift if shape is not None and shape.samples else None

    def curve(self, rows: int, max_width: int) -> list[float] | None:
        """
        Returns:
            `list[float]`, *optional*: estimated seconds for the widths 1 … `max_width`; `None` as long as no plain step was measured.
        """
        if not self._widths:
            return self._curve(rows, max_width)
        padded = [next(width for width in self._widths if width >= needed) for needed in range(1, max_width + 1)]
        curve = self._curve(rows, padded[-1])
        return [curve[width - 1] for width in padded] if curve is not None else None

    def _curve(self, rows: int, max_width: int) -> list[float] | None:
        known = sorted((width, shape) for width, shape in self._shapes.get(self._rows or rows, {}).items() if shape.samples)
        if not known or known[0][0] != 1:
            return None
        plain = known[0][1].typical
        curve = [plain]
        for at, (width, shape) in enumerate(known[1:], start=1):
            if len(curve) >= max_width:
                break
            # A fresh measurement leans on its neighbours. One that is long out of date leans on hope, and is made again.
            age = (self._forwards - shape.last) / self.HALF_LIFE
            lean = plain if age > self.OUT_OF_DATE else self._between(known, at)
            weight = len(shape.samples) * 0.5**age if age > self.OUT_OF_DATE else len(shape.samples)
            cost = (weight * shape.typical + 0.5 * lean) / (weight + 0.5)
            before, gap = curve[-1], width - len(curve)
            curve += [before + (cost - before) * step / gap for step in range(1, gap + 1)]
        curve += [curve[-1]] * (max_width - len(curve))
        return [cost * self._drift for cost in curve[:max_width]]

    @staticmethod
    def _between(known: list[tuple[int, _Shape]], at: int) -> float:
        """What the neighbours of a measured width make one expect there; the widest is expected to cost no more than the one before."""
        below, above = known[at - 1], known[min(at + 1, len(known) - 1)]
        if above[0] == known[at][0]:
            return below[1].typical
        share = (known[at][0] - below[0]) / (above[0] - below[0])
        return below[1].typical * (1 - share) + above[1].typical * share

    def verify(self, rows: int, max_depth: int) -> list[float] | None:
        """
        Returns:
            `list[float]`, *optional*: estimated seconds of verifying 0 … `max_depth` drafted tokens, at the width that suits best (see
            `width`); `None` as long as no plain step was measured.
        """
        curve = self.curve(rows, max_depth + 1)
        if curve is not None:
            for depth in range(max_depth - 1, -1, -1):
                curve[depth] = min(curve[depth], curve[depth + 1])
        return curve

    def width(self, rows: int, depth: int, max_depth: int) -> int:
        """
        The width of a forward that verifies `depth` drafted tokens where up to `max_depth` would fit: a wider one, filled up with
        tokens that nobody looks at, can cost less. (One token is a product of matrix and vector, two are one of matrices.)
        """
        curve = self.curve(rows, max_depth + 1) if max_depth > depth else None
        if curve is None:
            return depth + 1
        if (trial := self.trial(rows)) is not None and depth < trial:
            return trial
        best = min(range(depth + 1, max_depth + 2), key=lambda width: curve[width - 1])
        return best if curve[best - 1] < self.WORTH_FILLING * curve[depth] else depth + 1

    def trial(self, rows: int) -> int | None:
        """
        A width that should be fed when little is lost by it, to learn what it costs: one token, which everything is compared with, and
        for one row two, since a single token is the shape that kernels treat apart.
        """
        widths = self._shapes.get(self._rows or rows, {})
        if 1 not in widths:
            return None
        for width in (1, 2) if rows == 1 else (1,):
            shape = widths.get(width)
            if shape is None or len(shape.samples) < 3 or self._forwards - shape.last > 2 * self.HALF_LIFE:
                return width
        return None

    def record_reading(self, num_tokens: int, seconds: float) -> None:
        """Taking in a text of `num_tokens` tokens, of all rows together, took `seconds`."""
        if self._read[0] == 0.0:
            num_tokens, seconds = 1, seconds / num_tokens  # a process's first one pays for the kernels' set-up: little is made of it
        self._read = [self._read[0] * self.READ_DECAY + num_tokens, self._read[1] * self.READ_DECAY + seconds]

    def reading(self, num_tokens: int) -> float:
        """The seconds that taking in so many tokens is expected to take; 0 as long as nothing is known."""
        tokens, seconds = self._read
        return num_tokens * seconds / tokens if tokens else 0.0

    def to_dict(self) -> dict[str, float]:
        """Typical seconds by "rows×width"."""
        return {
            f"{rows}×{width}": shape.typical * self._drift
            for rows, widths in self._shapes.items()
            for width, shape in widths.items()
            if shape.samples
        }


@dataclass
class _Shape:
    samples: deque[float]
    typical: float = 0.0  # their lower median
    last: int = 0  # the forward that measured it last

    def __lt__(self, other: _Shape) -> bool:  # for sorting beside the width, which is unique
        return False


class AcceptanceRates:
    """
    The chance that a drafted token is accepted when those before it were, by the drafter's evidence for it: decayed counts, with the
    drafter's own word as the prior.

    One piece of evidence may stand for a whole draft; then each position has a rate of its own, and its prior is the rate of the
    position before it: a drafter that was right i times is expected to go on being right.
    """

    DECAY = 0.97
    STRENGTH = 3.0
    """How many observations the prior counts for."""
    CAUTION = 0.85
    """What a drafter's own word counts: drafters overrate themselves, and an answer may be over before that is learned."""

    def __init__(self) -> None:
        # (source, evidence) -> [reached, accepted] by position after the one that the evidence belongs to
        self._counts: dict[tuple[str, int], list[list[float]]] = {}

    def observe(self, draft: Draft, position: int, accepted: bool) -> None:
        """The draft's token at `position` (from 0), all that it follows accepted, was accepted or not."""
        last = len(draft.evidence) - 1
        evidence = draft.evidence[min(position, last)]
        counts = self._counts.setdefault((draft.source, evidence), [])
        place = max(0, position - last)
        while len(counts) <= place:
            counts.append([0.0, 0.0])
        # Memory is counted in drafts: a long one says more about now, and not less about before.
        decay = 1.0 if place == 0 and evidence in draft.evidence[:position] else self.DECAY
        reached = counts[place]
        reached[0] = reached[0] * decay + 1.0
        reached[1] = reached[1] * decay + accepted

    def reaches(self, draft: Draft) -> list[float]:
        """The chance of each of a draft's tokens to be accepted, with all that it follows."""
        reaches: list[float] = []
        last, rate = len(draft.evidence) - 1, 0.0
        for node in range(len(draft.tokens)):
            if node <= last:
                counts = self._counts.get((draft.source, draft.evidence[node]), ())
                rate = self.CAUTION * chance_of(draft.evidence[node])
            place = max(0, node - last)
            if place < len(counts):
                reached, accepted = counts[place]
                rate = (accepted + self.STRENGTH * rate) / (reached + self.STRENGTH)
            parent = draft.parents[node] if draft.parents is not None else node - 1
            reaches.append(rate * (reaches[parent] if parent >= 0 else 1.0))
        return reaches

    def to_dict(self) -> dict[str, list[list[float]]]:
        """Reached and accepted, decayed, by "source/evidence" and position."""
        return {f"{source}/{evidence}": [list(c) for c in counts] for (source, evidence), counts in self._counts.items()}

    @classmethod
    def from_dict(cls, values: dict[str, list[list[float]]]) -> AcceptanceRates:
        rates = cls()
        for name, counts in values.items():
            source, _, evidence = name.rpartition("/")
            rates._counts[source, int(evidence)] = [list(c) for c in counts]
        return rates


@dataclass
class Pace:
    """
    What rounds brought.

    Attributes:
        tokens (`float`): a row.
        time (`float`): that they took, in plain steps.
        rounds (`float`): how many there were.
    """

    HELD_UP: ClassVar[float] = 3.0
    """A round that took so many times what they do was held up by something else, and counts as that."""

    tokens: float = 0.0
    time: float = 0.0
    rounds: float = 0.0

    def add(self, tokens: float, time: float, decay: float = 1.0) -> None:
        if self.rounds:
            time = min(time, self.HELD_UP * self.time / self.rounds)
        self.tokens, self.time, self.rounds = self.tokens * decay + tokens, self.time * decay + time, self.rounds * decay + 1.0


class _Paid:
    """What is known of a drafter that costs time."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=32)  # a drafted token's, recently
        self.accepted: list[list[float]] = []  # [reached, accepted] by position, whatever the evidence
        self.pace = Pace(tokens=6.0, time=4.0, rounds=2.0)  # decayed; a guess at first
        self.is_new = True
        self.is_idle = False
        self.waited = 0  # rounds since it was used last
        self.patience = RoundPlan.FIRST_PATIENCE  # rounds until an idle drafter is tried again

    @property
    def typical(self) -> float:
        return sorted(self.seconds)[len(self.seconds) // 2] if self.seconds else 0.0

    @property
    def rate(self) -> float:
        """The chance that a drafted token is accepted, those before it accepted."""
        reached, accepted = (sum(counts[i] for counts in self.accepted) for i in (0, 1))
        return (accepted + 1.4) / (reached + 2.0)

    def rates(self, depth: int) -> Iterator[float]:
        """For each position the chance that a token is accepted, those before it accepted."""
        rate = 0.7
        for position in range(depth):
            if position < len(self.accepted):
                reached, accepted = self.accepted[position]
                rate = (accepted + AcceptanceRates.STRENGTH * rate) / (reached + AcceptanceRates.STRENGTH)
            yield rate

    def observe(self, position: int, accepted: bool) -> None:
        while len(self.accepted) <= position:
            self.accepted.append([0.0, 0.0])
        counts = self.accepted[position]
        counts[0] = counts[0] * AcceptanceRates.DECAY + 1.0
        counts[1] = counts[1] * AcceptanceRates.DECAY + accepted

    def end_round(self, tokens: float, time: float) -> None:
        """A round with this drafter brought `tokens` a row in the time of so many plain steps."""
        # An idle drafter's few trials have to weigh more than what made it idle.
        self.pace.add(tokens, time, decay=0.7 if self.is_idle else 0.95)
        self.is_new = False
        if self.is_idle:
            if tokens > time:
                self.waited = self.patience  # well done: once more, at once
            else:
                self.patience = min(2 * self.patience, RoundPlan.MAX_PATIENCE)
        pays = self.pace.tokens > self.pace.time
        if pays:
            self.patience = RoundPlan.FIRST_PATIENCE
        self.is_idle = not pays


class DepthController:
    """
    Chooses how deep to draft and how many drafted tokens to verify. Lives in a `Speculator`; safe to share between threads.

    Args:
        depth (`str`): `"adaptive"`; `"constant"` or `"confidence"` to verify all that is drafted; `"heuristic"`, two tokens more after a
            draft that was accepted whole and one less after another, as transformers' schedule of that name.
    """

    FIRST_HEURISTIC_DEPTH = 5
    PACE_DECAY = 0.98
    LITTLE = 0.5
    """Expected tokens that learning a cost may cost."""
    NEARLY, NEARLY_SHARE = 0.08, 0.6
    """Of a tree, the most is verified that is expected to be nearly as good as the best: so many tokens worse, at most by this share of
    those that it is expected to bring. Its small chances are estimated with caution: where so little decides, real text loses no time by
    it, and the target runs less often."""

    def __init__(self, depth: str = "adaptive"):
        self.strategy = depth
        self.rates = AcceptanceRates()
        self._heuristic: dict[str, int] = {}  # source -> depth
        self._paid: dict[str, _Paid] = {}
        self._pace = Pace(2.0, 2.0, 2.0)
        self._lock = threading.RLock()

    def plan(
        self, rows: int, costs: ForwardCosts, remaining: int | None = None, so_far: Pace | None = None, takes_trees: bool = False
    ) -> RoundPlan:
        """
        What drafters may ask in a round of so many rows on a target with these costs; at most `remaining` tokens a row are to come, and
        `so_far` is what the call's rounds have brought. `takes_trees`: the target can verify a tree.
        """
        return RoundPlan(self, rows, costs, remaining, so_far, takes_trees)

    @property
    def speedup(self) -> float:
        """Tokens a second of late over those of plain decoding."""
        return self._pace.tokens / self._pace.time

    def trim(self, drafts: Sequence[Draft], costs: ForwardCosts) -> int:
        """
        How many drafted tokens to verify.

        Args:
            drafts (`Sequence[Draft]`): what was proposed, one for each running row.

        Returns:
            `int`: 0 … length of the longest draft; longer drafts are to be cut to it.
        """
        deepest = max((len(draft.tokens) for draft in drafts), default=0)
        if self.strategy == "heuristic":
            return min(deepest, max((self._heuristic_depth(draft.source) for draft in drafts if draft.tokens), default=0))
        if deepest == 0 or self.strategy != "adaptive":
            return deepest
        with self._lock:
            curve = costs.verify(len(drafts), deepest)
            if curve is None:
                return 0  # what a plain step costs has to be known first
            gains = self._gains(drafts, deepest)
            price = self._price(curve, len(drafts))
            worth = [gain - price * cost for gain, cost in zip(gains, curve, strict=True)]
            depth, best = max(enumerate(worth), key=lambda choice: choice[1])
            if drafts[0].parents is not None:
                depth = max(k for k in range(deepest + 1) if worth[k] + min(self.NEARLY, self.NEARLY_SHARE * gains[k]) >= best)
            trial = costs.trial(len(drafts))
            if trial is not None and trial <= depth and gains[depth] - gains[trial - 1] < self.LITTLE:
                return trial - 1
            return depth

    def _gains(self, drafts: Sequence[Draft], deepest: int) -> list[float]:
        """Expected accepted tokens of all rows if so many of each draft's are verified."""
        gains = [0.0] * (deepest + 1)
        for draft in drafts:
            gain, reaches = 0.0, self.rates.reaches(draft)
            for k in range(1, deepest + 1):
                gain += reaches[k - 1] if k <= len(reaches) else 0.0
                gains[k] += gain
        return gains

    def _price(self, curve: list[float], rows: int) -> float:
        """λ: the tokens that a second is worth."""
        return max(1.0, self.speedup) * rows / curve[0]

    def width(self, rows: int, depth: int, max_depth: int, costs: ForwardCosts) -> int:
        """How wide to make a forward that verifies `depth` drafted tokens where up to `max_depth` would fit (`ForwardCosts.width`)."""
        return depth + 1 if self.strategy != "adaptive" else costs.width(rows, depth, max_depth)

    def observe(self, draft: Draft, position: int, accepted: bool) -> None:
        """The draft's token at `position` (from 0), all that it follows accepted, was accepted or not."""
        with self._lock:
            self.rates.observe(draft, position, accepted)
            if draft.source in self._paid:
                self._paid[draft.source].observe(position, accepted)

    def end_round(self, plan: RoundPlan, drafts: Sequence[Draft], accepted: Sequence[int], seconds: float) -> None:
        """
        Args:
            plan (`RoundPlan`): the round's.
            drafts (`Sequence[Draft]`): as far as they were verified, one for each running row.
            accepted (`Sequence[int]`): how many of each one's tokens were.
            seconds (`float`): that the target's forward took.
        """
        with self._lock:
            for draft, right in zip(drafts, accepted, strict=True):
                if draft.tokens and self.strategy == "heuristic":
                    depth = self._heuristic_depth(draft.source)
                    self._heuristic[draft.source] = depth + 2 if right == len(draft.tokens) else max(1, depth - 1)
            plain = plan.costs.plain(plan.rows)
            if plain is None or self.strategy != "adaptive":
                return
            tokens = 1.0 + sum(accepted) / len(drafts)
            time = (seconds + sum(plan.drafting.values())) / plain
            self._pace.add(tokens, time, self.PACE_DECAY)
            plan.so_far.add(tokens, time)
            for source in plan.drafting:
                self._known(source).end_round(tokens, time)

    def _heuristic_depth(self, source: str) -> int:
        return self._heuristic.get(source, self.FIRST_HEURISTIC_DEPTH)

    def to_dict(self) -> dict[str, Any]:
        """What was learned, as plain values, ready for JSON."""
        with self._lock:
            return {
                "depth": self.strategy,
                "heuristic": dict(self._heuristic),
                "acceptance": self.rates.to_dict(),
                "pace": asdict(self._pace),
                "drafters": {
                    source: {
                        "seconds": list(paid.seconds), "accepted": [list(counts) for counts in paid.accepted], "pace": asdict(paid.pace),
                        "is_new": paid.is_new, "is_idle": paid.is_idle, "patience": paid.patience,
                    }
                    for source, paid in self._paid.items()
                },
            }  # fmt: skip

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DepthController:
        """From what `to_dict` gave, for example in an earlier process on the same machine."""
        controller = cls(values["depth"])
        controller._heuristic = dict(values["heuristic"])
        controller.rates = AcceptanceRates.from_dict(values["acceptance"])
        controller._pace = Pace(**values["pace"])
        for source, known in values["drafters"].items():
            paid = controller._known(source)
            paid.seconds.extend(known["seconds"])
            paid.accepted = [list(counts) for counts in known["accepted"]]
            paid.pace, paid.is_new = Pace(**known["pace"]), known["is_new"]
            paid.is_idle, paid.patience = known["is_idle"], known["patience"]
        return controller

    def _known(self, source: str) -> _Paid:
        return self._paid.setdefault(source, _Paid())


class RoundPlan:
    """
    One round's answers to drafters (the `Plan` of `assistgen.drafters.base`).

    Attributes:
        drafting (`dict[str, float]`): the sources that cost time in this round, and how many seconds they took.
    """

    FIRST_DEPTH = 4
    """Tokens of the first draft of all, whatever they cost: less of it teaches little."""
    FIRST_PATIENCE, MAX_PATIENCE = 8, 128
    PATIENCE_TO_READ = 32
    """Rounds more before a trial for each plain step that taking in the text takes, so that trials in vain cost some 3 %; fewer by the
    tokens to come if the text is new, since it may be of another kind than those before; up to"""
    MOST_PATIENCE_TO_READ = 1024
    """so many rounds."""
    FIRST_TO_COME = 32
    """Tokens that an answer is expected to have at first: few are as long as they may be. Later, so many more than it has."""
    DOUBT = 2.0
    """Taking in the text is to save as many times the time that it takes."""
    FIRST_STEPS = 8.0
    """Plain steps that a call's own rounds count with at first, in what they are said to bring without the drafter."""

    def __init__(
        self,
        controller: DepthController,
        rows: int,
        costs: ForwardCosts,
        remaining: int | None = None,
        so_far: Pace | None = None,
        takes_trees: bool = False,
    ):
        self.rows, self.costs, self.remaining = rows, costs, remaining
        self.so_far = so_far if so_far is not None else Pace()
        # A tree's order is a guess, and most of it is wrong: only a controller that weighs what it brings makes it pay.
        self.takes_trees = takes_trees and controller.strategy == "adaptive"
        self.drafting: dict[str, float] = {}
        self._controller = controller
        self._curve: list[float] | None = None

    @property
    def weighs_costs(self) -> bool:
        return self._controller.strategy == "adaptive"

    def budget(self, source: str, limit: int, reading: float = 0.0, is_new: bool = False) -> Budget:
        """
        How deep to draft with a source that costs time: not at all while its rounds bring less than plain steps would in their time, but
        for a trial after 8 rounds, then 16, 32 … 128; nor if what is expected to come still wouldn't repay taking in the text first, going
        by what the call's rounds bring without it; they have as long as that takes to show it.
        """
        controller = self._controller
        if controller.strategy == "heuristic":
            limit = min(limit, controller._heuristic_depth(source))
        if not self.weighs_costs or limit == 0:
            return Budget(limit, limit)
        with controller._lock:
            known = controller._known(source)
            self._curve = self.costs.verify(self.rows, limit)
            if self._curve is None:
                return Budget(0, 0)  # what a plain step costs has to be known first
            reading /= self._curve[0]  # in plain steps
            if self.so_far.time + 0.5 < reading and not known.is_idle:
                return Budget(0, 0)  # give or take half a round
            without = (self.so_far.time + self.FIRST_STEPS) / (self.so_far.tokens + self.FIRST_STEPS)  # plain steps a token
            saved = max(0.0, without - known.pace.time / known.pace.tokens)
            to_come = self.so_far.tokens + self.FIRST_TO_COME
            if self.remaining is not None:
                to_come = min(to_come, self.remaining)
            if known.is_idle or self.DOUBT * reading > saved * to_come:
                known.waited += 1
                more = self.PATIENCE_TO_READ * reading - (to_come if is_new else 0.0)
                if known.waited < known.patience + min(max(0.0, more), self.MOST_PATIENCE_TO_READ) or reading > to_come:
                    return Budget(0, 0)
                known.waited = 0
            price, gain, reach = controller._price(self._curve, self.rows), 0.0, 1.0
            best = (0.0, 1)
            for depth, rate in enumerate(known.rates(limit), start=1):
                reach *= rate
                gain += self.rows * reach
                best = max(best, (gain - price * (self._curve[depth] + depth * known.typical - self._curve[0]), depth))
            return Budget(best[1], limit)

    def rate(self, source: str, evidence: int) -> float:
        """The chance that a token with this evidence is accepted."""
        with self._controller._lock:
            return self._controller.rates.reaches(Draft([0], source, (evidence,)))[0]

    def goes_on(self, source: str, reaches: Sequence[Sequence[float]]) -> bool:
        """
        Whether another drafted token is expected to pay, or several more.

        Args:
            reaches (`Sequence[Sequence[float]]`): for each row the chance that its draft is accepted up to each token.
        """
        controller, curve = self._controller, self._curve
        if not self.weighs_costs or curve is None:
            return True
        with controller._lock:
            known = controller._known(source)
            price, rate, step = controller._price(curve, self.rows), known.rate, known.typical
            deepest = max(len(reach) for reach in reaches)
            if known.is_new and deepest < self.FIRST_DEPTH:
                return True
            gain, stop = 0.0, -price * curve[0]
            for k in range(min(deepest, len(curve) - 1)):
                gain += sum(reach[k] for reach in reaches if k < len(reach))
                stop = max(stop, gain - price * curve[k + 1])
            reach = sum(reach[-1] for reach in reaches if len(reach) == deepest)
            for k in range(deepest + 1, len(curve)):
                reach *= rate
                gain += reach
                if gain - price * (curve[k] + (k - deepest) * step) > stop:
                    return True
        return False

    def spent(self, source: str, num_tokens: int, seconds: float) -> None:
        """Drafting `num_tokens` tokens a row took `seconds`; what reading took is no part of it, but of what beginning again costs."""
        self.drafting[source] = self.drafting.get(source, 0.0) + seconds
        with self._controller._lock:
            self._controller._known(source).seconds.append(seconds / num_tokens)

    def renew(self, source: str) -> None:
        """What drafting with a source costs has changed: what its rounds were worth is forgotten."""
        with self._controller._lock:
            self._controller._paid.pop(source, None)

    def prefers(self, draft: Draft, source: str, limit: int) -> bool:
        """
        Whether a free draft in hand promises at least as much as one of `source`, of up to `limit` tokens, in its place. Where the one is
        right the other is likely to be: it is taken to miss only those of the draft's tokens that are wrong and that it would miss anyway.
        """
        controller, length = self._controller, len(draft.tokens)
        if not draft.tokens:
            return False
        with controller._lock:
            curve = self.costs.verify(self.rows, max(length, limit))
            if curve is None or not self.weighs_costs:
                return True
            price = controller._price(curve, self.rows) / self.rows  # of one row's share
            reaches = controller.rates.reaches(draft)
            free = max(gain - price * curve[k] for k, gain in enumerate(accumulate(reaches, initial=0.0)))
            at_depth = [0.0] * (limit + length)  # the chance that so many of its tokens are right
            for depth, reach in zip(draft.depths(), reaches, strict=True):
                at_depth[depth - 1] += reach
            known = controller._known(source)
            best, gain, reach, before = -price * curve[0], 0.0, 1.0, 1.0
            for depth, rate in enumerate(known.rates(limit), start=1):
                right, before = min(1.0, at_depth[depth - 1] / before) if before else 0.0, at_depth[depth - 1]
                reach *= 1.0 - (1.0 - right) * (1.0 - rate)
                gain += reach
                best = max(best, gain - price * (curve[depth] + depth * known.typical))
            return free >= best


class ShadowedDraft:
    """
    Follows a draft past the point where it was cut, comparing it with what the row really says.

    A drafter that costs nothing proposes in every round, so its acceptance is known also for drafts that were not verified: the
    controller learns when speculation starts to pay again without spending a forward on a trial.
    """

    __slots__ = ("_draft", "_node")

    def __init__(self, draft: Draft):
        self._draft = draft
        self._node = -1

    def follow(self, tokens: list[int], controller: DepthController) -> bool:
        """Compares the row's next `tokens` with the draft's; `False` once there is nothing left to learn."""
        for token in tokens:
            right = None
            for node in self._draft.children(self._node):
                accepted = self._draft.tokens[node] == token
                controller.observe(self._draft, node, accepted)
                right = node if accepted else right
            if right is None:
                return False
            self._node = right
        return bool(self._draft.children(self._node))
