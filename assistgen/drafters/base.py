"""The contract between the decode loop and whatever guesses the next tokens. Plain integers; no torch, no transformers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


EVIDENCE_CLASSES = 24


def evidence_of(chance: float) -> int:
    """The class, 0 … `EVIDENCE_CLASSES`, of a token's chance to be accepted: three for each halving of the doubt."""
    doubt = 1.0 - chance
    return EVIDENCE_CLASSES if doubt <= 2.0 ** (-EVIDENCE_CLASSES / 3) else int(-3 * math.log2(doubt))


def chance_of(evidence: int) -> float:
    """The chance in the middle of a class."""
    return 1.0 - 2.0 ** (-(evidence + 0.5) / 3)


@dataclass(slots=True)
class Draft:
    """
    A chain of guessed tokens for one row.

    Attributes:
        tokens (`list[int]`): the guess, in order; may be empty.
        source (`str`): the drafter's name.
        evidence (`tuple[int, ...]`): for each token a class of the chance that the drafter gives it (`evidence_of`). The controller
            starts from that chance and learns the class's true acceptance rate. The last one stands for all further tokens.
        probs (*optional*): the distributions that the tokens were drawn from, `(len(tokens), target vocabulary)`; `None` for a
            deterministic draft, which is compared with the target's own choice. All tokens drawn must be here: whether another one is
            drawn may depend on those before it, and none may be left out for what it is.
        is_free (`bool`): guessing cost next to nothing, so the controller also learns from guesses that weren't verified.
    """

    tokens: list[int]
    source: str
    evidence: tuple[int, ...] = (3,)
    probs: Any = None
    is_free: bool = True

    def cut(self, length: int) -> Draft:
        """The first `length` tokens."""
        return Draft(self.tokens[:length], self.source, self.evidence, self.probs, self.is_free)


class Drafter(ABC):
    """
    Guesses the next tokens of the rows (sequences) of one call.

    The loop calls `begin` once, after the target's first token is out, then in each round `propose` and `commit`, and `end` at last,
    also after an error. A drafter lives for one call; what should outlive it belongs to the `Speculator`.
    """

    name: str
    """Short name, as in `method`; marks the accepted tokens in `chunk.sources`."""

    is_free: bool = True
    """Guessing costs next to nothing, so it is done in every round."""

    constant_depth: bool = False
    """Every proposed token is to be verified: the controller doesn't shorten the drafts."""

    num_forwards: int = 0
    """Forward calls of a draft model so far."""

    @abstractmethod
    def begin(self, rows: Sequence[list[int]]) -> None:
        """Takes in the rows' tokens so far: prompt without padding, and the first generated token."""

    @abstractmethod
    def propose(self, rows: Sequence[int], max_tokens: Sequence[int], plan: Plan) -> list[Draft]:
        """
        Guesses what follows in each of `rows`, which run in this round: at most `max_tokens[i]` tokens, fewer or none at will; 0 asks
        for none. `plan` says how deep drafting pays for a drafter that isn't free.
        """

    @abstractmethod
    def commit(self, row: int, tokens: list[int]) -> None:
        """Row `row` goes on with `tokens` (at least one), accepted or the target's own."""

    def observe(self, draft: Draft, accepted: int) -> None:  # noqa: B027 - most learn all they need from `commit`
        """Of this draft, as far as it was verified, the first `accepted` tokens were accepted. Before the row's `commit`."""

    def end(self) -> None:  # noqa: B027 - most have nothing to put away
        """The call is over."""


class Budget(NamedTuple):
    """
    Attributes:
        depth (`int`): tokens to draft where the draft can't be looked at on the way.
        limit (`int`): the most tokens to draft where it can (see `Plan.goes_on`); 0: draft nothing.
    """

    depth: int
    limit: int


class Plan(Protocol):
    """
    What the controller answers to a drafter that costs time (see `assistgen.control.DepthController`).

    Attributes:
        remaining (`int`, *optional*): the most tokens that a row may still get, if it is known.
    """

    remaining: int | None

    @property
    def weighs_costs(self) -> bool:
        """Whether it depends on what things cost; at a fixed depth it doesn't."""

    def budget(self, source: str, limit: int, reading: float = 0.0, is_new: bool = False) -> Budget:
        """
        What may be drafted in this round, at most `limit` tokens a row, if taking in text first takes `reading` seconds; `is_new`: nothing
        was drafted in this call yet.
        """

    def rate(self, source: str, evidence: int) -> float:
        """The chance that a token with this evidence is accepted."""

    def goes_on(self, source: str, reaches: Sequence[Sequence[float]]) -> bool:
        """Whether another token is expected to pay after drafts whose rows reach each of their tokens with these chances."""

    def spent(self, source: str, num_tokens: int, seconds: float) -> None:
        """Drafting `num_tokens` tokens a row took `seconds`."""

    def renew(self, source: str) -> None:
        """What drafting with a source costs has changed."""

    def prefers(self, draft: Draft, source: str, limit: int) -> bool:
        """Whether a draft in hand promises at least as much as one of `source`, of up to `limit` tokens, in its place."""
