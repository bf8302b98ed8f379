"""
A forward of a Llama-like model over a few tokens, its weights with 8 bits each, compiled by numba: one parallel region of torch's threads,
which wait for each other between the steps of a layer. Imported where it is needed: numba takes a second.

All numbers but the weights are float32. Each row of a weight's integers has a scale, by which its products are multiplied.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from .kernels import (
    LANES,
    LINE,
    OUTPUTS,
    PARTS,
    TILE,
    TOKENS,
    compiled,
    dots_1,
    dots_2,
    dots_4,
    dots_4_more,
    pointer,
    release_tiles,
    room_for_sums,
    take,
    tile_product_of,
    use_tiles,
    widened,
)


_njit = partial(njit, nogil=True, error_model="numpy")
"""Nothing may raise: the other threads would wait for a thread that has left."""


def _structure(**fields: str) -> Any:
    return np.dtype([(name, kind) for kind, names in fields.items() for name in names.split()])


LAYER = _structure(
    int64="""
        before_attention query_key_value query_key_value_scale query_key_value_bias query_norm key_norm output output_scale output_bias
        before_mlp gate_up gate_up_scale gate_up_bias down down_scale down_bias
    """
)
"""Addresses: norms' gains, and weights with their scales and biases, below each other where they meet the same input. 0: there is none."""
MODEL = _structure(
    int64="num_layers layers hidden heads key_value_heads head_size between vocabulary before_head head head_scale head_bias",
    float32="attention_scale epsilon",
)
"""Sizes, and addresses: `layers` points to a `LAYER` each. `between` is the size of what lies between the MLP's products."""
JOB = _structure(
    int64="""
        threads counters barrier model tokens places rows cells keys values cos sin
        residual after_attention query_key_value attended gate up between scratch scratch_size product_size kept num_kept logits
    """
)
"""
A forward, by addresses and sizes. `threads` and `counters` are 0 at first; `barrier` is a function.

For each of `tokens` tokens `places` has a row and a position. `keys` and `values` are of the shape `(layers, rows, key-value heads, cells,
head size)`, `cos` and `sin` `(cells, head size)`. `residual` holds the tokens' embeddings; it and what follows has room for the tokens.
`scratch` has for each thread `scratch_size` bytes: `product_size` for a product's input, then a norm of all tokens, then a score for each
cell. `logits` are those of the tokens numbered in `kept`.
"""
ROWS = 48
"""Of a weight, that a thread takes at least: a multiple of `OUTPUTS` and `TILE`."""
TEXTS = 8
"""Tokens that a tile takes, in two columns each."""
LARGEST = 127 * 128
"""Of a token's numbers as integers."""
COUNTERS = 6
"""Of each layer, on lines of their own; one more is the head's."""
QUANTIZATION = _structure(int64="counter weight integers scales outputs inputs")
"""Of a weight `(outputs, inputs)`, by addresses; `counter` is 0 at first."""

_multiply_tile = tile_product_of("tdpbssd")


@intrinsic
def _call(typing_context: Any, address: Any) -> Any:
    """Calls a function that takes and returns nothing."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.call(builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), []).as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), code


@_njit(inline="always")
def _vector(address: Any, size: Any) -> Any:
    return carray(pointer(address), size if address else 0, np.float32)


@_njit(inline="always")
def _matrix(address: Any, rows: Any, columns: Any) -> Any:
    return carray(pointer(address), (rows if address else 0, columns), np.float32)


@_njit(inline="always")
def _put(number: Any, scale: Any, bias: Any, added: Any, out: Any, m: Any, n: Any) -> None:
    """A product's number for a token and an output, where it belongs; `bias` and `added` may be empty."""
    number *= scale[n]
    if bias.shape[0]:
        number += bias[n]
    if added.shape[0]:
        number += added[m, n]
    out[m, n] = number


@_njit(inline="always")
def _put_all(sums: Any, scale: Any, bias: Any, added: Any, out: Any, m: Any, n: Any) -> None:
    tokens = len(sums) // OUTPUTS
    for j in range(OUTPUTS):
        for i in range(tokens):
            _put(sums[j * tokens + i], scale, bias, added, out, m + i, n + j)


@_njit()
def _multiply(start: Any, stop: Any, weight: Any, scale: Any, bias: Any, x: Any, room: Any, added: Any, out: Any) -> None:
    """Outputs `start` … `stop - 1` for all tokens. Fewer than `OUTPUTS` are made with some before."""
    tokens, inputs = x.shape
    texts, row, step = x.ctypes.data, 4 * inputs, OUTPUTS * LANES
    for begin in range(start, stop, OUTPUTS):
        n = min(begin, stop - OUTPUTS)
        rows = weight + n * inputs
        ahead = rows + 2 * OUTPUTS * inputs
        m = 0
        while tokens - m >= TOKENS:
            if m == 0:
                _put_all(dots_4(np.int8, rows, texts, inputs, ahead, step), scale, bias, added, out, m, n)
            else:
                _put_all(dots_4_more(np.int8, rows, texts + m * row, inputs, ahead, step), scale, bias, added, out, m, n)
            m += TOKENS
        if tokens - m >= 2:
            _put_all(dots_2(np.int8, rows, texts + m * row, inputs, ahead, step), scale, bias, added, out, m, n)
            m += 2
        if tokens - m == 1:
            _put_all(dots_1(np.int8, rows, texts + m * row, inputs, ahead, step), scale, bias, added, out, m, n)


@_njit()
def _as_it_is(x: Any, room: Any) -> None:
    """Nothing to arrange."""


@_njit(inline="always")
def _bytes(x: Any, room: Any, m: Any, at_once: Any) -> Any:
    """Tokens `m` and on as tiles take them: fours of inputs by tokens, a column of each one's higher bits, behind these of its lower."""
    tokens, inputs = x.shape
    size = 2 * at_once * inputs
    return carray(pointer(room + LINE + (m + at_once - 1) // at_once * size), (inputs // 4, 2 * at_once, 4), np.int8)


@_njit()
def _arrange_in_tiles(x: Any, room: Any) -> None:
    """Numbers as integers of 15 bits, by each token's largest, for products with integers of 8."""
    tokens, inputs = x.shape
    at_once, factors = min(tokens, TEXTS), _vector(room, tokens)
    use_tiles(2 * at_once)
    for first in range(0, tokens, at_once):
        m = min(first, tokens - at_once)
        texts = _bytes(x, room, m, at_once)
        for i in range(at_once):
            largest, broken = np.float32(0), np.float32(0)
            for k in range(inputs):
                largest = max(largest, abs(x[m + i, k]))
                broken += x[m + i, k] * np.float32(0)
            factors[m + i] = largest / np.float32(LARGEST) + broken  # not a number if one of them is none
            factor = np.float32(LARGEST) / largest if largest > 0 else np.float32(0)
            for k in range(inputs):
                number = np.int32(np.rint(x[m + i, k] * factor))
                higher = (number + 64) >> 7
                texts[k // 4, i, k % 4], texts[k // 4, at_once + i, k % 4] = higher, number - (higher << 7)


@_njit()
def _multiply_in_tiles(start: Any, stop: Any, weight: Any, scale: Any, bias: Any, x: Any, room: Any, added: Any, out: Any) -> None:
    """The same where the CPU has tiles for integers; the weight's lie behind each other."""
    tokens, inputs = x.shape
    at_once, factors = min(tokens, TEXTS), _vector(room, tokens)
    sums = carray(pointer(room_for_sums()), (TILE, LINE // 4), np.int32)
    for n in range(start, stop, TILE):
        for first in range(0, tokens, at_once):
            m = min(first, tokens - at_once)
            texts = _bytes(x, room, m, at_once).ctypes.data
            _multiply_tile(weight + n * inputs, LINE, TILE * LINE, texts, 8 * at_once, inputs // LINE, sums.ctypes.data)
            for i in range(at_once):
                for j in range(TILE):
                    whole = np.float32(128) * np.float32(sums[j, i]) + np.float32(sums[j, at_once + i])
                    _put(whole * factors[m + i], scale, bias, added, out, m + i, n + j)


@_njit(inline="always")
def _next(counter: Any, outputs: Any) -> Any:
    """From where to where this thread goes on; the start is past the end when there is nothing left."""
    part = (outputs // PARTS // ROWS + 1) * ROWS
    start = take(counter, part)
    return start, min(start + part, outputs)


@_njit(fastmath=True)
def _normed(x: Any, gain: Any, epsilon: Any, out: Any) -> None:
    """RMSNorm."""
    squares = np.float32(0)
    for k in range(x.shape[0]):
        squares += x[k] * x[k]
    factor = np.float32(1) / np.float32(math.sqrt(squares / np.float32(x.shape[0]) + epsilon))
    for k in range(x.shape[0]):
        out[k] = x[k] * factor * gain[k]


@_njit()
def _rotate(x: Any, cos: Any, sin: Any, out: Any) -> None:
    """Rotary position embedding, by halves."""
    half = x.shape[0] // 2
    for k in range(half):
        first, second = x[k], x[half + k]
        out[k] = first * cos[k] - second * sin[k]
        out[half + k] = second * cos[half + k] + first * sin[half + k]


@_njit(fastmath=True)
def _attend(query: Any, keys: Any, values: Any, scale: Any, scores: Any, out: Any) -> None:
    top, total = np.float32(-3e38), np.float32(0)  # no infinity: fast mathematics know none
    for cell in range(keys.shape[0]):
        score = np.float32(0)
        for k in range(query.shape[0]):
            score += query[k] * keys[cell, k]
        scores[cell] = score * scale
        top = max(top, scores[cell])
    out[:] = 0
    for cell in range(keys.shape[0]):
        weight = np.float32(math.exp(scores[cell] - top))
        total += weight
        for k in range(query.shape[0]):
            out[k] += weight * values[cell, k]
    for k in range(query.shape[0]):
        out[k] /= total


@_njit()
def _place_heads(counter: Any, job: Any, model: Any, layer: Any, qkv: Any, keys: Any, values: Any) -> None:
    """Queries are rotated where they are; keys, rotated, and values go to their cells."""
    heads, size, others = model.heads, model.head_size, model.key_value_heads
    places = carray(pointer(job.places), (job.tokens, 2), np.int64)
    cos, sin = _matrix(job.cos, job.cells, size), _matrix(job.sin, job.cells, size)
    query_norm, key_norm = _vector(layer.query_norm, size), _vector(layer.key_norm, size)
    head = take(counter, 1)
    while head < heads + others:
        gain = query_norm if head < heads else key_norm
        for m in range(job.tokens):
            row, position = places[m, 0], places[m, 1]
            numbers = qkv[m, head * size : (head + 1) * size]
            if gain.shape[0]:
                _normed(numbers, gain, model.epsilon, numbers)
            to = numbers if head < heads else keys[row, head - heads, position]
            _rotate(numbers, cos[position], sin[position], to)
            if head >= heads:
                values[row, head - heads, position] = qkv[m, (head + others) * size : (head + others + 1) * size]
        head = take(counter, 1)


@_njit()
def _attention(counter: Any, job: Any, model: Any, qkv: Any, keys: Any, values: Any, scores: Any, attended: Any) -> None:
    heads, size = model.heads, model.head_size
    places = carray(pointer(job.places), (job.tokens, 2), np.int64)
    head = take(counter, 1)
    while head < heads:
        shared, its = head // (heads // model.key_value_heads), slice(head * size, (head + 1) * size)
        for m in range(job.tokens):
            row, end = places[m, 0], places[m, 1] + 1
            _attend(qkv[m, its], keys[row, shared, :end], values[row, shared, :end], model.attention_scale, scores, attended[m, its])
        head = take(counter, 1)


def _forward_by(arrange: Any, multiply: Any) -> Any:
    """All of a thread's part in a forward, with this way to a product."""

    @_njit()
    def product(counter: Any, weight: Any, scale: Any, bias: Any, x: Any, room: Any, added: Any, out: Any) -> None:
        outputs = out.shape[1]
        scales, biases = _vector(scale, outputs), _vector(bias, outputs)
        arrange(x, room)
        start, stop = _next(counter, outputs)
        while start < outputs:
            multiply(start, stop, weight, scales, biases, x, room, added, out)
            start, stop = _next(counter, outputs)

    @_njit()
    def gated(counter: Any, weight: Any, scale: Any, bias: Any, x: Any, room: Any, gate: Any, up: Any, out: Any) -> None:
        """`silu(gate) * up`."""
        size = out.shape[1]
        scales, biases, none = _vector(scale, 2 * size), _vector(bias, 2 * size), _matrix(0, 0, 0)
        arrange(x, room)
        start, stop = _next(counter, size)
        while start < size:
            multiply(start, stop, weight, scales[:size], biases[:size], x, room, none, gate)
            multiply(start, stop, weight + size * x.shape[1], scales[size:], biases[size:], x, room, none, up)
            for m in range(out.shape[0]):
                for k in range(start, stop):
                    number = gate[m, k]
                    out[m, k] = number / (np.float32(1) + np.float32(math.exp(-number))) * up[m, k]
            start, stop = _next(counter, size)

    @_njit()
    def run(job: Any, model: Any, thread: Any) -> None:
        tokens, hidden, heads, others, size = job.tokens, model.hidden, model.heads, model.key_value_heads, model.head_size
        x, after_attention = _matrix(job.residual, tokens, hidden), _matrix(job.after_attention, tokens, hidden)
        qkv, attended = _matrix(job.query_key_value, tokens, (heads + 2 * others) * size), _matrix(job.attended, tokens, heads * size)
        gate, up = _matrix(job.gate, tokens, model.between), _matrix(job.up, tokens, model.between)
        between = _matrix(job.between, tokens, model.between)
        room = job.scratch + thread * job.scratch_size  # of this thread: for a product, for a norm, for scores
        normed = _matrix(room + job.product_size, tokens, hidden)
        scores, none = _vector(room + job.product_size + tokens * hidden * 4, job.cells), _matrix(0, 0, 0)
        shape = (model.num_layers, job.rows, others, job.cells, size)
        keys, values = carray(pointer(job.keys), shape, np.float32), carray(pointer(job.values), shape, np.float32)
        layers = carray(pointer(model.layers), model.num_layers, LAYER)
        counter = job.counters
        for number in range(model.num_layers):
            layer = layers[number]
            for m in range(tokens):
                _normed(x[m], _vector(layer.before_attention, hidden), model.epsilon, normed[m])
            product(counter, layer.query_key_value, layer.query_key_value_scale, layer.query_key_value_bias, normed, room, none, qkv)
            _call(job.barrier)
            _place_heads(counter + LINE, job, model, layer, qkv, keys[number], values[number])
            _call(job.barrier)
            _attention(counter + 2 * LINE, job, model, qkv, keys[number], values[number], scores, attended)
            _call(job.barrier)
            product(counter + 3 * LINE, layer.output, layer.output_scale, layer.output_bias, attended, room, x, after_attention)
            _call(job.barrier)
            for m in range(tokens):
                _normed(after_attention[m], _vector(layer.before_mlp, hidden), model.epsilon, normed[m])
            gated(counter + 4 * LINE, layer.gate_up, layer.gate_up_scale, layer.gate_up_bias, normed, room, gate, up, between)
            _call(job.barrier)
            product(counter + 5 * LINE, layer.down, layer.down_scale, layer.down_bias, between, room, after_attention, x)
            _call(job.barrier)
            counter += COUNTERS * LINE
        if job.num_kept == 0:
            return
        kept = carray(pointer(job.kept), job.num_kept, np.int64)
        for m in range(job.num_kept):
            _normed(x[kept[m]], _vector(model.before_head, hidden), model.epsilon, normed[m])
        logits = _matrix(job.logits, job.num_kept, model.vocabulary)
        product(counter, model.head, model.head_scale, model.head_bias, normed[: job.num_kept], room, none, logits)

    return run


_run, _run_in_tiles = _forward_by(_as_it_is, _multiply), _forward_by(_arrange_in_tiles, _multiply_in_tiles)


def _forward(job: Any) -> None:
    fields = carray(job, 1, JOB)[0]
    thread = take(carray(job, 1, np.int64).ctypes.data, 1)
    _run(fields, carray(pointer(fields.model), 1, MODEL)[0], thread)


def _forward_in_tiles(job: Any) -> None:
    fields = carray(job, 1, JOB)[0]
    thread = take(carray(job, 1, np.int64).ctypes.data, 1)
    _run_in_tiles(fields, carray(pointer(fields.model), 1, MODEL)[0], thread)
    release_tiles()


@_njit(inline="always")
def _quantize(dtype: Any, job: Any) -> None:
    """Each row by its own largest number."""
    fields = carray(job, 1, QUANTIZATION)[0]
    shape = (fields.outputs, fields.inputs)
    weight, integers = carray(pointer(fields.weight), shape, dtype), carray(pointer(fields.integers), shape, np.int8)
    scales, counter = _vector(fields.scales, fields.outputs), carray(job, 1, np.int64).ctypes.data
    start, stop = _next(counter, fields.outputs)
    while start < fields.outputs:
        for n in range(start, stop):
            largest = np.float32(0)
            for k in range(fields.inputs):
                largest = max(largest, abs(widened(weight[n, k])))
            scales[n] = largest / np.float32(127)
            factor = np.float32(127) / largest if largest > 0 else np.float32(0)
            for k in range(fields.inputs):
                integers[n, k] = np.int8(np.rint(widened(weight[n, k]) * factor))
        start, stop = _next(counter, fields.outputs)


def _quantize_float32(job: Any) -> None:
    _quantize(np.float32, job)


def _quantize_bfloat16(job: Any) -> None:
    _quantize(np.uint16, job)


def product_size(tokens: int, inputs: int) -> int:
    """Bytes of room for a product's input: a line of factors, and so many tokens and some more, with two bytes a number."""
    return LINE + -(-(tokens + TEXTS) * 2 * inputs // LINE) * LINE


@cache
def body(name: str) -> Any:
    """
    What threads run, with its `address`: `"forward"` of a `JOB`, or that `"forward in tiles"`, or `"float32"` and `"bfloat16"`, the
    `QUANTIZATION` of such a weight. Kept for as long as the process runs: its code may be in use.
    """
    functions = {
        "forward": _forward, "forward in tiles": _forward_in_tiles, "float32": _quantize_float32, "bfloat16": _quantize_bfloat16,
    }  # fmt: skip
    return compiled(functions[name], types.void(types.voidptr), error_model="numpy")
