"""What a call was given, as drafters see it: the prompts, the texts that they may look things up in, and what isn't text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Inputs:
    """
    Attributes:
        target (`PreTrainedModel`): the model that got it.
        prompt (`torch.LongTensor` of shape `(rows, prompt length)`): the prompts as `generate()` prepared them, padded; of a decoder if
            the target has an encoder, and empty if they came as embeddings.
        attention_mask (`torch.LongTensor` of shape `(rows, …)`, *optional*): of the prompts, or of the encoder's input.
        source (`torch.Tensor` of shape `(rows, …)`, *optional*): the encoder's input, ids or features.
        encoder_outputs (*optional*): what the target's encoder made of it.
        given (`dict`): the user's own arguments, images among them.
        tokenizer, assistant_tokenizer (*optional*): the target's and the draft model's, if the call has them.
        cache: gives the target's cache as it is now.
        lookup_ids (`list[list[int]]`, *optional*): the user's texts to look things up in, one for each row.
    """

    target: Any
    prompt: torch.Tensor
    attention_mask: torch.Tensor | None
    source: torch.Tensor | None
    encoder_outputs: Any
    given: dict[str, Any]
    tokenizer: Any
    assistant_tokenizer: Any
    cache: Callable[[], Any]
    lookup_ids: list[list[int]] | None

    def prompts(self) -> list[list[int]]:
        """The rows' prompts without padding; of embeddings, what stands for them in `lookup_ids`."""
        if self.prompt.shape[1] == 0 and self.lookup_ids is not None:
            return self.lookup_ids
        return _without_padding(self.prompt, self.attention_mask if self.source is None else None)

    def looked_up(self) -> list[list[int]]:
        """For each row the text, beside its prompt, whose parts are likely to be said."""
        texts: list[list[int]] = [[] for _ in range(self.prompt.shape[0])]
        if self.lookup_ids is not None and self.prompt.shape[1] > 0:
            texts = self.lookup_ids
        if self.source is not None and not self.source.is_floating_point() and self.source.dim() == 2:
            encoded = _without_padding(self.source, self.attention_mask)
            texts = [text + more for text, more in zip(texts, encoded, strict=True)]
        return texts


def _without_padding(ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[list[int]]:
    rows = ids.tolist()
    if attention_mask is None or attention_mask.shape != ids.shape:
        return rows
    return [[token for token, real in zip(row, mask, strict=True) if real] for row, mask in zip(rows, attention_mask.tolist(), strict=True)]


IMAGE_INPUTS = ("pixel_values", "pixel_values_videos", "pixel_values_images", "input_features", "input_values")


def placeholders(config: Any) -> frozenset[int]:
    """The ids that stand in a prompt for parts of images, videos and sounds."""
    names = [f"{kind}_token_{suffix}" for kind in ("image", "video", "audio") for suffix in ("id", "index")]
    return frozenset(value for name in names if isinstance(value := getattr(config, name, None), int))


def rows_of(lookup_ids: Any, num_rows: int | None = None) -> list[list[int]]:
    """
    `lookup_ids` as one list of ids for each row, or for each text.

    Raises:
        ValueError: if there are neither as many texts as rows nor one for all.
    """
    ids = lookup_ids.tolist() if callable(getattr(lookup_ids, "tolist", None)) else list(lookup_ids)
    texts = [list(text) for text in ids] if ids and not isinstance(ids[0], int) else [ids]
    if num_rows is None:
        return texts
    if len(texts) == 1:
        texts = texts * num_rows
    if len(texts) != num_rows:
        raise ValueError(f"`lookup_ids` holds {len(texts)} texts for {num_rows} rows. Give one text, or one for each row.")
    return texts
