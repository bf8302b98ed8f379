"""
Linear layers over a few tokens on a CPU.

A forward over one token is bound by reading the weights. One over eight could cost hardly more, and speculation lives on that, but the
libraries behind torch may not be made for it: on a CPU without bfloat16 instructions they multiply bfloat16 weights with each token in
turn, and write float32 weights out anew for a product with four. There a kernel of our own reads each weight once; on one with tiles for
bfloat16 (AMX) it reads them faster than torch does. Which way is quicker is measured, for the model's own shape of weights, once in a
process.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode

from . import compat, openmp


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
ROUNDS = 5
"""Times that both ways are measured in turn; the quickest counts, which nothing else disturbed."""
MARGIN = 1.1
"""So many times torch's speed, at least: what is measured in milliseconds isn't exact."""

_lock = threading.Lock()
_layers_lock = threading.Lock()
_here = threading.local()
"""This thread's: `entered`, and `scratch` for its products."""
_quick: dict[tuple[Any, ...], list[int]] = {}
"""By type, shape and number of threads: which of `SAMPLES` our own product is quicker for."""
_asked: Counter[tuple[Any, ...]] = Counter()
"""By the same: products asked for while it wasn't known."""


def quick_products(model: Any, tokens: int) -> QuickProducts | None:
    """
    How a model's linear layers are quicker over a few tokens than by torch's own way, or `None`.

    Args:
        model (`PreTrainedModel`): the model.
        tokens (`int`): so many are still to be decoded. Too few, together with those of earlier calls, aren't worth a measurement.
    """
    if model.device.type != "cpu" or model.dtype not in DTYPES or openmp.is_ruled_out():
        return None
    if compat.is_sharded(model) or is_compiled(model):  # ranks must not follow their own clocks
        return None
    shapes = Counter(tuple(weight.shape) for weight in _weights(model) if _is_big(weight))
    if not shapes:
        return None
    outputs, inputs = max(shapes, key=lambda shape: shapes[shape] * shape[0] * shape[1])
    key = model.dtype, outputs, inputs, torch.get_num_threads()
    with _lock:
        if key not in _quick:
            _asked[key] += work(model, tokens)
        if key not in _quick and _asked[key] >= MIN_WORK and _is_usable():
            _quick[key] = [sample for sample in SAMPLES if speed_up(model.dtype, outputs, inputs, sample) >= MARGIN]
        quick = _quick.get(key)
    return QuickProducts(model.modules(), [SAMPLES[sample] for sample in quick]) if quick else None


def over_prompt(model: Any, tokens: int) -> AbstractContextManager[Any]:
    """
    For a prefill of so many tokens: torch's own way, which plain decoding goes, but where that takes bfloat16 weights a token at a time.
    """
    if model.device.type == "cpu" and model.dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "AVX2":
        products = quick_products(model, tokens) if work(model, tokens) >= MIN_WORK else None
        if products is not None and products.pays(AT_ONCE):
            return QuickProducts(model.modules(), [(2, 1 << 30)]).over(tokens)
    return nullcontext()


def _weights(model: Any) -> Iterator[Any]:
    """Of the linear layers, as far as they lie ready: some kinds of layers make theirs when they are asked for."""
    return (module._parameters.get("weight") for module in model.modules() if isinstance(module, torch.nn.Linear))


def work(model: Any, tokens: int) -> int:
    """Products of two numbers in the linear layers of forwards over so many tokens."""
    return tokens * sum(weight.numel() for weight in _weights(model) if weight is not None)


def is_compiled(model: Any) -> bool:
    """A compiled forward would be compiled anew where a layer's is exchanged."""
    return any(
        module._compiled_call_impl is not None or hasattr(module, "_orig_mod") or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def has_own_forward(module: torch.nn.Module) -> bool:
    """Whether nobody but us has put another `forward` in its place."""
    return type(module.__dict__.get("forward")) in (type(None), _Forward)


def _is_big(weight: Any) -> bool:
    is_matrix = is_plain(weight) and weight.dtype in DTYPES and weight.dim() == 2 and weight.layout == torch.strided
    fits = is_matrix and weight.shape[0] >= 3 and weight.shape[1] % LANES == 0
    return fits and weight.numel() >= MIN_WEIGHT and weight.is_contiguous()


def _is_usual(module: Any) -> bool:
    """A linear layer with parameters of its own that are nothing but that, and big."""
    if not isinstance(module, torch.nn.Linear) or type(module).forward is not torch.nn.Linear.forward:
        return False
    return "bias" in module._parameters and _is_big(module._parameters.get("weight"))


def is_plain(tensor: Any) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"


class QuickProducts:
    """
    While it is entered, linear layers go by `product` in this thread where that is quicker. The model is left as it was.

    Args:
        modules (`Iterable[torch.nn.Module]`): the layers, among others.
        ranges (`Sequence[tuple[int, int]]`): from how many tokens to how many it is.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], ranges: Sequence[tuple[int, int]]):
        self._layers = [(module.__dict__, _Forward(module)) for module in modules if _is_usual(module)]
        self._ranges = ranges

    def pays(self, tokens: int) -> bool:
        return any(low <= tokens <= high for low, high in self._ranges)

    def over(self, tokens: int) -> AbstractContextManager[Any]:
        """For a forward over so many tokens. Not where somebody's mode is to see the linear layers."""
        others = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
        return self if self.pays(tokens) and not others and _get_current_dispatch_mode() is None else nullcontext()

    def __enter__(self) -> None:
        with _layers_lock:
            for attributes, forward in self._layers:
                there = attributes.setdefault("forward", forward)
                if type(there) is _Forward:  # and not what somebody else has put there
                    there.users += 1
        _here.entered = [*getattr(_here, "entered", ()), self]

    def __exit__(self, *raised: object) -> None:
        _here.entered = _here.entered[:-1]
        with _layers_lock:
            for attributes, _ in self._layers:
                there = attributes.get("forward")
                if type(there) is _Forward:
                    there.users -= 1
                    if not there.users:
                        del attributes["forward"]


class _Forward:
    """
    In place of a linear layer's `forward` while a thread has entered `QuickProducts`. Each product streams a weight through the caches,
    so that what stands between two of them runs from memory: few steps, and few of torch's.
    """

    def __init__(self, layer: torch.nn.Module):
        self.users = 0
        self._parameters: dict[str, Any] = layer._parameters
        self._weight, self._bias = weight, bias = self._parameters["weight"], self._parameters["bias"]
        self._address, self._dtype, self._inputs = weight.data_ptr(), weight.dtype, weight.shape[1]
        self._fits = bias is None or (
            is_plain(bias) and bias.dtype == weight.dtype and bias.shape == weight.shape[:1] and bias.is_contiguous()
        )

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        entered = getattr(_here, "entered", None)
        as_before = weight is self._weight and bias is self._bias and weight.data_ptr() == self._address
        if entered and as_before and self._takes(input) and entered[-1].pays(input.numel() // self._inputs):
            return product(input, weight, bias)
        return torch.nn.functional.linear(input, weight, bias)

    def _takes(self, x: Any) -> bool:
        fits = self._fits and is_plain(x) and x.dtype == self._dtype and x.dim() > 0 and x.shape[-1] == self._inputs
        return fits and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


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
    outputs, inputs = weight.shape
    x = x if x.is_contiguous() else x.contiguous()
    out = x.new_empty((*x.shape[:-1], outputs))
    kernel, tokens, size = _kernel(x.dtype, outputs, inputs), x.numel() // inputs, x.itemsize
    from_, to, added = x.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr()
    for start in range(0, tokens, AT_ONCE):
        part = min(AT_ONCE, tokens - start)
        job = kernel.job(
            0, weight.data_ptr(), from_ + start * inputs * size, _scratch(inputs), added, to + start * outputs * size, outputs, inputs, part
        )
        address = ctypes.addressof(job)
        kernel.arrange(address)
        openmp.run_parallel(kernel.body, address)
    return out


@cache
def _kernel(dtype: torch.dtype, outputs: int, inputs: int) -> Any:
    from . import kernels  # numba takes a second

    kind = str(dtype).removeprefix("torch.")
    if dtype == torch.bfloat16 and inputs % kernels.PAIRED == 0:
        if outputs >= kernels.TILE and kernels.has_tiles("bf16"):
            kind = "tiles"
        elif outputs >= kernels.PAIRED_OUTPUTS and kernels.has_pairs():
            kind = "pairs"
    return kernels.kernel(kind)


def _scratch(inputs: int) -> int:
    """The address of this thread's room for `AT_ONCE` tokens of float32 numbers."""
    scratch = getattr(_here, "scratch", None)
    if scratch is None or len(scratch) < AT_ONCE * inputs:
        scratch = _here.scratch = torch.empty(AT_ONCE * inputs, dtype=torch.float32, device="cpu")
    return scratch.data_ptr()


def _is_usable() -> bool:
    """Whether the kernels run here. Compiles them on a machine's first time."""
    try:
        for dtype in DTYPES:
            for outputs, inputs in ((3, LANES), (16, 32)):  # the latter fits pairs and tiles
                x = torch.ones(2, inputs, dtype=dtype, device="cpu")
                product(x, x.new_ones(outputs, inputs))
    except Exception:
        logger.warning("Linear layers go by torch's own way: the kernel that may be quicker doesn't run here.", exc_info=True)
        openmp.rule_out()
    return not openmp.is_ruled_out()


def speed_up(dtype: torch.dtype, outputs: int, inputs: int, tokens: int) -> float:
    """How many times as quick as by torch a linear layer over so many tokens is."""
    outputs = max(3, min(outputs, MEASURED // inputs))
    copies = -(-MEASURED // (outputs * inputs)) if tokens < AT_ONCE else 1
    theirs, ours = [], []
    with torch.no_grad():
        layers = [torch.nn.utils.skip_init(torch.nn.Linear, inputs, outputs, bias=False, dtype=dtype, device="cpu") for _ in range(copies)]
        for layer in layers:
            layer.weight.fill_(1.0)
        x = layers[0].weight.new_ones(tokens, inputs)
        products = QuickProducts(layers, [(tokens, tokens)])

        def seconds() -> float:
            before = perf_counter()
            for layer in layers:
                layer(x)
            return perf_counter() - before

        for _ in range(ROUNDS):
            theirs.append(seconds())
            with products:
                ours.append(seconds())
    return min(theirs) / min(ours)
