"""What followed the last few tokens wherever they occurred before: an index that grows a token at a time."""

from __future__ import annotations

import math
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
        tokens (`list[int]`): each token's parent comes before it.
        parents (`list[int]`): index of the token that each one follows, -1 for the context's end. One branch so far: -1, 0, 1, …
        probs (`list[float]`): the estimated chance that all is accepted up to this token.
        score (`float`): their sum, the expected number of accepted tokens.
        match_length (`int`): length of the suffix of the context that stands behind it, in tokens; 0 if there is none.
    """

    tokens: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    score: float = 0.0
    match_length: int = 0

    @property
    def parents(self) -> list[int]:
        return list(range(-1, len(self.tokens) - 1))


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
        self._states = np.empty((2 * capacity, automaton.STATE_FIELDS), np.int32)
        self._states[automaton.ROOT] = (0, automaton.NONE, 0, automaton.NONE, automaton.NONE, 0)
        self._edges = np.empty((capacity, automaton.EDGE_FIELDS), np.int32)
        self._buckets = np.full(capacity, automaton.NONE, np.int32)
        self._text = np.empty(capacity, np.int32)
        self._meta = np.zeros(automaton.META_FIELDS, np.int64)
        self._meta[automaton.NUM_STATES] = 1

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
        new = np.asarray(tokens, np.int32)
        while True:
            done = automaton.extend(new, self.max_depth, self._states, self._edges, self._buckets, self._text, self._meta)
            if done == len(new):
                return
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
        if wanted > len(self._edges):
            self._edges = self._grown(self._edges, wanted)
            self._buckets = np.empty(len(self._edges), np.int32)
            automaton.rebuild_buckets(self._edges, meta[automaton.NUM_EDGES], self._buckets)

    def _grown(self, array: Any, wanted: int) -> Any:
        if wanted <= len(array):
            return array
        grown = np.empty((max(wanted, int(len(array) * self.GROWTH)), *array.shape[1:]), array.dtype)
        grown[: len(array)] = array
        return grown


class Cursor:
    """
    Where a context stands in an index: the end of the index's own text, or another text that is followed as it grows.

    Args:
        index (`SuffixIndex`): what is searched.
        is_own (`bool`): the context is the end of the index's own last sequence.
    """

    def __init__(self, index: SuffixIndex, is_own: bool):
        self.index = index
        self.is_own = is_own
        self._at = np.zeros(2, np.int64)
        self._chain = np.empty(index.max_depth + 1, np.int64)
        self._room(16)

    def _room(self, max_tokens: int) -> None:
        self._tokens = np.empty((2, max_tokens), np.int32)
        self._probs = np.empty((2, max_tokens), np.float64)

    @property
    def match_length(self) -> int:
        """Length of the longest suffix of the context that the index knows, in tokens; up to `max_depth`."""
        return self._place()[1]

    @property
    def count(self) -> int:
        """How often that suffix occurs, the context itself included if it is the index's own."""
        index, (state, length) = self.index, self._place()
        return int(index._states[automaton.suffix_state(state, length, index._states), automaton.COUNT])

    def _place(self) -> tuple[int, int]:
        meta = self.index._meta
        state, length = (meta[automaton.ACTIVE], meta[automaton.ACTIVE_LENGTH]) if self.is_own else self._at
        return int(state), min(int(length), self.index.max_depth)

    def advance(self, tokens: Sequence[int]) -> None:
        """The other text goes on with `tokens`."""
        index = self.index
        new = np.asarray(tokens, np.int32)
        automaton.advance(new, index.max_depth, self._at, index._states, index._edges, index._buckets)

    def propose(self, max_tokens: int, max_spec_factor: float = math.inf, min_token_prob: float = 0.02) -> Proposal:
        """
        Args:
            max_tokens (`int`): the most tokens to propose.
            max_spec_factor (`float`): at most this many times the length of the match.
            min_token_prob (`float`): tokens less likely than this are left out.
        """
        index = self.index
        if self._tokens.shape[1] < max_tokens:
            self._room(max_tokens)
        state, length = self._place()
        row, n, size, score = automaton.propose(
            state,
            length,
            self.is_own,
            max_tokens,
            max_spec_factor,
            min_token_prob,
            index.max_depth,
            index._states,
            index._edges,
            index._text,
            len(index),
            self._chain,
            self._tokens,
            self._probs,
        )
        if n == 0:
            return Proposal()
        return Proposal(self._tokens[row, :n].tolist(), self._probs[row, :n].tolist(), score, size)
