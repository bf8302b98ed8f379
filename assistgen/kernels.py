"""The product of a big weight and a few tokens on a CPU, compiled by numba. Imported where it is needed: numba takes a second."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic, overload


OUTPUTS, TOKENS = 3, 4
"""Sums that stay in registers while so many rows of the weight meet so many tokens: 12 of the 16 registers that AVX2 has."""
NAN = np.uint16(0x7FC0)


def compiled(function: Any = None, **options: Any) -> Any:
    """`njit`, with the result kept on disk where numba finds a place for it."""
    if function is None:
        return partial(compiled, **options)
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:
        return njit(**options)(function)


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """An address (an int64) as something that `carray` takes."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), code


@intrinsic
def _widened(typing_context: Any, number: Any) -> Any:
    """A float32 as it is, a bfloat16 (its bits, an uint16) as a float32."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if number == types.float32:
            return arguments[0]
        bits = builder.shl(builder.zext(arguments[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(number), code


@intrinsic
def _bits(typing_context: Any, number: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), code


def _stored(number: Any, example: Any) -> Any:
    """A float32 as what `example` is, rounded to the nearest (to even in a tie)."""


@overload(_stored)
def _store(number: Any, example: Any) -> Any:
    def as_it_is(number: Any, example: Any) -> Any:
        return number

    def as_bfloat16(number: Any, example: Any) -> Any:
        bits = _bits(number)
        return (
            np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)) if number == number else NAN
        )

    return as_it_is if example == types.float32 else as_bfloat16


# Sums may be regrouped into vectors; what is not finite stays so.
@njit(parallel=True, nogil=True, fastmath={"reassoc", "contract", "nsz"})
def _multiply(weight: Any, x: Any, bias: Any, out: Any) -> None:
    wide = np.zeros((out.shape[0], x.shape[1]), np.float32)
    for m in range(x.shape[0]):
        for k in range(x.shape[1]):
            wide[m, k] = _widened(x[m, k])
    for block in prange((weight.shape[0] + OUTPUTS - 1) // OUTPUTS):
        n = min(block * OUTPUTS, weight.shape[0] - OUTPUTS)
        for m in range(0, out.shape[0], TOKENS):
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = np.float32(0)
            for k in range(weight.shape[1]):
                a, b, c = _widened(weight[n, k]), _widened(weight[n + 1, k]), _widened(weight[n + 2, k])
                x0, x1, x2, x3 = wide[m, k], wide[m + 1, k], wide[m + 2, k], wide[m + 3, k]
                a0 += a * x0
                a1 += a * x1
                a2 += a * x2
                a3 += a * x3
                b0 += b * x0
                b1 += b * x1
                b2 += b * x2
                b3 += b * x3
                c0 += c * x0
                c1 += c * x1
                c2 += c * x2
                c3 += c * x3
            for j, sums in enumerate(((a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3))):
                more = _widened(bias[n + j]) if bias.shape[0] else np.float32(0)
                for i in range(TOKENS):
                    out[m + i, n + j] = _stored(sums[i] + more, out[0, 0])


@njit(parallel=True, nogil=True, fastmath={"reassoc", "contract", "nsz"})
def _multiply_one(weight: Any, x: Any, bias: Any, out: Any) -> None:
    wide = np.zeros(x.shape[1], np.float32)
    for k in range(x.shape[1]):
        wide[k] = _widened(x[0, k])
    for n in prange(weight.shape[0]):
        total = np.float32(0)
        for k in range(weight.shape[1]):
            total += _widened(weight[n, k]) * wide[k]
        out[0, n] = _stored(total + _widened(bias[n]) if bias.shape[0] else total, out[0, 0])


@njit(nogil=True, inline="always")
def _product(dtype: Any, weight: Any, x: Any, bias: Any, out: Any, outputs: Any, inputs: Any, tokens: Any) -> None:
    weights = carray(pointer(weight), (outputs, inputs), dtype)
    given = carray(pointer(x), (tokens, inputs), dtype)
    added = carray(pointer(bias), (outputs if bias else 0,), dtype)
    padded = (tokens + TOKENS - 1) // TOKENS * TOKENS
    product = carray(pointer(out), (padded, outputs), dtype)
    if tokens == 1:
        _multiply_one(weights, given, added, product)
    else:
        _multiply(weights, given, added, product)


# Two functions with one signature each, and only they are kept on disk: processes that compile at once can't mix up each other's files.
@compiled(nogil=True)
def multiply_float32(weight: Any, x: Any, bias: Any, out: Any, outputs: Any, inputs: Any, tokens: Any) -> None:
    """
    `out = x @ weight.T + bias`, each number of the weight read once; sums are in float32.

    Args:
        weight, x, bias, out: addresses of contiguous `(outputs, inputs)`, `(tokens, inputs)`, `(outputs,)` and `(padded, outputs)`
            numbers, `padded` being the next multiple of `TOKENS`. No bias if its address is 0. At least `OUTPUTS` outputs.
    """
    _product(np.float32, weight, x, bias, out, outputs, inputs, tokens)


@compiled(nogil=True)
def multiply_bfloat16(weight: Any, x: Any, bias: Any, out: Any, outputs: Any, inputs: Any, tokens: Any) -> None:
    """The same for bfloat16."""
    _product(np.uint16, weight, x, bias, out, outputs, inputs, tokens)
