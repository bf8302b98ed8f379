"""The contract between the decode loop and whatever guesses the next tokens. Plain integers; no torch, no transformers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


EVIDENCE_CLASSES = 24
LEAST_EVIDENCE = -8
SMALL_CHANCE = 1.0 - 2.0 ** (-1 / 3)
"""Below this, the classes go by the halvings of the chance."""


def evidence_of(chance: float) -> int:
    """The class, `LEAST_EVIDENCE` … `EVIDENCE_CLASSES`, of a token's chance to be accepted: three for each halving of the doubt."""
    if chance < SMALL_CHANCE:
        return max(LEAST_EVIDENCE, -int(math.log2(SMALL_CHANCE / chance))) if chance > 0.0 else LEAST_EVIDENCE
    doubt = 1.0 - chance
    return EVIDENCE_CLASSES if doubt <= 2.0 ** (-EVIDENCE_CLASSES / 3) else int(-3 * math.log2(doubt))


def chance_of(evidence: int) -> float:
    """The chance in the middle of a class."""
    return 1.0 - 2.0 ** (-(evidence + 0.5) / 3) if evidence > 0 else SMALL_CHANCE * 2.0 ** (evidence - 0.5)


@dataclass(slots=True)
class Draft:
    """
    Guessed tokens for one row: a chain, or a tree in which several compete to follow the same token. In a node's place, -1 stands for the
    row's last committed token.

    Attributes:
        tokens (`list[int]`): the guess; may be empty. A chain's in order; a tree's in the order of their worth, each after the one that
            it follows, so that the first few of them are a draft as well.
        source (`str`): the drafter's name.
        evidence (`tuple[int, ...]`): for each token a class of the chance that the drafter gives it (`evidence_of`), what it follows
            accepted. The controller starts from that chance and learns the class's true acceptance rate. The last one stands for all
            further tokens.
        probs (*optional*): the distributions that the tokens were drawn from, `(len(tokens), target vocabulary)`; `None` for a
            deterministic draft, which is compared with the target's own choice. All tokens drawn must be here: whether another one is
            drawn may depend on those before it, and none may be left out for what it is.
        is_free (`bool`): guessing cost next to nothing, so the controller also learns from guesses that weren't verified.
        parents (`list[int]`, *optional*): for each token of a tree the index of the one that it follows; `None` for a chain.
    """

    tokens: list[int]
    source: str
    evidence: tuple[int, ...] = (3,)
    probs: Any = None
    is_free: bool = True
    parents: list[int] | None = None

    def cut(self, length: int) -> Draft:
        """The first `length` tokens."""
        parents = self.parents[:length] if self.parents is not None else None
        return Draft(self.tokens[:length], self.source, self.evidence, self.probs, self.is_free, branching(parents))

    def without(self, banned: Container[int]) -> Draft:
        """A tree without the nodes `banned` and what follows them."""
        assert self.parents is not None
        places = {-1: -1}  # of the nodes that stay
        for node, parent in enumerate(self.parents):
            if parent in places and node not in banned:
                places[node] = len(places) - 1
        nodes = list(places)[1:]
        return Draft(
            [self.tokens[node] for node in nodes],
            self.source,
            tuple(self.evidence[min(node, len(self.evidence) - 1)] for node in nodes),
            is_free=self.is_free,
            parents=branching([places[self.parents[node]] for node in nodes]),
        )

    def follow(self, node: int, token: int) -> int | None:
        """The node that says `token` after `node`, or `None`."""
        if self.parents is None:
            node += 1
            return node if node < len(self.tokens) and self.tokens[node] == token else None
        return next((child for child in self.children(node) if self.tokens[child] == token), None)

    def children(self, node: int) -> list[int]:
        """The nodes that follow `node`."""
        if self.parents is None:
            return [node + 1] if node + 1 < len(self.tokens) else []
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> list[int]:
        """The nodes up to `node`, in order."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node] if self.parents is not None else node - 1
        return path[::-1]

    def path_on(self, path: list[int]) -> list[int]:
        """A path from the start, and how it most likely goes on."""
        path = path.copy()
        while children := self.children(path[-1] if path else -1):
            path.append(children[0])
        return path

    def depths(self) -> list[int]:
        """How many tokens the row would have, from this draft, with each node the last."""
        if self.parents is None:
            return list(range(1, len(self.tokens) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths


def branching(parents: list[int] | None) -> list[int] | None:
    """`None` for the parents of what is only a chain."""
    return None if parents is None or parents == list(range(-1, len(parents) - 1)) else parents


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
    What the controller answers to a drafter in one round (see `assistgen.control.DepthController`).

    Attributes:
        remaining (`int`, *optional*): the most tokens that a row may still get, if it is known.
        takes_trees (`bool`): a draft may be a tree.
    """

    remaining: int | None
    takes_trees: bool

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
