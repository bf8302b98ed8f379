"""Tokens that the target can't say whatever its logits: no use in verifying a draft past one."""

from __future__ import annotations

from typing import Any

import torch


class HardBans:
    """
    `suppress_tokens` and `bad_words_ids` as a drafter needs them: known from the configuration, without calling any processor.

    Args:
        generation_config (`GenerationConfig`): of the call.
        stop_tokens (`set[int]`): end-of-sequence tokens, which `bad_words_ids` never bans.
    """

    def __init__(self, generation_config: Any, stop_tokens: set[int]):
        self._tokens = set(generation_config.suppress_tokens or ())
        self._words: dict[int, list[list[int]]] = {}  # last id -> the ids before it
        for word in generation_config.bad_words_ids or ():
            if len(word) == 1 and word[0] not in stop_tokens:
                self._tokens.add(word[0])
            elif len(word) > 1:
                self._words.setdefault(word[-1], []).append(list(word[:-1]))
        self._reach = max((len(start) for starts in self._words.values() for start in starts), default=0)

    def allowed(self, prefix: torch.Tensor, draft: list[int]) -> int:
        """
        How many tokens of a draft come before the first banned one.

        Args:
            prefix (`torch.LongTensor` of shape `(length,)`): the row's committed ids.
            draft (`list[int]`): what is to follow them.
        """
        if not self._tokens and not self._words:
            return len(draft)
        context = prefix[-self._reach :].tolist() if self._reach else []
        for position, token in enumerate(draft):
            if token in self._tokens:
                return position
            before = context + draft[:position]
            if any(before[-len(start) :] == start for start in self._words.get(token, ())):
                return position
        return len(draft)
