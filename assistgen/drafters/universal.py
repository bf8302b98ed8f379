"""A draft model with a foreign tokenizer, in front of the draft model's own loop.

Two routes. *Text*: the draft model continues the text, and what it says is put into the target's vocabulary (as in universal assisted
generation, Timor et al., 2024, but byte for byte and of the new text only); any two tokenizers will do. *Vocabulary*: only tokens that
both vocabularies have are drafted, token for token, with probabilities (token-level intersection, Timor et al., arXiv 2502.05202), so that
sampled drafts are accepted by speculative sampling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..stats import DrafterStats, SpeculationStats
from ..translation import Alignment, translation_of
from .base import Draft, Drafter, Plan, chance_of, evidence_of
from .draft_model import NAME, DraftModelDrafter


MUCH_OVERLAP = 0.95
"""The share of the prompts' tokens that must be the same in both vocabularies for a token to be as good a guess as a text."""


class UniversalDrafter(Drafter):
    """
    `method="draft_model"` with a foreign tokenizer; with the same one after all, the draft model's own drafter.

    Args:
        make_drafter: makes the draft model's drafter from the keyword arguments `vocab_size` (if it isn't the target's), `shared` and
            `unsettled` of `DraftModelDrafter`.
        model (`PreTrainedModel`): the draft model.
        tokenizers (`tuple`): functions that give the target's tokenizer and the draft's.
        stats (`SpeculationStats`): of the call; the route and the overlap go there.
        draws (`bool`): the drafts are sampled.
        by_vocabulary (`bool`, *optional*): `use_heterogeneous_vocab`.
        unseen (`frozenset[int]`): the target's ids that don't stand for text.
    """

    name = NAME
    is_free = False

    def __init__(
        self,
        make_drafter: Callable[..., DraftModelDrafter],
        model: Any,
        tokenizers: tuple[Callable[[], Any], Callable[[], Any]],
        stats: SpeculationStats,
        draws: bool,
        by_vocabulary: bool | None,
        unseen: frozenset[int],
    ):
        self._make_drafter, self._model, self._tokenizers, self._stats = make_drafter, model, tokenizers, stats
        self._draws, self._by_vocabulary = draws, by_vocabulary
        self._unseen = unseen
        self._drafter: DraftModelDrafter | None = None
        self._alignments: list[Alignment] = []
        self._same_tokens: dict[int, int] | None = None

    @property
    def num_forwards(self) -> int:  # type: ignore[override]
        return self._drafter.num_forwards if self._drafter is not None else 0

    def begin(self, rows: Sequence[list[int]]) -> None:
        target, draft = (load() for load in self._tokenizers)
        translation = translation_of(target, draft)
        if translation is None:
            self._drafter = self._make_drafter()
            self._drafter.begin(rows)
            return
        # Gemma needs a BOS, whatever its tokenizer does.
        needs_bos = translation.draft.starts_with_bos() or self._model.config.model_type.startswith("gemma")
        bos = translation.draft.bos_token_id
        start = [bos] if needs_bos and bos is not None else []
        self._alignments = [Alignment(translation.target, translation.draft, start) for _ in rows]
        for alignment, row in zip(self._alignments, rows, strict=True):
            alignment.extend(token for token in row if token not in self._unseen)
        texts = [list(alignment.ids) for alignment in self._alignments]
        same_tokens = translation.shared()
        by_vocabulary = self._by_vocabulary or self._draws or _overlap(rows, texts, same_tokens) >= MUCH_OVERLAP
        self._same_tokens = same_tokens if by_vocabulary else None
        counts = self._stats.drafters.setdefault(self.name, DrafterStats())
        counts.route = "vocabulary" if by_vocabulary else "text"
        counts.vocabulary_overlap = translation.overlap
        foreign: dict[str, Any] = {"unsettled": 2 * Alignment.LOOK_BACK}
        if by_vocabulary:
            foreign["shared"] = translation.pairs
        else:
            foreign["vocab_size"] = self._model.get_input_embeddings().num_embeddings
        self._drafter = self._make_drafter(**foreign)
        self._drafter.take_in(texts)

    def propose(self, rows: Sequence[int], max_tokens: Sequence[int], plan: Plan) -> list[Draft]:
        assert self._drafter is not None
        if not self._alignments:
            return self._drafter.propose(rows, max_tokens, plan)
        rooms = list(max_tokens)
        if self._same_tokens is not None:  # a token stands for a token only where a character is complete
            rooms = [0 if self._alignments[row].pending else room for row, room in zip(rows, rooms, strict=True)]
        drafts = self._drafter.propose(rows, rooms, plan)
        if self._same_tokens is not None:
            return [self._renamed(draft) for draft in drafts]
        return [self._translated(row, draft).cut(room) for row, room, draft in zip(rows, max_tokens, drafts, strict=True)]

    def _renamed(self, draft: Draft) -> Draft:
        assert self._same_tokens is not None
        return Draft([self._same_tokens[token] for token in draft.tokens], self.name, draft.evidence, draft.probs, is_free=False)

    def _translated(self, row: int, draft: Draft) -> Draft:
        reach, reaches = 1.0, [1.0]
        for position in range(len(draft.tokens)):
            reach *= chance_of(draft.evidence[min(position, len(draft.evidence) - 1)])
            reaches.append(reach)
        tokens, evidence, before = [], [], 0
        for token, number in self._alignments[row].translate(draft.tokens):
            tokens.append(token)
            evidence.append(evidence_of(reaches[number] / reaches[before]))
            before = number
        return Draft(tokens, self.name, tuple(evidence) or (3,), is_free=False)

    def commit(self, row: int, tokens: list[int]) -> None:
        assert self._drafter is not None
        if not self._alignments:
            self._drafter.commit(row, tokens)
            return
        alignment = self._alignments[row]
        kept = alignment.extend(tokens)
        self._drafter.rewrite(row, kept, alignment.ids[kept:])

    def end(self) -> None:
        if self._drafter is not None:
            self._drafter.end()


def _overlap(rows: Sequence[list[int]], texts: Sequence[list[int]], same_tokens: dict[int, int]) -> float:
    """The share of the target's tokens of some texts that stand in the draft's too."""
    both = 0
    for row, text in zip(rows, texts, strict=True):
        renamed = Counter(same_tokens[token] for token in text if token in same_tokens)
        both += (Counter(row) & renamed).total()
    return both / max(1, sum(map(len, rows)))
