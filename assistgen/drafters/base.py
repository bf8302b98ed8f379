"""The contract between the decode loop and whatever guesses the next tokens. Plain integers; no torch, no transformers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Draft:
    """
    A chain of guessed tokens for one row.

    Attributes:
        tokens (`list[int]`): the guess, in order; may be empty.
        evidence (`int`): how much stood behind the guess, in the drafter's own small classes (n-gram: a class of match lengths). The
            controller learns one acceptance rate for each.
    """

    tokens: list[int]
    evidence: int = 0


class Drafter(ABC):
    """
    Guesses the next tokens of the rows (sequences) of one call.

    The loop calls `begin` once, after the target's first token is out, then in each round `propose` and `commit`. A drafter lives for
    one call; what should outlive it belongs to the `Speculator`.
    """

    name: str
    """Short name, as in `method`; marks the accepted tokens in `chunk.sources`."""

    constant_depth: bool = False
    """Every proposed token is to be verified: the controller doesn't shorten the drafts."""

    @abstractmethod
    def begin(self, rows: Sequence[list[int]]) -> None:
        """Takes in the rows' tokens so far: prompt without padding, and the first generated token."""

    @abstractmethod
    def propose(self, row: int, max_tokens: int) -> Draft:
        """
        Guesses what follows in row `row`: at most `max_tokens` (≥ 1) tokens, fewer or none at will. Must not depend on whether
        earlier guesses were verified, only on the committed tokens.
        """

    @abstractmethod
    def commit(self, row: int, tokens: list[int]) -> None:
        """Row `row` goes on with `tokens` (at least one), accepted or the target's own."""
