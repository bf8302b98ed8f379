"""How deep to speculate: acceptance estimated from what happened, cost measured in this process, the best ratio taken.

The depth of a round maximises expected tokens per second, `sum over rows (1 + E[accepted(k)]) / cost(k + 1)`, and k = 0, a plain
step, is always one of the choices. (The objective is that of goodput, arXiv 2406.14066.) Plain numbers; no torch, no transformers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .drafters.base import Budget, Draft


class ForwardCosts:
    """
    Seconds that one target forward takes, by the number of rows and by its width (tokens per row), as measured in this process.

    The curve is not monotone (two tokens can cost less than one, or twice as much), so nothing is assumed about it: a width that was
    never measured is taken to lie between the nearest measured ones, and an old measurement fades, so that it is made again.
    """

    SAMPLES = 9
    HALF_LIFE = 512
    """Forwards after which a measurement counts half."""
    WORTH_FILLING = 0.98
    """A wider forward than needed has to cost less than this share."""

    def __init__(self) -> None:
        self._shapes: dict[int, dict[int, _Shape]] = {}  # rows -> width -> what was measured
        self._forwards = 0

    def record(self, rows: int, width: int, seconds: float) -> None:
        self._forwards += 1
        widths = self._shapes.setdefault(rows, {})
        shape = widths.get(width)
        if shape is None:
            shape = widths[width] = _Shape(deque(maxlen=self.SAMPLES))
            if width > 1:
                return  # the first forward of a new shape pays for the kernels' set-up, and would mislead for a long time
        shape.samples.append(seconds)
        shape.typical = sorted(shape.samples)[len(shape.samples) // 2]
        shape.last = self._forwards

    def curve(self, rows: int, max_width: int) -> list[float] | None:
        """
        Returns:
            `list[float]`, *optional*: estimated seconds for the widths 1 … `max_width`; `None` as long as no plain step was measured.
        """
        known = sorted((width, shape) for width, shape in self._shapes.get(rows, {}).items() if shape.samples)
        if not known or known[0][0] != 1:
            return None
        plain = known[0][1].typical
        curve: list[float] = []
        for width, shape in known:
            cost = shape.typical
            if width > 1:
                # Half a measurement of "costs no more than a plain step" is mixed in: hope that fades with evidence, and returns with age.
                weight = len(shape.samples) * 0.5 ** ((self._forwards - shape.last) / self.HALF_LIFE)
                cost = (weight * cost + 0.5 * plain) / (weight + 0.5)
            before, reached = (curve[-1], len(curve)) if curve else (cost, 0)
            gap = width - reached
            curve += [before + (cost - before) * step / gap for step in range(1, gap + 1)]
            if width >= max_width:
                break
        curve += [curve[-1]] * (max_width - len(curve))
        return curve[:max_width]

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
        if rows == 1 and depth == 0 and self._is_worth_a_trial(self._shapes[1]):
            return 2
        best = min(range(depth + 1, max_depth + 2), key=lambda width: curve[width - 1])
        return best if curve[best - 1] < self.WORTH_FILLING * curve[depth] else depth + 1

    def _is_worth_a_trial(self, widths: dict[int, _Shape]) -> bool:
        if len(widths[1].samples) < 3:
            return False
        two = widths.get(2)
        if two is None or len(two.samples) < 3:
            return True
        # What is dear is tried ever more rarely, what is worth it is used anyway.
        return self._forwards - two.last > 2 * self.HALF_LIFE

    def to_dict(self) -> dict[str, float]:
        """Typical seconds by "rows×width"."""
        return {
            f"{rows}×{width}": shape.typical for rows, widths in self._shapes.items() for width, shape in widths.items() if shape.samples
        }


@dataclass
class _Shape:
    samples: deque[float]
    typical: float = 0.0  # their median
    last: int = 0  # the forward that measured it last

    def __lt__(self, other: _Shape) -> bool:  # for sorting beside the width, which is unique
        return False


class AcceptanceRates:
    """
    The chance that a drafted token is accepted when those before it were, by the drafter's evidence for it: decayed counts with a prior.

    One piece of evidence may stand for a whole draft; then each position has a rate of its own, and its prior is the rate of the
    position before it: a drafter that was right i times is expected to go on being right.
    """

    DECAY = 0.97
    STRENGTH = 2.0
    """How many observations the prior counts for."""

    def __init__(self) -> None:
        # (source, evidence) -> [reached, accepted] by position after the one that the evidence belongs to
        self._counts: dict[tuple[str, int], list[list[float]]] = {}

    def observe(self, draft: Draft, position: int, accepted: bool) -> None:
        """The draft's token at `position` (from 0), all before it accepted, was accepted or not."""
        last = len(draft.evidence) - 1
        counts = self._counts.setdefault((draft.source, draft.evidence[min(position, last)]), [])
        place = max(0, position - last)
        while len(counts) <= place:
            counts.append([0.0, 0.0])
        reached = counts[place]
        reached[0] = reached[0] * self.DECAY + 1.0
        reached[1] = reached[1] * self.DECAY + accepted

    def expected(self, source: str, evidence: Sequence[int], depth: int) -> list[float]:
        """
        Returns:
            `list[float]`: expected accepted tokens of drafts of 0, 1, …, `depth` tokens.
        """
        reach, total, totals = 1.0, 0.0, [0.0]
        last = len(evidence) - 1
        rate = 0.0
        for position in range(depth):
            if position <= last:
                counts = self._counts.get((source, evidence[position]), ())
                rate = min(0.3 + 0.1 * evidence[position], 0.9)
            place = max(0, position - last)
            if place < len(counts):
                reached, accepted = counts[place]
                rate = (accepted + self.STRENGTH * rate) / (reached + self.STRENGTH)
            reach *= rate
            total += reach
            totals.append(total)
        return totals

    def to_dict(self) -> dict[str, list[list[float]]]:
        return {f"{source}/{evidence}": [list(c) for c in counts] for (source, evidence), counts in self._counts.items()}


@dataclass
class _Paid:
    """What is known of a drafter that costs time."""

    seconds: deque[float]  # a drafted token's, recently
    accepted: list[list[float]]  # [reached, accepted] by position, whatever the evidence
    idle: int = 0  # rounds since it was used last
    patience: int = 8  # rounds until it is tried again

    @property
    def typical(self) -> float:
        return sorted(self.seconds)[len(self.seconds) // 2] if self.seconds else 0.0

    def tokens_per_second(self, curve: list[float], limit: int) -> tuple[float, int]:
        """The best over depths 1 … limit, a row, and that depth; `curve`: what verifying each depth costs."""
        gain, rate, reach, best = 1.0, 0.7, 1.0, (0.0, 0)
        for position in range(limit):
            if position < len(self.accepted):
                reached, accepted = self.accepted[position]
                rate = (accepted + AcceptanceRates.STRENGTH * rate) / (reached + AcceptanceRates.STRENGTH)
            reach *= rate
            gain += reach
            depth = position + 1
            best = max(best, (gain / (curve[depth] + depth * self.typical), depth))
        return best


class DepthController:
    """
    Chooses how deep to draft and how many drafted tokens to verify. Lives in a `Speculator`; safe to share between threads.

    Args:
        depth (`str`): `"adaptive"`, or `"constant"` to draft and verify as much as allowed.
    """

    def __init__(self, depth: str = "adaptive"):
        self.constant = depth == "constant"
        self.rates = AcceptanceRates()
        self._paid: dict[str, _Paid] = {}
        self._lock = threading.RLock()

    def plan(self, rows: int, costs: ForwardCosts) -> RoundPlan:
        """What drafters may ask in a round of so many rows on a target with these costs."""
        return RoundPlan(self, rows, costs)

    def trim(self, drafts: Sequence[Draft], costs: ForwardCosts) -> int:
        """
        How many drafted tokens to verify.

        Args:
            drafts (`Sequence[Draft]`): what was proposed, one for each running row.

        Returns:
            `int`: 0 … length of the longest draft; longer drafts are to be cut to it.
        """
        deepest = max((len(draft.tokens) for draft in drafts), default=0)
        if deepest == 0 or self.constant:
            return deepest
        with self._lock:
            curve = costs.verify(len(drafts), deepest)
            if curve is None:
                return 0  # what a plain step costs has to be known first
            gains = [0.0] * (deepest + 1)
            for draft in drafts:
                expected = self.rates.expected(draft.source, draft.evidence, len(draft.tokens))
                for k in range(deepest + 1):
                    gains[k] += 1.0 + expected[min(k, len(draft.tokens))]
        return max(range(deepest + 1), key=lambda k: gains[k] / curve[k])

    def width(self, rows: int, depth: int, max_depth: int, costs: ForwardCosts) -> int:
        """How wide to make a forward that verifies `depth` drafted tokens where up to `max_depth` would fit (`ForwardCosts.width`)."""
        return depth + 1 if self.constant else costs.width(rows, depth, max_depth)

    def observe(self, draft: Draft, position: int, accepted: bool) -> None:
        """The draft's token at `position` (from 0), all before it accepted, was accepted or not."""
        with self._lock:
            self.rates.observe(draft, position, accepted)
            if draft.source in self._paid:
                counts = self._paid[draft.source].accepted
                while len(counts) <= position:
                    counts.append([0.0, 0.0])
                counts[position][0] = counts[position][0] * AcceptanceRates.DECAY + 1.0
                counts[position][1] = counts[position][1] * AcceptanceRates.DECAY + accepted

    def to_dict(self) -> dict[str, Any]:
        """What was learned, as plain values."""
        with self._lock:
            return {
                "depth": "constant" if self.constant else "adaptive",
                "acceptance": self.rates.to_dict(),
                "draft_seconds": {source: paid.typical for source, paid in self._paid.items()},
            }

    def _known(self, source: str) -> _Paid:
        return self._paid.setdefault(source, _Paid(deque(maxlen=32), []))


class RoundPlan:
    """One round's answers to drafters that cost time (the `Plan` of `assistgen.drafters.base`)."""

    PROBE_DEPTH = 3
    MAX_PATIENCE = 256

    def __init__(self, controller: DepthController, rows: int, costs: ForwardCosts):
        self._controller, self._rows, self._costs = controller, rows, costs

    def budget(self, source: str, limit: int) -> Budget:
        """
        How deep to draft with a source that costs time.

        It pays if the best of `(1 + E[accepted(k)]) / (verify(k) + k · draft)` is more than a plain step's `1 / verify(0)`. A source
        that doesn't is tried again after 8 rounds, then 16, 32 … 256.
        """
        controller = self._controller
        if controller.constant or limit == 0:
            return Budget(limit, limit, 0.0)
        with controller._lock:
            known = controller._known(source)
            curve = self._costs.verify(self._rows, limit)
            if curve is None:
                return Budget(0, 0, 0.0)  # what a plain step costs has to be known first
            best, depth = known.tokens_per_second(curve, limit)
            if best > 1.0 / curve[0]:
                known.idle, known.patience = 0, 8
                # Another step pays while the chance that its token counts, times what a token costs otherwise, covers the step.
                return Budget(depth, limit, min(0.9, known.typical * best))
            known.idle += 1
            if known.idle < known.patience:
                return Budget(0, 0, 0.0)
            known.idle, known.patience = 0, min(2 * known.patience, self.MAX_PATIENCE)
            probe = min(limit, self.PROBE_DEPTH)
            return Budget(probe, probe, 0.0)

    def rate(self, source: str, evidence: int) -> float:
        """The chance that a token with this evidence is accepted."""
        with self._controller._lock:
            return self._controller.rates.expected(source, (evidence,), 1)[1]

    def spent(self, source: str, num_tokens: int, seconds: float) -> None:
        """Drafting `num_tokens` tokens a row took `seconds`."""
        with self._controller._lock:
            self._controller._known(source).seconds.append(seconds / num_tokens)

    def prefers(self, draft: Draft, source: str, limit: int) -> bool:
        """Whether a free draft in hand promises at least as many tokens per second as drafting with `source`."""
        controller = self._controller
        if not draft.tokens:
            return False
        with controller._lock:
            curve = self._costs.verify(self._rows, max(limit, len(draft.tokens)))
            if curve is None:
                return True
            expected = controller.rates.expected(draft.source, draft.evidence, len(draft.tokens))
            free = max((1.0 + gain) / curve[k] for k, gain in enumerate(expected))
            return free >= controller._known(source).tokens_per_second(curve, limit)[0]


class ShadowedDraft:
    """
    Follows a draft past the point where it was cut, comparing it with what the row really says.

    A drafter that costs nothing proposes in every round, so its acceptance is known also for drafts that were not verified: the
    controller learns when speculation starts to pay again without spending a forward on a trial.
    """

    __slots__ = ("_draft", "_position")

    def __init__(self, draft: Draft):
        self._draft = draft
        self._position = 0

    def follow(self, tokens: list[int], controller: DepthController) -> bool:
        """Compares the row's next `tokens` with the draft's; `False` once there is nothing left to learn."""
        draft = self._draft
        for token in tokens:
            if self._position == len(draft.tokens):
                return False
            accepted = token == draft.tokens[self._position]
            controller.observe(draft, self._position, accepted)
            self._position += 1
            if not accepted:
                return False
        return self._position < len(draft.tokens)
