"""Everything that depends on the version of transformers (5.17 to 5.25), and the facts about its caches that the loop relies on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput, is_deepspeed_zero3_enabled, is_fsdp_managed_module


# `past_key_values` became `cache` on the way to 5.24: the argument of `forward`, the key in the model kwargs, the field of outputs.
CACHE: str = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
CACHE_NAMES = ("cache", "past_key_values")


CONTINUE_A_STATE = frozenset(
    {
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "kimi_linear",
        "lara_mini",
        "mamba2",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "zaya",
    }
)
"""Model types whose forward over several tokens goes on from the recurrent state in the cache. Mamba's, for one, starts anew."""

WITHOUT_STATE = frozenset({"lfm2", "lfm2_moe", "lfm3"})
"""Model types whose linear layers keep nothing but the inputs of a convolution, which can be cropped."""


ONE_AT_A_TIME = frozenset({"xlm", "cpmant", "moshi"})
"""Model types whose forward behind a cache is made for one token: XLM's asks with a mask token, the others' masks are of one token."""

PASSES_OVER_LAYERS = frozenset({"dory"})
"""Model types that run some layers several times and keep each pass in layers of the cache of their own, or read what is in them."""

NOTHING_KEPT: Any = getattr(cache_utils, "DummyLayer", ())
"""The class of a cache's place for a layer that shares another's keys and values (Gemma 3n); before 5.24 the cache ends before those."""


def self_attention_layers(cache: Any) -> list[Any]:
    """The layers that grow with the generated tokens."""
    return list((cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache).layers)


def why_no_roll_back(cache: Any, model: Any = None) -> str | None:
    """
    Why a cache can't go back to an earlier length, or `None` if it can. Reliable before the first forward.

    Layers with a recurrent state go back to a copy of it, which takes a `model` that goes on from it with several tokens.

    A static sliding-window layer forgets what it overwrote once it is past its window; `crop` would give wrong logits without a word.
    """
    if cache is None:
        return "the model keeps no cache"
    if not isinstance(cache, Cache):
        return f"a cache of type {type(cache).__name__} can't be rolled back"
    if getattr(cache, "offloading", False):
        return "an offloaded cache can't be rolled back"
    if isinstance(cache, EncoderDecoderCache):
        return why_no_roll_back(cache.self_attention_cache, model)
    if not cache.layers and type(cache) is not DynamicCache:
        return f"a cache of type {type(cache).__name__} can't be rolled back"
    for layer in cache.layers:
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer) or isinstance(layer, NOTHING_KEPT):
            continue
        if type(layer) is StaticSlidingWindowLayer:
            # 5.17 doesn't say how long the cache was asked to be, so there every such layer is taken to pass its window.
            if getattr(layer, "_is_croppable", False):
                continue
            return "a static sliding-window cache can't be rolled back past its window"
        if type(layer) in (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer) and model is not None:
            model_type = model.config.get_text_config(decoder=True).model_type
            if model_type in CONTINUE_A_STATE | WITHOUT_STATE:
                continue
            return f"{model_type} doesn't go on from a recurrent state with several tokens"
        return f"a cache layer of type {type(layer).__name__} can't be rolled back"
    return None


def why_not_several_at_once(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, max_length: int) -> str | None:
    """
    Why several tokens in one forward wouldn't get the logits that they get one by one, or `None` if they do. LLM.int8() (arXiv
    2208.07339) multiplies those features apart that are large for any of the tokens. A rotary embedding that changes with the length goes
    by the furthest position; where that happens once, one row without padding can be decoded around it (`position_limits`). PEFT's prompt
    learning feeds the last token and no other, as some old models do.

    Args:
        input_ids (`torch.Tensor` of shape `(rows, length)`), attention_mask (`torch.Tensor` of shape `(rows, length)`, *optional*): the
            prompts; the mask is longer if there are embeddings before the ids.
        max_length (`int`): of ids, that the call may come to.
    """
    config = getattr(model.config, "quantization_config", None)
    if getattr(config, "load_in_8bit", False) and getattr(config, "llm_int8_threshold", 0.0) > 0:
        return "8-bit products depend on the forward's other tokens; quantise with llm_int8_threshold=0.0"
    if (model_type := model.config.get_text_config(decoder=True).model_type) in ONE_AT_A_TIME:
        return f"{model_type} takes one token at a time"
    adapted = getattr(model.prepare_inputs_for_generation, "__self__", None)
    if getattr(getattr(adapted, "active_peft_config", None), "is_prompt_learning", False):
        return "PEFT's prompt learning takes one token at a time"
    if (change := where_rotary_changes(model)) is not None:
        border, goes_on = change
        is_padded = False
        if attention_mask is not None:
            max_length += max(0, attention_mask.shape[1] - input_ids.shape[1])
            is_padded = not bool(attention_mask.all())
        if max_length > border and (goes_on or is_padded or input_ids.shape[0] > 1):
            return f"the rotary embedding changes past {border} tokens, which the call may pass"
    return None


def is_recurrent(layer: Any) -> bool:
    """Whether a cache layer keeps a recurrent state, which can't be cropped. Reliable after the first forward."""
    return isinstance(layer, LinearAttentionLayer) and any(layer.is_recurrent_states_initialized.values())


def linear_count(layer: Any) -> torch.Tensor | None:
    """How many tokens a linear layer has seen, which it counts since 5.25."""
    return getattr(layer, "cumulative_length_linear", None)


def keeps_everything(cache: Any) -> bool:
    """Whether all layers hold all keys and values as they are."""
    return type(cache) is DynamicCache and all(type(layer) is DynamicLayer and layer.keys is not None for layer in cache.layers)


def crop(cache: Any, tokens_to_remove: int) -> None:
    """
    Takes the last `tokens_to_remove` ≥ 0 tokens out of a cache, recurrent states excepted. To be called also with 0: a sliding-window
    layer that records its past shrinks back to its window only then.
    """
    for layer in self_attention_layers(cache):
        if not getattr(layer, "is_initialized", True):
            continue
        if is_recurrent(layer):
            if isinstance(layer, DynamicLayer):  # attention beside the state
                DynamicLayer.crop(layer, -tokens_to_remove)
        elif isinstance(layer, StaticLayer) and not hasattr(StaticLayer, "crop"):  # before 5.24
            layer.cumulative_length.sub_(tokens_to_remove)
        else:
            layer.crop(-tokens_to_remove)


@contextmanager
def recording_past(cache: Any) -> Iterator[None]:
    """Sliding-window layers keep what slides out of the window until `crop`; switched back afterwards, on a user's cache too."""
    layers = [layer for layer in self_attention_layers(cache) if hasattr(layer, "record_past") and not is_recurrent(layer)]
    before = [layer.record_past for layer in layers]
    for layer in layers:
        layer.record_past = True
    try:
        yield
    finally:
        for layer, record_past in zip(layers, before, strict=True):
            layer.record_past = record_past


def length_of(cache: Any, default: int = 0) -> int:
    """Cached tokens (a static layer answers with a tensor); `default` for a cache that has no such thing, as recurrent layers."""
    if why_no_roll_back(cache) is not None and not isinstance(cache, Cache):
        return default
    try:
        return int(cache.get_seq_length())
    except ValueError:
        return default


def load_window(layer: Any, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
    """
    Puts rows of equal length back into a cache layer as transformers itself would have left them.

    Args:
        keys, values (`torch.Tensor` of shape `(rows, heads, min(length, window - 1) or length, head_dim)`): the newest last.
        length (`int`): tokens that the layer has seen.
    """
    if isinstance(layer, StaticLayer):
        layer.keys[:, :, : keys.shape[2]] = keys
        layer.values[:, :, : keys.shape[2]] = values
        layer.cumulative_length.fill_(length)
        if isinstance(layer, StaticSlidingWindowLayer):
            layer.cumulative_length_int = length
        return
    layer.keys, layer.values = keys, values
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = length


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """What some vision-language models keep of their last prompt is put back."""
    keepers = [module for module in model.modules() if hasattr(module, "rope_deltas")]
    before = [module.rope_deltas for module in keepers]
    try:
        yield
    finally:
        for module, rope_deltas in zip(keepers, before, strict=True):
            module.rope_deltas = rope_deltas


def ranks_in_step(model: Any) -> bool:
    """Whether other processes have to run a forward whenever this one does (ZeRO-3, FSDP): what `generate()` calls `synced_gpus`."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return False
    return is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)


def is_sharded(model: Any) -> bool:
    """Whether other processes hold parts of the model and decode the same text (tensor parallelism)."""
    return (getattr(model, "_tp_size", None) or 1) > 1


def where_rotary_changes(model: Any) -> tuple[int, bool] | None:
    """
    The length past which a rotary embedding has other frequencies (Phi-3 drops its cache there, too), and whether they change with every
    token from there on; `None`: they never change.
    """
    config = model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    # Before 5.24 Phi-3 begins anew with the last token only, again and again; that can be had only one token at a time.
    borders, goes_on = [], CACHE != "cache"
    for kind in [parameters] if "rope_type" in parameters else filter(None, parameters.values()):
        if kind["rope_type"] == "longrope":
            borders.append(kind["original_max_position_embeddings"])
        elif "dynamic" in kind["rope_type"]:
            borders.append(config.max_position_embeddings)
            goes_on = True
    return (min(borders), goes_on) if borders else None


def position_limits(model: Any) -> list[int]:
    """Lengths at which something changes: the positions that a model was made for, and where its rotary embedding does."""
    config = model.config.get_text_config(decoder=True)
    positions = getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None)
    change = where_rotary_changes(model)
    return [limit for limit in (positions, change[0] if change is not None else None) if limit is not None]


def has_hooks(module: Any) -> bool:
    """Somebody's: transformers installs its own for good once hidden states were asked for, and these only pick out."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(getattr(hook, "__name__", "") != "output_capturing_hook" for hook in hooks)
