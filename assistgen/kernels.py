"""The product of a big weight and a few tokens on a CPU, compiled by numba. Imported where it is needed: numba takes a second."""

from __future__ import annotations

import ctypes
import sys
from functools import cache, partial
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import carray, njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic, overload


LANES = 8
"""As linear.py says, too, which imports torch: the suffix index, which knows none, takes the helpers below."""
OUTPUTS, TOKENS = 3, 4
"""Rows of the weight that meet so many tokens at once: of the 16 registers that AVX2 has, 12 for the sums, 3 for the weight, 1 for a token.
It is written in vectors, since a compiler that makes them by itself needs more registers and moves sums about."""
LINE = 64
"""Bytes that come from memory at once."""
NAN = np.uint16(0x7FC0)
TILE = 16
"""Rows of AMX's tiles, each of 64 bytes: outputs by pairs of inputs, pairs of inputs by tokens, and sums of outputs by tokens."""
SUMS, WEIGHTS, TEXTS = range(3)
"""The tiles."""


@cache
def has_tiles() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in tiles (Intel's AMX), and Linux lets the process use them."""
    if sys.platform != "linux" or not binding.get_host_cpu_features().get("amx-bf16"):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(*map(ctypes.c_long, (arch_prctl, request_permission, tile_data))) == 0


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


def _dots(tokens: int, fetch: bool) -> Any:
    """
    A function for `OUTPUTS` rows of a weight times so many tokens: their sums over `inputs`, as a tuple, row by row.

    Args:
        tokens (`int`): at most `TOKENS`.
        fetch (`bool`): whether what lies at `ahead`, the weight's next rows, is called for meanwhile, `step` bytes for every `LANES`
            inputs, so that waiting for memory and multiplying overlap.
    """

    @intrinsic
    def dots(typing_context: Any, dtype: Any, weight: Any, x: Any, inputs: Any, ahead: Any, step: Any) -> Any:
        single, size = ir.FloatType(), dtype.dtype.bitwidth // 8
        element = single if dtype.dtype == types.float32 else ir.IntType(16)
        i32, i64 = ir.IntType(32), ir.IntType(64)
        floats, ints, stored = (ir.VectorType(kind, LANES) for kind in (single, i32, element))

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def known(name: str, result: Any, *takes: Any) -> Any:
                return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, takes), name)

            def rows(start: Any, number: int, kind: Any, size: int) -> list[Any]:
                starts = [builder.add(start, builder.mul(inputs, i64(row * size))) for row in range(number)]
                return [builder.inttoptr(row, kind.as_pointer()) for row in starts]

            def read(row: Any, kind: Any, size: int) -> Any:
                return builder.load(builder.bitcast(builder.gep(row, [k]), kind.as_pointer()), align=size)

            def read_weight(row: Any) -> Any:
                numbers = read(row, stored, size)
                if element == single:
                    return numbers
                return builder.bitcast(builder.shl(builder.zext(numbers, ints), ints([16] * LANES)), floats)

            def added_up(numbers: Any) -> Any:
                """Always in the same order, so that a token's product doesn't depend on how many tokens there are."""
                for half in (LANES >> step for step in range(1, LANES.bit_length())):
                    low, high = (
                        builder.shuffle_vector(numbers, numbers, ir.VectorType(i32, half)(list(range(start, start + half))))
                        for start in (0, half)
                    )
                    numbers = builder.fadd(low, high)
                return builder.extract_element(numbers, i32(0))

            _, weight, x, inputs, ahead, step = arguments
            add_product = known(f"llvm.fmuladd.v{LANES}f32", floats, floats, floats, floats)
            call_for = known("llvm.prefetch.p0i8", ir.VoidType(), cgutils.voidptr_t, i32, i32, i32)
            weights, texts = rows(weight, OUTPUTS, element, size), rows(x, tokens, single, 4)

            before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
            builder.branch(loop)
            builder.position_at_end(loop)
            k, ahead, *sums = [builder.phi(i64), builder.phi(i64), *(builder.phi(floats) for _ in range(OUTPUTS * tokens))]
            numbers, totals = [read_weight(row) for row in weights], list(sums)
            for token, text in enumerate(texts):
                of_token = read(text, floats, 4)
                for at in range(token, len(sums), tokens):
                    totals[at] = builder.call(add_product, [numbers[at // tokens], of_token, sums[at]])
            for offset in range(0, OUTPUTS * LANES * size if fetch else 0, LINE):
                line = builder.inttoptr(builder.add(ahead, i64(offset)), cgutils.voidptr_t)
                builder.call(call_for, [line, i32(0), i32(3), i32(1)])
            k_after = builder.add(k, i64(LANES))
            for phi, first, then in [
                (k, i64(0), k_after),
                (ahead, arguments[4], builder.add(ahead, step)),
                *((phi, floats([0.0] * LANES), total) for phi, total in zip(sums, totals, strict=True)),
            ]:
                phi.add_incoming(first, before)
                phi.add_incoming(then, loop)
            builder.cbranch(builder.icmp_unsigned("<", k_after, inputs), loop, after)
            builder.position_at_end(after)
            return context.make_tuple(builder, signature.return_type, [added_up(total) for total in totals])

        return types.UniTuple(types.float32, OUTPUTS * tokens)(dtype, *[types.int64] * 5), code

    return dots


_dots_1, _dots_2, _dots_4, _dots_4_more = _dots(1, True), _dots(2, True), _dots(TOKENS, True), _dots(TOKENS, False)


@njit(nogil=True, inline="always")
def _write(sums: Any, bias: Any, out: Any, m: Any, n: Any) -> None:
    tokens = len(sums) // OUTPUTS
    for j in range(OUTPUTS):
        more = _widened(bias[n + j]) if bias.shape[0] else np.float32(0)
        for i in range(tokens):
            out[m + i, n + j] = _stored(sums[j * tokens + i] + more, out[0, 0])


@njit(parallel=True, nogil=True)
def _multiply(dtype: Any, weight: Any, x: Any, bias: Any, out: Any) -> None:
    (tokens, inputs), outputs, size = x.shape, out.shape[1], x.itemsize
    wide = np.zeros((out.shape[0], inputs), np.float32)
    for m in range(tokens):
        for k in range(inputs):
            wide[m, k] = _widened(x[m, k])
    in_fours = (tokens + 1) // TOKENS * TOKENS  # three count as four
    # The next rows are called for by halves where two passes or more go over these.
    step = OUTPUTS * LANES * size // (1 if tokens <= TOKENS else 2)
    for block in prange((outputs + OUTPUTS - 1) // OUTPUTS):
        texts, row = wide.ctypes.data, 4 * inputs  # asked for in here: outside, the array would be freed too early
        n = min(block * OUTPUTS, outputs - OUTPUTS)
        rows, ahead = weight + n * inputs * size, weight + min(n + OUTPUTS, outputs - OUTPUTS) * inputs * size
        middle = ahead + step * (inputs // LANES)
        for m in range(0, in_fours, TOKENS):
            if m <= TOKENS:
                _write(_dots_4(dtype, rows, texts + m * row, inputs, middle if m else ahead, step), bias, out, m, n)
            else:
                _write(_dots_4_more(dtype, rows, texts + m * row, inputs, ahead, step), bias, out, m, n)
        m = in_fours
        if tokens - m == 1:
            _write(_dots_1(dtype, rows, texts + m * row, inputs, middle if m else ahead, step), bias, out, m, n)
        elif tokens - m == 2:
            _write(_dots_2(dtype, rows, texts + m * row, inputs, middle if m else ahead, step), bias, out, m, n)


def _instruct(builder: Any, name: str, *values: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), values)


def _at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, cgutils.voidptr_t)


@intrinsic
def _use_tiles(typing_context: Any, shapes: Any) -> Any:
    """Gives the tiles of this thread their shapes, by the address of what says them."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _instruct(builder, "ldtilecfg", _at(builder, arguments[0]))
        return context.get_dummy_value()

    return types.void(types.int64), code


@intrinsic
def _release_tiles(typing_context: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _instruct(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def _multiply_tile(typing_context: Any, weight: Any, row: Any, texts: Any, steps: Any, sums: Any) -> Any:
    """`TILE` rows of a weight, `row` bytes each, times as many tokens, in so many steps of a tile each; all by address."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weight, row, texts, steps, sums = arguments
        i8, i64 = ir.IntType(8), ir.IntType(64)
        _instruct(builder, "tilezero", i8(SUMS))
        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        step = builder.phi(i64)
        of_weight, of_texts = (
            _at(builder, builder.add(start, builder.mul(step, i64(size)))) for start, size in ((weight, LINE), (texts, TILE * LINE))
        )
        _instruct(builder, "tileloadd64", i8(WEIGHTS), of_weight, row)
        _instruct(builder, "tileloadd64", i8(TEXTS), of_texts, i64(LINE))
        _instruct(builder, "tdpbf16ps", i8(SUMS), i8(WEIGHTS), i8(TEXTS))
        next_step = builder.add(step, i64(1))
        step.add_incoming(i64(0), before)
        step.add_incoming(next_step, loop)
        builder.cbranch(builder.icmp_unsigned("<", next_step, steps), loop, after)
        builder.position_at_end(after)
        _instruct(builder, "tilestored64", i8(SUMS), _at(builder, sums), i64(LINE))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), code


@njit(parallel=True, nogil=True)
def _multiply_in_tiles(weight: Any, x: Any, bias: Any, out: Any) -> None:
    (tokens, inputs), outputs = x.shape, out.shape[1]
    tiles, steps = (tokens + TILE - 1) // TILE, inputs // (2 * TILE)
    pairs = np.zeros((tiles, inputs // 2, TILE, 2), np.uint16)
    for m in range(tokens):
        for k in range(inputs):
            pairs[m // TILE, k // 2, m % TILE, k % 2] = x[m, k]
    shapes = np.zeros(LINE, np.uint8)  # as the instruction takes them: which kind, bytes of a row, rows
    shapes[0] = 1
    for tile in (SUMS, WEIGHTS, TEXTS):
        shapes[16 + 2 * tile], shapes[48 + tile] = LINE, TILE
    for block in prange((outputs + TILE - 1) // TILE):
        n = min(block * TILE, outputs - TILE)
        sums = np.empty((TILE, TILE), np.float32)
        _use_tiles(shapes.ctypes.data)
        for tile in range(tiles):
            texts = pairs.ctypes.data + tile * steps * TILE * LINE
            _multiply_tile(weight + n * inputs * 2, inputs * 2, texts, steps, sums.ctypes.data)
            for m in range(tile * TILE, min(tokens, (tile + 1) * TILE)):
                for j in range(TILE):
                    more = _widened(bias[n + j]) if bias.shape[0] else np.float32(0)
                    out[m, n + j] = _stored(sums[j, m % TILE] + more, out[0, 0])
        _release_tiles()


@njit(nogil=True, inline="always")
def _product(dtype: Any, weight: Any, x: Any, bias: Any, out: Any, outputs: Any, inputs: Any, tokens: Any) -> None:
    given = carray(pointer(x), (tokens, inputs), dtype)
    added = carray(pointer(bias), (outputs if bias else 0,), dtype)
    padded = (tokens + TOKENS - 1) // TOKENS * TOKENS
    _multiply(dtype, weight, given, added, carray(pointer(out), (padded, outputs), dtype))


# Functions with one signature each, and only they are kept on disk: processes that compile at once can't mix up each other's files.
@compiled(nogil=True)
def multiply_float32(weight: Any, x: Any, bias: Any, out: Any, outputs: Any, inputs: Any, tokens: Any) -> None:
    """
    `out = x @ weight.T + bias`, each number of the weight read once; sums are in float32.

    Args:
        weight, x, bias, out: addresses of contiguous `(outputs, inputs)`, `(tokens, inputs)`, `(outputs,)` and `(padded, outputs)`
            numbers, `padded` being the next multiple of `TOKENS`. No bias if its address is 0. At least `OUTPUTS` outputs, and a multiple
            of `LANES` inputs.
    """
    _product(np.float32, weight, x, bias, out, outputs, inputs, tokens)


@compiled(nogil=True)
def multiply_bfloat16(weight: Any, x: Any, bias: Any, out: Any, outputs: Any, inputs: Any, tokens: Any) -> None:
    """The same for bfloat16."""
    _product(np.uint16, weight, x, bias, out, outputs, inputs, tokens)


@compiled(nogil=True)
def multiply_in_tiles(weight: Any, x: Any, bias: Any, out: Any, outputs: Any, inputs: Any, tokens: Any) -> None:
    """The same for bfloat16 where the CPU `has_tiles`, `out` of `(tokens, outputs)`: at least `TILE` outputs, a multiple of 32 inputs."""
    given, added = carray(pointer(x), (tokens, inputs), np.uint16), carray(pointer(bias), (outputs if bias else 0,), np.uint16)
    _multiply_in_tiles(weight, given, added, carray(pointer(out), (tokens, outputs), np.uint16))
