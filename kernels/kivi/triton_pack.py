"""Exact tokens to pages: what ``reference.pack`` writes."""

from __future__ import annotations

import triton
import triton.language as tl

from . import format as _format
from .triton_page import (
    ROWS,
    boosted_channels,
    boosted_rows,
    load_float,
    load_operand,
    rotation_signs,
    rounded,
    store_float,
)

FIT_SHRINK = tl.constexpr(_format.FIT_SHRINK)
FIT_ROUNDS = tl.constexpr(_format.FIT_ROUNDS)
FIT_LIMIT = tl.constexpr(_format.FIT_LIMIT)
FIRST_RMS = tl.constexpr(_format.FIRST_RMS)
FIRST_RMS_4BIT = tl.constexpr(_format.FIRST_RMS_4BIT)


@triton.jit
def _rint(value):
    """0 <= float32 < 2^22 rounded to the nearest integer, halves to the even one.

    Adding and subtracting 2^23 drops the fraction.
    """
    return (value + 8388608.0) - 8388608.0


@triton.jit
def _codes(x, counted, scale, low, levels, KIND: tl.constexpr):
    """``round(clamp((x - low) / scale, 0, levels))``, each step rounded to KIND; float32.

    Zero where nothing is counted and where the scale is zero.
    """
    ratio = rounded(tl.div_rn(rounded(x - low, KIND), tl.where(scale > 0, scale, 1.0)), KIND)
    codes = _rint(tl.minimum(tl.maximum(ratio, 0.0), levels))
    return tl.where(counted & (scale > 0), codes, 0.0)


@triton.jit
def _range(x, counted, AXIS: tl.constexpr):
    """(least, greatest) of what is counted, the axis kept; zero where nothing is."""
    low = tl.min(tl.where(counted, x, float("inf")), AXIS, keep_dims=True)
    high = tl.max(tl.where(counted, x, float("-inf")), AXIS, keep_dims=True)
    some = high >= low
    return tl.where(some, low, 0.0), tl.where(some, high, 0.0)


@triton.jit
def _quantise(x, counted, levels, KIND: tl.constexpr, FIT: tl.constexpr, AXIS: tl.constexpr):
    """(codes int32, scale, minimum) of groups along AXIS, as ``reference._quantise``.

    x: float32, zero where not counted; levels: the greatest code, float32.
    """
    low, high = _range(x, counted, AXIS)
    if FIT == "minmax":
        scale = rounded(tl.div_rn(rounded(high - low, KIND), levels + tl.zeros_like(low)), KIND)
        codes = _codes(x, counted, scale, low, levels, KIND)
    else:
        half = (high - low) * (FIT_SHRINK / 2)
        scale = tl.div_rn(half * 2, levels + tl.zeros_like(half))
        low = (high + low) * 0.5 - half
        count = tl.maximum(tl.sum(counted.to(tl.float32), AXIS, keep_dims=True), 1.0)
        x_mean = tl.div_rn(tl.sum(x, AXIS, keep_dims=True), count)
        # A loop at run time: unrolled, its rounds would share registers.
        for _ in range(FIT_ROUNDS):
            codes = _codes(x, counted, scale, low, levels, "fp32")
            code_mean = tl.div_rn(tl.sum(codes, AXIS, keep_dims=True), count)
            spread = tl.where(counted, codes - code_mean, 0.0)
            variance = tl.sum(spread * spread, AXIS, keep_dims=True)
            product = tl.sum(spread * x, AXIS, keep_dims=True)
            slope = tl.div_rn(product, tl.where(variance > 0, variance, 1.0))
            fits = (variance > 0) & (slope > 0)
            scale = tl.where(fits, slope, scale)
            low = tl.where(fits, x_mean - slope * code_mean, low)
        scale, low = rounded(scale, KIND), rounded(low, KIND)
        codes = _codes(x, counted, scale, low, levels, "fp32")
        code_mean = tl.div_rn(tl.sum(codes, AXIS, keep_dims=True), count)
        spread = tl.where(counted, x - x_mean, 0.0)
        product = tl.sum(spread * (codes - code_mean), AXIS, keep_dims=True)
        energy = tl.sum(spread * spread, AXIS, keep_dims=True)
        stretched = tl.div_rn(energy, tl.where(product > 0, product, 1.0))
        fits = (product > 0) & (stretched < FIT_LIMIT * scale)
        scale = rounded(tl.where(fits, stretched, scale), KIND)
        low = rounded(tl.where(fits, x_mean - stretched * code_mean, low), KIND)
    return codes.to(tl.int32), scale, low


@triton.jit
def choose_channels(
    keys_ptr,  # [slots, B, H, D]
    slots_ptr,  # int32 [n]
    bytes_ptr,  # the cache
    blocks_ptr,  # int32 [n]
    fills_ptr,  # int32 [n]
    firsts_ptr,  # int32 [n]
    slot_stride,
    token_stride,
    head_stride,
    block_bytes,  # of the cache
    head_bytes,
    PAGE: tl.constexpr,
):
    """The channels with the greatest ``sum over groups of (max - min)^2``, in ascending order.

    A channel's rank is the number of channels that beat it: those with a greater sum, and of equal
    ones those before it. Program (i, head).
    """
    i = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    fill = tl.load(fills_ptr + i)
    sinks = tl.where(tl.load(firsts_ptr + i) != 0, PAGE.sinks, 0)
    keys = keys_ptr + tl.load(slots_ptr + i).to(tl.int64) * slot_stride + head * head_stride
    data = bytes_ptr + tl.load(blocks_ptr + i).to(tl.int64) * block_bytes + head * head_bytes
    d = tl.arange(0, PAGE.channels)
    total = tl.zeros([PAGE.channels], tl.float32)
    for group in range(PAGE.block // PAGE.group):
        t = group * PAGE.group + tl.arange(0, PAGE.group)
        counted = ((t < fill) & (t >= sinks))[None, :] & (d < PAGE.size)[:, None]
        at = keys + t.to(tl.int64)[None, :] * token_stride + d[:, None]
        x = load_float(at, counted, PAGE.kind)
        low, high = _range(x, counted, 1)
        width = tl.reshape(high - low, [PAGE.channels])
        total += width * width
    total = tl.where(d < PAGE.size, total, -1.0)
    mine, other = total[None, :], total[:, None]
    before = d[:, None] < d[None, :]
    rank = tl.sum(((other > mine) | ((other == mine) & before)).to(tl.int32), 0)
    chosen = (rank < PAGE.boosted).to(tl.int32)
    row = tl.cumsum(chosen, 0) - chosen
    tl.store(data + PAGE.boosted_at + row, d.to(tl.uint8), mask=chosen != 0)


@triton.jit
def _plane_of_keys(codes, PAGE: tl.constexpr):
    """Words [rows, T] of codes int32 [channels, T] of two bits."""
    split = tl.reshape(codes, [PAGE.rows, ROWS, codes.shape[1]])
    # The bits of a word are disjoint, so that their sum is their disjunction.
    return tl.sum(split << (2 * tl.arange(0, ROWS))[None, :, None], 1)


@triton.jit
def _plane_of_values(codes, PAGE: tl.constexpr):
    """Words [T / 16, channels] of codes int32 [T, g, C] of two bits."""
    split = tl.reshape(codes, [codes.shape[0] // ROWS, ROWS, PAGE.channels])
    return tl.sum(split << (2 * tl.arange(0, ROWS))[None, :, None], 1)


@triton.jit
def _quantise_rotated(x, levels: tl.constexpr, DOT: tl.constexpr, PAGE: tl.constexpr):
    """(codes int32 [T, channels], scale [T, 1]) as ``reference._quantise_rotated``.

    x: operands [T, channels], zero where not counted.
    """
    y = tl.dot(x, rotation_signs(DOT, PAGE), input_precision="ieee") * (PAGE.turned**-0.5)
    middle: tl.constexpr = levels / 2
    first: tl.constexpr = FIRST_RMS if PAGE.value_bits == 2 else FIRST_RMS_4BIT
    real = (tl.arange(0, PAGE.channels) < PAGE.size)[None, :]
    energy = tl.sum(y * y, 1, keep_dims=True)
    scale = tl.sqrt_rn(tl.div_rn(energy, PAGE.size + tl.zeros_like(energy))) * first
    for _ in range(FIT_ROUNDS):
        c = tl.where(real, _centred(y, scale, levels), 0.0)
        square = tl.sum(c * c, 1, keep_dims=True)
        scale = tl.div_rn(tl.sum(c * y, 1, keep_dims=True), square)
    scale = rounded(scale, PAGE.kind)
    c = _centred(y, scale, levels)
    product = tl.sum(tl.where(real, c * y, 0.0), 1, keep_dims=True)
    stretched = tl.div_rn(energy, tl.where(product > 0, product, 1.0))
    scale = rounded(tl.where((product > 0) & (scale > 0), stretched, 0.0), PAGE.kind)
    codes = tl.where((scale > 0) & real, c + middle, 0.0)
    return codes.to(tl.int32), scale


@triton.jit
def _centred(y, scale, levels: tl.constexpr):
    """Codes less their middle, float32; of nothing, the least."""
    ratio = tl.div_rn(y, tl.where(scale > 0, scale, 1.0)) + levels / 2
    codes = _rint(tl.minimum(tl.maximum(ratio, 0.0), levels))
    return tl.where(scale > 0, codes, 0.0) - levels / 2


@triton.jit
def pack_keys(
    keys_ptr,  # [slots, B, H, D]
    slots_ptr,  # int32 [n]
    words_ptr,  # int32, the cache
    items_ptr,  # the same memory
    bytes_ptr,  # the same memory
    blocks_ptr,  # int32 [n]
    fills_ptr,  # int32 [n]
    firsts_ptr,  # int32 [n]
    slot_stride,
    token_stride,
    head_stride,
    block_bytes,  # of the cache
    head_bytes,
    PAGE: tl.constexpr,
):
    """``code = round((k - m) / s)`` of one group of tokens, for every channel.

    Program (i, head, group), after ``choose_channels``. The first group's also writes the exact
    keys of the sinks, and zeros at the end.
    """
    i = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    group = tl.program_id(2)
    fill = tl.load(fills_ptr + i)
    sinks = tl.where(tl.load(firsts_ptr + i) != 0, PAGE.sinks, 0)
    page = tl.load(blocks_ptr + i).to(tl.int64) * block_bytes + head * head_bytes
    keys = keys_ptr + tl.load(slots_ptr + i).to(tl.int64) * slot_stride + head * head_stride
    words = words_ptr + page // 4
    items = items_ptr + (page // 4) * PAGE.per_word
    data = bytes_ptr + page

    d = tl.arange(0, PAGE.channels)
    t = group * PAGE.group + tl.arange(0, PAGE.group)
    real = d < PAGE.size
    if PAGE.boosted:
        four, row = boosted_rows(boosted_channels(data, PAGE), PAGE)
        levels = tl.where(four != 0, 15.0, 3.0)[:, None]
    else:
        levels = tl.full([PAGE.channels, 1], (1 << PAGE.key_bits) - 1, tl.float32)
    counted = ((t < fill) & (t >= sinks))[None, :] & real[:, None]
    at = keys + t.to(tl.int64)[None, :] * token_stride + d[:, None]
    x = load_float(at, counted, PAGE.kind)
    codes, scale, low = _quantise(x, counted, levels, PAGE.kind, PAGE.fit, 1)

    r = tl.arange(0, PAGE.rows)[:, None]
    at = words + r * PAGE.block + t[None, :]
    inside = (r < PAGE.size // ROWS) & (t >= 0)[None, :]
    high = codes
    if PAGE.key_bits == 4:
        high = codes >> 2
        tl.store(at + PAGE.key_extra, _plane_of_keys(codes & 3, PAGE), mask=inside)
    elif PAGE.boosted:
        high = codes >> (2 * four)[:, None]
        rest = (codes & 3) << (2 * (row % ROWS))[:, None]
        for e in tl.static_range(PAGE.boosted // ROWS):
            mine = (four != 0) & (row // ROWS == e)
            word = tl.sum(tl.where(mine[:, None], rest, 0), 0)
            tl.store(words + PAGE.key_extra + e * PAGE.block + t, word)
    tl.store(at, _plane_of_keys(high, PAGE), mask=inside)
    at = items + PAGE.key_scale + group * PAGE.size + d[:, None]
    store_float(at, scale, real[:, None], PAGE.kind)
    store_float(at + (PAGE.key_min - PAGE.key_scale), low, real[:, None], PAGE.kind)

    if group == 0:
        if PAGE.sinks:
            # There are no more sinks than tokens of a group.
            seen = (t < fill) & (t < sinks)
            source = keys + t.to(tl.int64)[None, :] * token_stride + d[:, None]
            exact = load_float(source, seen[None, :] & real[:, None], PAGE.kind)
            target = items + PAGE.sink_keys + t[None, :] * PAGE.size + d[:, None]
            store_float(target, exact, (t < PAGE.sinks)[None, :] & real[:, None], PAGE.kind)
        for start in range(0, PAGE.tail, PAGE.channels):
            empty = data + PAGE.boosted_at + PAGE.boosted + start + d
            tl.store(empty, tl.zeros_like(d).to(tl.uint8), mask=start + d < PAGE.tail)


@triton.jit
def pack_values(
    values_ptr,  # [slots, B, H, D]
    slots_ptr,  # int32 [n]
    words_ptr,  # int32, the cache
    items_ptr,  # the same memory
    blocks_ptr,  # int32 [n]
    fills_ptr,  # int32 [n]
    firsts_ptr,  # int32 [n]
    slot_stride,
    token_stride,
    head_stride,
    block_bytes,  # of the cache
    head_bytes,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    DOT: tl.constexpr,
):
    """``code = round((v - m) / s)`` of TOKENS tokens, for every group of channels.

    Of rotated V, ``code = round(v R / s + middle)``. Program (i, head, tile of tokens).
    """
    i = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    fill = tl.load(fills_ptr + i)
    page = tl.load(blocks_ptr + i).to(tl.int64) * block_bytes + head * head_bytes
    values = values_ptr + tl.load(slots_ptr + i).to(tl.int64) * slot_stride + head * head_stride
    words = words_ptr + page // 4
    items = items_ptr + (page // 4) * PAGE.per_word

    start = tl.program_id(2) * TOKENS
    t = (start + tl.arange(0, TOKENS))[:, None, None]
    g = tl.arange(0, PAGE.value_groups_padded)[None, :, None]
    c = g * PAGE.value_tile + tl.arange(0, PAGE.value_tile)[None, None, :]
    counted = (t < fill) & (c < PAGE.size)
    levels: tl.constexpr = float((1 << PAGE.value_bits) - 1)
    if PAGE.rotated:
        sinks = tl.where(tl.load(firsts_ptr + i) != 0, PAGE.sinks, 0)
        token = start + tl.arange(0, TOKENS)[:, None]
        across = tl.arange(0, PAGE.channels)[None, :]
        source = values + token.to(tl.int64) * token_stride + across
        inside = (token < fill) & (across < PAGE.size)
        x = load_operand(source, inside & (token >= sinks), PAGE.kind, DOT)
        codes, scale = _quantise_rotated(x, levels, DOT, PAGE)
        codes, scale = codes[:, None, :], scale[:, :, None]
        if PAGE.sinks:
            exact = load_float(source, inside & (token < sinks), PAGE.kind)
            target = items + PAGE.sink_values + token * PAGE.size + across
            store_float(target, exact, (token < PAGE.sinks) & (across < PAGE.size), PAGE.kind)
    else:
        x = load_float(values + t.to(tl.int64) * token_stride + c, counted, PAGE.kind)
        codes, scale, low = _quantise(x, counted, levels, PAGE.kind, PAGE.fit, 2)

    r = start // ROWS + tl.arange(0, TOKENS // ROWS)[:, None]
    d = tl.arange(0, PAGE.channels)[None, :]
    at = words + PAGE.value_codes + r * PAGE.size + d
    inside = (d < PAGE.size) & (r >= 0)
    if PAGE.value_bits == 4:
        tl.store(at, _plane_of_values(codes >> 2, PAGE), mask=inside)
        at += PAGE.value_extra - PAGE.value_codes
        tl.store(at, _plane_of_values(codes & 3, PAGE), mask=inside)
    else:
        tl.store(at, _plane_of_values(codes, PAGE), mask=inside)
    at = items + PAGE.value_scale + g * PAGE.block + t
    inside = (g < PAGE.value_groups) & (t >= 0)
    store_float(at, scale, inside, PAGE.kind)
    if not PAGE.rotated:
        store_float(at + (PAGE.value_min - PAGE.value_scale), low, inside, PAGE.kind)
