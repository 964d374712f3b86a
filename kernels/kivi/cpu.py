"""KIVI pages on the CPU: numba around the loops of ``_vector``, on torch's threads.

Reads and writes the bytes that ``reference.py`` does. Tasks of packing and unpacking are blocks and
heads, those of attention stand in ``kernels.cpu_attention``. Where there are few new tokens, codes
are multiplied as they are (``_vector._plane``) and never written out.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

from .. import cpu_attention
from ..attention import Attention
from ..cpu_attention import (
    BLOCK,
    CACHE,
    CACHE_BLOCK,
    CACHE_HEAD,
    FEW_ROWS,
    FORMAT,
    KIND,
    KINDS,
    KV_HEADS,
    LENGTHS,
    LIST,
    QUERIES,
    SCRATCH_BYTES,
    SIZE,
    STARTS,
    T_BEGIN,
    T_END,
    T_FEW,
    T_SEQUENCE,
    T_SPAN,
    T_SPANS,
    TABLE,
    TABLE_ROW,
    TASK_BYTES,
    TASKS,
    TILE,
    WINDOW,
    Local,
    attend_tile,
    compiled,
    finish,
    int32,
    load_queries,
    merged,
    narrow,
    next_task,
    param,
    plan_attend,
    planner,
    run,
    run_attention,
    scratch,
    set_attention,
    soften,
    state_layout,
    strides,
    turn,
    widen,
    worker,
)
from ..vector import (
    BF16,
    FP16,
    FP32,
    filled,
    get_f32,
    get_i32,
    get_u8,
    kept_outside,
    prefetched,
    product_row,
    put_f32,
    put_i32,
    put_i64,
    put_u8,
    scaled,
)
from . import _vector as vec
from . import format as form
from ._vector import (
    butterfly,
    coefficients,
    decode_row,
    extremes,
    least_squares,
    multiplied,
    picked,
    rotated_eights,
    stretched,
    symmetric_fit,
    symmetric_stretched,
)
from .format import PageFormat

_UNBIASED = form.FITS.index("unbiased")

OWN_TILE = 128
"""New tokens that are read as keys at once."""

# A code is multiplied where it lies in its word, but for the top one; see _vector._plane.
_POWERS = np.array(
    [[scale * (4.0 ** -(r % 16) if r % 16 < 15 else 1.0) for r in range(4096)] for scale in (1, 4)]
    + [[1.0] * 4096],
    np.float32,
)

# Places in the array of parameters: the format, exact tokens, and then each entry point's.
(
    GROUP, KEY_GROUPS, VALUE_GROUPS, VALUE_GROUP, KEY_BITS, VALUE_BITS, BOOSTED,
    EXTRA_ROWS, SINKS, FIT, ROTATED, POWER_OF_TWO, PAGE_BYTES, POWERS, POWERS4, ONES, MASKS,
    KEY_CODES, KEY_EXTRA, VALUE_CODES, VALUE_EXTRA, KEY_SCALE, KEY_MIN, VALUE_SCALE, VALUE_MIN,
    SINK_KEYS, SINK_VALUES, BOOSTED_AT,
    EXACT,
) = range(FORMAT, FORMAT + 29)  # fmt: skip
(
    KEYS, VALUES, KEYS_SLOT, KEYS_TOKEN, KEYS_HEAD, VALUES_SLOT, VALUES_TOKEN, VALUES_HEAD,
    FIRST_OF_OP,
) = range(EXACT, EXACT + 9)  # fmt: skip
SLOTS, BLOCKS, FILLS, FIRSTS, PACK_END = range(FIRST_OF_OP, FIRST_OF_OP + 5)
(
    KEY, KEY_TOKEN, KEY_HEAD, VALUE, VALUE_TOKEN, VALUE_HEAD, SLOT_OF_BLOCK, ATTEND_END,
) = range(FIRST_OF_OP, FIRST_OF_OP + 8)  # fmt: skip


@functools.lru_cache(maxsize=64)
def _format_parameters(fmt: PageFormat) -> list[int]:
    powers = _POWERS.ctypes.data
    return [
        fmt.group, fmt.key_groups, fmt.value_groups,
        fmt.value_group, fmt.key_bits, fmt.value_bits, fmt.boosted, fmt.extra_rows, fmt.sinks,
        form.FITS.index(fmt.fit), int(fmt.rotated),
        fmt.head_size & -fmt.head_size, fmt.page_bytes, powers,
        powers + _POWERS.strides[0], powers + 2 * _POWERS.strides[0], vec.MASKS.ctypes.data,
        *(offset for offset, _ in fmt.sections.values()),
    ]  # fmt: skip


_local = Local()


@compiled
def _planes(P, words, stride, count, coef, coef_stride, out, out_stride, rows, columns):
    """All tiles of a plane: at most four queries at once, in tiles of 32 columns or 16."""
    rows = kept_outside(rows)
    masks = param(P, MASKS)
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


@compiled
def _scales(P, page, to, first):
    """Scales and minima of a page as float32, of K and then of V, and the sinks of a first one."""
    block, size, kind = param(P, BLOCK), param(P, SIZE), param(P, KIND)
    keys, values = param(P, KEY_GROUPS) * size, param(P, VALUE_GROUPS) * block
    value_low = to + 4 * (2 * keys + values)
    sinks = value_low + 4 * values
    if param(P, ROTATED):
        widen(kind, page + param(P, KEY_SCALE), 0, to, 0, 1, 2 * keys + values)
        multiplied(value_low - 4 * values, param(P, ONES), value_low, values)
        scaled(value_low, values, -_middle(P), np.float32(0))
    else:
        widen(kind, page + param(P, KEY_SCALE), 0, to, 0, 1, 2 * (keys + values))
    if first:
        count = param(P, SINKS) * size * (1 + param(P, ROTATED))
        widen(kind, page + param(P, SINK_KEYS), 0, sinks, 0, 1, count)


@compiled
def _middle(P):
    """What is subtracted from the codes of rotated V."""
    return np.float32(7.5) if param(P, VALUE_BITS) == 4 else np.float32(1.5)


@compiled
def _rotate(P, row):
    """``row @ rotation(size)`` in place."""
    row = kept_outside(row)
    size, power = param(P, SIZE), param(P, POWER_OF_TWO)
    rotated_eights(row, size, np.float32(1) / math.sqrt(np.float32(power)))
    half = 8
    while half < power:
        for x in range(0, size, 2 * half):
            butterfly(row + 4 * x, row + 4 * (x + half), half)
        half *= 2


@compiled
def _written_out(P, page, first, scales, extra_of, keys, keys_stride, values):
    """A page as float32: K to ``keys [size][block]``, V to ``values [block][size]``.

    extra_of: scratch, int32 [size].
    """
    block = kept_outside(param(P, BLOCK))
    size, group, key_groups = param(P, SIZE), param(P, GROUP), param(P, KEY_GROUPS)
    value_groups, value_group = param(P, VALUE_GROUPS), param(P, VALUE_GROUP)
    _scales(P, page, scales, first)
    key_low = scales + 4 * key_groups * size
    value_scale = key_low + 4 * key_groups * size
    value_low = value_scale + 4 * value_groups * block
    sinks = value_low + 4 * value_groups * block
    every = param(P, KEY_BITS) == 4
    for c in range(size):
        put_i32(extra_of + 4 * c, c if every else -1)
    for j in range(param(P, BOOSTED)):
        put_i32(extra_of + 4 * get_u8(page + param(P, BOOSTED_AT) + j), j)
    for c in range(size):
        words = page + param(P, KEY_CODES) + 4 * (c // 16) * block
        j = get_i32(extra_of + 4 * c)
        extra = page + param(P, KEY_EXTRA) + 4 * (j // 16) * block
        for g in range(key_groups):
            at, i = 4 * g * group, 4 * (g * size + c)
            decode_row(
                words + at, 2 * (c % 16), extra + at if j >= 0 else 0, 2 * (j % 16),
                keys + c * keys_stride + at, get_f32(scales + i), get_f32(key_low + i), group,
            )  # fmt: skip
    four, rotated = param(P, VALUE_BITS) == 4, param(P, ROTATED)
    for t in range(block):
        row = 4 * (t // 16) * size
        for g in range(value_groups):
            x, i = g * value_group, 4 * (g * block + t)
            at = row + 4 * x
            decode_row(
                page + param(P, VALUE_CODES) + at, 2 * (t % 16),
                page + param(P, VALUE_EXTRA) + at if four else 0, 2 * (t % 16),
                values + 4 * (t * size + x), get_f32(value_scale + i), get_f32(value_low + i),
                min(value_group, size - x),
            )  # fmt: skip
        if rotated:
            _rotate(P, values + 4 * t * size)
    if first:
        count = param(P, SINKS)
        for t in range(count):
            for c in range(size):
                put_f32(keys + c * keys_stride + 4 * t, get_f32(sinks + 4 * (t * size + c)))
        if rotated:
            multiplied(sinks + 4 * count * size, param(P, ONES), values, count * size)


# ------------------------------------------------------------------------------- attention


@compiled
def _layout(P):
    """Where a worker's scratch has what, in bytes: queries, outputs, scores, maxima, sums,
    corrections, coefficients, extra ones, queries of boosted channels, spare rows, scales, K, V;
    the sums of rotated V; and the end."""
    block, size = param(P, BLOCK), param(P, SIZE)
    longest = max(block, size)
    few = max(param(P, QUERIES), FEW_ROWS)
    queries, outputs, scores, maxima, sums, corrections, keys, values, coef = state_layout(P)
    extra = coef + 4 * few * longest
    boosted = extra + 4 * few * longest
    spare = boosted + 4 * few * size
    scales = spare + 4 * (3 * longest + few)
    scale_count = 2 * param(P, KEY_GROUPS) * size + 2 * param(P, VALUE_GROUPS) * block
    turned = scales + 4 * (scale_count + 2 * param(P, SINKS) * size)
    end = turned + 4 * few * size
    return (
        queries, outputs, scores, maxima, sums, corrections, coef, extra, boosted, spare, scales,
        keys, values, turned, (end + 4095) // 4096 * 4096 + 64,
    )  # fmt: skip


@compiled
def _attend_page(P, W, page, rows, head, first, valid, key_position, query_position):
    """A packed block, its codes multiplied as they are."""
    rows = kept_outside(rows)
    block, size, group, tile = param(P, BLOCK), param(P, SIZE), param(P, GROUP), 4 * param(P, TILE)
    key_groups, value_groups = param(P, KEY_GROUPS), param(P, VALUE_GROUPS)
    queries, outputs, scores, _, _, corrections, coef, extra, wide, spare, scales = _layout(P)[:11]
    turned = _layout(P)[13]
    queries, outputs, scores, scales = W + queries, W + outputs, W + scores, W + scales
    coef, extra, wide, corrections = W + coef, W + extra, W + wide, W + corrections
    longest, line = 4 * max(block, size), 4 * size
    factors = W + spare
    extra_factors, power, sums = factors + longest, factors + 2 * longest, factors + 3 * longest
    powers, boosted, extra_rows = param(P, POWERS), param(P, BOOSTED), param(P, EXTRA_ROWS)
    _scales(P, page, scales, first)
    key_low = scales + key_groups * line
    value_scale = key_low + key_groups * line
    value_low = value_scale + 4 * value_groups * block
    sinks = value_low + 4 * value_groups * block

    chosen, extra_queries = page + param(P, BOOSTED_AT), queries
    if boosted:
        extra_queries = wide
        multiplied(powers, param(P, ONES), power, size)
        for j in range(boosted):
            c = 4 * get_u8(chosen + j)
            put_f32(power + c, np.float32(4) * get_f32(power + c))
        for r in range(rows):
            picked(queries + r * line, chosen, param(P, ONES), wide + r * line, boosted)
    elif extra_rows:
        power = param(P, POWERS4)
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
            P, page + param(P, KEY_CODES) + at, 4 * block, size // 16, coef, longest, scores + at,
            tile, rows, group,
        )  # fmt: skip
        if extra_rows:
            _planes(
                P, page + param(P, KEY_EXTRA) + at, 4 * block, extra_rows // 16, extra, longest,
                scores + at, tile, rows, group,
            )  # fmt: skip
    if first:
        for t in range(min(valid, param(P, SINKS))):
            sink = sinks + t * line
            coefficients(queries, line, sink, sink, coef, longest, sums, rows, size)
            for r in range(rows):
                put_f32(scores + r * tile + 4 * t, get_f32(sums + 4 * r))

    soften(P, W, rows, head, block, valid, key_position, query_position)

    if param(P, ROTATED):
        for r in range(rows):
            correction = get_f32(corrections + 4 * r)
            scaled(outputs + r * line, size, correction, np.float32(0))
            if first:
                for t in range(min(valid, param(P, SINKS))):
                    sink = sinks + (param(P, SINKS) + t) * line
                    weight = get_f32(scores + r * tile + 4 * t)
                    product_row(sink, weight, outputs + r * line, size)
        outputs = W + turned
    four = param(P, VALUE_BITS) == 4
    power = param(P, POWERS4) if four else powers
    value_group = param(P, VALUE_GROUP)
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
            P, page + param(P, VALUE_CODES) + 4 * x, line, block // 16, coef, longest, out, line,
            rows, columns,
        )  # fmt: skip
        if four:
            _planes(
                P, page + param(P, VALUE_EXTRA) + 4 * x, line, block // 16, extra, longest, out,
                line, rows, columns,
            )  # fmt: skip


@compiled
def _attend_tile(P, W, rows, head, count, key_position, query_position, few):
    """Keys and values that stand in scratch as float32."""
    attend_tile(P, W, rows, head, count, key_position, query_position)
    if few and param(P, ROTATED):
        size, corrections, turned = param(P, SIZE), _layout(P)[5], _layout(P)[13]
        for r in range(rows):
            correction = get_f32(W + corrections + 4 * r)
            scaled(W + turned + 4 * r * size, size, correction, np.float32(0))


@compiled
def _load_exact(P, W, key, key_stride, value, value_stride, count):
    size, kind = param(P, SIZE), param(P, KIND)
    keys, values = _layout(P)[11:13]
    turn(kind, key, key_stride, W + keys, 4 * (param(P, TILE) + 16), count, size)
    widen(kind, value, value_stride, W + values, 4 * size, count, size)


@compiled
def _attend_history(P, W, sequence, head, begin, end, history, rows, position, few):
    """Blocks ``begin`` to ``end`` of a sequence, for queries from ``position`` on."""
    block, window = param(P, BLOCK), param(P, WINDOW)
    scales, keys, values = _layout(P)[10:13]
    table = param(P, TABLE) + sequence * param(P, TABLE_ROW)
    for b in range(begin, end):
        start = b * block
        valid = min(block, history - start)
        if window and start + valid <= position - window + 1:
            continue
        index = get_i32(table + 4 * b)
        slot = get_i32(param(P, SLOT_OF_BLOCK) + 4 * index)
        if slot >= 0:
            key = param(P, KEYS) + slot * param(P, KEYS_SLOT) + head * param(P, KEYS_HEAD)
            value = param(P, VALUES) + slot * param(P, VALUES_SLOT) + head * param(P, VALUES_HEAD)
            _load_exact(P, W, key, param(P, KEYS_TOKEN), value, param(P, VALUES_TOKEN), valid)
            _attend_tile(P, W, rows, head, valid, start, position, few)
            continue
        page = param(P, CACHE) + index * param(P, CACHE_BLOCK) + head * param(P, CACHE_HEAD)
        if b + 1 < end:
            index = get_i32(table + 4 * (b + 1))
            if get_i32(param(P, SLOT_OF_BLOCK) + 4 * index) < 0:
                following = (
                    param(P, CACHE) + index * param(P, CACHE_BLOCK) + head * param(P, CACHE_HEAD)
                )
                prefetched(following, param(P, PAGE_BYTES))
        first = b == 0 and param(P, SINKS) > 0
        if few:
            _attend_page(P, W, page, rows, head, first, valid, start, position)
        else:
            coef = W + _layout(P)[6]
            _written_out(
                P, page, first, W + scales, coef, W + keys, 4 * (param(P, TILE) + 16), W + values
            )
            _attend_tile(P, W, rows, head, valid, start, position, few)


@compiled
def _attend_own(P, W, start, head, count, history, rows, position, few):
    """The first ``count`` new tokens, for queries from ``position`` on."""
    window = param(P, WINDOW)
    for t in range(0, count, OWN_TILE):
        valid = min(OWN_TILE, count - t)
        if window and history + t + valid <= position - window + 1:
            continue
        key = param(P, KEY) + (start + t) * param(P, KEY_TOKEN) + head * param(P, KEY_HEAD)
        value = param(P, VALUE) + (start + t) * param(P, VALUE_TOKEN) + head * param(P, VALUE_HEAD)
        _load_exact(P, W, key, param(P, KEY_TOKEN), value, param(P, VALUE_TOKEN), valid)
        _attend_tile(P, W, rows, head, valid, history + t, position, few)


@compiled
def _attend_task(P, W, task):
    kv_heads, queries, size = param(P, KV_HEADS), param(P, QUERIES), param(P, SIZE)
    item, head = param(P, LIST) + TASK_BYTES * (task // kv_heads), task % kv_heads
    sequence, begin, end = param(item, T_SEQUENCE), param(item, T_BEGIN), param(item, T_END)
    start = get_i32(param(P, STARTS) + 4 * sequence)
    new = get_i32(param(P, STARTS) + 4 * (sequence + 1)) - start
    history = get_i32(param(P, LENGTHS) + 4 * sequence) - new
    one = np.float32(1)
    if not param(item, T_FEW):
        tokens = end - begin
        rows, position = tokens * queries, history + begin
        load_queries(P, W, start + begin, tokens, head, one)
        blocks = (history + param(P, BLOCK) - 1) // param(P, BLOCK)
        _attend_history(P, W, sequence, head, 0, blocks, history, rows, position, False)
        _attend_own(P, W, start, head, end, history, rows, position, False)
        finish(P, W, start + begin, tokens, head, one)
        return
    rows = new * queries
    outputs, turned = _layout(P)[1], _layout(P)[13]
    load_queries(P, W, start, new, head, one)
    filled(W + turned, rows * size, np.float32(0))
    _attend_history(P, W, sequence, head, begin, end, history, rows, history, True)
    if param(item, T_SPAN) == param(item, T_SPANS) - 1:
        _attend_own(P, W, start, head, new, history, rows, history, True)
    if param(P, ROTATED):
        for r in range(rows):
            row = W + turned + 4 * r * size
            _rotate(P, row)
            product_row(row, one, W + outputs + 4 * r * size, size)
    if merged(P, W, item, head, rows):
        finish(P, W, start, new, head, one)


# ------------------------------------------------------------------------------ pack, unpack


@compiled
def _encode(kind, values, scale, low, top, cut, place, words, count):
    count = kept_outside(count)
    if not scale > np.float32(0):
        return
    if kind == BF16:
        vec.encode_bf16(values, scale, low, top, cut, place, words, count)
    elif kind == FP16:
        vec.encode_fp16(values, scale, low, top, cut, place, words, count)
    else:
        vec.encode_fp32(values, scale, low, top, cut, place, words, count)


@compiled
def _fitted(P, values, stride, count, low, scale, top):
    """From the least values and the greatest of eight groups, their minima and scales, not yet
    rounded. Values of a group stand in a column."""
    count = kept_outside(count)
    if param(P, FIT) == _UNBIASED:
        shrink = np.float32(form.FIT_SHRINK)
        least_squares(values, stride, count, low, scale, top, shrink, form.FIT_ROUNDS)


@compiled
def _stretched(values, stride, count, low, scale, out_low, out_scale, top):
    count = kept_outside(count)
    limit = np.float32(form.FIT_LIMIT)
    stretched(values, stride, count, low, scale, out_low, out_scale, top, limit)


@compiled
def _rounded_row(kind, row, count, spare):
    if kind != FP32:
        narrow(kind, row, 0, spare, 0, 1, count)
        widen(kind, spare, 0, row, 0, 1, count)


@compiled
def _rounded_scales(P, low, scale, top, count, spare):
    """Minima and scales, rounded to the dtype, from what ``_fitted`` leaves."""
    count = kept_outside(count)
    kind = param(P, KIND)
    if param(P, FIT) != _UNBIASED:
        for i in range(count):
            put_f32(scale + 4 * i, get_f32(scale + 4 * i) - get_f32(low + 4 * i))
        _rounded_row(kind, scale, count, spare)
        for i in range(count):
            put_f32(scale + 4 * i, get_f32(scale + 4 * i) / get_f32(top + 4 * i))
    _rounded_row(kind, low, count, spare)
    _rounded_row(kind, scale, count, spare)


@compiled
def _choose_boosted(P, low, high, top, total, page):
    """The channels of greatest width, squared and summed over the groups, to the page, ascending;
    ``top``: the greatest code of each channel."""
    boosted = kept_outside(param(P, BOOSTED))
    size, key_groups = param(P, SIZE), param(P, KEY_GROUPS)
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
            put_u8(page + param(P, BOOSTED_AT) + j, c)
            j += 1


@compiled
def _pack_layout(P):
    """In bytes: K, K turned, V, V turned, minima and scales of K and V, tops of K and V, spare."""
    block, size = param(P, BLOCK), param(P, SIZE)
    plane = 4 * block * size + 64 * max(block, size)
    key_scales = 4 * param(P, KEY_GROUPS) * size
    value_scales = 4 * param(P, VALUE_GROUPS) * block
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


@compiled
def _pack_keys(P, W, source, page, fill, first):
    fill = kept_outside(fill)
    block, size, group, kind = param(P, BLOCK), param(P, SIZE), param(P, GROUP), param(P, KIND)
    key_groups = param(P, KEY_GROUPS)
    keys, turned, _, _, low, scale, _, _, top, _, total, spare, _ = _pack_layout(P)
    keys, turned, low, scale, top = W + keys, W + turned, W + low, W + scale, W + top
    line = 4 * (block + 16)
    sinks = min(param(P, SINKS), fill) if first else 0
    widen(kind, source, param(P, KEYS_TOKEN), keys, 4 * size, fill, size)
    turn(FP32, keys, 4 * size, turned, line, fill, size)
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
    four = param(P, KEY_BITS) == 4
    filled(top, size, np.float32(15) if four else np.float32(3))
    if param(P, BOOSTED):
        _choose_boosted(P, low, scale, top, W + total, page)
    for g in range(key_groups):
        begin = max(g * group, sinks)
        count = min((g + 1) * group, fill) - begin
        if g:
            widen(FP32, top, 0, top + 4 * g * size, 0, 1, size)
        if count > 0:
            for c in range(0, size, 8):
                at = 4 * (g * size + c)
                values = keys + 4 * (begin * size + c)
                _fitted(P, values, 4 * size, count, low + at, scale + at, top + 4 * c)
    _rounded_scales(P, low, scale, top, key_groups * size, W + spare)
    stored_low, stored_scale = low, scale
    if param(P, FIT) == _UNBIASED:
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
    narrow(kind, stored_scale, 0, page + param(P, KEY_SCALE), 0, 1, key_groups * size)
    narrow(kind, stored_low, 0, page + param(P, KEY_MIN), 0, 1, key_groups * size)
    narrow(kind, keys, 4 * size, page + param(P, SINK_KEYS), (2 + 2 * (kind == FP32)) * size, sinks,
            size)  # fmt: skip

    if param(P, FIT) == _UNBIASED:
        kind = FP32
    j = 0
    for c in range(size):
        boosted = get_f32(top + 4 * c) > np.float32(3)
        place, words = 2 * (c % 16), page + param(P, KEY_CODES) + 4 * (c // 16) * block
        place_extra, extra = 2 * (j % 16), page + param(P, KEY_EXTRA) + 4 * (j // 16) * block
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
        start = page + (param(P, KEY_EXTRA) if plane else param(P, KEY_CODES))
        for r in range((param(P, EXTRA_ROWS) if plane else size) // 16):
            for t in range(sinks):
                put_i32(start + 4 * (r * block + t), 0)
            for t in range(fill, block):
                put_i32(start + 4 * (r * block + t), 0)


@compiled
def _fit_rotated(P, W, page, begin, fill):
    """Scales that codes of rotated V are found with, their minima, and what is stored."""
    fill = kept_outside(fill)
    block, size, kind = param(P, BLOCK), param(P, SIZE), param(P, KIND)
    _, _, values, turned, _, _, low, scale, _, _, _, spare, _ = _pack_layout(P)
    values, turned, low, scale, stored = W + values, W + turned, W + low, W + scale, W + spare
    line, middle = 4 * (block + 16), _middle(P)
    four = param(P, VALUE_BITS) == 4
    first = np.float32(form.FIRST_RMS_4BIT) if four else np.float32(form.FIRST_RMS)
    for t in range(fill):
        if t < begin:
            filled(values + 4 * t * size, size, np.float32(0))
        else:
            _rotate(P, values + 4 * t * size)
    turn(FP32, values, 4 * size, turned, line, fill, size)
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
    narrow(kind, stored, 0, page + param(P, VALUE_SCALE), 0, 1, block)


@compiled
def _fit_values(P, W, page, fill):
    """Scales and minima of V, to scratch and to the page."""
    fill = kept_outside(fill)
    block, size, kind = param(P, BLOCK), param(P, SIZE), param(P, KIND)
    groups, group = param(P, VALUE_GROUPS), param(P, VALUE_GROUP)
    _, _, values, turned, _, _, low, scale, _, top, _, spare, _ = _pack_layout(P)
    turned, low, scale, top, spare = W + turned, W + low, W + scale, W + top, W + spare
    line, total = 4 * (block + 16), groups * block
    turn(FP32, W + values, 4 * size, turned, line, fill, size)
    filled(top, total, np.float32(15) if param(P, VALUE_BITS) == 4 else np.float32(3))
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
    if param(P, FIT) == _UNBIASED:
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
        narrow(kind, spare + 4 * total, 0, page + param(P, VALUE_SCALE), 0, 1, total)
        narrow(kind, spare, 0, page + param(P, VALUE_MIN), 0, 1, total)
    else:
        narrow(kind, scale, 0, page + param(P, VALUE_SCALE), 0, 1, total)
        narrow(kind, low, 0, page + param(P, VALUE_MIN), 0, 1, total)


@compiled
def _pack_values(P, W, source, page, fill, first):
    fill = kept_outside(fill)
    block, size, kind = param(P, BLOCK), param(P, SIZE), param(P, KIND)
    groups, group = param(P, VALUE_GROUPS), param(P, VALUE_GROUP)
    _, _, values, _, _, _, low, scale, _, _, _, _, _ = _pack_layout(P)
    values, low, scale = W + values, W + low, W + scale
    four = param(P, VALUE_BITS) == 4
    limit = np.float32(15) if four else np.float32(3)
    widen(kind, source, param(P, VALUES_TOKEN), values, 4 * size, fill, size)
    filled(low, groups * block, np.float32(0))
    filled(scale, groups * block, np.float32(0))
    if param(P, ROTATED):
        sinks = min(param(P, SINKS), fill) if first else 0
        narrow(kind, values, 4 * size, page + param(P, SINK_VALUES),
                (2 + 2 * (kind == FP32)) * size, sinks, size)  # fmt: skip
        _fit_rotated(P, W, page, sinks, fill)
    else:
        _fit_values(P, W, page, fill)
    if param(P, ROTATED) or param(P, FIT) == _UNBIASED:
        kind = FP32
    for t in range(fill):
        place = 2 * (t % 16)
        for g in range(groups):
            x = g * group
            columns, i = min(group, size - x), 4 * (g * block + t)
            row, s, m = values + 4 * (t * size + x), get_f32(scale + i), get_f32(low + i)
            at = 4 * ((t // 16) * size + x)
            words = page + param(P, VALUE_CODES) + at
            if four:
                _encode(kind, row, s, m, limit, 2, place, words, columns)
                extra = page + param(P, VALUE_EXTRA) + at
                _encode(kind, row, s, m, limit, 0, place, extra, columns)
            else:
                _encode(kind, row, s, m, limit, 0, place, words, columns)


@compiled
def _block_of(P, task):
    """Page, K and V of a task of pack or unpack, its fill and whether it is the first."""
    i, head = task // param(P, KV_HEADS), task % param(P, KV_HEADS)
    block, slot = get_i32(param(P, BLOCKS) + 4 * i), get_i32(param(P, SLOTS) + 4 * i)
    page = param(P, CACHE) + block * param(P, CACHE_BLOCK) + head * param(P, CACHE_HEAD)
    keys = param(P, KEYS) + slot * param(P, KEYS_SLOT) + head * param(P, KEYS_HEAD)
    values = param(P, VALUES) + slot * param(P, VALUES_SLOT) + head * param(P, VALUES_HEAD)
    fill = min(get_i32(param(P, FILLS) + 4 * i), param(P, BLOCK))
    return page, keys, values, fill, get_i32(param(P, FIRSTS) + 4 * i) != 0


@compiled
def _pack_task(P, W, task):
    page, keys, values, fill, first = _block_of(P, task)
    filled(page, param(P, PAGE_BYTES) // 4, np.float32(0))
    _pack_keys(P, W, keys, page, fill, first)
    _pack_values(P, W, values, page, fill, first)


@compiled
def _unpack_layout(P):
    """In bytes: K, K turned, V, scales, indices of rows."""
    block, size = param(P, BLOCK), param(P, SIZE)
    plane = 4 * block * size
    scales = (param(P, KEY_GROUPS) + param(P, SINKS)) * size + param(P, VALUE_GROUPS) * block
    scales *= 2
    end = 3 * plane + 64 * size + 4 * scales + 4 * size
    return (
        0, plane, 2 * plane + 64 * size, 3 * plane + 64 * size, 3 * plane + 64 * size + 4 * scales,
        (end + 4095) // 4096 * 4096 + 64,
    )  # fmt: skip


@compiled
def _unpack_task(P, W, task):
    page, keys, values, fill, first = _block_of(P, task)
    block, size, kind = param(P, BLOCK), param(P, SIZE), param(P, KIND)
    k, turned, v, scales, rows, _ = _unpack_layout(P)
    line = 4 * (block + 16)
    first = first and param(P, SINKS) > 0
    _written_out(P, page, first, W + scales, W + rows, W + turned, line, W + v)
    turn(FP32, W + turned, line, W + k, 4 * size, size, block)
    narrow(kind, W + k, 4 * size, keys, param(P, KEYS_TOKEN), fill, size)
    narrow(kind, W + v, 4 * size, values, param(P, VALUES_TOKEN), fill, size)


# Functions of an entry point: the planner, called from Python before the workers, completes the
# parameters; a worker takes tasks until there are none left. Their only free variable is the digest
# of the sources: numba's cache takes a function's free variables for a part of it, and those that
# are compiled functions themselves would look new in every process.


def _pack_code(sources):
    @planner()
    def plan(P):
        _ = sources
        put_i64(P + 8 * SCRATCH_BYTES, _pack_layout(P)[-1])
        return 0

    @worker()
    def work(P):
        _ = sources
        W, task = scratch(P), next_task(P)
        while task < param(P, TASKS):
            _pack_task(P, W, task)
            task = next_task(P)

    return plan, work


def _unpack_code(sources):
    @planner()
    def plan(P):
        _ = sources
        put_i64(P + 8 * SCRATCH_BYTES, _unpack_layout(P)[-1])
        return 0

    @worker()
    def work(P):
        _ = sources
        W, task = scratch(P), next_task(P)
        while task < param(P, TASKS):
            _unpack_task(P, W, task)
            task = next_task(P)

    return plan, work


def _attend_code(sources):
    @planner()
    def plan(P):
        _ = sources
        put_i64(P + 8 * SCRATCH_BYTES, _layout(P)[14])
        return plan_attend(P)

    @worker()
    def work(P):
        _ = sources
        W, task = scratch(P), next_task(P)
        while task < param(P, TASKS):
            _attend_task(P, W, task)
            task = next_task(P)

    return plan, work


@functools.cache
def _code(name: str):
    """The planner and the worker of an entry point; compiled, or loaded from numba's cache."""
    make = {"pack": _pack_code, "unpack": _unpack_code, "attend": _attend_code}[name]
    return make(cpu_attention.sources(vec.__file__, form.__file__, __file__))


def _set_exact(keys: torch.Tensor, values: torch.Tensor) -> None:
    _local.parameters[EXACT:FIRST_OF_OP] = [
        keys.data_ptr(), values.data_ptr(), *strides(keys), *strides(values),
    ]  # fmt: skip


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
    plan, work = _code(name)
    numbers = [int32(t) for t in (slots, blocks, fills, firsts)]
    p = _local.parameters
    p[BLOCK:CACHE] = fmt.block_tokens, fmt.head_size, KINDS[fmt.dtype], cache.shape[1]
    p[CACHE : CACHE_HEAD + 1] = cache.data_ptr(), *strides(cache)[:2]
    p[FORMAT:EXACT] = _format_parameters(fmt)
    _set_exact(keys, values)
    p[SLOTS:PACK_END] = [t.data_ptr() for t in numbers]
    p[TASKS] = len(blocks) * cache.shape[1]
    plan(_local.address)
    run(work, _local)


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
    if not len(seq_lens):
        return
    code = _code("attend")
    kept = set_attention(
        _local, attention, query, cache, fmt.block_tokens, block_table, query_start, seq_lens, out,
        max_query, max_seq, tile=max(fmt.block_tokens, OWN_TILE), new_stored=False,
    )  # fmt: skip
    slot_of_block = int32(slot_of_block)
    item, k, v = key.element_size(), key.stride(), value.stride()
    p = _local.parameters
    p[FORMAT:EXACT] = _format_parameters(fmt)
    _set_exact(exact_keys, exact_values)
    p[KEY:ATTEND_END] = [
        key.data_ptr(), k[0] * item, k[1] * item, value.data_ptr(), v[0] * item, v[1] * item,
        slot_of_block.data_ptr(),
    ]  # fmt: skip
    run_attention(code, _local)
    del kept
