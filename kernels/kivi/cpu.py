"""KIVI pages on the CPU: numba around the loops of ``_vector``, on torch's threads.

Reads and writes the bytes that ``reference.py`` does. Every entry point fills an array of
parameters, addresses and sizes as int64, and lets workers take tasks by an atomic counter: blocks
and heads to pack and unpack, and for attention

*   a span of the history of one sequence and KV head, where there are few new tokens: codes are
    multiplied as they are (``_vector._plane``), never written out, and the last worker to finish a
    sequence's head merges its spans;
*   a tile of new tokens of one sequence and KV head otherwise: blocks are written out as float32
    one at a time.

Both keep the maximum, the sum and the weighted sum of a softmax that goes on from block to block.
How the work is split depends on shapes alone, so that results do not depend on threads.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from pathlib import Path

import numpy as np
import torch
from numba import cfunc, njit, types

from .. import openmp
from . import _vector as vec
from . import format as form
from ._vector import (
    butterfly,
    capped,
    coefficients,
    decode_row,
    exp2,
    extremes,
    fetch_add,
    filled,
    get_f32,
    get_i32,
    get_i64,
    get_u8,
    kept_outside,
    least_squares,
    multiplied,
    picked,
    prefetched,
    product_row,
    put_f32,
    put_i32,
    put_i64,
    put_u8,
    rotated_eights,
    row_exp,
    row_max,
    scaled,
    stretched,
    symmetric_fit,
    symmetric_stretched,
    with_slope,
)
from .attention import Attention
from .format import PageFormat

_compiled = njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True)

_LOG2E = math.log2(math.e)
_KIND = {torch.bfloat16: vec.BF16, torch.float16: vec.FP16, torch.float32: vec.FP32}
_BF16, _FP16, _FP32 = vec.BF16, vec.FP16, vec.FP32
_UNBIASED = form.FITS.index("unbiased")
_MINUS_INF = np.float32(-np.inf)

FEW_ROWS = 16
"""So many queries of a KV head read codes as they are; more are worth a block written out."""

SPAN = 512
"""Tokens of history of a task with few queries, a whole number of blocks."""

TILE_ROWS = 192
"""Queries of a task with many."""

OWN_TILE = 128
"""New tokens that are read as keys at once."""

# A code is multiplied where it lies in its word, but for the top one; see _vector._plane.
_POWERS = np.array(
    [[scale * (4.0 ** -(r % 16) if r % 16 < 15 else 1.0) for r in range(4096)] for scale in (1, 4)]
    + [[1.0] * 4096],
    np.float32,
)

# Places in the array of parameters: what workers share, the format, and then each entry point's.
(
    NEXT, WORKER, TASKS, SCRATCH, SCRATCH_BYTES,
    BLOCK, SIZE, GROUP, KEY_GROUPS, VALUE_GROUPS, VALUE_GROUP, KEY_BITS, VALUE_BITS, BOOSTED,
    EXTRA_ROWS, SINKS, KIND, FIT, ROTATED, POWER_OF_TWO, PAGE_BYTES, POWERS, POWERS4, ONES, MASKS,
    KEY_CODES, KEY_EXTRA, VALUE_CODES, VALUE_EXTRA, KEY_SCALE, KEY_MIN, VALUE_SCALE, VALUE_MIN,
    SINK_KEYS, SINK_VALUES, BOOSTED_AT,
    OWN,
) = range(37)  # fmt: skip
(
    CACHE, CACHE_BLOCK, CACHE_HEAD, KEYS, VALUES, KEYS_SLOT, KEYS_TOKEN, KEYS_HEAD, VALUES_SLOT,
    VALUES_TOKEN, VALUES_HEAD, KV_HEADS, FIRST_OF_OP,
) = range(OWN, OWN + 13)  # fmt: skip
SLOTS, BLOCKS, FILLS, FIRSTS, PACK_END = range(FIRST_OF_OP, FIRST_OF_OP + 5)
(
    QUERY, QUERY_TOKEN, QUERY_HEAD, KEY, KEY_TOKEN, KEY_HEAD, VALUE, VALUE_TOKEN, VALUE_HEAD,
    OUT, OUT_TOKEN, OUT_HEAD, SLOT_OF_BLOCK, TABLE, TABLE_ROW, STARTS, LENGTHS, SEQUENCES,
    QUERIES, WINDOW, CAP, SLOPES, LOGIT_SINKS, FLOATS, ROWS, TILE, LIST, PARTIALS, COUNTERS,
    PARTIAL_FLOATS, COUNTER_COUNT, ATTEND_END,
) = range(FIRST_OF_OP, FIRST_OF_OP + 32)  # fmt: skip
_PARAMETERS = 128

# A task in the list of attention: int64 each.
T_SEQUENCE, T_FEW, T_BEGIN, T_END, T_SPANS, T_SPAN, T_PARTIAL, T_COUNTER = range(8)
_TASK_BYTES = 64


@functools.lru_cache(maxsize=64)
def _format_parameters(fmt: PageFormat) -> list[int]:
    powers = _POWERS.ctypes.data
    return [
        fmt.block_tokens, fmt.head_size, fmt.group, fmt.key_groups, fmt.value_groups,
        fmt.value_group, fmt.key_bits, fmt.value_bits, fmt.boosted, fmt.extra_rows, fmt.sinks,
        _KIND[fmt.dtype], form.FITS.index(fmt.fit), int(fmt.rotated),
        fmt.head_size & -fmt.head_size, fmt.page_bytes, powers,
        powers + _POWERS.strides[0], powers + 2 * _POWERS.strides[0], vec.MASKS.ctypes.data,
        *(offset for offset, _ in fmt.sections.values()),
    ]  # fmt: skip


class _Local(threading.local):
    """What a thread that calls keeps between calls: parameters and scratch, grown when needed."""

    def __init__(self) -> None:
        self.parameters = np.zeros(_PARAMETERS, np.int64)
        self.address = self.parameters.ctypes.data
        self.floats = np.zeros(8, np.float32)
        self.buffers: dict[str, tuple[np.ndarray, int, int]] = {}

    def room(self, name: str, size: int) -> int:
        """The address of so many bytes, aligned."""
        held = self.buffers.get(name)
        if held is None or held[2] < size:
            size = max(4096, size + size // 2)
            array = np.zeros(size + 64, np.uint8)
            address = array.ctypes.data
            held = array, address + -address % 64, size
            self.buffers[name] = held
        return held[1]


_local = _Local()


@_compiled
def _p(P, name):
    return get_i64(P + 8 * name)


def _of_kind(bf16, fp16, fp32):
    """The operation on rows for the dtype that is given when it runs."""

    @_compiled
    def run(kind, source, stride, target, target_stride, rows, columns):
        rows = kept_outside(rows)
        if kind == _BF16:
            bf16(source, stride, target, target_stride, rows, columns)
        elif kind == _FP16:
            fp16(source, stride, target, target_stride, rows, columns)
        else:
            fp32(source, stride, target, target_stride, rows, columns)

    return run


_widen = _of_kind(vec.widen_bf16, vec.widen_fp16, vec.widen_fp32)
_narrow = _of_kind(vec.narrow_bf16, vec.narrow_fp16, vec.narrow_fp32)
_turn = _of_kind(vec.turn_bf16, vec.turn_fp16, vec.turn_fp32)


@_compiled
def _planes(P, words, stride, count, coef, coef_stride, out, out_stride, rows, columns):
    """All tiles of a plane: at most four queries at once, in tiles of 32 columns or 16."""
    rows = kept_outside(rows)
    masks = _p(P, MASKS)
    while rows > 0:
        now = 4 if rows % 4 == 0 else min(rows, 3)
        x = 0
        if now < 4:
            while x + 32 <= columns:
                w, o = words + 4 * x, out + 4 * x
                if now == 3:
                    vec.plane34(w, stride, count, coef, coef_stride, o, out_stride, masks)
                elif now == 2:
                    vec.plane24(w, stride, count, coef, coef_stride, o, out_stride, masks)
                else:
                    vec.plane14(w, stride, count, coef, coef_stride, o, out_stride, masks)
                x += 32
        while x < columns:
            w, o = words + 4 * x, out + 4 * x
            if now == 4:
                vec.plane42(w, stride, count, coef, coef_stride, o, out_stride, masks)
            elif now == 3:
                vec.plane32(w, stride, count, coef, coef_stride, o, out_stride, masks)
            elif now == 2:
                vec.plane22(w, stride, count, coef, coef_stride, o, out_stride, masks)
            else:
                vec.plane12(w, stride, count, coef, coef_stride, o, out_stride, masks)
            x += 16
        rows -= now
        coef += now * coef_stride
        out += now * out_stride


@_compiled
def _products(values, stride, count, coef, coef_stride, out, out_stride, rows, columns):
    """As ``_planes``, of float32 values. A tile of values stays in the cache for all queries."""
    rows = kept_outside(rows)
    for x in range(0, columns, 16):
        v, c, o = values + 4 * x, coef, out + 4 * x
        left = rows
        while left > 0:
            now = 6 if left >= 6 else min(left, 3)
            if now == 6:
                vec.product62(v, stride, count, c, coef_stride, o, out_stride)
            elif now == 3:
                vec.product32(v, stride, count, c, coef_stride, o, out_stride)
            elif now == 2:
                vec.product22(v, stride, count, c, coef_stride, o, out_stride)
            else:
                vec.product12(v, stride, count, c, coef_stride, o, out_stride)
            left -= now
            c += now * coef_stride
            o += now * out_stride


@_compiled
def _scales(P, page, to, first):
    """Scales and minima of a page as float32, of K and then of V, and the sinks of a first one."""
    block, size, kind = _p(P, BLOCK), _p(P, SIZE), _p(P, KIND)
    keys, values = _p(P, KEY_GROUPS) * size, _p(P, VALUE_GROUPS) * block
    value_low = to + 4 * (2 * keys + values)
    sinks = value_low + 4 * values
    if _p(P, ROTATED):
        _widen(kind, page + _p(P, KEY_SCALE), 0, to, 0, 1, 2 * keys + values)
        multiplied(value_low - 4 * values, _p(P, ONES), value_low, values)
        scaled(value_low, values, -_middle(P), np.float32(0))
    else:
        _widen(kind, page + _p(P, KEY_SCALE), 0, to, 0, 1, 2 * (keys + values))
    if first:
        count = _p(P, SINKS) * size * (1 + _p(P, ROTATED))
        _widen(kind, page + _p(P, SINK_KEYS), 0, sinks, 0, 1, count)


@_compiled
def _middle(P):
    """What is subtracted from the codes of rotated V."""
    return np.float32(7.5) if _p(P, VALUE_BITS) == 4 else np.float32(1.5)


@_compiled
def _rotate(P, row):
    """``row @ rotation(size)`` in place."""
    row = kept_outside(row)
    size, power = _p(P, SIZE), _p(P, POWER_OF_TWO)
    rotated_eights(row, size, np.float32(1) / math.sqrt(np.float32(power)))
    half = 8
    while half < power:
        for x in range(0, size, 2 * half):
            butterfly(row + 4 * x, row + 4 * (x + half), half)
        half *= 2


@_compiled
def _written_out(P, page, first, scales, extra_of, keys, keys_stride, values):
    """A page as float32: K to ``keys [size][block]``, V to ``values [block][size]``.

    extra_of: scratch, int32 [size].
    """
    block = kept_outside(_p(P, BLOCK))
    size, group, key_groups = _p(P, SIZE), _p(P, GROUP), _p(P, KEY_GROUPS)
    value_groups, value_group = _p(P, VALUE_GROUPS), _p(P, VALUE_GROUP)
    _scales(P, page, scales, first)
    key_low = scales + 4 * key_groups * size
    value_scale = key_low + 4 * key_groups * size
    value_low = value_scale + 4 * value_groups * block
    sinks = value_low + 4 * value_groups * block
    every = _p(P, KEY_BITS) == 4
    for c in range(size):
        put_i32(extra_of + 4 * c, c if every else -1)
    for j in range(_p(P, BOOSTED)):
        put_i32(extra_of + 4 * get_u8(page + _p(P, BOOSTED_AT) + j), j)
    for c in range(size):
        words = page + _p(P, KEY_CODES) + 4 * (c // 16) * block
        j = get_i32(extra_of + 4 * c)
        extra = page + _p(P, KEY_EXTRA) + 4 * (j // 16) * block
        for g in range(key_groups):
            at, i = 4 * g * group, 4 * (g * size + c)
            decode_row(
                words + at, 2 * (c % 16), extra + at if j >= 0 else 0, 2 * (j % 16),
                keys + c * keys_stride + at, get_f32(scales + i), get_f32(key_low + i), group,
            )  # fmt: skip
    four, rotated = _p(P, VALUE_BITS) == 4, _p(P, ROTATED)
    for t in range(block):
        row = 4 * (t // 16) * size
        for g in range(value_groups):
            x, i = g * value_group, 4 * (g * block + t)
            at = row + 4 * x
            decode_row(
                page + _p(P, VALUE_CODES) + at, 2 * (t % 16),
                page + _p(P, VALUE_EXTRA) + at if four else 0, 2 * (t % 16),
                values + 4 * (t * size + x), get_f32(value_scale + i), get_f32(value_low + i),
                min(value_group, size - x),
            )  # fmt: skip
        if rotated:
            _rotate(P, values + 4 * t * size)
    if first:
        count = _p(P, SINKS)
        for t in range(count):
            for c in range(size):
                put_f32(keys + c * keys_stride + 4 * t, get_f32(sinks + 4 * (t * size + c)))
        if rotated:
            multiplied(sinks + 4 * count * size, _p(P, ONES), values, count * size)


# ------------------------------------------------------------------------------- attention


@_compiled
def _layout(P):
    """Where a worker's scratch has what, in bytes: queries, outputs, scores, maxima, sums,
    corrections, coefficients, extra ones, queries of boosted channels, spare rows, scales, K, V;
    the sums of rotated V; and the end."""
    block, size, rows, tile = _p(P, BLOCK), _p(P, SIZE), _p(P, ROWS), _p(P, TILE)
    longest = max(block, size)
    few = max(_p(P, QUERIES), FEW_ROWS)
    queries = 0
    outputs = queries + 4 * rows * size
    scores = outputs + 4 * rows * size
    maxima = scores + 4 * rows * tile
    sums = maxima + 4 * rows
    corrections = sums + 4 * rows
    coef = corrections + 4 * rows
    extra = coef + 4 * few * longest
    boosted = extra + 4 * few * longest
    spare = boosted + 4 * few * size
    scales = spare + 4 * (3 * longest + few)
    scale_count = 2 * _p(P, KEY_GROUPS) * size + 2 * _p(P, VALUE_GROUPS) * block
    turned = scales + 4 * (scale_count + 2 * _p(P, SINKS) * size)
    keys = turned + 4 * few * size
    # Keys a page apart would share the sets of the cache.
    values = keys + 4 * size * (tile + 16)
    end = values + 4 * size * tile
    return (
        queries, outputs, scores, maxima, sums, corrections, coef, extra, boosted, spare, scales,
        keys, values, turned, (end + 4095) // 4096 * 4096 + 64,
    )  # fmt: skip


@_compiled
def _load_queries(P, W, start, tokens, head, few):
    """Queries of a KV head, scaled, to scratch: row ``token * queries + query``."""
    queries, size = _p(P, QUERIES), _p(P, SIZE)
    at, outputs, _, maxima, sums = _layout(P)[:5]
    scale = get_f32(_p(P, FLOATS))
    for i in range(tokens):
        for g in range(queries):
            r = i * queries + g
            source = _p(P, QUERY) + (start + i) * _p(P, QUERY_TOKEN)
            source += (head * queries + g) * _p(P, QUERY_HEAD)
            row = W + at + 4 * r * size
            _widen(_p(P, KIND), source, 0, row, 0, 1, size)
            scaled(row, size, scale, np.float32(0))
            filled(W + outputs + 4 * r * size, size, np.float32(0))
            put_f32(W + maxima + 4 * r, _MINUS_INF)
            put_f32(W + sums + 4 * r, np.float32(0))
            if few:
                filled(W + _layout(P)[13] + 4 * r * size, size, np.float32(0))


@_compiled
def _soften(P, W, rows, head, width, valid, key_position, query_position):
    """Scores of a block become weights, and the softmax goes on.

    width: of the row, a multiple of 8; valid: its keys that are there.
    """
    rows = kept_outside(rows)
    queries, window, tile = _p(P, QUERIES), _p(P, WINDOW), _p(P, TILE)
    _, _, scores, maxima, sums, corrections = _layout(P)[:6]
    for r in range(rows):
        row = W + scores + 4 * r * tile
        position = query_position + r // queries
        begin = max(0, position - window + 1 - key_position) if window else 0
        end = min(valid, position - key_position + 1)
        if end <= begin:
            filled(row, width, np.float32(0))
            put_f32(W + corrections + 4 * r, np.float32(1))
            continue
        if _p(P, CAP):
            floats = _p(P, FLOATS)
            capped(row, width, get_f32(floats + 4), get_f32(floats + 8))
        if _p(P, SLOPES):
            slope = get_f32(_p(P, SLOPES) + 4 * (head * queries + r % queries))
            with_slope(row, width, slope * np.float32(_LOG2E), key_position - position)
        for t in range(begin):
            put_f32(row + 4 * t, _MINUS_INF)
        for t in range(end, width):
            put_f32(row + 4 * t, _MINUS_INF)
        before = get_f32(W + maxima + 4 * r)
        largest = max(before, row_max(row, width))
        if not largest > _MINUS_INF:
            filled(row, width, np.float32(0))
            put_f32(W + corrections + 4 * r, np.float32(1))
            continue
        correction = exp2(before - largest)
        total = row_exp(row, width, largest)
        put_f32(W + maxima + 4 * r, largest)
        put_f32(W + sums + 4 * r, get_f32(W + sums + 4 * r) * correction + total)
        put_f32(W + corrections + 4 * r, correction)


@_compiled
def _attend_page(P, W, page, rows, head, first, valid, key_position, query_position):
    """A packed block, its codes multiplied as they are."""
    rows = kept_outside(rows)
    block, size, group, tile = _p(P, BLOCK), _p(P, SIZE), _p(P, GROUP), 4 * _p(P, TILE)
    key_groups, value_groups = _p(P, KEY_GROUPS), _p(P, VALUE_GROUPS)
    queries, outputs, scores, _, _, corrections, coef, extra, wide, spare, scales = _layout(P)[:11]
    turned = _layout(P)[13]
    queries, outputs, scores, scales = W + queries, W + outputs, W + scores, W + scales
    coef, extra, wide, corrections = W + coef, W + extra, W + wide, W + corrections
    longest, line = 4 * max(block, size), 4 * size
    factors = W + spare
    extra_factors, power, sums = factors + longest, factors + 2 * longest, factors + 3 * longest
    powers, boosted, extra_rows = _p(P, POWERS), _p(P, BOOSTED), _p(P, EXTRA_ROWS)
    _scales(P, page, scales, first)
    key_low = scales + key_groups * line
    value_scale = key_low + key_groups * line
    value_low = value_scale + 4 * value_groups * block
    sinks = value_low + 4 * value_groups * block

    chosen, extra_queries = page + _p(P, BOOSTED_AT), queries
    if boosted:
        extra_queries = wide
        multiplied(powers, _p(P, ONES), power, size)
        for j in range(boosted):
            c = 4 * get_u8(chosen + j)
            put_f32(power + c, np.float32(4) * get_f32(power + c))
        for r in range(rows):
            picked(queries + r * line, chosen, _p(P, ONES), wide + r * line, boosted)
    elif extra_rows:
        power = _p(P, POWERS4)
    else:
        power = powers
    for g in range(key_groups):
        scale, low, at = scales + g * line, key_low + g * line, 4 * g * group
        if extra_rows:
            if boosted:
                picked(scale, chosen, powers, extra_factors, boosted)
            else:
                multiplied(scale, powers, extra_factors, size)
            coefficients(
                extra_queries, line, extra_factors, low, extra, longest, sums, rows, extra_rows
            )
        multiplied(scale, power, factors, size)
        coefficients(queries, line, factors, low, coef, longest, sums, rows, size)
        for r in range(rows):
            filled(scores + r * tile + at, group, get_f32(sums + 4 * r))
        _planes(
            P, page + _p(P, KEY_CODES) + at, 4 * block, size // 16, coef, longest, scores + at,
            tile, rows, group,
        )  # fmt: skip
        if extra_rows:
            _planes(
                P, page + _p(P, KEY_EXTRA) + at, 4 * block, extra_rows // 16, extra, longest,
                scores + at, tile, rows, group,
            )  # fmt: skip
    if first:
        for t in range(min(valid, _p(P, SINKS))):
            sink = sinks + t * line
            coefficients(queries, line, sink, sink, coef, longest, sums, rows, size)
            for r in range(rows):
                put_f32(scores + r * tile + 4 * t, get_f32(sums + 4 * r))

    _soften(P, W, rows, head, block, valid, key_position, query_position)

    if _p(P, ROTATED):
        for r in range(rows):
            correction = get_f32(corrections + 4 * r)
            scaled(outputs + r * line, size, correction, np.float32(0))
            if first:
                for t in range(min(valid, _p(P, SINKS))):
                    sink = sinks + (_p(P, SINKS) + t) * line
                    weight = get_f32(scores + r * tile + 4 * t)
                    product_row(sink, weight, outputs + r * line, size)
        outputs = W + turned
    four = _p(P, VALUE_BITS) == 4
    power = _p(P, POWERS4) if four else powers
    value_group = _p(P, VALUE_GROUP)
    for g in range(value_groups):
        scale, low = value_scale + 4 * g * block, value_low + 4 * g * block
        x = g * value_group
        columns, out = min(value_group, size - x), outputs + 4 * x
        if four:
            multiplied(scale, powers, extra_factors, block)
            coefficients(scores, tile, extra_factors, low, extra, longest, sums, rows, block)
        multiplied(scale, power, factors, block)
        coefficients(scores, tile, factors, low, coef, longest, sums, rows, block)
        for r in range(rows):
            correction = get_f32(corrections + 4 * r)
            scaled(out + r * line, columns, correction, get_f32(sums + 4 * r))
        _planes(
            P, page + _p(P, VALUE_CODES) + 4 * x, line, block // 16, coef, longest, out, line,
            rows, columns,
        )  # fmt: skip
        if four:
            _planes(
                P, page + _p(P, VALUE_EXTRA) + 4 * x, line, block // 16, extra, longest, out,
                line, rows, columns,
            )  # fmt: skip


@_compiled
def _attend_tile(P, W, rows, head, count, key_position, query_position, few):
    """Keys and values that stand in scratch as float32."""
    rows = kept_outside(rows)
    size, tile = _p(P, SIZE), _p(P, TILE)
    queries, outputs, scores, _, _, corrections, _, _, _, _, _, keys, values, turned, _ = _layout(P)
    width = (count + 15) // 16 * 16
    for r in range(rows):
        filled(W + scores + 4 * r * tile, width, np.float32(0))
    _products(
        W + keys, 4 * (tile + 16), size, W + queries, 4 * size, W + scores, 4 * tile, rows, width
    )
    _soften(P, W, rows, head, width, count, key_position, query_position)
    for r in range(rows):
        correction = get_f32(W + corrections + 4 * r)
        scaled(W + outputs + 4 * r * size, size, correction, np.float32(0))
        if few and _p(P, ROTATED):
            scaled(W + turned + 4 * r * size, size, correction, np.float32(0))
    _products(W + values, 4 * size, count, W + scores, 4 * tile, W + outputs, 4 * size, rows, size)


@_compiled
def _load_exact(P, W, key, key_stride, value, value_stride, count):
    size, kind = _p(P, SIZE), _p(P, KIND)
    keys, values = _layout(P)[11:13]
    _turn(kind, key, key_stride, W + keys, 4 * (_p(P, TILE) + 16), count, size)
    _widen(kind, value, value_stride, W + values, 4 * size, count, size)


@_compiled
def _attend_history(P, W, sequence, head, begin, end, history, rows, position, few):
    """Blocks ``begin`` to ``end`` of a sequence, for queries from ``position`` on."""
    block, window = _p(P, BLOCK), _p(P, WINDOW)
    scales, keys, values = _layout(P)[10:13]
    table = _p(P, TABLE) + sequence * _p(P, TABLE_ROW)
    for b in range(begin, end):
        start = b * block
        valid = min(block, history - start)
        if window and start + valid <= position - window + 1:
            continue
        index = get_i32(table + 4 * b)
        slot = get_i32(_p(P, SLOT_OF_BLOCK) + 4 * index)
        if slot >= 0:
            key = _p(P, KEYS) + slot * _p(P, KEYS_SLOT) + head * _p(P, KEYS_HEAD)
            value = _p(P, VALUES) + slot * _p(P, VALUES_SLOT) + head * _p(P, VALUES_HEAD)
            _load_exact(P, W, key, _p(P, KEYS_TOKEN), value, _p(P, VALUES_TOKEN), valid)
            _attend_tile(P, W, rows, head, valid, start, position, few)
            continue
        page = _p(P, CACHE) + index * _p(P, CACHE_BLOCK) + head * _p(P, CACHE_HEAD)
        if b + 1 < end:
            index = get_i32(table + 4 * (b + 1))
            if get_i32(_p(P, SLOT_OF_BLOCK) + 4 * index) < 0:
                following = _p(P, CACHE) + index * _p(P, CACHE_BLOCK) + head * _p(P, CACHE_HEAD)
                prefetched(following, _p(P, PAGE_BYTES))
        first = b == 0 and _p(P, SINKS) > 0
        if few:
            _attend_page(P, W, page, rows, head, first, valid, start, position)
        else:
            coef = W + _layout(P)[6]
            _written_out(
                P, page, first, W + scales, coef, W + keys, 4 * (_p(P, TILE) + 16), W + values
            )
            _attend_tile(P, W, rows, head, valid, start, position, few)


@_compiled
def _attend_own(P, W, start, head, count, history, rows, position, few):
    """The first ``count`` new tokens, for queries from ``position`` on."""
    window = _p(P, WINDOW)
    for t in range(0, count, OWN_TILE):
        valid = min(OWN_TILE, count - t)
        if window and history + t + valid <= position - window + 1:
            continue
        key = _p(P, KEY) + (start + t) * _p(P, KEY_TOKEN) + head * _p(P, KEY_HEAD)
        value = _p(P, VALUE) + (start + t) * _p(P, VALUE_TOKEN) + head * _p(P, VALUE_HEAD)
        _load_exact(P, W, key, _p(P, KEY_TOKEN), value, _p(P, VALUE_TOKEN), valid)
        _attend_tile(P, W, rows, head, valid, history + t, position, few)


@_compiled
def _finish(P, W, start, tokens, head):
    """Divide by the sums, and write the output."""
    queries, size = _p(P, QUERIES), _p(P, SIZE)
    _, outputs, _, maxima, sums = _layout(P)[:5]
    for r in range(tokens * queries):
        h = head * queries + r % queries
        total, factor = get_f32(W + sums + 4 * r), np.float32(1)
        if _p(P, LOGIT_SINKS):
            sink = get_f32(_p(P, LOGIT_SINKS) + 4 * h) * np.float32(_LOG2E)
            before = get_f32(W + maxima + 4 * r)
            largest = max(before, sink)
            factor = exp2(before - largest)
            total = total * factor + exp2(sink - largest)
        row = W + outputs + 4 * r * size
        scaled(row, size, factor / total, np.float32(0))
        to = _p(P, OUT) + (start + r // queries) * _p(P, OUT_TOKEN) + h * _p(P, OUT_HEAD)
        _narrow(_p(P, KIND), row, 0, to, 0, 1, size)


@_compiled
def _merge(P, W, partial, stride, spans, rows):
    """The spans of a sequence's head into one, in their order."""
    size = _p(P, SIZE)
    _, outputs, _, maxima, sums = _layout(P)[:5]
    for r in range(rows):
        largest = _MINUS_INF
        for s in range(spans):
            largest = max(largest, get_f32(partial + s * stride + 4 * r))
        total = np.float32(0)
        out = W + outputs + 4 * r * size
        filled(out, size, np.float32(0))
        for s in range(spans):
            at = partial + s * stride
            factor = exp2(get_f32(at + 4 * r) - largest)
            total += factor * get_f32(at + 4 * (rows + r))
            source = at + 4 * (2 * rows + r * size)
            product_row(source, factor, out, size)
        put_f32(W + maxima + 4 * r, largest)
        put_f32(W + sums + 4 * r, total)


@_compiled
def _attend_task(P, W, task):
    kv_heads, queries, size = _p(P, KV_HEADS), _p(P, QUERIES), _p(P, SIZE)
    item, head = _p(P, LIST) + _TASK_BYTES * (task // kv_heads), task % kv_heads
    sequence, begin, end = _p(item, T_SEQUENCE), _p(item, T_BEGIN), _p(item, T_END)
    start = get_i32(_p(P, STARTS) + 4 * sequence)
    new = get_i32(_p(P, STARTS) + 4 * (sequence + 1)) - start
    history = get_i32(_p(P, LENGTHS) + 4 * sequence) - new
    if not _p(item, T_FEW):
        tokens = end - begin
        rows, position = tokens * queries, history + begin
        _load_queries(P, W, start + begin, tokens, head, False)
        blocks = (history + _p(P, BLOCK) - 1) // _p(P, BLOCK)
        _attend_history(P, W, sequence, head, 0, blocks, history, rows, position, False)
        _attend_own(P, W, start, head, end, history, rows, position, False)
        _finish(P, W, start + begin, tokens, head)
        return
    rows, spans, span = new * queries, _p(item, T_SPANS), _p(item, T_SPAN)
    _load_queries(P, W, start, new, head, True)
    _attend_history(P, W, sequence, head, begin, end, history, rows, history, True)
    if span == spans - 1:
        _attend_own(P, W, start, head, new, history, rows, history, True)
    if _p(P, ROTATED):
        outputs, turned = _layout(P)[1], _layout(P)[13]
        for r in range(rows):
            row = W + turned + 4 * r * size
            _rotate(P, row)
            product_row(row, np.float32(1), W + outputs + 4 * r * size, size)
    if spans > 1:
        stride = 4 * rows * (size + 2)
        partial = _p(P, PARTIALS) + 4 * _p(item, T_PARTIAL) + head * spans * stride
        outputs, maxima, sums = _layout(P)[1], _layout(P)[3], _layout(P)[4]
        at = partial + span * stride
        for r in range(rows):
            put_f32(at + 4 * r, get_f32(W + maxima + 4 * r))
            put_f32(at + 4 * (rows + r), get_f32(W + sums + 4 * r))
        _widen(_FP32, W + outputs, 0, at + 8 * rows, 0, 1, rows * size)
        if fetch_add(_p(P, COUNTERS) + 8 * (_p(item, T_COUNTER) + head), 1) < spans - 1:
            return
        _merge(P, W, partial, stride, spans, rows)
    _finish(P, W, start, new, head)


@_compiled
def _plan_attend(P):
    """Write the list of tasks, the long ones first; how many there are, a KV head."""
    block, window, kv_heads = _p(P, BLOCK), _p(P, WINDOW), _p(P, KV_HEADS)
    queries, size, starts, lengths = _p(P, QUERIES), _p(P, SIZE), _p(P, STARTS), _p(P, LENGTHS)
    tile = max(1, TILE_ROWS // queries)
    step = max(1, SPAN // block)
    count, floats, counters = 0, 0, 0
    for turn in range(2):
        for sequence in range(_p(P, SEQUENCES)):
            start = get_i32(starts + 4 * sequence)
            new = get_i32(starts + 4 * (sequence + 1)) - start
            if new <= 0:
                continue
            few = new == 1 or new * queries <= FEW_ROWS
            if few != (turn == 1):
                continue
            history = get_i32(lengths + 4 * sequence) - new
            if not few:
                tiles = (new + tile - 1) // tile
                for i in range(tiles - 1, -1, -1):
                    item = _p(P, LIST) + _TASK_BYTES * count
                    put_i64(item + 8 * T_SEQUENCE, sequence)
                    put_i64(item + 8 * T_FEW, 0)
                    put_i64(item + 8 * T_BEGIN, i * tile)
                    put_i64(item + 8 * T_END, min(new, (i + 1) * tile))
                    count += 1
                continue
            blocks = (history + block - 1) // block
            begin = max(0, history - window + 1) // block if window else 0
            begin = min(begin, blocks)
            spans = max(1, (blocks - begin + step - 1) // step)
            for i in range(spans):
                item = _p(P, LIST) + _TASK_BYTES * count
                put_i64(item + 8 * T_SEQUENCE, sequence)
                put_i64(item + 8 * T_FEW, 1)
                put_i64(item + 8 * T_BEGIN, begin + i * step)
                put_i64(item + 8 * T_END, min(blocks, begin + (i + 1) * step))
                put_i64(item + 8 * T_SPANS, spans)
                put_i64(item + 8 * T_SPAN, i)
                put_i64(item + 8 * T_PARTIAL, floats)
                put_i64(item + 8 * T_COUNTER, counters)
                count += 1
            if spans > 1:
                floats += spans * kv_heads * new * queries * (size + 2)
                counters += kv_heads
    put_i64(P + 8 * PARTIAL_FLOATS, floats)
    put_i64(P + 8 * COUNTER_COUNT, counters)
    put_i64(P + 8 * SCRATCH_BYTES, _layout(P)[14])
    put_i64(P + 8 * TASKS, count * kv_heads)
    return count


# ------------------------------------------------------------------------------ pack, unpack


@_compiled
def _encode(kind, values, scale, low, top, cut, place, words, count):
    count = kept_outside(count)
    if not scale > np.float32(0):
        return
    if kind == _BF16:
        vec.encode_bf16(values, scale, low, top, cut, place, words, count)
    elif kind == _FP16:
        vec.encode_fp16(values, scale, low, top, cut, place, words, count)
    else:
        vec.encode_fp32(values, scale, low, top, cut, place, words, count)


@_compiled
def _fitted(P, values, stride, count, low, scale, top):
    """From the least values and the greatest of eight groups, their minima and scales, not yet
    rounded. Values of a group stand in a column."""
    count = kept_outside(count)
    if _p(P, FIT) == _UNBIASED:
        shrink = np.float32(form.FIT_SHRINK)
        least_squares(values, stride, count, low, scale, top, shrink, form.FIT_ROUNDS)


@_compiled
def _stretched(values, stride, count, low, scale, out_low, out_scale, top):
    count = kept_outside(count)
    limit = np.float32(form.FIT_LIMIT)
    stretched(values, stride, count, low, scale, out_low, out_scale, top, limit)


@_compiled
def _rounded_row(kind, row, count, spare):
    if kind != _FP32:
        _narrow(kind, row, 0, spare, 0, 1, count)
        _widen(kind, spare, 0, row, 0, 1, count)


@_compiled
def _rounded_scales(P, low, scale, top, count, spare):
    """Minima and scales, rounded to the dtype, from what ``_fitted`` leaves."""
    count = kept_outside(count)
    kind = _p(P, KIND)
    if _p(P, FIT) != _UNBIASED:
        for i in range(count):
            put_f32(scale + 4 * i, get_f32(scale + 4 * i) - get_f32(low + 4 * i))
        _rounded_row(kind, scale, count, spare)
        for i in range(count):
            put_f32(scale + 4 * i, get_f32(scale + 4 * i) / get_f32(top + 4 * i))
    _rounded_row(kind, low, count, spare)
    _rounded_row(kind, scale, count, spare)


@_compiled
def _choose_boosted(P, low, high, top, total, page):
    """The channels of greatest width, squared and summed over the groups, to the page, ascending;
    ``top``: the greatest code of each channel."""
    boosted = kept_outside(_p(P, BOOSTED))
    size, key_groups = _p(P, SIZE), _p(P, KEY_GROUPS)
    for c in range(size):
        sum_ = np.float32(0)
        for g in range(key_groups):
            width = get_f32(high + 4 * (g * size + c)) - get_f32(low + 4 * (g * size + c))
            sum_ += width * width
        put_f32(total + 4 * c, sum_)
        put_f32(top + 4 * c, np.float32(3))
    for _ in range(boosted):
        best, most = 0, np.float32(-1)
        for c in range(size):
            sum_ = get_f32(total + 4 * c)
            if sum_ > most:
                best, most = c, sum_
        put_f32(total + 4 * best, np.float32(-2))
        put_f32(top + 4 * best, np.float32(15))
    j = 0
    for c in range(size):
        if get_f32(top + 4 * c) > np.float32(3):
            put_u8(page + _p(P, BOOSTED_AT) + j, c)
            j += 1


@_compiled
def _pack_layout(P):
    """In bytes: K, K turned, V, V turned, minima and scales of K and V, tops of K and V, spare."""
    block, size = _p(P, BLOCK), _p(P, SIZE)
    plane = 4 * block * size + 64 * max(block, size)
    key_scales = 4 * _p(P, KEY_GROUPS) * size
    value_scales = 4 * _p(P, VALUE_GROUPS) * block
    keys = 0
    keys_turned = keys + plane
    values = keys_turned + plane
    values_turned = values + plane
    key_low = values_turned + plane
    key_scale = key_low + key_scales
    value_low = key_scale + key_scales
    value_scale = value_low + value_scales
    key_top = value_scale + value_scales
    value_top = key_top + key_scales
    total = value_top + value_scales
    spare = total + 4 * size
    end = spare + 2 * max(key_scales, value_scales)
    return (
        keys, keys_turned, values, values_turned, key_low, key_scale, value_low, value_scale,
        key_top, value_top, total, spare, (end + 4095) // 4096 * 4096 + 64,
    )  # fmt: skip


@_compiled
def _pack_keys(P, W, source, page, fill, first):
    fill = kept_outside(fill)
    block, size, group, kind = _p(P, BLOCK), _p(P, SIZE), _p(P, GROUP), _p(P, KIND)
    key_groups = _p(P, KEY_GROUPS)
    keys, turned, _, _, low, scale, _, _, top, _, total, spare, _ = _pack_layout(P)
    keys, turned, low, scale, top = W + keys, W + turned, W + low, W + scale, W + top
    line = 4 * (block + 16)
    sinks = min(_p(P, SINKS), fill) if first else 0
    _widen(kind, source, _p(P, KEYS_TOKEN), keys, 4 * size, fill, size)
    _turn(_FP32, keys, 4 * size, turned, line, fill, size)
    for g in range(key_groups):
        begin = max(g * group, sinks)
        count = min((g + 1) * group, fill) - begin
        for c in range(0, size, 8):
            at = 4 * (g * size + c)
            if count > 0:
                values = keys + 4 * (begin * size + c)
                extremes(values, 4 * size, count, low + at, scale + at)
            else:
                filled(low + at, 8, np.float32(0))
                filled(scale + at, 8, np.float32(0))
    four = _p(P, KEY_BITS) == 4
    filled(top, size, np.float32(15) if four else np.float32(3))
    if _p(P, BOOSTED):
        _choose_boosted(P, low, scale, top, W + total, page)
    for g in range(key_groups):
        begin = max(g * group, sinks)
        count = min((g + 1) * group, fill) - begin
        if g:
            _widen(_FP32, top, 0, top + 4 * g * size, 0, 1, size)
        if count > 0:
            for c in range(0, size, 8):
                at = 4 * (g * size + c)
                values = keys + 4 * (begin * size + c)
                _fitted(P, values, 4 * size, count, low + at, scale + at, top + 4 * c)
    _rounded_scales(P, low, scale, top, key_groups * size, W + spare)
    stored_low, stored_scale = low, scale
    if _p(P, FIT) == _UNBIASED:
        stored_low, stored_scale = W + spare, W + spare + 4 * key_groups * size
        filled(stored_low, 2 * key_groups * size, np.float32(0))
        for g in range(key_groups):
            begin = max(g * group, sinks)
            count = min((g + 1) * group, fill) - begin
            if count > 0:
                for c in range(0, size, 8):
                    at = 4 * (g * size + c)
                    values = keys + 4 * (begin * size + c)
                    _stretched(
                        values, 4 * size, count, low + at, scale + at, stored_low + at,
                        stored_scale + at, top + 4 * c,
                    )  # fmt: skip
    _narrow(kind, stored_scale, 0, page + _p(P, KEY_SCALE), 0, 1, key_groups * size)
    _narrow(kind, stored_low, 0, page + _p(P, KEY_MIN), 0, 1, key_groups * size)
    _narrow(kind, keys, 4 * size, page + _p(P, SINK_KEYS), (2 + 2 * (kind == _FP32)) * size, sinks,
            size)  # fmt: skip

    if _p(P, FIT) == _UNBIASED:
        kind = _FP32
    j = 0
    for c in range(size):
        boosted = get_f32(top + 4 * c) > np.float32(3)
        place, words = 2 * (c % 16), page + _p(P, KEY_CODES) + 4 * (c // 16) * block
        place_extra, extra = 2 * (j % 16), page + _p(P, KEY_EXTRA) + 4 * (j // 16) * block
        for g in range(key_groups):
            at, i = 4 * g * group, 4 * (g * size + c)
            values, s, m = turned + c * line + at, get_f32(scale + i), get_f32(low + i)
            if boosted:
                _encode(kind, values, s, m, np.float32(15), 2, place, words + at, group)
                _encode(kind, values, s, m, np.float32(15), 0, place_extra, extra + at, group)
            else:
                _encode(kind, values, s, m, np.float32(3), 0, place, words + at, group)
        j += boosted
    for plane in range(2):
        start = page + (_p(P, KEY_EXTRA) if plane else _p(P, KEY_CODES))
        for r in range((_p(P, EXTRA_ROWS) if plane else size) // 16):
            for t in range(sinks):
                put_i32(start + 4 * (r * block + t), 0)
            for t in range(fill, block):
                put_i32(start + 4 * (r * block + t), 0)


@_compiled
def _fit_rotated(P, W, page, begin, fill):
    """Scales that codes of rotated V are found with, their minima, and what is stored."""
    fill = kept_outside(fill)
    block, size, kind = _p(P, BLOCK), _p(P, SIZE), _p(P, KIND)
    _, _, values, turned, _, _, low, scale, _, _, _, spare, _ = _pack_layout(P)
    values, turned, low, scale, stored = W + values, W + turned, W + low, W + scale, W + spare
    line, middle = 4 * (block + 16), _middle(P)
    four = _p(P, VALUE_BITS) == 4
    first = np.float32(form.FIRST_RMS_4BIT) if four else np.float32(form.FIRST_RMS)
    for t in range(fill):
        if t < begin:
            filled(values + 4 * t * size, size, np.float32(0))
        else:
            _rotate(P, values + 4 * t * size)
    _turn(_FP32, values, 4 * size, turned, line, fill, size)
    for t in range(0, fill, 8):
        symmetric_fit(turned + 4 * t, line, size, scale + 4 * t, first, middle, form.FIT_ROUNDS)
    for t in range(fill, min(block, fill + 7)):
        put_f32(scale + 4 * t, np.float32(0))
    _rounded_row(kind, scale, block, stored)
    filled(stored, block, np.float32(0))
    for t in range(0, fill, 8):
        symmetric_stretched(turned + 4 * t, line, size, scale + 4 * t, stored + 4 * t, middle)
    for t in range(block):
        if not get_f32(stored + 4 * t) > np.float32(0):
            put_f32(scale + 4 * t, np.float32(0))
        put_f32(low + 4 * t, -middle * get_f32(scale + 4 * t))
    _narrow(kind, stored, 0, page + _p(P, VALUE_SCALE), 0, 1, block)


@_compiled
def _fit_values(P, W, page, fill):
    """Scales and minima of V, to scratch and to the page."""
    fill = kept_outside(fill)
    block, size, kind = _p(P, BLOCK), _p(P, SIZE), _p(P, KIND)
    groups, group = _p(P, VALUE_GROUPS), _p(P, VALUE_GROUP)
    _, _, values, turned, _, _, low, scale, _, top, _, spare, _ = _pack_layout(P)
    turned, low, scale, top, spare = W + turned, W + low, W + scale, W + top, W + spare
    line, total = 4 * (block + 16), groups * block
    _turn(_FP32, W + values, 4 * size, turned, line, fill, size)
    filled(top, total, np.float32(15) if _p(P, VALUE_BITS) == 4 else np.float32(3))
    for g in range(groups):
        x = g * group
        columns = min(group, size - x)
        for t in range(0, fill, 8):
            at = 4 * (g * block + t)
            column = turned + x * line + 4 * t
            extremes(column, line, columns, low + at, scale + at)
            _fitted(P, column, line, columns, low + at, scale + at, top)
        for t in range(fill, min(block, fill + 7)):
            put_f32(low + 4 * (g * block + t), np.float32(0))
            put_f32(scale + 4 * (g * block + t), np.float32(0))
    _rounded_scales(P, low, scale, top, total, spare)
    if _p(P, FIT) == _UNBIASED:
        filled(spare, 2 * total, np.float32(0))
        for g in range(groups):
            x = g * group
            columns = min(group, size - x)
            for t in range(0, fill, 8):
                at = 4 * (g * block + t)
                _stretched(
                    turned + x * line + 4 * t, line, columns, low + at, scale + at, spare + at,
                    spare + 4 * total + at, top,
                )  # fmt: skip
            for t in range(fill, min(block, fill + 7)):
                put_f32(spare + 4 * (g * block + t), np.float32(0))
                put_f32(spare + 4 * (total + g * block + t), np.float32(0))
        _narrow(kind, spare + 4 * total, 0, page + _p(P, VALUE_SCALE), 0, 1, total)
        _narrow(kind, spare, 0, page + _p(P, VALUE_MIN), 0, 1, total)
    else:
        _narrow(kind, scale, 0, page + _p(P, VALUE_SCALE), 0, 1, total)
        _narrow(kind, low, 0, page + _p(P, VALUE_MIN), 0, 1, total)


@_compiled
def _pack_values(P, W, source, page, fill, first):
    fill = kept_outside(fill)
    block, size, kind = _p(P, BLOCK), _p(P, SIZE), _p(P, KIND)
    groups, group = _p(P, VALUE_GROUPS), _p(P, VALUE_GROUP)
    _, _, values, _, _, _, low, scale, _, _, _, _, _ = _pack_layout(P)
    values, low, scale = W + values, W + low, W + scale
    four = _p(P, VALUE_BITS) == 4
    limit = np.float32(15) if four else np.float32(3)
    _widen(kind, source, _p(P, VALUES_TOKEN), values, 4 * size, fill, size)
    filled(low, groups * block, np.float32(0))
    filled(scale, groups * block, np.float32(0))
    if _p(P, ROTATED):
        sinks = min(_p(P, SINKS), fill) if first else 0
        _narrow(kind, values, 4 * size, page + _p(P, SINK_VALUES),
                (2 + 2 * (kind == _FP32)) * size, sinks, size)  # fmt: skip
        _fit_rotated(P, W, page, sinks, fill)
    else:
        _fit_values(P, W, page, fill)
    if _p(P, ROTATED) or _p(P, FIT) == _UNBIASED:
        kind = _FP32
    for t in range(fill):
        place = 2 * (t % 16)
        for g in range(groups):
            x = g * group
            columns, i = min(group, size - x), 4 * (g * block + t)
            row, s, m = values + 4 * (t * size + x), get_f32(scale + i), get_f32(low + i)
            at = 4 * ((t // 16) * size + x)
            words = page + _p(P, VALUE_CODES) + at
            if four:
                _encode(kind, row, s, m, limit, 2, place, words, columns)
                extra = page + _p(P, VALUE_EXTRA) + at
                _encode(kind, row, s, m, limit, 0, place, extra, columns)
            else:
                _encode(kind, row, s, m, limit, 0, place, words, columns)


@_compiled
def _block_of(P, task):
    """Page, K and V of a task of pack or unpack, its fill and whether it is the first."""
    i, head = task // _p(P, KV_HEADS), task % _p(P, KV_HEADS)
    block, slot = get_i32(_p(P, BLOCKS) + 4 * i), get_i32(_p(P, SLOTS) + 4 * i)
    page = _p(P, CACHE) + block * _p(P, CACHE_BLOCK) + head * _p(P, CACHE_HEAD)
    keys = _p(P, KEYS) + slot * _p(P, KEYS_SLOT) + head * _p(P, KEYS_HEAD)
    values = _p(P, VALUES) + slot * _p(P, VALUES_SLOT) + head * _p(P, VALUES_HEAD)
    fill = min(get_i32(_p(P, FILLS) + 4 * i), _p(P, BLOCK))
    return page, keys, values, fill, get_i32(_p(P, FIRSTS) + 4 * i) != 0


@_compiled
def _pack_task(P, W, task):
    page, keys, values, fill, first = _block_of(P, task)
    filled(page, _p(P, PAGE_BYTES) // 4, np.float32(0))
    _pack_keys(P, W, keys, page, fill, first)
    _pack_values(P, W, values, page, fill, first)


@_compiled
def _unpack_layout(P):
    """In bytes: K, K turned, V, scales, indices of rows."""
    block, size = _p(P, BLOCK), _p(P, SIZE)
    plane = 4 * block * size
    scales = (_p(P, KEY_GROUPS) + _p(P, SINKS)) * size + _p(P, VALUE_GROUPS) * block
    scales *= 2
    end = 3 * plane + 64 * size + 4 * scales + 4 * size
    return (
        0, plane, 2 * plane + 64 * size, 3 * plane + 64 * size, 3 * plane + 64 * size + 4 * scales,
        (end + 4095) // 4096 * 4096 + 64,
    )  # fmt: skip


@_compiled
def _unpack_task(P, W, task):
    page, keys, values, fill, first = _block_of(P, task)
    block, size, kind = _p(P, BLOCK), _p(P, SIZE), _p(P, KIND)
    k, turned, v, scales, rows, _ = _unpack_layout(P)
    line = 4 * (block + 16)
    first = first and _p(P, SINKS) > 0
    _written_out(P, page, first, W + scales, W + rows, W + turned, line, W + v)
    _turn(_FP32, W + turned, line, W + k, 4 * size, size, block)
    _narrow(kind, W + k, 4 * size, keys, _p(P, KEYS_TOKEN), fill, size)
    _narrow(kind, W + v, 4 * size, values, _p(P, VALUES_TOKEN), fill, size)


# ------------------------------------------------------------------------------ entry points


@functools.cache
def _sources() -> str:
    """A digest of everything that the compiled code is made of: numba's own cache looks only at the
    file of a function."""
    digest = hashlib.sha256()
    for path in (vec.__file__, form.__file__, __file__):
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


@_compiled
def _scratch(P):
    """The scratch memory of the worker that asks."""
    return _p(P, SCRATCH) + fetch_add(P + 8 * WORKER, 1) * _p(P, SCRATCH_BYTES)


@_compiled
def _next(P):
    """The next task, or one behind the last."""
    return fetch_add(P + 8 * NEXT, 1)


_worker = functools.partial(cfunc, types.void(types.int64), cache=True, error_model="numpy")
_planner = functools.partial(
    njit, types.int64(types.int64), nogil=True, cache=True, error_model="numpy"
)

# Functions of an entry point: the planner, called from Python before the workers, completes the
# parameters; a worker takes tasks until there are none left. Their only free variable is the digest
# of the sources: numba's cache takes a function's free variables for a part of it, and those that
# are compiled functions themselves would look new in every process.


def _pack_code(sources):
    @_planner()
    def plan(P):
        _ = sources
        put_i64(P + 8 * SCRATCH_BYTES, _pack_layout(P)[-1])
        return 0

    @_worker()
    def work(P):
        _ = sources
        W, task = _scratch(P), _next(P)
        while task < _p(P, TASKS):
            _pack_task(P, W, task)
            task = _next(P)

    return plan, work


def _unpack_code(sources):
    @_planner()
    def plan(P):
        _ = sources
        put_i64(P + 8 * SCRATCH_BYTES, _unpack_layout(P)[-1])
        return 0

    @_worker()
    def work(P):
        _ = sources
        W, task = _scratch(P), _next(P)
        while task < _p(P, TASKS):
            _unpack_task(P, W, task)
            task = _next(P)

    return plan, work


def _attend_code(sources):
    @_planner()
    def plan(P):
        _ = sources
        return _plan_attend(P)

    @_worker()
    def work(P):
        _ = sources
        W, task = _scratch(P), _next(P)
        while task < _p(P, TASKS):
            _attend_task(P, W, task)
            task = _next(P)

    return plan, work


@functools.cache
def _code(name: str):
    """The planner and the worker of an entry point; compiled, or loaded from numba's cache."""
    make = {"pack": _pack_code, "unpack": _unpack_code, "attend": _attend_code}[name]
    return make(_sources())


def _run(worker, local: _Local) -> None:
    p = local.parameters
    p[SCRATCH] = local.room("scratch", int(p[SCRATCH_BYTES]) * torch.get_num_threads())
    p[NEXT] = p[WORKER] = 0
    openmp.run(worker.address, local.address, int(p[TASKS]))


def _strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    item = tensor.element_size()
    first, second, third, _ = tensor.stride()
    return first * item, second * item, third * item


def _store_parameters(cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> list[int]:
    return [
        cache.data_ptr(), *_strides(cache)[:2], keys.data_ptr(), values.data_ptr(),
        *_strides(keys), *_strides(values), cache.shape[1],
    ]  # fmt: skip


def _int32(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype != torch.int32 or not tensor.is_contiguous():
        return tensor.to(torch.int32).contiguous()
    return tensor


def _code_blocks(
    name: str,
    fmt: PageFormat,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    blocks: torch.Tensor,
    fills: torch.Tensor,
    firsts: torch.Tensor,
) -> None:
    if not len(blocks):
        return
    plan, worker = _code(name)
    numbers = [_int32(t) for t in (slots, blocks, fills, firsts)]
    p = _local.parameters
    p[BLOCK:OWN] = _format_parameters(fmt)
    p[OWN:FIRST_OF_OP] = _store_parameters(cache, keys, values)
    p[SLOTS:PACK_END] = [t.data_ptr() for t in numbers]
    p[TASKS] = len(blocks) * cache.shape[1]
    plan(_local.address)
    _run(worker, _local)


def warm_up() -> None:
    """Compile everything, or load it from numba's cache, so that no request waits for it."""
    for name in ("pack", "unpack", "attend"):
        _code(name)


def pack(
    fmt: PageFormat,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    blocks: torch.Tensor,
    fills: torch.Tensor,
    firsts: torch.Tensor,
) -> None:
    """Write pages from exact tokens, see ``reference.pack``."""
    _code_blocks("pack", fmt, keys, values, slots, cache, blocks, fills, firsts)


def unpack(
    fmt: PageFormat,
    cache: torch.Tensor,
    blocks: torch.Tensor,
    fills: torch.Tensor,
    firsts: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Exact tokens from pages, see ``reference.unpack``."""
    _code_blocks("unpack", fmt, keys, values, slots, cache, blocks, fills, firsts)


def attend(
    fmt: PageFormat,
    attention: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    exact_keys: torch.Tensor,
    exact_values: torch.Tensor,
    slot_of_block: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    max_query: int,
    max_seq: int,
) -> None:
    """Attention of new tokens over their sequences, see ``reference.attend``."""
    sequences = len(seq_lens)
    if not sequences:
        return
    plan, worker = _code("attend")
    item = query.element_size()
    heads, kv_heads = query.shape[1], key.shape[1]
    queries = heads // kv_heads
    slopes, sinks = attention.slopes, attention.sinks
    if slopes is not None and slopes.dtype != torch.float32:
        slopes = slopes.float()
    if sinks is not None and sinks.dtype != torch.float32:
        sinks = sinks.float()
    slot_of_block, query_start, seq_lens = map(_int32, (slot_of_block, query_start, seq_lens))
    if block_table.dtype != torch.int32 or block_table.stride(-1) != 1:
        block_table = block_table.to(torch.int32).contiguous()
    q, k, v, o = query.stride(), key.stride(), value.stride(), out.stride()
    local = _local
    cap = attention.soft_cap
    local.floats[:3] = (
        attention.scale * _LOG2E, 2 / cap if cap else 0, cap * _LOG2E
    )  # fmt: skip
    # Few queries, at most FEW_ROWS or those of one token; many, at most a tile.
    rows = max(FEW_ROWS, TILE_ROWS if max_query > 1 else 0, queries)
    step = max(1, SPAN // fmt.block_tokens) * fmt.block_tokens
    spans = sequences * (max_seq // step + 2)
    tiles = len(query) // max(1, TILE_ROWS // queries) + sequences
    p = local.parameters
    p[BLOCK:OWN] = _format_parameters(fmt)
    p[OWN:FIRST_OF_OP] = _store_parameters(cache, exact_keys, exact_values)
    p[QUERY:PARTIALS] = [
        query.data_ptr(), q[0] * item, q[1] * item, key.data_ptr(), k[0] * item, k[1] * item,
        value.data_ptr(), v[0] * item, v[1] * item, out.data_ptr(), o[0] * item, o[1] * item,
        slot_of_block.data_ptr(), block_table.data_ptr(), 4 * block_table.stride(0),
        query_start.data_ptr(), seq_lens.data_ptr(), sequences, queries, attention.window,
        int(cap != 0), 0 if slopes is None else slopes.data_ptr(),
        0 if sinks is None else sinks.data_ptr(), local.floats.ctypes.data, rows,
        max(fmt.block_tokens, OWN_TILE), local.room("list", _TASK_BYTES * (spans + tiles)),
    ]  # fmt: skip
    plan(local.address)
    counters = int(p[COUNTER_COUNT])
    if counters:
        p[PARTIALS] = local.room("partials", 4 * int(p[PARTIAL_FLOATS]))
        p[COUNTERS] = local.room("counters", 8 * counters)
        local.buffers["counters"][0][: 8 * counters + 64] = 0
    _run(worker, local)
