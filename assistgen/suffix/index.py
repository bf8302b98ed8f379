"""What followed the last few tokens wherever they occurred before: an index that grows a token at a time."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import automaton


@dataclass(slots=True)
class Proposal:
    """
    What may follow a context.

    Attributes:
        tokens (`list[int]`): in order, or with `parents` the likeliest first.
        probs (`list[float]`): the estimated chance that all is accepted up to this token.
        score (`float`): their sum, the expected number of accepted tokens; of the likeliest way on alone if there are several.
        match_length (`int`): length of the suffix of the context that stands behind it, in tokens; 0 if there is none.
        parents (`list[int]`, *optional*): if there are several ways on, index of the token that each one follows, which comes before it;
            -1 for the context's end.
    """

    tokens: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    score: float = 0.0
    match_length: int = 0
    parents: list[int] | None = None


class SuffixIndex:
    """
    All substrings of one or more token sequences, with counts (see `automaton`). Taking in a token and proposing cost the same whatever
    the length; some 50 bytes a token.

    Args:
        max_depth (`int`): the longest context that is looked at, in tokens.
    """

    GROWTH = 1.1

    def __init__(self, max_depth: int = 24, capacity: int = 256):
        self.max_depth = max_depth
        self._meta = np.zeros(automaton.META_FIELDS, np.int64)
        self._meta[automaton.NUM_STATES] = 1
        self._meta[automaton.MAX_DEPTH] = max_depth
        self._states = np.empty((capacity + capacity // 2, automaton.STATE_FIELDS), np.int32)
        self._states[automaton.ROOT] = (0, automaton.NONE, 0, automaton.NONE, automaton.NONE, 0)
        self._edges = np.empty((capacity - capacity // 8, automaton.EDGE_FIELDS), np.int32)
        self._buckets = np.full(len(self._edges), automaton.NONE, np.int32)
        self._text = np.empty(capacity, np.int32)
        self._one = np.empty(1, np.int32)
        self._point()

    def __len__(self) -> int:
        """Tokens, with one more for the end of each sequence but the last."""
        return int(self._meta[automaton.NUM_TOKENS])

    @property
    def nbytes(self) -> int:
        """Memory in use, and set aside for growth."""
        return sum(array.nbytes for array in (self._states, self._edges, self._buckets, self._text))

    @property
    def text(self) -> Any:
        """All tokens, `(len(self),)`, with -1 behind each sequence but the last."""
        return self._text[: len(self)]

    def extend(self, tokens: Sequence[int]) -> None:
        """The present sequence goes on with `tokens`."""
        if len(tokens) == 1:
            new = self._one
            new[0] = tokens[0]
        else:
            new = np.asarray(tokens, np.int32)
        while (done := automaton.extend(new, self._meta)) < len(new):
            new = new[done:]
            self._grow(len(new))

    def begin_sequence(self) -> None:
        """What comes next has nothing to do with what came before."""
        meta = self._meta
        if meta[automaton.NUM_TOKENS] == 0 or self._text[meta[automaton.NUM_TOKENS] - 1] == automaton.SEPARATOR:
            return
        self._grow(1)
        self._text[meta[automaton.NUM_TOKENS]] = automaton.SEPARATOR
        meta[automaton.NUM_TOKENS] += 1
        meta[automaton.LAST] = meta[automaton.ACTIVE] = automaton.ROOT
        meta[automaton.ACTIVE_LENGTH] = 0

    def _grow(self, tokens: int) -> None:
        """Room for what is there and some of `tokens` more: an array that is full grows by a tenth."""
        meta, more = self._meta, min(tokens, 1 << 16)
        self._states = self._grown(self._states, int(meta[automaton.NUM_STATES]) + more + 2)
        self._text = self._grown(self._text, int(meta[automaton.NUM_TOKENS]) + more + 2)
        wanted = max(int(meta[automaton.WANTED_EDGES]), int(meta[automaton.NUM_EDGES]) + more // 4)
        rebuilds = wanted > len(self._edges)
        if rebuilds:
            self._edges = self._grown(self._edges, wanted)
            self._buckets = np.empty(len(self._edges), np.int32)
        self._point()
        if rebuilds:
            automaton.rebuild_buckets(meta)

    def _grown(self, array: Any, wanted: int) -> Any:
        if wanted <= len(array):
            return array
        grown = np.empty((max(wanted, int(len(array) * self.GROWTH)), *array.shape[1:]), array.dtype)
        grown[: len(array)] = array
        return grown

    def _point(self) -> None:
        """Tells the compiled functions where the arrays are."""
        meta = self._meta
        meta[automaton.STATES], meta[automaton.STATES_ROOM] = self._states.ctypes.data, len(self._states)
        meta[automaton.EDGES], meta[automaton.EDGES_ROOM] = self._edges.ctypes.data, len(self._edges)
        meta[automaton.BUCKETS] = self._buckets.ctypes.data
        meta[automaton.TEXT], meta[automaton.TEXT_ROOM] = self._text.ctypes.data, len(self._text)


class Cursor:
    """
    Where a context stands: at the end of an index's own text, or, another text that is followed as it grows, in one or more indexes.

    Args:
        indexes (`Sequence[SuffixIndex]`): what is searched, the preferred one of equals first; of one depth.
        is_own (`bool`): the context is the end of the last sequence of the one index.
    """

    def __init__(self, indexes: Sequence[SuffixIndex], is_own: bool):
        self.indexes = tuple(indexes)
        self.is_own = is_own
        # Python's arrays: what a proposal reads and writes of them takes a microsecond more with numpy's.
        self._metas = array("q", [index._meta.ctypes.data for index in indexes])
        self._places = array("q", [0] * (2 * len(indexes)))
        self._new = array("i", [0])
        self._chain = array("q", [0] * (max(index.max_depth for index in indexes) + 1))
        self._branch_tokens, self._branch_probs = array("i", [0] * automaton.MAX_BRANCHES), array("d", [0.0] * automaton.MAX_BRANCHES)
        self._make_room(16)

    def _make_room(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens, self._probs = array("i", [0] * (2 * max_tokens)), array("d", [0.0] * (2 * max_tokens))
        self._point()

    def _point(self) -> None:
        """Tells the compiled functions where the arrays are (the order is `automaton`'s)."""
        metas, places, new, chain, tokens, probs, branch_tokens, branch_probs = (
            numbers.buffer_info()[0]
            for numbers in (
                self._metas, self._places, self._new, self._chain, self._tokens, self._probs, self._branch_tokens, self._branch_probs
            )
        )  # fmt: skip
        self._asker = array(
            "q",
            [
                self.is_own, len(self.indexes), metas, places, new, chain, len(self._chain), tokens, probs, self._max_tokens,
                branch_tokens, branch_probs,
            ],
        )  # fmt: skip
        self._address = self._asker.buffer_info()[0]

    def _take(self, new: Sequence[int]) -> int:
        """Puts tokens where the compiled functions find them."""
        if len(new) > len(self._new):
            self._new = array("i", [0] * len(new))
            self._point()
        for i, token in enumerate(new):
            self._new[i] = token
        return len(new)

    @property
    def match_length(self) -> int:
        """Length of the longest suffix of the context that an index knows, in tokens; up to `max_depth`."""
        if not self.is_own:
            return max(self._places[1::2])
        index = self.indexes[0]
        return min(int(index._meta[automaton.ACTIVE_LENGTH]), index.max_depth)

    def count(self) -> int:
        """How often that suffix occurs in the first index, the context itself included if it is the index's own."""
        meta = self.indexes[0]._meta
        state = meta[automaton.ACTIVE] if self.is_own else self._places[0]
        return int(automaton.count(state, self.match_length, meta))

    def advance(self, tokens: Sequence[int]) -> None:
        """The other text goes on with `tokens`."""
        num_new = self._take(tokens)  # may move what the address is of
        automaton.advance(self._address, num_new)

    def propose(
        self, max_tokens: int, max_spec_factor: float = math.inf, min_token_prob: float = 0.002, new: Sequence[int] = ()
    ) -> Proposal:
        """
        Args:
            max_tokens (`int`): the most tokens to propose.
            max_spec_factor (`float`): at most this many times the length of the match.
            min_token_prob (`float`): tokens less likely than this are left out.
            new (`Sequence[int]`): as by `advance`, the other text goes on with these first.
        """
        if max_tokens > self._max_tokens:
            self._make_room(max_tokens)
        num_new = self._take(new)
        first, end, size, score = automaton.propose(self._address, num_new, max_tokens, max_spec_factor, min_token_prob)
        if first == end:
            return Proposal()
        return Proposal(self._tokens[first:end].tolist(), self._probs[first:end].tolist(), score, size)

    def branch(
        self,
        proposal: Proposal,
        max_tokens: int,
        max_spec_factor: float = math.inf,
        min_token_prob: float = 0.002,
        memory: Cursor | None = None,
    ) -> Proposal:
        """
        A tree: `proposal`, from here or elsewhere, beside the other tokens that may come next in the index's own text.

        Args:
            max_tokens (`int`): the most tokens in all.
            max_spec_factor, min_token_prob (`float`): as in `propose`.
            memory (`Cursor`, *optional*): follows this text in others. What the text itself leaves open goes by the largest of these.
        """
        trunk, chances = proposal.tokens, proposal.probs
        first, first_prob = (trunk[0], chances[0]) if trunk else (automaton.NONE, 0.0)
        n = automaton.branch(
            self._address, first, first_prob, max_spec_factor, min_token_prob, memory._address if memory is not None else 0
        )
        if n == 0 or (len(trunk) >= max_tokens and chances[max_tokens - 1] >= self._branch_probs[0]):
            return proposal
        others, likely = self._branch_tokens[:n].tolist(), self._branch_probs[:n].tolist()
        likely.append(-1.0)
        tokens: list[int] = []
        probs: list[float] = []
        parents: list[int] = []
        at, last = 0, -1
        for token, prob in zip(trunk, chances, strict=True):
            while likely[at] > prob:
                tokens.append(others[at])
                probs.append(likely[at])
                parents.append(-1)
                at += 1
            parents.append(last)
            last = len(tokens)
            tokens.append(token)
            probs.append(prob)
        tokens += others[at:]
        probs += likely[at:n]
        parents += [-1] * (n - at)
        return Proposal(tokens[:max_tokens], probs[:max_tokens], proposal.score, proposal.match_length, parents[:max_tokens])
