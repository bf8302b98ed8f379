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

from .drafters.base import Draft


class ForwardCosts:
    """
    Seconds that one target forward takes, by the number of rows and by its width (tokens per row), as measured in this process.

    The curve is not monotone (two tokens can cost less than one, or twice as much), so nothing is assumed about it: a width that was
    never measured is taken to lie between the nearest measured ones, and an old measurement fades, so that it is made again.
    """

    SAMPLES = 9
    HALF_LIFE = 512
    """Forwards after which a measurement counts half."""

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
    The chance that a draft's i-th token is accepted when those before it were, by the drafter's evidence: decayed counts with a prior.

    The prior of a position is the rate of the position before it, so a drafter that was right i times is expected to go on being right.
    """

    DECAY = 0.97
    STRENGTH = 2.0
    """How many observations the prior counts for."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], list[list[float]]] = {}  # (drafter, evidence) -> [reached, accepted] by position

    def observe(self, drafter: str, evidence: int, position: int, accepted: bool) -> None:
        """The draft's token at `position` (from 0), all before it accepted, was accepted or not."""
        counts = self._counts.setdefault((drafter, evidence), [])
        while len(counts) <= position:
            counts.append([0.0, 0.0])
        reached = counts[position]
        reached[0] = reached[0] * self.DECAY + 1.0
        reached[1] = reached[1] * self.DECAY + accepted

    def expected(self, drafter: str, evidence: int, depth: int) -> list[float]:
        """
        Returns:
            `list[float]`: expected accepted tokens of drafts of 0, 1, …, `depth` tokens.
        """
        counts = self._counts.get((drafter, evidence), ())
        rate = min(0.3 + 0.1 * evidence, 0.9)
        reach, total, totals = 1.0, 0.0, [0.0]
        for position in range(depth):
            if position < len(counts):
                reached, accepted = counts[position]
                rate = (accepted + self.STRENGTH * rate) / (reached + self.STRENGTH)
            reach *= rate
            total += reach
            totals.append(total)
        return totals

    def to_dict(self) -> dict[str, list[list[float]]]:
        return {f"{drafter}/{evidence}": [list(c) for c in counts] for (drafter, evidence), counts in self._counts.items()}


class DepthController:
    """
    Chooses how many drafted tokens to verify. Lives in a `Speculator`; safe to share between threads.

    Args:
        depth (`str`): `"adaptive"`, or `"constant"` to verify whatever was drafted.
    """

    def __init__(self, depth: str = "adaptive"):
        self.depth = depth
        self.rates = AcceptanceRates()
        self._lock = threading.Lock()

    def trim(self, drafter: str, drafts: Sequence[Draft], costs: ForwardCosts) -> int:
        """
        The depth k of this round.

        Args:
            drafts (`Sequence[Draft]`): what was proposed, one for each running row.

        Returns:
            `int`: 0 … length of the longest draft; longer drafts are to be cut to it.
        """
        deepest = max((len(draft.tokens) for draft in drafts), default=0)
        if deepest == 0 or self.depth == "constant":
            return deepest
        with self._lock:
            curve = costs.curve(len(drafts), deepest + 1)
            if curve is None:
                return 0  # what a plain step costs has to be known first
            gains = [0.0] * (deepest + 1)
            for draft in drafts:
                expected = self.rates.expected(drafter, draft.evidence, len(draft.tokens))
                for k in range(deepest + 1):
                    gains[k] += 1.0 + expected[min(k, len(draft.tokens))]
        return max(range(deepest + 1), key=lambda k: gains[k] / curve[k])

    def observe(self, drafter: str, evidence: int, position: int, accepted: bool) -> None:
        """See `AcceptanceRates.observe`."""
        with self._lock:
            self.rates.observe(drafter, evidence, position, accepted)

    def to_dict(self) -> dict[str, Any]:
        """What was learned, as plain values."""
        with self._lock:
            return {"depth": self.depth, "acceptance": self.rates.to_dict()}


class ShadowedDraft:
    """
    Follows a draft past the point where it was cut, comparing it with what the row really says.

    A drafter that costs nothing proposes in every round, so its acceptance is known also for drafts that were not verified: the
    controller learns when speculation starts to pay again without spending a forward on a trial.
    """

    __slots__ = ("_drafter", "_draft", "_position")

    def __init__(self, drafter: str, draft: Draft):
        self._drafter = drafter
        self._draft = draft
        self._position = 0

    def follow(self, tokens: list[int], controller: DepthController) -> bool:
        """Compares the row's next `tokens` with the draft's; `False` once there is nothing left to learn."""
        draft = self._draft
        for token in tokens:
            if self._position == len(draft.tokens):
                return False
            accepted = token == draft.tokens[self._position]
            controller.observe(self._drafter, draft.evidence, self._position, accepted)
            self._position += 1
            if not accepted:
                return False
        return self._position < len(draft.tokens)
