"""Several drafters as one: those that cost nothing are asked first, the draft model where their guesses promise less."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Draft, Drafter, Plan


class ChainDrafter(Drafter):
    """
    `drafters=[…]`.

    Args:
        drafters (`Sequence[Drafter]`): the first is asked first. Only the last may cost time.
        limits (`Sequence[int]`): the most tokens that each drafts in a round.
    """

    name = "chain"

    def __init__(self, drafters: Sequence[Drafter], limits: Sequence[int]):
        self._drafters = drafters
        self._limits = limits
        self.is_free = all(drafter.is_free for drafter in drafters)

    @property
    def num_forwards(self) -> int:  # type: ignore[override]
        return sum(drafter.num_forwards for drafter in self._drafters)

    def begin(self, rows: Sequence[list[int]]) -> None:
        for drafter in self._drafters:
            drafter.begin(rows)

    def propose(self, rows: Sequence[int], max_tokens: Sequence[int], plan: Plan) -> list[Draft]:
        best = [Draft([], self.name) for _ in rows]
        for drafter, limit in zip(self._drafters, self._limits, strict=True):
            # A free drafter fills the gaps; one that costs time also competes with what there is.
            rooms = [min(room, limit) for room in max_tokens]
            rooms = [
                0 if draft.tokens and (drafter.is_free or plan.prefers(draft, drafter.name, room)) else room
                for draft, room in zip(best, rooms, strict=True)
            ]
            if max(rooms, default=0) > 0:
                others = drafter.propose(rows, rooms, plan)
                best = [other if other.tokens else draft for draft, other in zip(best, others, strict=True)]
        return best

    def commit(self, row: int, tokens: list[int]) -> None:
        for drafter in self._drafters:
            drafter.commit(row, tokens)

    def observe(self, draft: Draft, accepted: int) -> None:
        for drafter in self._drafters:
            drafter.observe(draft, accepted)

    def end(self) -> None:
        for drafter in self._drafters:
            drafter.end()
