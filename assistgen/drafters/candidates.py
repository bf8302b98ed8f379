"""The bridge to transformers: our drafters as `CandidateGenerator`s for its loop, and its `CandidateGenerator`s as drafters for ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from ..config import SpeculationConfig
from ..control import DepthController, ForwardCosts
from ..stats import SpeculationStats
from ..translation import translation_of
from .base import Draft, Drafter, Plan
from .draft_model import DraftMemory, DraftModelDrafter, check_can_draft, draft_warpers
from .ngram import NGramDrafter
from .suffix import SuffixDrafter
from .universal import UniversalDrafter


class _OneRowGenerator(CandidateGenerator):
    """One of our drafters, for transformers' own assisted decoding of one row."""

    requires_model_outputs = False

    def __init__(self, make_drafter: Callable[..., Drafter], num_speculative_tokens: int, max_length: int | None):
        self.num_speculative_tokens = num_speculative_tokens
        self.max_length = max_length
        self._make_drafter = make_drafter
        self._drafter: Drafter | None = None
        self._seen: torch.Tensor | None = None
        self._plan = DepthController("constant").plan(1, ForwardCosts())

    @property
    def num_drafting_tokens(self) -> int:
        """So many tokens the loop must be able to take back (asked since 5.25)."""
        return self.num_speculative_tokens

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: Any) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(1, length)`): the committed tokens.

        Returns:
            the ids with the draft behind them, `(1, length + draft)`, and the logits that it was drawn from, `(1, draft, vocab)`, or
            `None` if it is deterministic.
        """
        if input_ids.shape[0] != 1:
            raise ValueError(f"`input_ids` must have one row, got {input_ids.shape[0]}. Batches run in `assistgen.generate`.")
        drafter = self._take_in(input_ids)
        room = self.num_speculative_tokens
        if self.max_length is not None:
            room = min(room, self.max_length - input_ids.shape[1] - 1)
        draft = drafter.propose([0], [room], self._plan)[0] if room > 0 else Draft([], drafter.name)
        if not draft.tokens:
            return input_ids, None
        logits = draft.probs.log()[None] if draft.probs is not None else None
        return torch.cat([input_ids, input_ids.new_tensor([draft.tokens])], dim=1), logits

    def _take_in(self, input_ids: torch.Tensor) -> Drafter:
        seen = self._seen
        self._seen = input_ids
        if self._drafter is None or seen is None or not _goes_on(seen, input_ids):
            if self._drafter is not None:
                self._drafter.end()  # another text
            self._drafter = self._make_drafter()
            self._drafter.begin(input_ids.tolist())
        elif input_ids.shape[1] > seen.shape[1]:
            self._drafter.commit(0, input_ids[0, seen.shape[1] :].tolist())
        return self._drafter

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int) -> None:
        """Nothing to adapt: the committed tokens arrive with the next `get_candidates`."""


def _goes_on(seen: torch.Tensor, input_ids: torch.Tensor) -> bool:
    return seen.shape[1] <= input_ids.shape[1] and torch.equal(seen, input_ids[:, : seen.shape[1]])


class NGramCandidateGenerator(_OneRowGenerator):
    """
    n-gram drafting for transformers' own assisted decoding, one row.

    Args:
        num_speculative_tokens (`int`, defaults to 10): the most tokens drafted in a round.
        prompt_lookup_min (`int`, *optional*), prompt_lookup_max (`int`, *optional*): shortest and longest n-gram looked up; 2 and 5.
        max_length (`int`, *optional*): the sequence's final length, prompt included; drafts leave room for the target's own token.
    """

    def __init__(
        self,
        num_speculative_tokens: int = 10,
        prompt_lookup_min: int | None = None,
        prompt_lookup_max: int | None = None,
        max_length: int | None = None,
    ):
        config = SpeculationConfig(
            method="ngram",
            num_speculative_tokens=num_speculative_tokens,
            prompt_lookup_min=prompt_lookup_min,
            prompt_lookup_max=prompt_lookup_max,
        )  # checks them
        super().__init__(lambda: NGramDrafter(*config.ngram_sizes), num_speculative_tokens, max_length)


class SuffixCandidateGenerator(_OneRowGenerator):
    """
    Suffix decoding for transformers' own assisted decoding, one row. That loop doesn't say when a text is over, so a `store` is searched
    and gets a text when the next one begins.

    Args:
        num_speculative_tokens (`int`, defaults to 16): the most tokens drafted in a round.
        suffix_decoding_max_tree_depth, suffix_decoding_max_spec_factor, suffix_decoding_min_token_prob, store: as in
            `SpeculationConfig`.
        max_length (`int`, *optional*): the sequence's final length, prompt included; drafts leave room for the target's own token.
    """

    def __init__(
        self,
        num_speculative_tokens: int = 16,
        suffix_decoding_max_tree_depth: int = 24,
        suffix_decoding_max_spec_factor: float | None = None,
        suffix_decoding_min_token_prob: float | None = None,
        store: Any = None,
        max_length: int | None = None,
    ):
        config = SpeculationConfig(
            method="suffix",
            num_speculative_tokens=num_speculative_tokens,
            suffix_decoding_max_tree_depth=suffix_decoding_max_tree_depth,
            suffix_decoding_max_spec_factor=suffix_decoding_max_spec_factor,
            suffix_decoding_min_token_prob=suffix_decoding_min_token_prob,
            store=store,
        )  # checks them
        super().__init__(lambda: SuffixDrafter(*config.suffix_settings, store), num_speculative_tokens, max_length)


class DraftModelCandidateGenerator(_OneRowGenerator):
    """
    A draft model for transformers' own assisted decoding, one row, without its nested `generate()`.

    Args:
        model (`PreTrainedModel`): the draft model, with the target's tokenizer.
        vocab_size (`int`): the target's.
        num_speculative_tokens (`int`, defaults to 8): the most tokens drafted in a round.
        draft_confidence_threshold (`float`, defaults to 0.4): a draft ends where the draft model's likeliest token is less likely.
        generation_config (`GenerationConfig`, *optional*): of the target's call, to draw drafts from the distribution that it describes;
            `None` drafts the likeliest tokens.
        max_length (`int`, *optional*): the sequence's final length, prompt included; drafts leave room for the target's own token.
    """

    def __init__(
        self,
        model: Any,
        vocab_size: int,
        num_speculative_tokens: int = 8,
        draft_confidence_threshold: float | None = 0.4,
        generation_config: Any = None,
        max_length: int | None = None,
    ):
        SpeculationConfig(
            method="draft_model",
            model=model,
            num_speculative_tokens=num_speculative_tokens,
            draft_confidence_threshold=draft_confidence_threshold,
        )  # checks them
        check_can_draft(model)
        memory = DraftMemory()
        warpers = draft_warpers(generation_config, None) if generation_config is not None else None

        def make_drafter(**foreign: Any) -> DraftModelDrafter:
            size = foreign.pop("vocab_size", vocab_size)
            return DraftModelDrafter(model, size, model.device, warpers, draft_confidence_threshold, memory, **foreign)

        super().__init__(make_drafter, num_speculative_tokens, max_length)


class UniversalCandidateGenerator(DraftModelCandidateGenerator):
    """
    A draft model with a foreign tokenizer for transformers' own assisted decoding, one row. It drafts by text, or token for token where
    the vocabularies hardly differ or the drafts are drawn.

    Args:
        model (`PreTrainedModel`): the draft model.
        vocab_size (`int`): the target's.
        tokenizer, assistant_tokenizer (`PreTrainedTokenizerBase`): the target's and the draft model's.
        num_speculative_tokens (`int`, defaults to 8): the most tokens drafted in a round.
        draft_confidence_threshold (`float`, defaults to 0.4): a draft ends where the draft model's likeliest token is less likely.
        use_heterogeneous_vocab (`bool`, *optional*): as in `SpeculationConfig`.
        generation_config (`GenerationConfig`, *optional*): of the target's call, to draw drafts from the distribution that it describes;
            `None` drafts the likeliest tokens.
        max_length (`int`, *optional*): the sequence's final length, prompt included; drafts leave room for the target's own token.
    """

    def __init__(
        self,
        model: Any,
        vocab_size: int,
        tokenizer: Any,
        assistant_tokenizer: Any,
        num_speculative_tokens: int = 8,
        draft_confidence_threshold: float | None = 0.4,
        use_heterogeneous_vocab: bool | None = None,
        generation_config: Any = None,
        max_length: int | None = None,
    ):
        super().__init__(model, vocab_size, num_speculative_tokens, draft_confidence_threshold, generation_config, max_length)
        SpeculationConfig(method="draft_model", model=model, use_heterogeneous_vocab=use_heterogeneous_vocab)  # checks it
        if use_heterogeneous_vocab is False and translation_of(tokenizer, assistant_tokenizer) is not None:
            raise ValueError("`use_heterogeneous_vocab=False`, and `assistant_tokenizer` differs from `tokenizer`.")
        make_drafter: Any = self._make_drafter
        self._make_drafter = lambda: UniversalDrafter(
            make_drafter,
            model,
            (lambda: tokenizer, lambda: assistant_tokenizer),
            SpeculationStats(),
            generation_config is not None,
            use_heterogeneous_vocab,
            frozenset(),
        )


class CandidateGeneratorDrafter(Drafter):
    """
    Any transformers `CandidateGenerator` in our loop, one row. Its draft is taken as it is and compared with the target's own
    choice at each position, which is lossless whatever it was drawn from.

    Args:
        generator (`CandidateGenerator`): one that works on ids alone (`requires_model_outputs=False`).
        device (`torch.device`): of the ids that it gets.
    """

    constant_depth = True  # a generator draws its own conclusions from the number of matches

    def __init__(self, generator: CandidateGenerator, device: torch.device):
        if getattr(generator, "requires_model_outputs", False):
            raise ValueError(
                f"`speculation`: {type(generator).__name__} needs the target's outputs, which assistgen doesn't hand out yet. "
                "Use a generator with `requires_model_outputs=False`."
            )
        self.name = type(generator).__name__
        self._generator = generator
        self._device = device
        self._drafted: list[int] = []

    def begin(self, rows: Sequence[list[int]]) -> None:
        if len(rows) != 1:
            raise ValueError(f"A `CandidateGenerator` drafts for one row, got {len(rows)}.")
        self._ids = torch.tensor([rows[0]], device=self._device)

    def propose(self, rows: Sequence[int], max_tokens: Sequence[int], plan: Plan) -> list[Draft]:
        candidates, _ = self._generator.get_candidates(self._ids)
        length = self._ids.shape[1]
        if candidates.shape[0] != 1 or candidates.shape[1] < length:
            raise ValueError(f"get_candidates returned shape {tuple(candidates.shape)} for ids of shape {tuple(self._ids.shape)}")
        self._drafted = candidates[0, length : length + max_tokens[0]].tolist()
        return [Draft(self._drafted, self.name)]

    def commit(self, row: int, tokens: list[int]) -> None:
        self._ids = torch.cat([self._ids, self._ids.new_tensor([tokens])], dim=1)
        matches = 0
        while matches < min(len(tokens), len(self._drafted)) and tokens[matches] == self._drafted[matches]:
            matches += 1
        # The generators of transformers read from the scores only how many positions were verified.
        verified = torch.empty(1, len(self._drafted) + 1, 0)
        self._generator.update_candidate_strategy(self._ids, verified, matches)
        self._drafted = []
