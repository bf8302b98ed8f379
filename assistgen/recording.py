"""What `return_dict_in_generate=True` asks for, cut out of block-wide forwards exactly as plain `generate()` would have it per token."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import StaticLayer
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from . import compat


class Recorder:
    """
    Collects scores, logits, hidden states and attentions of each committed token.

    Args:
        generation_config (`GenerationConfig`): says what is asked for.
        model_kwargs (`dict`): of the call; holds the encoder's outputs.
        num_rows (`int`): rows of the batch.
        is_encoder_decoder (`bool`): which of the two output classes is due.
    """

    def __init__(self, generation_config: Any, model_kwargs: dict[str, Any], num_rows: int, is_encoder_decoder: bool):
        wanted = generation_config
        self.returns_dict = bool(wanted.return_dict_in_generate)
        self.is_encoder_decoder = is_encoder_decoder
        self._encoder_outputs = model_kwargs.get("encoder_outputs") or {}
        prefix = "decoder_" if is_encoder_decoder else ""
        fields = {  # field of the output -> field of the forward's output
            f"{prefix}attentions": f"{prefix}attentions" if wanted.output_attentions else None,
            "cross_attentions": "cross_attentions" if wanted.output_attentions and is_encoder_decoder else None,
            f"{prefix}hidden_states": f"{prefix}hidden_states" if wanted.output_hidden_states else None,
        }
        self._fields = {name: source for name, source in fields.items() if source is not None} if self.returns_dict else {}
        self._wants_attentions, self._wants_hidden_states = wanted.output_attentions, wanted.output_hidden_states
        self.scores: list[list[torch.Tensor]] | None = None
        self.logits: list[list[torch.Tensor]] | None = None
        if self.returns_dict and wanted.output_scores:
            self.scores = [[] for _ in range(num_rows)]
        if self.returns_dict and wanted.output_logits:
            self.logits = [[] for _ in range(num_rows)]
        self._states: dict[str, list[list[tuple]]] = {name: [[] for _ in range(num_rows)] for name in self._fields}

    def record_distribution(self, row: int, logits: torch.Tensor, scores: torch.Tensor) -> None:
        """The raw logits and processed scores, `(1, vocab)` each, that the row's next token is chosen by."""
        if self.logits is not None:
            self.logits[row].append(logits.clone())
        if self.scores is not None:
            self.scores[row].append(scores.clone())

    def row_scores(self, row: int) -> tuple[torch.Tensor, ...] | None:
        """What a stopping criterion gets as `scores`."""
        return tuple(self.scores[row]) if self.scores is not None else None

    @property
    def records_distributions(self) -> bool:
        return self.scores is not None or self.logits is not None

    @property
    def records_states(self) -> bool:
        return bool(self._fields)

    def record_states(self, row: int, outputs: Any, slot: int, position: int | None, width: int, visible: int, cache: Any) -> None:
        """
        The states behind one committed token.

        Args:
            outputs: of the forward.
            slot (`int`): the row's place among the rows of this forward.
            position (`int`, *optional*): of the token's query in the block; `None` for the prefill, which is kept whole.
            width (`int`): of the block.
            visible (`int`): slots of the cache, the query's own included, that a full-attention layer sees.
            cache: after the forward, before it is rolled back.
        """
        for name, source in self._fields.items():
            layers = getattr(outputs, source)
            if layers is None:
                continue
            part = []
            for i, states in enumerate(layers):
                if states is None or position is None:
                    part.append(states if states is None else states[slot : slot + 1])
                elif name.endswith("hidden_states"):
                    part.append(states[slot : slot + 1, position : position + 1].clone())
                else:
                    keys = (
                        slice(None)
                        if name == "cross_attentions"
                        else self._keys(i, states.shape[-1] - (width - 1 - position), visible, cache)
                    )
                    part.append(states[slot : slot + 1, :, position : position + 1, keys].clone())
            self._states[name][row].append(tuple(part))

    @staticmethod
    def _keys(layer: int, end: int, visible: int, cache: Any) -> slice:
        """The keys that a forward over this one token would have returned attention weights for; `end`: in a window's own count."""
        layers = compat.self_attention_layers(cache)
        if layer < len(layers) and isinstance(layers[layer], StaticLayer):
            return slice(None)
        window = getattr(layers[layer], "sliding_window", None) if layer < len(layers) else None
        return slice(0, visible) if window is None else slice(max(0, end - window), end)

    def output(self, sequences: torch.Tensor, cache: Any) -> Any:
        """The tensor or the output object that plain `generate()` returns."""
        if not self.returns_dict:
            return sequences
        values: dict[str, Any] = {"sequences": sequences, "scores": _by_step(self.scores), "logits": _by_step(self.logits)}
        for name, rows in self._states.items():
            steps = max(len(row) for row in rows)
            filled = [row + [None] * (steps - len(row)) for row in rows]
            values[name] = tuple(_stack_layers(list(step)) for step in zip(*filled, strict=True))
        values[compat.CACHE] = cache
        if not self.is_encoder_decoder:
            return GenerateDecoderOnlyOutput(**values)
        if self._wants_attentions:
            values["encoder_attentions"] = self._encoder_outputs.get("attentions")
        if self._wants_hidden_states:
            values["encoder_hidden_states"] = self._encoder_outputs.get("hidden_states")
        return GenerateEncoderDecoderOutput(**values)


def _by_step(rows: list[list[torch.Tensor]] | None) -> tuple[torch.Tensor, ...] | None:
    """Per-row lists of `(1, …)` to one `(rows, …)` a step. After a row's end there is nothing; zeros stand there."""
    if rows is None:
        return None
    if len(rows) == 1:
        return tuple(rows[0])
    steps = max(len(row) for row in rows)
    blank = torch.zeros_like(next(row for row in rows if row)[0]) if steps else None
    return tuple(torch.cat([row[step] if step < len(row) else blank for row in rows]) for step in range(steps))


def _stack_layers(rows: list[tuple | None]) -> tuple:
    """One step's states of all rows, layer by layer, each padded with zeros on the right to the widest row."""
    present = [row for row in rows if row is not None]
    if len(rows) == 1:
        return present[0]
    layers = []
    for states in zip(*(row if row is not None else present[0] for row in rows), strict=True):
        parts = [torch.zeros_like(s) if row is None and s is not None else s for row, s in zip(rows, states, strict=True)]
        layers.append(None if parts[0] is None else torch.cat(parts))
    return tuple(layers)
