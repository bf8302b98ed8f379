"""
Linear layers over a few tokens on a CPU.

A forward over one token is bound by reading the weights. One over eight could cost hardly more, and speculation lives on that, but the
libraries behind torch may not be made for it: on a CPU without bfloat16 instructions they multiply bfloat16 weights with each token in
turn, and write float32 weights out anew for a product with four. There a kernel of our own reads each weight once. Which way is quicker
is measured, for the model's own shape of weights, once in a process.
"""

from __future__ import annotations

import logging
import os
import statistics
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode

from . import compat


logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)
MIN_WEIGHT = 1 << 18
"""Numbers in a weight that is worth the call."""
SAMPLES = {1: (1, 1), 2: (2, 3), 4: (4, 5), 8: (6, 8), 16: (9, 16), 32: (17, 32), 64: (33, 128)}
"""Numbers of tokens that are measured, and from where to where each says which way is quicker."""
LANES = 8
"""Numbers of a row that the kernel multiplies at once: rows are that long, or a multiple."""
AT_ONCE = 64
"""Tokens that are multiplied with a weight before the next ones are: more of them don't fit into a core's cache."""
MIN_WORK = 2 * 10**10
"""Products of two numbers that repay the seconds that getting ready takes, once in a process; calls add up."""
MEASURED = 1 << 24
"""Numbers in the weights of a measurement, more than most processors' caches hold."""
OPERATIONS = 10
"""Calls of torch for each of a model's linear layers (2,142 for the 211 of a Llama of 30 layers)."""
ROUNDS = 3
"""Times that both ways are measured in turn; the median counts."""
MARGIN = 1.15
"""So many times torch's speed, at least: what is measured in milliseconds isn't exact."""

_lock = threading.Lock()
_quick: dict[tuple[Any, ...], list[int]] = {}
"""By type, shape and number of threads: which of `SAMPLES` our own product is quicker for."""
_asked: Counter[tuple[Any, ...]] = Counter()
"""By the same: products asked for while it wasn't known."""
_ruled_out = threading.Event()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ruled_out.set)  # OpenMP's threads don't survive a fork


def quick_products(model: Any, tokens: int) -> QuickProducts | None:
    """
    How a model's linear layers are quicker over a few tokens than by torch's own way, or `None`.

    Args:
        model (`PreTrainedModel`): the model.
        tokens (`int`): so many are still to be decoded. Too few, together with those of earlier calls, aren't worth a measurement.
    """
    if model.device.type != "cpu" or model.dtype not in DTYPES or _ruled_out.is_set():
        return None
    if compat.is_sharded(model) or _is_compiled(model):  # ranks must not follow their own clocks
        return None
    shapes = Counter(tuple(weight.shape) for weight in _weights(model) if _is_big(weight))
    if not shapes:
        return None
    outputs, inputs = max(shapes, key=lambda shape: shapes[shape] * shape[0] * shape[1])
    key = model.dtype, outputs, inputs, torch.get_num_threads()
    with _lock:
        if key not in _quick:
            _asked[key] += _work(model, tokens)
        if key not in _quick and _asked[key] >= MIN_WORK and _is_usable():
            _quick[key] = [sample for sample in SAMPLES if speed_up(model.dtype, outputs, inputs, sample) >= MARGIN]
        quick = _quick.get(key)
    return QuickProducts([SAMPLES[sample] for sample in quick]) if quick else None


def over_prompt(model: Any, tokens: int) -> AbstractContextManager[Any]:
    """
    For a prefill of so many tokens: torch's own way, which plain decoding goes, but where that takes bfloat16 weights a token at a time.
    """
    if model.device.type == "cpu" and model.dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "AVX2":
        products = quick_products(model, tokens) if _work(model, tokens) >= MIN_WORK else None
        if products is not None and products.pays(AT_ONCE):
            return QuickProducts([(2, 1 << 30)]).over(tokens)
    return nullcontext()


def _weights(model: Any) -> Iterator[Any]:
    """Of the linear layers, as far as they lie ready: some kinds of layers make theirs when they are asked for."""
    return (module._parameters.get("weight") for module in model.modules() if isinstance(module, torch.nn.Linear))


def _work(model: Any, tokens: int) -> int:
    return tokens * sum(weight.numel() for weight in _weights(model) if weight is not None)


def _is_compiled(model: Any) -> bool:
    """A compiled forward would be compiled anew for a function mode."""
    return any(
        module._compiled_call_impl is not None or hasattr(module, "_orig_mod") or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def _is_big(weight: Any) -> bool:
    is_plain = _is_plain(weight) and weight.dtype in DTYPES and weight.dim() == 2 and weight.layout == torch.strided
    fits = is_plain and weight.shape[0] >= 3 and weight.shape[1] % LANES == 0
    return fits and weight.numel() >= MIN_WEIGHT and weight.is_contiguous()


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"


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
        """For a forward over so many tokens. Not where somebody else's mode is to see the linear layers."""
        others = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
        return self if self.pays(tokens) and not others and _get_current_dispatch_mode() is None else nullcontext()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and not kwargs and self._takes(*args):
            return product(*args)
        return func(*args, **(kwargs or {}))

    def _takes(self, x: Any, weight: Any, bias: Any = None) -> bool:
        if not _is_big(weight) or not _is_plain(x) or x.dtype != weight.dtype or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
            return False
        fits = bias is None or (_is_plain(bias) and bias.dtype == x.dtype and bias.shape == weight.shape[:1] and bias.is_contiguous())
        watched = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
        return fits and not watched and self.pays(x.numel() // weight.shape[1])


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """
    `torch.nn.functional.linear` by our own kernel.

    Args:
        x (`torch.Tensor` of shape `(…, inputs)`): float32 or bfloat16. Sums are in float32.
        weight (`torch.Tensor` of shape `(outputs, inputs)`), bias (`torch.Tensor` of shape `(outputs,)`, *optional*): of the same type,
            contiguous, on the CPU; at least 3 outputs, and a multiple of `LANES` inputs.

    Returns:
        `torch.Tensor` of shape `(…, outputs)`.
    """
    import numba

    from . import kernels

    (outputs, inputs), x = weight.shape, x.contiguous()
    tokens = x.numel() // inputs
    out = x.new_empty(-(-tokens // kernels.TOKENS) * kernels.TOKENS, outputs)
    multiply = kernels.multiply_bfloat16 if x.dtype == torch.bfloat16 else kernels.multiply_float32
    if x.dtype == torch.bfloat16 and outputs >= kernels.TILE and inputs % (2 * kernels.TILE) == 0 and kernels.has_tiles():
        multiply = kernels.multiply_in_tiles
    added = bias.data_ptr() if bias is not None else 0
    before = numba.get_num_threads()
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    try:
        for start in range(0, tokens, AT_ONCE):
            from_, to = x.data_ptr() + start * inputs * x.itemsize, out.data_ptr() + start * outputs * x.itemsize
            multiply(weight.data_ptr(), from_, added, to, outputs, inputs, min(AT_ONCE, tokens - start))
    finally:
        numba.set_num_threads(before)
    return out[:tokens].view(*x.shape[:-1], outputs)


def _is_usable() -> bool:
    """Whether the kernel runs here. Compiles it on a machine's first time."""
    threads = torch.get_num_threads()
    try:
        import numba

        numba.get_num_threads()  # starts the threads
        if numba.threading_layer() == "workqueue":  # which ends the process if two threads are in it
            _ruled_out.set()
        else:
            for dtype in DTYPES:
                x = torch.ones(2, 32, dtype=dtype, device="cpu")
                product(x, x.new_ones(16, 32))
    except Exception:
        logger.warning("Linear layers go by torch's own way: the kernel that may be quicker doesn't run here.", exc_info=True)
        _ruled_out.set()
    if torch.get_num_threads() != threads:  # numba's threads may be those of torch
        torch.set_num_threads(threads)
    return not _ruled_out.is_set()


def speed_up(dtype: torch.dtype, outputs: int, inputs: int, tokens: int) -> float:
    """
    How many times as quick as by torch a linear layer over so many tokens is, together with the operations between two of them, which
    the detour slows down.
    """
    outputs = max(3, min(outputs, MEASURED // inputs))
    copies = -(-MEASURED // (outputs * inputs)) if tokens < AT_ONCE else 1
    weights = [torch.ones(outputs, inputs, dtype=dtype, device="cpu") for _ in range(copies)]
    x = weights[0].new_ones(tokens, inputs)
    little, wide = x.new_ones(8), x.new_ones(1 << 16)

    def seconds() -> float:
        before = perf_counter()
        for weight in weights:
            torch.nn.functional.linear(x, weight)
            for _ in range(OPERATIONS):
                torch.neg(little)
            torch.neg(wide)  # in torch's own threads, which are others than the kernel's
        return perf_counter() - before

    theirs, ours = [], []
    with torch.no_grad():
        for _ in range(ROUNDS):
            theirs.append(seconds())
            with QuickProducts([(tokens, tokens)]):
                ours.append(seconds())
    return statistics.median(torchs / own for torchs, own in zip(theirs, ours, strict=True))
