"""What `auto` chooses, without a model or a clock: `python -m benchmarks.choice`.

Recorded answers (`benchmarks.record`) are said once more. Suffix decoding guesses what it would have guessed, the draft model what it did;
forwards, drafted tokens and the reading of a prompt take what they were measured to take, give or take 5 %. Control, chain and suffix
index are the real ones. All answers are said with one state of control, as of a `Speculator`, in each of six orders.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import AutoTokenizer

from assistgen import weights
from assistgen.control import DepthController, ForwardCosts, Pace, ShadowedDraft
from assistgen.drafters.base import Draft, Drafter, Plan
from assistgen.drafters.chain import ChainDrafter
from assistgen.drafters.draft_model import FAR_BEHIND, SAMPLE
from assistgen.drafters.suffix import SuffixDrafter

from .common import chat, geometric_mean, spec_bench
from .drafters import GROUPS
from .record import RECORDINGS
from .simulate import CURVES, LIMIT, cost, drafted


@dataclass(frozen=True)
class Costs:
    """Milliseconds: of a forward by its width, of a drafted token, of reading a token of the prompt."""

    curve: dict[int, float]
    draft_ms: float
    read_ms: float


COSTS = {
    "AVX2, our products": Costs(CURVES["1.5B bfloat16, AVX2, our products"], 110, 24),
    "AVX2, a cheaper draft": Costs(CURVES["1.5B bfloat16, AVX2, our products"], 100, 8),
    "AVX-512": Costs(CURVES["1.5B bfloat16, AVX-512"], 90, 4),
    "AMX": Costs(CURVES["1.5B bfloat16, AMX"], 86, 2),
    "AMX, our products, the draft from a copy": Costs({1: 130, 2: 134, 4: 141, 8: 148, 16: 160}, 28, 2),
}
SIDES = ("suffix", "draft_model", "auto")


@dataclass
class Answer:
    """A prompt's answer, and what the draft model drafted at each of its places but the first: tokens and their evidence."""

    category: str
    prompt: list[int]
    output: list[int]
    drafts: list[tuple[list[int], list[int]]]


class Clock:
    def __init__(self, seed: int):
        self._random, self.ms = random.Random(seed), 0.0

    def seconds(self, ms: float) -> float:
        """What so many milliseconds took this time."""
        ms *= math.exp(self._random.gauss(0.0, 0.05))
        self.ms += ms
        return ms / 1e3


class RecordedDraftModel(Drafter):
    """Drafts as `DraftModelDrafter` does where it looks at each token, from a recording."""

    name = "draft_model"
    is_free = False

    def __init__(self, answer: Answer, costs: Costs, clock: Clock, read_costs: ForwardCosts):
        self._answer, self._costs, self._clock, self._read_costs = answer, costs, clock, read_costs

    def begin(self, rows: Sequence[list[int]]) -> None:
        self._length, self._held, self._is_new = len(rows[0]), 0, True

    def propose(self, rows: Sequence[int], max_tokens: Sequence[int], plan: Plan) -> list[Draft]:
        behind = self._length - self._held - 1
        behind = behind if behind >= FAR_BEHIND else 0
        reading = self._read_costs.reading(behind)
        budget = plan.budget(self.name, max_tokens[0], reading, is_new=self._is_new)
        draft, reach = Draft([], self.name, (), is_free=False), [1.0]
        if budget.limit == 0:
            return [draft]
        if reading == 0.0 and behind >= 2 * SAMPLE:
            self._clock.seconds(SAMPLE * self._costs.read_ms)
            self._read_costs.record_reading(SAMPLE, self._clock.seconds(SAMPLE * self._costs.read_ms))
            return [draft]
        self._is_new = False
        if behind:
            self._read_costs.record_reading(behind, self._clock.seconds(behind * self._costs.read_ms))
        tokens, evidence = self._answer.drafts[self._length - len(self._answer.prompt) - 1]
        for token, known in list(zip(tokens, evidence, strict=True))[: min(max_tokens[0], budget.limit)]:
            plan.spent(self.name, 1, self._clock.seconds(self._costs.draft_ms))
            draft.tokens.append(token)
            draft.evidence += (known,)
            reach.append(reach[-1] * plan.rate(self.name, known))
            if not plan.goes_on(self.name, [reach[1:]]):
                break
        self._held = self._length
        return [draft]

    def commit(self, row: int, tokens: list[int]) -> None:
        self._length += len(tokens)


def answers(name: str = "qwen2.5-coder-1.5b", draft: str = "qwen2.5-coder-0.5b") -> list[Answer]:
    tokenizer = AutoTokenizer.from_pretrained(weights.locate(name))
    entries = {entry["id"]: entry for entry in json.loads((RECORDINGS / f"{name}.json").read_text())["recordings"]}
    found = []
    for item in spec_bench(10):
        if (entry := entries.get(item["id"])) is None:
            continue
        prompt = chat(tokenizer, item["prompt"])["input_ids"][0].tolist()
        found.append(Answer(item["category"], prompt, entry["output"], list(drafted(entry, draft))))
    return found


class Session:
    """One side's state, from answer to answer."""

    def __init__(self, side: str, costs: Costs, seed: int):
        self._side, self._costs, self._clock = side, costs, Clock(seed)
        self._controller, self._target_costs, self._read_costs = DepthController(), ForwardCosts(), ForwardCosts()

    def _drafter(self, answer: Answer) -> Drafter:
        made: list[Drafter] = []
        if self._side != "draft_model":
            made.append(SuffixDrafter())
        if self._side != "suffix":
            made.append(RecordedDraftModel(answer, self._costs, self._clock, self._read_costs))
        return made[0] if len(made) == 1 else ChainDrafter(made, [LIMIT] * len(made))

    def say(self, answer: Answer, tokens: int, beyond: int) -> float:
        """
        Milliseconds a token after the first, as `decoding.Decoding` takes them.

        Args:
            tokens: the answer is cut to so many.
            beyond: `max_new_tokens` is so many more.
        """
        controller, costs, output = self._controller, self._target_costs, answer.output[:tokens]
        drafter, so_far, shadows = self._drafter(answer), Pace(), []
        drafter.begin([answer.prompt + output[:1]])
        at, start = 1, self._clock.ms
        while at < len(output):
            room = min(LIMIT, len(output) + beyond - at - 1)
            plan = controller.plan(1, costs, len(output) + beyond - at, so_far, takes_trees=True)
            proposal = drafter.propose([0], [room], plan)[0] if room else Draft([], drafter.name)
            depth = controller.trim([proposal], costs)
            draft, width = proposal.cut(depth), controller.width(1, depth, room, costs)
            seconds = self._clock.seconds(cost(self._costs.curve, width))
            costs.record(1, width, seconds)
            accepted, node = 0, draft.follow(-1, output[at])
            while node is not None and at + accepted + 1 < len(output):
                accepted += 1
                node = draft.follow(node, output[at + accepted])
            if not proposal.is_free:
                for position in range(min(accepted + 1, depth)):
                    controller.observe(draft, position, position < accepted)
            elif proposal.tokens:
                shadows.append(ShadowedDraft(proposal))
            fresh = output[at : at + accepted + 1]
            shadows = [shadow for shadow in shadows if shadow.follow(fresh, controller)]
            drafter.commit(0, fresh)
            controller.end_round(plan, [draft], [accepted], seconds)
            at += accepted + 1
        drafter.end()
        return (self._clock.ms - start) / (len(output) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=96, help="answers are cut to so many")
    parser.add_argument("--beyond", type=int, default=400, help="max_new_tokens is so many more than the answer has")
    arguments = parser.parse_args()
    recorded, results = answers(), {}
    for name, costs in COSTS.items():
        speeds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for seed in range(6):
            order = random.Random(seed).sample(recorded, len(recorded)) if seed else recorded
            for side in SIDES:
                session = Session(side, costs, seed)
                for answer in order:
                    task = answer.category if answer.category in GROUPS else "mt_bench"
                    speeds[side][task].append(costs.curve[1] / session.say(answer, arguments.tokens, arguments.beyond))
        results[name] = {side: {task: geometric_mean(values) for task, values in by_task.items()} for side, by_task in speeds.items()}
        over_all = {side: geometric_mean([speed for values in by_task.values() for speed in values]) for side, by_task in speeds.items()}
        print(f"{name}, over plain after the first token: " + ", ".join(f"{side} {speed:.2f}" for side, speed in over_all.items()))
        for task in results[name]["auto"]:
            better = max(SIDES[:2], key=lambda side: results[name][side][task])
            ratio = results[name]["auto"][task] / results[name][better][task]
            print(f"    {task:16s} auto {results[name]['auto'][task]:.2f}, over {better}, the better: {ratio:.2f}")
    print(json.dumps({"speed_over_plain": results}))


if __name__ == "__main__":
    main()
