"""Suffix decoding: the longest repetition of what was just said, in the request's own text or a store of earlier ones, goes on.

Source: SuffixDecoding (Oliaro et al., arXiv 2411.04975), whose rule scores the continuation of every match length by its expected number
of accepted tokens. Differences: the text's own end doesn't count as an occurrence, a short context and a rare continuation are trusted
less, the context of a probability grows along the draft, and a draft that reaches the text's end goes on as the repetition it is. Where a
tree can be verified, the next token's other candidates compete with that draft: what followed at other places, after any context, in the
text and then in the store, and frequent tokens. In text that doesn't repeat itself these are most of what is right; deeper branches would
add a tenth of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .base import Draft, Drafter, Plan, branching, evidence_of


if TYPE_CHECKING:
    from ..suffix.index import Cursor, Proposal, SuffixIndex
    from ..suffix.store import StoreCursor, SuffixStore, Vocabulary

NAME = "suffix"
STORE_TRUST = 0.5
"""What a store's score counts beside that of the row's own text: edits of a text that the store also knows otherwise follow the old one."""


class SuffixDrafter(Drafter):
    """
    `method="suffix"`: an index over each row's prompt and output, and the store if there is one; the better score drafts.

    Args:
        max_depth (`int`): the longest context, in tokens.
        max_spec_factor (`float`): a draft is at most so many times as long as its match.
        min_token_prob (`float`): less likely tokens aren't drafted.
        store (`SuffixStore`, *optional*): searched, and given the outputs when the call is over.
        vocabulary (`Vocabulary`, *optional*): tells the store what the ids mean.
        looked_up (`Sequence[list[int]]`): for each row a text that is searched like its own.
    """

    name = NAME

    def __init__(
        self,
        max_depth: int = 24,
        max_spec_factor: float = math.inf,
        min_token_prob: float = 0.002,
        store: SuffixStore | None = None,
        vocabulary: Vocabulary | None = None,
        looked_up: Sequence[list[int]] = (),
    ):
        self.max_depth, self.max_spec_factor, self.min_token_prob = max_depth, max_spec_factor, min_token_prob
        self._store, self._vocabulary, self._looked_up = store, vocabulary, looked_up
        if store is not None:
            store.check(vocabulary)
        self._own: list[SuffixIndex] = []
        self._own_cursors: list[Cursor] = []
        self._store_cursors: list[StoreCursor | None] = []
        self._outputs: list[list[int]] = []

    def begin(self, rows: Sequence[list[int]]) -> None:
        from ..suffix.index import Cursor, SuffixIndex  # numba takes a second to import

        for text, tokens in zip(self._looked_up or [[] for _ in rows], rows, strict=True):
            index = SuffixIndex(self.max_depth, len(text) + len(tokens) + 256)
            index.extend(text + tokens)
            self._own.append(index)
            self._own_cursors.append(Cursor([index], is_own=True))
            self._outputs.append(tokens[-1:])
            memory = self._store.cursor() if self._store is not None else None
            if memory is not None:
                memory.advance(tokens)
            self._store_cursors.append(memory)

    def propose(self, rows: Sequence[int], max_tokens: Sequence[int], plan: Plan) -> list[Draft]:
        return [
            self._propose(row, room, plan.takes_trees) if room > 0 else Draft([], NAME) for row, room in zip(rows, max_tokens, strict=True)
        ]

    def _propose(self, row: int, max_tokens: int, as_tree: bool) -> Draft:
        limits = (max_tokens, self.max_spec_factor, self.min_token_prob)
        own, memory = self._own_cursors[row], self._store_cursors[row]
        best = own.propose(*limits)
        if memory is not None and STORE_TRUST * (other := memory.propose(*limits)).score > best.score:
            best = other
        if as_tree:
            best = memory.branch(own, best, *limits) if memory is not None else own.branch(best, *limits)
        return as_draft(best)

    def commit(self, row: int, tokens: list[int]) -> None:
        self._own[row].extend(tokens)
        self._outputs[row] += tokens
        if (memory := self._store_cursors[row]) is not None:
            memory.advance(tokens)

    def end(self) -> None:
        if self._store is not None:
            for output in self._outputs:
                self._store.add(output, self._vocabulary)
        self._own, self._own_cursors, self._store_cursors, self._outputs = [], [], [], []


def as_draft(proposal: Proposal) -> Draft:
    """With each token's own chance, what it follows accepted, as evidence."""
    probs, parents = proposal.probs, proposal.parents
    if parents is None:
        before, evidence = 1.0, []
        for prob in probs:
            evidence.append(evidence_of(prob / before))
            before = prob
    else:
        evidence = [evidence_of(prob / probs[parent] if parent >= 0 else prob) for prob, parent in zip(probs, parents, strict=True)]
    return Draft(proposal.tokens, NAME, tuple(evidence) or (3,), parents=branching(parents))
