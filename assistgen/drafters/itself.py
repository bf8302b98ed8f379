"""A model as its own draft: its first layers, a copy in four bits, or what it is without its adapters.

All are modules of their own around the model's weights: nothing of the model is changed or switched, also for other threads.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn


def first_layers(model: Any, num_layers: int) -> Any:
    """
    The first layers of a decoder, its final norm and its head (early exit, as in LayerSkip, arXiv 2404.16710; it pays with models that
    were trained for it).

    Args:
        model (`PreTrainedModel`): decoder-only.
        num_layers (`int`): how many; fewer than the model has.

    Raises:
        ValueError: if the model has no more layers than that, or none to be found.
    """
    _check_no_dispatch(model, "assistant_early_exit")
    config = model.config.get_text_config(decoder=True)
    if num_layers >= config.num_hidden_layers:
        raise ValueError(f"`assistant_early_exit={num_layers}` must be less than the target's {config.num_hidden_layers} layers.")
    stacks = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers and "encoder" not in name.split(".")
    ]
    if len(stacks) != 1 or model.config.is_encoder_decoder:
        raise ValueError(f"`method='early_exit'` doesn't know the layers of {type(model).__name__}.")
    shorter = copy.deepcopy(config)
    shorter.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None) is not None:
        shorter.layer_types = config.layer_types[:num_layers]

    path = stacks[0].split(".")
    top = module = _shell(model)
    for name in path[:-1]:
        module._modules[name] = _shell(module._modules[name])
        module = module._modules[name]
        if getattr(module, "config", None) is config:
            module.config = shorter
    module._modules[path[-1]] = nn.ModuleList(list(module._modules[path[-1]])[:num_layers])
    if top.config is config:
        top.config = shorter
    return top


def nf4_twin(model: Any) -> Any:
    """
    A copy of a model whose linear layers are in four bits (NF4 of QLoRA, arXiv 2305.14314, by bitsandbytes), to draft for the model:
    `speculation={"method": "draft_model", "model": assistgen.nf4_twin(model)}`. Embeddings, norms and the head are the model's own.

    Args:
        model (`PreTrainedModel`): in float32, bfloat16 or float16.

    Raises:
        ImportError: without bitsandbytes (`pip install assistgen[quant]`).
        ValueError: if the model has no linear layers, or lies on several devices.
    """
    import bitsandbytes

    _check_no_dispatch(model, "model")
    head = model.get_output_embeddings()

    def quantized(module: Any) -> Any:
        if type(module) is not nn.Linear or module is head:
            return None
        weight = module.weight.detach()
        twin = bitsandbytes.nn.Linear4bit(
            module.in_features, module.out_features, bias=module.bias is not None, compute_dtype=weight.dtype, quant_type="nf4"
        )
        twin.weight = bitsandbytes.nn.Params4bit(weight.clone(), requires_grad=False, quant_type="nf4", module=twin)
        if module.bias is not None:
            twin.bias = module.bias
        return twin.to(weight.device)

    twin = _copied(model, quantized)
    if twin is model:
        raise ValueError(f"`model` ({type(model).__name__}) has no linear layers that could be put into four bits.")
    return twin


def without_adapters(model: Any) -> Any:
    """
    The model that a PEFT model's adapters were added to: a draft for it. One without adapters as it is.

    Raises:
        ValueError: if they are merged into the weights, or the model lies on several devices.
    """
    adapted = [module for module in model.modules() if hasattr(module, "get_base_layer")]
    if not adapted:
        return model
    if any(getattr(module, "merged", False) for module in adapted):
        raise ValueError("`model` can't draft: its adapters are merged into its weights; unmerge them first.")
    _check_no_dispatch(model, "model")
    return _copied(model, lambda module: module.get_base_layer() if hasattr(module, "get_base_layer") else None)


def _check_no_dispatch(model: Any, name: str) -> None:
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError(f"`{name}` doesn't go with a model that accelerate has spread over several devices.")


def _copied(module: Any, replacement: Callable[[Any], Any]) -> Any:
    other = replacement(module)
    if other is not None:
        return other
    children = {name: _copied(child, replacement) for name, child in module._modules.items() if child is not None}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    shell = _shell(module)
    shell._modules.update(children)
    return shell


def _shell(module: Any) -> Any:
    """A module of its own around the same weights and submodules, without the hooks, which are the user's."""
    shell = copy.copy(module)
    shell._modules = dict(module._modules)
    shell._forward_hooks, shell._forward_pre_hooks = OrderedDict(), OrderedDict()
    for name in ("generate", "forward"):  # an enabled model's, a compiled one's: they are bound to the model
        vars(shell).pop(name, None)
    return shell
