"""The bridge to transformers: our drafters as `CandidateGenerator`s for its loop, and its `CandidateGenerator`s as drafters for ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from ..config import SpeculationConfig
from .base import Draft, Drafter, Plan
from .ngram import NGramIndex


class NGramCandidateGenerator(CandidateGenerator):
    """
    n-gram drafting for transformers' own assisted decoding, one row.

    Args:
        num_speculative_tokens (`int`, defaults to 10): the most tokens drafted in a round.
        prompt_lookup_min (`int`, *optional*), prompt_lookup_max (`int`, *optional*): shortest and longest n-gram looked up; 2 and 5.
        max_length (`int`, *optional*): the sequence's final length, prompt included; drafts leave room for the target's own token.
    """

    requires_model_outputs = False

    def __init__(
        self,
        num_speculative_tokens: int = 10,
        prompt_lookup_min: int | None = None,
        prompt_lookup_max: int | None = None,
        max_length: int | None = None,
    ):
        config = SpeculationConfig(
            num_speculative_tokens=num_speculative_tokens, prompt_lookup_min=prompt_lookup_min, prompt_lookup_max=prompt_lookup_max
        )  # checks them
        self.num_speculative_tokens = num_speculative_tokens
        self.max_length = max_length
        self._sizes = config.ngram_sizes
        self._index = NGramIndex(*self._sizes)
        self._seen: torch.Tensor | None = None

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: Any) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(1, length)`): the committed tokens.

        Returns:
            the ids with the draft behind them, `(1, length + draft)`, and `None`: the draft is deterministic and has no logits.
        """
        if input_ids.shape[0] != 1:
            raise ValueError(f"`input_ids` must have one row, got {input_ids.shape[0]}. Batches run in `assistgen.generate`.")
        self._take_in(input_ids)
        room = self.num_speculative_tokens
        if self.max_length is not None:
            room = min(room, self.max_length - input_ids.shape[1] - 1)
        draft = self._index.propose(room).tokens if room > 0 else []
        if not draft:
            return input_ids, None
        return torch.cat([input_ids, input_ids.new_tensor([draft])], dim=1), None

    def _take_in(self, input_ids: torch.Tensor) -> None:
        seen = self._seen
        if seen is None or seen.shape[1] > input_ids.shape[1] or not torch.equal(seen, input_ids[:, : seen.shape[1]]):
            self._index = NGramIndex(*self._sizes)  # another text
        self._index.extend(input_ids[0, len(self._index.tokens) :].tolist())
        self._seen = input_ids

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int) -> None:
        """Nothing to adapt: the committed tokens arrive with the next `get_candidates`."""


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
