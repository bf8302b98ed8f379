"""
A draft model's steps on a CPU: all layers in one parallel region, from a copy of the weights with 8 bits each.

A step of a small model over one token takes as long as reading its weights, and about as long again for Python and hundreds of small
operations. A draft needn't be exact, only likely, so half the bytes do, and a family of models that is one formula (Llama's) needs neither
torch nor Python between two of its products. Prompts, and whatever else is many tokens, go by the model itself.

The weights are rounded to integers row by row (as in LLM.int8(), arXiv 2208.07339, but with nothing kept apart: what they are multiplied
with stays float32, or has 15 bits in tiles).
"""

from __future__ import annotations

import logging
import threading
import weakref
from contextlib import nullcontext
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from . import compat, linear, openmp
from .cache import FULL
from .control import ForwardCosts
from .target import Target, layer_types


logger = logging.getLogger(__name__)

FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings in which a position's doesn't depend on the text's length."""
MAX_WEIGHTS = 1 << 31
"""Weights, and so bytes of a copy: a draft model is small."""
MAX_ROWS = 4
"""Rows of a batch that still gain by it."""
WIDEST = 16
"""Tokens at once; more are left to the model itself."""
CELLS = 512
"""Tokens of each row that there is room for at first."""
PROBE = 6
"""Tokens by which a copy is compared with its model."""
LIKENESS = 0.98
"""Cosine of the angle between their logits, less what these have in common, that is expected at least; 0.995 is usual."""

_lock = threading.Lock()
_copies: weakref.WeakKeyDictionary[Any, tuple[Any, EightBits | None]] = weakref.WeakKeyDictionary()
"""With what the weights were when it was made, or turned out to be none."""
_asked: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Tokens, since the weights are as they are."""


def eight_bits(model: Any, tokens: int) -> EightBits | None:
    """
    The copy of a draft model, made when it is first worth it, or `None` where there is none: another family, other devices, layers that
    somebody has exchanged or added to, or a machine on which it isn't quicker.

    Args:
        model (`PreTrainedModel`): the draft model.
        tokens (`int`): so many may be drafted. Too few, together with those of earlier calls, aren't worth the seconds.
    """
    if not can_be_copied(model):
        return None
    with _lock:
        version = _version(model)
        known, copy = _copies.get(model, (None, None))
        if known == version:
            return copy
        _asked[model] = _asked.get(model, 0) + tokens
        if linear.work(model, _asked[model]) < linear.MIN_WORK:
            return None
        copy = None
        try:
            with torch.no_grad():
                made = EightBits(model)
                if made.likeness >= LIKENESS and made.speed_up >= linear.MARGIN:
                    copy = made
        except Exception:
            logger.warning("Drafts go by the draft model's own forward: the kernel that may be quicker doesn't run here.", exc_info=True)
        _copies[model] = version, copy
        _asked.pop(model, None)
        return copy


def can_be_copied(model: Any) -> bool:
    """As far as that is plain to see."""
    if type(model) not in FAMILIES or openmp.is_ruled_out() or compat.is_sharded(model) or linear.is_compiled(model):
        return False
    weights = list(model.parameters())
    if not all(linear.is_plain(weight) and weight.layout == torch.strided and weight.dtype in linear.DTYPES for weight in weights):
        return False
    if sum(weight.numel() for weight in weights) > MAX_WEIGHTS or not all(_is_untouched(module) for module in model.modules()):
        return False
    config = model.config
    if config.hidden_act != "silu" or set(layer_types(config)) != {FULL} or model.model.rotary_emb.rope_type not in ROTATIONS:
        return False
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    shapes = [[(name, weight.shape) for name, weight in layer.named_parameters()] for layer in model.model.layers]
    alike = len({layer.weight.dtype for layer in layers}) == 1 and all(shape == shapes[0] for shape in shapes)
    return alike and all(
        layer.in_features % linear.LANES == 0
        and layer.out_features >= linear.LANES
        and layer.weight.shape == (layer.out_features, layer.in_features)
        for layer in layers
    )


def _is_untouched(module: Any) -> bool:
    """transformers' own or torch's, so no adapter and nothing quantized; without hooks, and nobody has exchanged its forward."""
    kind = type(module)
    is_known = kind in (torch.nn.Linear, torch.nn.Embedding, torch.nn.ModuleList) or kind.__module__.startswith("transformers.")
    return is_known and not compat.has_hooks(module) and linear.has_own_forward(module)


def _version(model: Any) -> list[tuple[int, int, str]]:
    """Another one when a weight was exchanged or written to; by way of `data` (as adapters are merged) if that changed its first number."""
    return [
        (weight.data_ptr(), 0 if weight.is_inference() else weight._version, repr(weight.detach()[(0,) * weight.dim()].item()))
        for weight in model.parameters()
    ]


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros, whatever the defaults of dtype and device are."""
    return torch.zeros(shape, dtype=dtype, device="cpu")


class EightBits:
    """
    A model's weights with 8 bits each, and its forward over a few tokens with them.

    Attributes:
        costs (`ForwardCosts`): of that forward.
        is_in_tiles (`bool`): by instructions for tiles of integers (Intel's AMX).
        likeness (`float`), speed_up (`float`): of its logits to the model's, and over the model's own step, as measured.
    """

    def __init__(self, model: Any):
        from . import fused_kernels, kernels  # numba takes a second

        self._kernels = fused_kernels
        self._kept: list[Any] = []  # what addresses point to
        linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        self._most_inputs = max(layer.in_features for layer in linears)
        fits_tiles = all(layer.in_features % kernels.LINE == 0 and layer.out_features % kernels.TILE == 0 for layer in linears)
        self.is_in_tiles = fits_tiles and kernels.has_tiles("int8")
        inner, head = model.model, model.lm_head
        attention, mlp = inner.layers[0].self_attn, inner.layers[0].mlp
        self._embeddings, self._rotary = model.get_input_embeddings().weight.detach(), inner.rotary_emb
        sizes = {
            "num_layers": len(inner.layers),
            "hidden": head.in_features,
            "heads": attention.q_proj.out_features // attention.head_dim,
            "key_value_heads": attention.k_proj.out_features // attention.head_dim,
            "head_size": attention.head_dim,
            "between": mlp.gate_proj.out_features,
            "vocabulary": head.out_features,
            "attention_scale": attention.scaling,
            "epsilon": inner.norm.variance_epsilon,
        }
        layers = [self._layer(layer) for layer in inner.layers]
        table = self._structure("LAYER", *layers)
        whole = {**sizes, "layers": table.ctypes.data, "before_head": self._gain(inner.norm), **self._product("head", head)}
        self._model = self._structure("MODEL", whole)
        self.sizes = SimpleNamespace(**sizes)
        self.costs = ForwardCosts()
        self.likeness, self.speed_up = self._compared(model)

    def _structure(self, name: str, *values: dict[str, Any]) -> np.ndarray[Any, Any]:
        kind = getattr(self._kernels, name)
        made = np.array([tuple(value[field] for field in kind.names) for value in values], kind)
        self._kept.append(made)
        return made

    def _layer(self, layer: Any) -> dict[str, int]:
        attention, mlp = layer.self_attn, layer.mlp
        return {
            "before_attention": self._gain(layer.input_layernorm),
            **self._product("query_key_value", attention.q_proj, attention.k_proj, attention.v_proj),
            "query_norm": self._gain(getattr(attention, "q_norm", None)),
            "key_norm": self._gain(getattr(attention, "k_norm", None)),
            **self._product("output", attention.o_proj),
            "before_mlp": self._gain(layer.post_attention_layernorm),
            **self._product("gate_up", mlp.gate_proj, mlp.up_proj),
            **self._product("down", mlp.down_proj),
        }

    def _gain(self, norm: Any) -> int:
        return 0 if norm is None else self._address(norm.weight.float())

    def _product(self, name: str, *layers: Any) -> dict[str, int]:
        """Addresses for layers that meet the same input."""
        weights = [layer.weight.contiguous() for layer in layers]
        sizes, inputs = [len(weight) for weight in weights], weights[0].shape[1]
        integers, scales = torch.empty(sum(sizes), inputs, dtype=torch.int8, device="cpu"), _numbers(sum(sizes))
        body = self._kernels.body(str(weights[0].dtype).removeprefix("torch."))
        for weight, some, their in zip(weights, integers.split(sizes), scales.split(sizes), strict=True):
            job = np.array([(0, weight.data_ptr(), some.data_ptr(), their.data_ptr(), *weight.shape)], self._kernels.QUANTIZATION)
            openmp.run_parallel(body.address, job.ctypes.data)
        if self.is_in_tiles:  # each of them in one piece, one behind the other
            line, tile = self._kernels.LINE, self._kernels.TILE
            integers = integers.view(-1, tile, inputs // line, line).transpose(1, 2)
        bias = 0
        if any(layer.bias is not None for layer in layers):
            parts = [_numbers(size) if layer.bias is None else layer.bias.float() for layer, size in zip(layers, sizes, strict=True)]
            bias = self._address(torch.cat(parts))
        return {name: self._address(integers), f"{name}_scale": self._address(scales), f"{name}_bias": bias}

    def _address(self, numbers: torch.Tensor) -> int:
        numbers = numbers.detach().contiguous()
        self._kept.append(numbers)
        return numbers.data_ptr()

    def forward(self, ids: torch.Tensor, places: torch.Tensor, kept: torch.Tensor, cells: Cells) -> torch.Tensor:
        """
        Args:
            ids (`torch.LongTensor` of shape `(tokens,)`): at most `WIDEST`; those of a row behind each other.
            places (`torch.LongTensor` of shape `(tokens, 2)`): each one's row and position.
            kept (`torch.LongTensor` of shape `(kept,)`): which tokens' logits are wanted.
            cells (`Cells`): takes in their keys and values; holds those of all positions before them.

        Returns:
            `torch.FloatTensor` of shape `(kept, vocab)`.
        """
        sizes, tokens = self.sizes, len(ids)
        places, kept = places.contiguous(), kept.contiguous()
        cells.reserve(int(places[:, 1].max()) + 1)
        residual = self._embeddings[ids].float()
        logits = residual.new_empty(len(kept), sizes.vocabulary)
        line, product_size = self._kernels.LINE, self._kernels.product_size(tokens, self._most_inputs)
        scratch_size = -(-(product_size + 4 * (tokens * sizes.hidden + cells.length)) // line) * line
        lengths = {
            "after_attention": 4 * tokens * sizes.hidden,
            "query_key_value": 4 * tokens * (sizes.heads + 2 * sizes.key_value_heads) * sizes.head_size,
            "attended": 4 * tokens * sizes.heads * sizes.head_size,
            **dict.fromkeys(("gate", "up", "between"), 4 * tokens * sizes.between),
            "scratch": torch.get_num_threads() * scratch_size,
        }
        room, addresses = cells.room(sum(lengths.values()) + line * len(lengths)), {}
        for name, length in lengths.items():
            addresses[name], room = room, room + -(-length // line) * line
        counters = _numbers((sizes.num_layers * self._kernels.COUNTERS + 1) * line // 8, dtype=torch.long)
        tensors = {
            "counters": counters, "places": places, "keys": cells.keys, "values": cells.values, "cos": cells.cos, "sin": cells.sin,
            "residual": residual, "kept": kept, "logits": logits,
        }  # fmt: skip
        fields = {
            "threads": 0,
            "barrier": openmp.barrier(),
            "model": self._model.ctypes.data,
            "tokens": tokens,
            "rows": cells.keys.shape[1],
            "cells": cells.length,
            "num_kept": len(kept),
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
            "scratch_size": scratch_size,
            "product_size": product_size,
            **addresses,
        }
        job = np.array([tuple(fields[name] for name in self._kernels.JOB.names)], self._kernels.JOB)
        openmp.run_parallel(self._kernels.body("forward in tiles" if self.is_in_tiles else "forward").address, job.ctypes.data)
        return logits

    def rotations(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the first so many positions, `(length, head size)` each."""
        cos, sin = self._rotary(_numbers(1, 1), torch.arange(length, device="cpu")[None])
        return cos[0].float().contiguous(), sin[0].float().contiguous()

    def _compared(self, model: Any) -> tuple[float, float]:
        """How like the model's the logits are behind a few tokens, and how many times as quick."""
        ids = torch.randint(len(self._embeddings), (PROBE,), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        theirs, ours = [], []
        cache, cells = DynamicCache(), Cells(self, rows=1)
        places = torch.stack([torch.zeros_like(ids), torch.arange(PROBE, device="cpu")], dim=1)
        products = linear.quick_products(model, 0)
        with products.over(1) if products is not None else nullcontext():
            for at in range(PROBE):
                before = perf_counter()
                true = model(input_ids=ids[None, at : at + 1], return_dict=True, **{compat.CACHE: cache}).logits[0, -1].float()
                between = perf_counter()
                own = self.forward(ids[at : at + 1], places[at : at + 1], places[:1, 0], cells)[0]
                theirs.append(between - before)
                ours.append(perf_counter() - between)
        likeness = torch.nn.functional.cosine_similarity(true - true.mean(), own - own.mean(), dim=0)
        return float(likeness), min(theirs) / min(ours)


class Cells:
    """
    Keys and values of rows' tokens, by position, and room to work in.

    Attributes:
        keys (`torch.FloatTensor` of shape `(layers, rows, key-value heads, length, head size)`), values: likewise.
        cos (`torch.FloatTensor` of shape `(length, head size)`), sin: of the positions' rotation.
        length (`int`): positions that there is room for.
    """

    def __init__(self, copy: EightBits, rows: int):
        self._copy, self._room = copy, _numbers(0, dtype=torch.int8)
        sizes = copy.sizes
        self.keys = _numbers(sizes.num_layers, rows, sizes.key_value_heads, 0, sizes.head_size)
        self.values = self.keys.clone()
        self.reserve(CELLS)

    @property
    def length(self) -> int:
        return self.keys.shape[3]

    def reserve(self, length: int) -> None:
        if length > self.length:
            more = max(length, self.length + self.length // 2 + CELLS) - self.length
            self.keys, self.values = (torch.nn.functional.pad(old, (0, 0, 0, more)) for old in (self.keys, self.values))
            self.cos, self.sin = self._copy.rotations(self.length)

    def room(self, size: int) -> int:
        """The address of so many bytes, at the start of a line."""
        if len(self._room) < size + 64:
            self._room = torch.empty(size + 64, dtype=torch.int8, device="cpu")
        return -(-self._room.data_ptr() // 64) * 64


class FusedRows(Target):
    """Rows that advance on their own, by a copy of the model with 8 bits a weight: only for drafts, whose words are judged."""

    def __init__(self, copy: EightBits, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.copy, self.costs = copy, copy.costs

    def prefill(self) -> Any:
        outputs = super().prefill()
        mask = self.model_kwargs["attention_mask"]
        self.adopt(self.model_kwargs.pop(compat.CACHE), (mask.shape[1] - mask.sum(-1)).tolist())
        return outputs

    def adopt(self, cache: Any, padding: list[int]) -> None:
        """Goes on where a cache of the model ends, whose rows begin with so much padding."""
        self._padding, self.cells = padding, Cells(self.copy, rows=len(padding))
        for row, pad in enumerate(padding):
            self._take_in(row, 0, cache, row, pad)

    def _take_in(self, row: int, position: int, cache: Any, its_row: int, start: int) -> None:
        """What a cache of the model holds from `start` on."""
        self.cells.reserve(position + compat.length_of(cache) - start)
        for layer, keys, values in zip(cache.layers, self.cells.keys, self.cells.values, strict=True):
            end = position + layer.keys.shape[2] - start
            keys[row, :, position:end], values[row, :, position:end] = layer.keys[its_row, :, start:], layer.values[its_row, :, start:]

    def forward(self, rows: list[int], starts: list[int], counts: list[int], width: int, logits_to_keep: int) -> Any:
        self.places, self.leads, self.fed = list(range(len(rows))), [0] * len(rows), width
        self.forwards += 1
        positions = [start - self._padding[row] for row, start in zip(rows, starts, strict=True)]
        ids = torch.stack([self.tokens.ids[row, start : start + width] for row, start in zip(rows, starts, strict=True)])
        if width > WIDEST:
            logits = [self._read(*row, logits_to_keep) for row in zip(rows, positions, ids, strict=True)]
            return SimpleNamespace(logits=torch.stack(logits))
        at_once, first, parts = WIDEST // len(rows), width - logits_to_keep, []
        steps = [[[row, start + step] for step in range(width)] for row, start in zip(rows, positions, strict=True)]
        row_and_position = torch.tensor(steps, device="cpu")
        for begin in range(0, width, at_once):
            columns = slice(begin, min(begin + at_once, width))
            fed, places = ids[:, columns].flatten(), row_and_position[:, columns].flatten(0, 1)
            numbers = torch.arange(len(fed), device="cpu").view(len(rows), -1)[:, max(0, first - begin) :]
            logits = self.copy.forward(fed, places, numbers.flatten(), self.cells)
            parts.append(logits.view(*numbers.shape, logits.shape[-1]))
        return SimpleNamespace(logits=torch.cat(parts, dim=1) if len(parts) > 1 else parts[0])

    def _read(self, row: int, position: int, ids: torch.Tensor, logits_to_keep: int) -> torch.Tensor:
        """A row's further text, by the model itself. Returns the logits, `(logits_to_keep, vocab)`."""
        cache, cells = DynamicCache(), self.cells
        for number, (keys, values) in enumerate(zip(cells.keys, cells.values, strict=True)):
            cache.update(*(held[row : row + 1, :, :position].to(self.model.dtype) for held in (keys, values)), number)
        with linear.over_prompt(self.model, len(ids)), self._quickly(len(ids)):
            outputs = self.model(input_ids=ids[None], logits_to_keep=logits_to_keep, return_dict=True, **{compat.CACHE: cache})
        self._take_in(row, position, cache, 0, position)
        return outputs.logits[0]

    def roll_back(self, lengths: dict[int, int]) -> None:
        """Nothing to do: the next forward says where each row goes on."""

    def close(self, completed: bool = True) -> None:
        return None
