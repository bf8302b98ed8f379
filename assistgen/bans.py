"""Tokens that the target can't say whatever its logits: no use in verifying a draft past one."""

from __future__ import annotations

from typing import Any

import torch

from .drafters.base import Draft


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

    def allowed(self, prefix: torch.Tensor, draft: Draft) -> Draft:
        """
        The draft without banned tokens and what follows them.

        Args:
            prefix (`torch.LongTensor` of shape `(length,)`): the row's committed ids.
            draft (`Draft`): what is to follow them.
        """
        if not self._tokens and not self._words:
            return draft
        context = prefix[-self._reach :].tolist() if self._reach else []
        banned = set()
        for node, token in enumerate(draft.tokens):
            before = context + [draft.tokens[earlier] for earlier in draft.path(node)[:-1]]
            if token in self._tokens or any(before[-len(start) :] == start for start in self._words.get(token, ())):
                if draft.parents is None:
                    return draft.cut(node)
                banned.add(node)
        return draft.without(banned) if banned else draft
