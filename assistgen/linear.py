"""
Linear layers over a few tokens on a CPU.

A forward over one token is bound by reading the weights. One over eight could cost hardly more, and speculation lives on that, but the
libraries behind torch may not be made for it: on a CPU without bfloat16 instructions they multiply bfloat16 weights with each token in
turn, and write float32 weights out anew for a product with four. There a kernel of our own reads each weight once. Which way is quicker
is measured, for the model's own shape of weights, once in a process.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


DTYPES = (torch.float32, torch.bfloat16)
MIN_WEIGHT = 1 << 18
"""Numbers in a weight that is worth the call."""
SAMPLES = {1: (1, 1), 2: (2, 3), 4: (4, 8), 16: (9, 32), 64: (33, 1 << 30)}
"""Numbers of tokens that are measured, and from where to where each says which way is quicker."""
AT_ONCE = 64
"""Tokens that are multiplied with a weight before the next ones are: more of them don't fit into a core's cache."""
MIN_WORK = 2 * 10**10
"""Products of two numbers in a prefill that repays, in the first call of a process, the seconds that getting ready takes."""
MEASURED = 1 << 24
"""Numbers in the weights of a measurement, more than most processors' caches hold."""
OPERATIONS = 7
"""Of a model for each of its linear layers."""
MARGIN = 1.1
"""So many times torch's speed, at least: what is measured in milliseconds isn't exact."""

_lock = threading.Lock()
_forked = threading.Event()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked.set)  # OpenMP's threads don't survive a fork


def quick_products(model: Any) -> QuickProducts | None:
    """How a model's linear layers are quicker over a few tokens than by torch's own way, or `None`. Measures, if it must."""
    if model.device.type != "cpu" or model.dtype not in DTYPES or _forked.is_set() or _is_compiled(model):
        return None
    weights = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    shapes = Counter(tuple(weight.shape) for weight in weights if _is_big(weight))
    if not shapes:
        return None
    outputs, inputs = max(shapes, key=lambda shape: shapes[shape] * shape[0] * shape[1])
    with _lock:
        quick = [tokens for tokens in SAMPLES if _speed_up(model.dtype, outputs, inputs, tokens) >= MARGIN]
    return QuickProducts([SAMPLES[tokens] for tokens in quick]) if quick else None


def over_prompt(model: Any, tokens: int) -> AbstractContextManager[Any]:
    """
    For a prefill of so many tokens: torch's own way, which plain decoding goes, but where that takes bfloat16 weights a token at a time.
    Doesn't look at a clock, so that a prompt is taken in the same way in each call.
    """
    if model.device.type == "cpu" and model.dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "AVX2":
        work = tokens * sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
        return (quick_products(model) if work >= MIN_WORK else None) or nullcontext()
    return nullcontext()


def _is_compiled(model: Any) -> bool:
    """A compiled forward would be compiled anew for a function mode."""
    is_wrapped = hasattr(model, "_orig_mod") or hasattr(model.forward, "_torchdynamo_orig_callable")
    return is_wrapped or any(module._compiled_call_impl is not None for module in model.modules())


def _is_big(weight: torch.Tensor) -> bool:
    is_plain = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.device.type == "cpu" and weight.dtype in DTYPES
    return is_plain and weight.numel() >= MIN_WEIGHT and weight.is_contiguous()


class QuickProducts(TorchFunctionMode):
    """
    While it is entered, this thread's linear layers go by `product` where that is quicker. The model stays as it is.

    Args:
        ranges (`Sequence[tuple[int, int]]`): from how many tokens to how many it is.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]]):
        super().__init__()
        self._ranges = ranges

    def pays(self, tokens: int) -> bool:
        return any(low <= tokens <= high for low, high in self._ranges)

    def over(self, tokens: int) -> AbstractContextManager[Any]:
        """For a forward over so many tokens."""
        return self if self.pays(tokens) else nullcontext()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and not kwargs and self._takes(*args):
            return product(*args)
        return func(*args, **(kwargs or {}))

    def _takes(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
        is_whole = bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
        fits = _is_big(weight) and x.dtype == weight.dtype and x.device == weight.device and is_whole
        return fits and self.pays(x.numel() // weight.shape[1]) and not torch.is_grad_enabled()


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """
    `torch.nn.functional.linear` by our own kernel.

    Args:
        x (`torch.Tensor` of shape `(…, inputs)`): float32 or bfloat16. Sums are in float32.
        weight (`torch.Tensor` of shape `(outputs, inputs)`), bias (`torch.Tensor` of shape `(outputs,)`, *optional*): of the same type,
            contiguous, on the CPU.

    Returns:
        `torch.Tensor` of shape `(…, outputs)`.
    """
    import numba

    from . import kernels

    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    (outputs, inputs), x = weight.shape, x.contiguous()
    tokens = x.numel() // inputs
    out = torch.empty(-(-tokens // kernels.TOKENS) * kernels.TOKENS, outputs, dtype=x.dtype)
    multiply = kernels.multiply_bfloat16 if x.dtype == torch.bfloat16 else kernels.multiply_float32
    added = bias.data_ptr() if bias is not None else 0
    for start in range(0, tokens, AT_ONCE):
        from_, to = x.data_ptr() + start * inputs * x.itemsize, out.data_ptr() + start * outputs * x.itemsize
        multiply(weight.data_ptr(), from_, added, to, outputs, inputs, min(AT_ONCE, tokens - start))
    return out[:tokens].view(*x.shape[:-1], outputs)


@cache
def _speed_up(dtype: torch.dtype, outputs: int, inputs: int, tokens: int) -> float:
    """
    How many times as quick as by torch a linear layer over so many tokens is, together with the operations between two of them, which
    the detour slows down.
    """
    outputs = min(outputs, MEASURED // inputs)
    copies = -(-MEASURED // (outputs * inputs)) if tokens < AT_ONCE else 1
    weights = [torch.ones(outputs, inputs, dtype=dtype) for _ in range(copies)]
    x, little, wide = torch.ones(tokens, inputs, dtype=dtype), torch.ones(8), torch.ones(1 << 16)

    def seconds() -> float:
        before = perf_counter()
        for weight in weights:
            torch.nn.functional.linear(x, weight)
            for _ in range(OPERATIONS):
                torch.neg(little)
            torch.neg(wide)  # in torch's own threads, which are others than the kernel's
        return perf_counter() - before

    with torch.no_grad():
        product(x, weights[0])  # compiles
        import numba

        if numba.threading_layer() == "workqueue":  # which ends the process if two threads are in it
            return 0.0
        theirs = min(seconds() for _ in range(3))
        with QuickProducts([(tokens, tokens)]):
            return theirs / min(seconds() for _ in range(3))
