"""The product of a big weight and a few tokens on a CPU, compiled by numba. Imported where it is needed: numba takes a second."""

from __future__ import annotations

import ctypes
import sys
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding, ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload


LANES = 8
"""As linear.py says, too, which imports torch: the suffix index, which knows none, takes the helpers below."""
OUTPUTS, TOKENS = 3, 4
"""Rows of the weight that meet so many tokens at once: of the 16 registers that AVX2 has, 12 for the sums, 3 for the weight, 1 for a token.
It is written in vectors, since a compiler that makes them by itself needs more registers and moves sums about."""
PARTS = 64
"""Into about so many parts a weight is divided; each thread takes the next."""
LINE = 64
"""Bytes that come from memory at once."""
NAN = np.uint16(0x7FC0)
PAIRED, PAIRED_OUTPUTS = 32, 6
"""bfloat16 numbers of a row that AVX-512 multiplies at once, adding them up in pairs, and rows of the weight that meet `TOKENS` tokens
there: of its 32 registers, 24 for the sums, 6 for the weight, 1 for a token."""
TILE = 16
"""Rows of AMX's tiles, each of 64 bytes: outputs by pairs of inputs, pairs of inputs by tokens, and sums of outputs by tokens."""
SUMS, WEIGHTS, TEXTS = range(3)
"""The tiles."""


@cache
def has_tiles(kind: str) -> bool:
    """Whether this CPU multiplies matrices of `"bf16"` or `"int8"` in tiles (Intel's AMX), and Linux lets the process use them."""
    if sys.platform != "linux" or not binding.get_host_cpu_features().get(f"amx-{kind}"):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(*map(ctypes.c_long, (arch_prctl, request_permission, tile_data))) == 0


@cache
def has_pairs() -> bool:
    """Whether this CPU multiplies vectors of bfloat16 (AVX512_BF16)."""
    return bool(binding.get_host_cpu_features().get("avx512bf16"))


def compiled(function: Any = None, signature: Any = None, **options: Any) -> Any:
    """`njit`, or `cfunc` for a C function's signature, with the result kept on disk where numba finds a place for it."""
    if function is None:
        return partial(compiled, **options)
    compile = njit if signature is None else partial(cfunc, signature)
    try:
        return compile(cache=True, **options)(function)
    except RuntimeError:
        return compile(**options)(function)


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """An address (an int64) as something that `carray` takes."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), code


@intrinsic
def widened(typing_context: Any, number: Any) -> Any:
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


def _repeat(builder: Any, times: Any, values: list[Any], body: Any) -> list[Any]:
    """`body` makes new values of the number of the time, from 0, and of the values so far, so many times (at least once); the last ones."""
    first_time, before = ir.Constant(times.type, 0), builder.block
    loop, after = builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    time, *so_far = (phis := [builder.phi(value.type) for value in (first_time, *values)])
    new: list[Any] = body(time, so_far)
    next_time = builder.add(time, ir.Constant(times.type, 1))
    for phi, first, then in zip(phis, (first_time, *values), (next_time, *new), strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(then, builder.block)
    builder.cbranch(builder.icmp_unsigned("<", next_time, times), loop, after)
    builder.position_at_end(after)
    return new


def _rows(builder: Any, start: Any, number: int, size: Any) -> list[Any]:
    """The addresses of rows of so many bytes that lie behind each other."""
    return [builder.add(start, builder.mul(size, ir.Constant(size.type, row))) for row in range(number)]


def _read(builder: Any, address: Any, kind: Any, align: int) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def _call_for(builder: Any, address: Any, lines: int, locality: int) -> None:
    """Has so many lines of memory brought into this core's caches: with locality 3 into the smallest, too."""
    i32 = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, i32, i32, i32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    for line in range(lines):
        where = _at(builder, builder.add(address, ir.Constant(address.type, line * LINE)))
        builder.call(prefetch, [where, i32(0), i32(locality), i32(1)])


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
        element = single if dtype.dtype == types.float32 else ir.IntType(8 * size)
        i32, i64 = ir.IntType(32), ir.IntType(64)
        floats, ints, stored = (ir.VectorType(kind, LANES) for kind in (single, i32, element))

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def read_weight(row: Any, at: Any) -> Any:
                numbers = _read(builder, builder.add(row, builder.mul(at, i64(LANES * size))), stored, size)
                if element == single:
                    return numbers
                if size == 1:
                    return builder.sitofp(builder.sext(numbers, ints), floats)
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
            kind = ir.FunctionType(floats, [floats] * 3)
            add_product = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
            weights = _rows(builder, weight, OUTPUTS, builder.mul(inputs, i64(size)))
            texts = _rows(builder, x, tokens, builder.mul(inputs, i64(4)))

            def add(time: Any, sums: list[Any]) -> list[Any]:
                numbers, totals = [read_weight(row, time) for row in weights], list(sums)
                for token, text in enumerate(texts):
                    of_token = _read(builder, builder.add(text, builder.mul(time, i64(LANES * 4))), floats, 4)
                    for at in range(token, len(sums), tokens):
                        totals[at] = builder.call(add_product, [numbers[at // tokens], of_token, sums[at]])
                if fetch:
                    _call_for(builder, builder.add(ahead, builder.mul(time, step)), -(-OUTPUTS * LANES * size // LINE), locality=3)
                return totals

            totals = _repeat(builder, builder.udiv(inputs, i64(LANES)), [floats([0.0] * LANES)] * (OUTPUTS * tokens), add)
            return context.make_tuple(builder, signature.return_type, [added_up(total) for total in totals])

        return types.UniTuple(types.float32, OUTPUTS * tokens)(dtype, *[types.int64] * 5), code

    return dots


dots_1, dots_2, dots_4, dots_4_more = _dots(1, True), _dots(2, True), _dots(TOKENS, True), _dots(TOKENS, False)


@njit(nogil=True, inline="always")
def _write(sums: Any, bias: Any, out: Any, m: Any, n: Any) -> None:
    tokens = len(sums) // OUTPUTS
    for j in range(OUTPUTS):
        more = widened(bias[n + j]) if bias.shape[0] else np.float32(0)
        for i in range(tokens):
            if m + i < out.shape[0]:
                out[m + i, n + j] = _stored(sums[j * tokens + i] + more, out[0, 0])


JOB = 9
"""
So many numbers say what is to be done. The first is 0: the threads count with it what they have taken. Then, by address, contiguous weight
`(outputs, inputs)`, `x` `(tokens, inputs)`, room for it as the kernel takes it, bias `(outputs,)`, or 0 for none, and the result `(tokens,
outputs)`; then `outputs`, `inputs` and `tokens`.
"""


@njit(nogil=True, inline="always")
def _fields(job: Any) -> Any:
    return job[1], job[2], job[3], job[4], job[5], job[6], job[7], job[8]


@njit(nogil=True, inline="always")
def _widen(dtype: Any, job: Any) -> None:
    _, given, room, _, _, _, inputs, tokens = _fields(job)
    padded = (tokens + TOKENS - 1) // TOKENS * TOKENS
    x, wide = carray(pointer(given), (tokens, inputs), dtype), carray(pointer(room), (padded, inputs), np.float32)
    for m in range(tokens):
        for k in range(inputs):
            wide[m, k] = widened(x[m, k])
    wide[tokens:] = 0


@intrinsic
def take(typing_context: Any, counter: Any, number: Any) -> Any:
    """The next `number` of what the threads share, by the address of what counts them: from where on they are this thread's."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter, number = arguments
        return builder.atomic_rmw("add", builder.inttoptr(counter, ir.IntType(64).as_pointer()), number, "monotonic")

    return types.int64(types.int64, types.int64), code


@njit(nogil=True, inline="always")
def _multiply(dtype: Any, job: Any) -> None:
    weight, _, x, biases, to, outputs, inputs, tokens = _fields(job)
    bias = carray(pointer(biases), outputs if biases else 0, dtype)
    out = carray(pointer(to), (tokens, outputs), dtype)
    size, row = out.itemsize, 4 * inputs
    in_fours = (tokens + 1) // TOKENS * TOKENS  # three count as four
    # The next rows are called for by halves where two passes or more go over these.
    step = OUTPUTS * LANES * size // (1 if tokens <= TOKENS else 2)
    part = (outputs // PARTS // OUTPUTS + 1) * OUTPUTS
    while True:
        start = take(job.ctypes.data, part)
        if start >= outputs:
            break
        for begin in range(start, min(start + part, outputs), OUTPUTS):
            n = min(begin, outputs - OUTPUTS)
            rows, ahead = weight + n * inputs * size, weight + min(n + OUTPUTS, outputs - OUTPUTS) * inputs * size
            middle = ahead + step * (inputs // LANES)
            for m in range(0, in_fours, TOKENS):
                if m <= TOKENS:
                    _write(dots_4(dtype, rows, x + m * row, inputs, middle if m else ahead, step), bias, out, m, n)
                else:
                    _write(dots_4_more(dtype, rows, x + m * row, inputs, ahead, step), bias, out, m, n)
            m = in_fours
            if tokens - m == 1:
                _write(dots_1(dtype, rows, x + m * row, inputs, middle if m else ahead, step), bias, out, m, n)
            elif tokens - m == 2:
                _write(dots_2(dtype, rows, x + m * row, inputs, middle if m else ahead, step), bias, out, m, n)


def _added_up(builder: Any, vectors: list[Any]) -> Any:
    """The sum of each vector's numbers, as one vector, of as many vectors as each has numbers. All are added up in the same order."""
    lanes = size = len(vectors)
    while size > 1:
        low = [start + lane for start in range(0, 2 * lanes, size) for lane in range(size // 2)]
        halves = [_chosen(builder, vectors, [lane + more for lane in low]) for more in (0, size // 2)]
        vectors = [builder.fadd(*pair) for pair in zip(*halves, strict=True)]
        size //= 2
    return vectors[0]


def _chosen(builder: Any, vectors: list[Any], lanes: list[int]) -> list[Any]:
    """Of every two vectors, one of their numbers in these places, the second's behind the first's."""
    places = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
    return [builder.shuffle_vector(first, second, places) for first, second in zip(vectors[::2], vectors[1::2], strict=True)]


def _write_rounded(builder: Any, numbers: Any, bias: Any, out: Any) -> None:
    """A vector, with what lies at `bias` (0: nothing) added to it, as bfloat16: rounded to the nearest, to even in a tie."""
    count, i16, i32 = numbers.type.count, ir.IntType(16), ir.IntType(32)
    halves, words = ir.VectorType(i16, count), ir.VectorType(i32, count)

    def all_of(number: int) -> Any:
        return ir.Constant(words, [number] * count)

    with builder.if_else(builder.icmp_unsigned("!=", bias, ir.Constant(bias.type, 0))) as (with_bias, without):
        with with_bias:
            more = builder.shl(builder.zext(_read(builder, bias, halves, 2), words), all_of(16))
            added, where_added = builder.fadd(numbers, builder.bitcast(more, numbers.type)), builder.block
        with without:
            where_not = builder.block
    total = builder.phi(numbers.type)
    total.add_incoming(added, where_added)
    total.add_incoming(numbers, where_not)
    bits = builder.bitcast(total, words)
    even = builder.and_(builder.lshr(bits, all_of(16)), all_of(1))
    rounded = builder.lshr(builder.add(builder.add(bits, all_of(0x7FFF)), even), all_of(16))
    rounded = builder.select(builder.fcmp_unordered("uno", total, total), all_of(int(NAN)), rounded)
    builder.store(builder.trunc(rounded, halves), builder.inttoptr(out, halves.as_pointer()), align=2)


def _pairs(tokens: int, fetch: int) -> Any:
    """
    A function for `PAIRED_OUTPUTS` rows of a weight times so many tokens in bfloat16, written where they belong; takes addresses, and how
    many inputs and outputs there are.

    Args:
        tokens (`int`): at most `TOKENS`.
        fetch (`int`): so many lines are called for from `ahead` on for each one of a row.
    """
    lanes = PAIRED // 2
    places = 8
    """A token's in a vector of sums, the last of them unused."""

    @intrinsic
    def multiply(typing_context: Any, weight: Any, x: Any, inputs: Any, ahead: Any, bias: Any, out: Any, outputs: Any) -> Any:
        i32, i64 = ir.IntType(32), ir.IntType(64)
        floats, words = ir.VectorType(ir.FloatType(), lanes), ir.VectorType(i32, lanes)
        zeros, kind = floats([0.0] * lanes), ir.FunctionType(floats, [words, words, floats])

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            binding.initialize_native_asmparser()  # LLVM's own name for the instruction takes other types in each of its versions
            weight, x, inputs, ahead, bias, out, outputs = arguments
            row_size = builder.mul(inputs, i64(2))
            weights, texts = _rows(builder, weight, PAIRED_OUTPUTS, row_size), _rows(builder, x, tokens, row_size)

            def add(time: Any, sums: list[Any]) -> list[Any]:
                start, totals = builder.mul(time, i64(LINE)), []
                numbers = [_read(builder, builder.add(row, start), words, 2) for row in weights]
                for token, text in enumerate(texts):
                    of_token = _read(builder, builder.add(text, start), words, 2)
                    for number, so_far in zip(numbers, sums[token * PAIRED_OUTPUTS :], strict=False):
                        totals.append(builder.asm(kind, "vdpbf16ps $2, $1, $0", "=v,v,v,0", [of_token, number, so_far], False))
                # Rows may be too long for the smallest cache.
                _call_for(builder, builder.add(ahead, builder.mul(start, i64(fetch))), fetch, locality=2)
                return totals

            totals = _repeat(builder, builder.udiv(inputs, i64(PAIRED)), [zeros] * (tokens * PAIRED_OUTPUTS), add)
            unused = [zeros] * (places - PAIRED_OUTPUTS)
            placed = [vector for token in range(tokens) for vector in totals[token * PAIRED_OUTPUTS :][:PAIRED_OUTPUTS] + unused]
            placed += [zeros] * (-len(placed) % lanes)
            all_sums = [_added_up(builder, placed[start : start + lanes]) for start in range(0, len(placed), lanes)]
            for token, to in enumerate(_rows(builder, out, tokens, builder.mul(outputs, i64(2)))):
                of_both, first = all_sums[token * places // lanes], token * places % lanes
                [of_token] = _chosen(builder, [of_both, of_both], list(range(first, first + PAIRED_OUTPUTS)))
                _write_rounded(builder, of_token, bias, to)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), code

    return multiply


_pairs_1, _pairs_2, _pairs_3, _pairs_4 = (_pairs(tokens, PAIRED_OUTPUTS) for tokens in (1, 2, 3, TOKENS))
_pairs_4_half = _pairs(TOKENS, PAIRED_OUTPUTS // 2)


@njit(nogil=True, inline="always")
def _multiply_in_pairs(job: Any) -> None:
    weight, x, _, bias, out, outputs, inputs, tokens = _fields(job)
    row = 2 * inputs
    part = (outputs // PARTS // PAIRED_OUTPUTS + 1) * PAIRED_OUTPUTS
    while True:
        start = take(job.ctypes.data, part)
        if start >= outputs:
            break
        for begin in range(start, min(start + part, outputs), PAIRED_OUTPUTS):
            n = min(begin, outputs - PAIRED_OUTPUTS)
            rows, ahead = weight + n * row, weight + min(n + PAIRED_OUTPUTS, outputs - PAIRED_OUTPUTS) * row
            biases = bias + 2 * n if bias else 0
            for m in range(0, tokens, TOKENS):
                texts, to = x + m * row, out + 2 * (m * outputs + n)
                if tokens - m == 1:
                    _pairs_1(rows, texts, inputs, ahead, biases, to, outputs)
                elif tokens - m == 2:
                    _pairs_2(rows, texts, inputs, ahead, biases, to, outputs)
                elif tokens - m == 3:
                    _pairs_3(rows, texts, inputs, ahead, biases, to, outputs)
                elif tokens == TOKENS:
                    _pairs_4(rows, texts, inputs, ahead, biases, to, outputs)
                else:
                    _pairs_4_half(rows, texts, inputs, ahead + m // TOKENS * (PAIRED_OUTPUTS // 2) * row, biases, to, outputs)


def _instruct(builder: Any, name: str, *values: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), values)


def _at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, cgutils.voidptr_t)


@intrinsic
def _set_shapes(typing_context: Any, shapes: Any) -> Any:
    """Gives the tiles of this thread their shapes, by the address of what says them."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _instruct(builder, "ldtilecfg", _at(builder, arguments[0]))
        return context.get_dummy_value()

    return types.void(types.int64), code


@intrinsic
def release_tiles(typing_context: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _instruct(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def room_for_sums(typing_context: Any) -> Any:
    """The address of `TILE` lines on this thread's stack."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        room = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(8), TILE * LINE))
        room.align = LINE
        return builder.ptrtoint(room, ir.IntType(64))

    return types.int64(), code


@njit(nogil=True, inline="always")
def use_tiles(columns: Any) -> None:
    """Gives this thread's tiles shapes for so many columns of texts, until it is done with them (`release_tiles`)."""
    shapes = carray(pointer(room_for_sums()), LINE, np.uint8)  # as the instruction takes them: which kind, bytes of a row, rows
    shapes[:] = 0
    shapes[0] = 1
    for tile in (SUMS, WEIGHTS, TEXTS):
        shapes[16 + 2 * tile], shapes[48 + tile] = LINE if tile == WEIGHTS else 4 * columns, TILE
    _set_shapes(shapes.ctypes.data)


def tile_product_of(instruction: str) -> Any:
    """
    A function for `TILE` rows of a weight times as many tokens or fewer, in so many steps of a tile each, by what multiplies two tiles;
    takes addresses, and bytes from row to row and from step to step.
    """

    @intrinsic
    def multiply_tile(
        typing_context: Any, weight: Any, weight_row: Any, weight_step: Any, texts: Any, text_row: Any, steps: Any, sums: Any
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weight, weight_row, weight_step, texts, text_row, steps, sums = arguments
            i8, i64 = ir.IntType(8), ir.IntType(64)
            _instruct(builder, "tilezero", i8(SUMS))

            def add(_: Any, addresses: list[Any]) -> list[Any]:
                of_weight, of_texts = addresses
                _instruct(builder, "tileloadd64", i8(WEIGHTS), _at(builder, of_weight), weight_row)
                _instruct(builder, "tileloadd64", i8(TEXTS), _at(builder, of_texts), text_row)
                _instruct(builder, instruction, i8(SUMS), i8(WEIGHTS), i8(TEXTS))
                return [builder.add(of_weight, weight_step), builder.add(of_texts, builder.mul(text_row, i64(TILE)))]

            _repeat(builder, steps, [weight, texts], add)
            _instruct(builder, "tilestored64", i8(SUMS), _at(builder, sums), i64(LINE))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), code

    return multiply_tile


_multiply_tile = tile_product_of("tdpbf16ps")


@intrinsic
def _write_tile(typing_context: Any, sums: Any, column: Any, bias: Any, out: Any) -> Any:
    """A column of the sums, and of the bias if there is one, rounded to bfloat16 and put where they belong; addresses, and which column."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, column, bias, out = arguments
        i32, i64, single = ir.IntType(32), ir.IntType(64), ir.FloatType()
        numbers = ir.Constant(ir.VectorType(single, TILE), ir.Undefined)
        for row, address in enumerate(_rows(builder, builder.add(sums, builder.mul(column, i64(4))), TILE, i64(LINE))):
            numbers = builder.insert_element(numbers, _read(builder, address, single, 4), i32(row))
        _write_rounded(builder, numbers, bias, out)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), code


@njit(nogil=True, inline="always")
def _multiply_in_tiles(job: Any) -> None:
    weight, _, x, bias, out, outputs, inputs, tokens = _fields(job)
    at_once, sums = min(tokens, TILE), room_for_sums()
    use_tiles(at_once)
    part = (outputs // PARTS // TILE + 1) * TILE
    while True:
        start = take(job.ctypes.data, part)
        if start >= outputs:
            break
        for begin in range(start, min(start + part, outputs), TILE):
            n = min(begin, outputs - TILE)
            for first in range(0, tokens, TILE):
                m = min(first, tokens - at_once)
                _multiply_tile(weight + n * inputs * 2, inputs * 2, LINE, x + m * 4, tokens * 4, inputs // (2 * TILE), sums)
                for i in range(at_once):
                    _write_tile(sums, i, bias + n * 2 if bias else 0, out + ((m + i) * outputs + n) * 2)
    release_tiles()


# For each kind of numbers, what comes before a parallel region, and what the region's threads run, all of them the same.


def _arrange_float32(job: Any) -> None:
    """As it is, and a multiple of `TOKENS`."""
    _widen(np.float32, carray(job, JOB, np.int64))


def _multiply_float32(job: Any) -> None:
    """At least `OUTPUTS` outputs, a multiple of `LANES` inputs."""
    _multiply(np.float32, carray(job, JOB, np.int64))


def _arrange_bfloat16(job: Any) -> None:
    """As float32 numbers, and a multiple of `TOKENS`."""
    _widen(np.uint16, carray(job, JOB, np.int64))


def _multiply_bfloat16(job: Any) -> None:
    """At least `OUTPUTS` outputs, a multiple of `LANES` inputs."""
    _multiply(np.uint16, carray(job, JOB, np.int64))


def _arrange_pairs(job: Any) -> None:
    """As it is."""


def _multiply_pairs(job: Any) -> None:
    """bfloat16 where the CPU `has_pairs`: at least `PAIRED_OUTPUTS` outputs, a multiple of `PAIRED` inputs."""
    _multiply_in_pairs(carray(job, JOB, np.int64))


def _arrange_tiles(job: Any) -> None:
    """Pairs of inputs by tokens."""
    _, given, room, _, _, _, inputs, tokens = _fields(carray(job, JOB, np.int64))
    x, pairs = carray(pointer(given), (tokens, inputs // 2), np.uint32), carray(pointer(room), (inputs // 2, tokens), np.uint32)
    for k in range(inputs // 2):
        for m in range(tokens):
            pairs[k, m] = x[m, k]


def _multiply_tiles(job: Any) -> None:
    """bfloat16 where the CPU `has_tiles`: at least `TILE` outputs, a multiple of 32 inputs."""
    _multiply_in_tiles(carray(job, JOB, np.int64))


class Kernel(NamedTuple):
    """`arrange` takes the address of a `job`; so does the body of a parallel region, whose own is `body`."""

    job: Any
    arrange: Any
    body: int


@cache
def kernel(kind: str) -> Kernel:
    """Compiled for `"float32"`, `"bfloat16"`, or, in `"pairs"` or `"tiles"`, the latter."""
    arrange, body = {
        "float32": (_arrange_float32, _multiply_float32),
        "bfloat16": (_arrange_bfloat16, _multiply_bfloat16),
        "pairs": (_arrange_pairs, _multiply_pairs),
        "tiles": (_arrange_tiles, _multiply_tiles),
    }[kind]
    return Kernel(ctypes.c_int64 * JOB, _as_c(arrange).ctypes, _as_c(body).address)


@cache
def _as_c(function: Any) -> Any:
    """Kept for as long as the process runs: its code may be in use."""
    return compiled(function, types.void(types.voidptr))
