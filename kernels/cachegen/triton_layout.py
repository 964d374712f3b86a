"""Choice of tables, and the parts of a section other than the lanes' words: packing and unpacking.

A stripe whose planned mode is RAW is left alone.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from . import format as fmt
from .triton_common import (
    AT_BIT_PLANES,
    AT_BYTE_PLANES,
    AT_INDEX,
    AT_MAXIMA,
    AT_PARAM,
    AT_POSITIONS,
    AT_RAW,
    AT_STATES,
    AT_VALUES,
    CENTRE,
    CONSTANT,
    LANES,
    LOSSLESS,
    PLAN_AUX,
    PLAN_CODED,
    PLAN_EXCEPTIONS,
    PLAN_INDEX_BASE,
    PLAN_INDEX_WIDTH,
    PLAN_MODE,
    PLAN_PARAM_BASE,
    PLAN_PARAM_WIDTH,
    PLAN_PLACED,
    PLAN_WIDTH,
    RAW_CHANNEL,
    SEGMENT,
    TABLES,
    TOKEN_MAX,
    bits_of,
    load_bits,
    store_bits,
)

RAW = tl.constexpr(fmt.RAW)
COSTS_WIDTH = tl.constexpr(triton.next_power_of_2(fmt.TABLES + 1))
MAX_COST = tl.constexpr((1 << 31) - 1)


@functools.cache
def cost_rows(itemsize: int, device: torch.device) -> torch.Tensor:
    """int32 [2, 256, COSTS_WIDTH], lossy and lossless; zeros from column TABLES on."""
    rows = torch.zeros(2, 256, COSTS_WIDTH.value, dtype=torch.int32)
    for row, mode in zip(rows, (fmt.UNIFORM, fmt.LOSSLESS), strict=True):
        row[:, : fmt.TABLES] = torch.from_numpy(fmt.costs(mode, itemsize).copy())
    return rows.to(device)


@functools.cache
def escape_flags(device: torch.device) -> torch.Tensor:
    """uint8 [2, RAW_CHANNEL + 1, 256]: 1 where a symbol escapes from a table."""
    flags = torch.zeros(2, fmt.RAW_CHANNEL + 1, 256, dtype=torch.uint8)
    for flag, bank in zip(flags, (fmt.lossy_bank(), fmt.lossless_bank()), strict=True):
        flag[: fmt.TABLES] = torch.from_numpy(bank.freq[: fmt.TABLES] == 0)
        flag[: fmt.TABLES, fmt.ESCAPE] = 1
    return flags.to(device)


@triton.jit
def choose_tables(
    symbols_ptr,  # uint8 [S, T, C]
    modes_ptr,  # int32 [S]
    used_ptr,  # int32 [S, C]: LOSSLESS, disjunction of each channel's patterns
    costs_ptr,  # int32 [2, 256, COSTS_WIDTH]
    index_ptr,  # uint8 [S, C]
    tokens,
    channels,
    RAW_COST: tl.constexpr,
    RAW_COST_LOSSLESS: tl.constexpr,  # of a value, in units of the costs
    BLOCK_C: tl.constexpr,
):
    stripe = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    lossless = tl.load(modes_ptr + stripe) == LOSSLESS
    table = tl.arange(0, COSTS_WIDTH)
    costs = costs_ptr + lossless.to(tl.int32) * (256 * COSTS_WIDTH) + table[None, :]
    column = symbols_ptr + stripe * tokens * channels + c
    total = tl.zeros([BLOCK_C, COSTS_WIDTH], tl.int32)
    differs = tl.zeros([BLOCK_C], tl.int32)
    for _ in tl.range(0, tokens, loop_unroll_factor=4):
        symbol = tl.load(column, mask=c < channels, other=0).to(tl.int32)
        total += tl.load(costs + symbol[:, None] * COSTS_WIDTH)
        differs |= symbol ^ CENTRE
        column += channels
    total = tl.where(table[None, :] < TABLES, total, MAX_COST)
    least = tl.min(total, 1)
    index = tl.min(tl.where(total == least[:, None], table[None, :], COSTS_WIDTH), 1)
    raw_cost = tokens * tl.where(lossless, RAW_COST_LOSSLESS, RAW_COST)
    index = tl.where(least > raw_cost, RAW_CHANNEL, index)
    used = tl.load(used_ptr + stripe * channels + c, mask=c < channels, other=0)
    index = tl.where(tl.where(lossless, used, differs) == 0, CONSTANT, index)
    tl.store(index_ptr + stripe * channels + c, index.to(tl.uint8), mask=c < channels)


@triton.jit
def _escaping(symbols_ptr, index_ptr, flags, row, stripe, c, channels):
    """int32: which channels of a row escape."""
    symbol = tl.load(symbols_ptr + row * channels + c, mask=c < channels, other=0).to(tl.int32)
    index = tl.load(index_ptr + stripe * channels + c, mask=c < channels, other=CONSTANT)
    return tl.load(flags + index.to(tl.int32) * 256 + symbol).to(tl.int32)


@triton.jit
def count_escapes(
    symbols_ptr,  # uint8 [S, T, C]
    index_ptr,  # uint8 [S, C]
    modes_ptr,  # int32 [S]
    flags_ptr,  # uint8 [2, RAW_CHANNEL + 1, 256]
    counts_ptr,  # int64 [S, T]
    tokens,
    channels,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    stripe = row // tokens
    lossless = (tl.load(modes_ptr + stripe) == LOSSLESS).to(tl.int32)
    flags = flags_ptr + lossless * ((RAW_CHANNEL + 1) * 256)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, channels, BLOCK):
        c = start + tl.arange(0, BLOCK)
        count += _escaping(symbols_ptr, index_ptr, flags, row, stripe, c, channels)
    tl.store(counts_ptr + row, tl.sum(count, 0).to(tl.int64))


@triton.jit
def write_escapes(
    symbols_ptr,  # uint8 [S, T, C]
    index_ptr,  # uint8 [S, C]
    flags_ptr,  # uint8 [2, RAW_CHANNEL + 1, 256]
    ends_ptr,  # int64 [S, T]: escapes up to and with each row
    plan_ptr,  # int64 [S, PLAN_WIDTH]
    bits_ptr,  # [S, T, C]
    out32_ptr,
    out_ptr,  # the sections, in the items of the tensor
    tokens,
    channels,
    ITEMSIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    stripe = row // tokens
    t = row - stripe * tokens
    plan = plan_ptr + stripe * PLAN_WIDTH
    mode = tl.load(plan + PLAN_MODE)
    end = tl.load(ends_ptr + row)
    begin = tl.load(ends_ptr + row - 1, mask=t > 0, other=0)
    if (mode == RAW) | (begin == end):
        return
    flags = flags_ptr + (mode == LOSSLESS).to(tl.int32) * ((RAW_CHANNEL + 1) * 256)
    positions = out32_ptr + tl.load(plan + AT_POSITIONS) // 4
    values = out_ptr + tl.load(plan + AT_VALUES) // ITEMSIZE
    for start in range(0, channels, BLOCK):
        c = start + tl.arange(0, BLOCK)
        flag = _escaping(symbols_ptr, index_ptr, flags, row, stripe, c, channels)
        rank = begin + tl.cumsum(flag, 0) - flag
        bits = load_bits(bits_ptr + row * channels + c, flag != 0, ITEMSIZE)
        tl.store(positions + rank, (t * channels + c).to(tl.uint32).to(tl.int32, bitcast=True),
                 mask=flag != 0)  # fmt: skip
        store_bits(values + rank, bits, flag != 0, ITEMSIZE)
        begin += tl.sum(flag, 0)


@triton.jit
def restore_escapes(
    data32_ptr,
    data_ptr,  # the sections, in the items of the tensor
    plan_ptr,  # int64 [S, PLAN_WIDTH]
    out_ptr,  # [S, T, C]
    status_ptr,  # int32 [S]: set where positions are out of range or order
    tokens,
    channels,
    ITEMSIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    stripe = tl.program_id(0).to(tl.int64)
    plan = plan_ptr + stripe * PLAN_WIDTH
    count = tl.load(plan + PLAN_EXCEPTIONS)
    size = (stripe - stripe + tokens) * channels
    positions = data32_ptr + tl.load(plan + AT_POSITIONS) // 4
    values = data_ptr + tl.load(plan + AT_VALUES) // ITEMSIZE
    # Strides over the exceptions, so that the grid need not know how many a stripe has.
    for start in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        live = i < count
        position = tl.load(positions + i, mask=live, other=0).to(tl.int64) & 0xFFFFFFFF
        before = tl.load(positions + i - 1, mask=live & (i > 0), other=0).to(tl.int64) & 0xFFFFFFFF
        good = (position < size) & ((i == 0) | (before < position))
        bits = load_bits(values + i, live & good, ITEMSIZE)
        store_bits(out_ptr + stripe * size + position, bits, live & good, ITEMSIZE)
        wrong = tl.sum((live & (good == 0)).to(tl.int32), 0)
        tl.store(status_ptr + stripe, 1, mask=wrong > 0)


@triton.jit
def _pack(values, at, width, channels, out32_ptr, BLOCK: tl.constexpr):
    """Fixed-width integers, least significant bit first; a program for BLOCK words."""
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bit = word * 32
    first = bit // width
    packed = tl.zeros([BLOCK], tl.uint32)
    for k in range(32 // width + 2):
        i = first + k
        shift = i * width - bit
        value = tl.load(values + i, mask=(i < channels) & (shift < 32), other=0).to(tl.uint32)
        left = value << (tl.maximum(shift, 0) & 31).to(tl.uint32)
        right = value >> tl.maximum(-shift, 0).to(tl.uint32)
        packed |= tl.where(shift < 0, right, left)
    size = (channels * width + 31) // 32
    tl.store(out32_ptr + at // 4 + word, packed.to(tl.int32, bitcast=True), mask=word < size)


@triton.jit
def pack_channels(
    index_ptr,  # int32 [S, C]: above the base
    params_ptr,  # int32 [S, C]: above the base
    plan_ptr,  # int64 [S, PLAN_WIDTH]
    out32_ptr,
    channels,
    BLOCK: tl.constexpr,
):
    """The index plane and the parameter plane."""
    stripe = tl.program_id(0).to(tl.int64)
    plan = plan_ptr + stripe * PLAN_WIDTH
    if tl.load(plan + PLAN_MODE) == RAW:
        return
    width = tl.load(plan + PLAN_INDEX_WIDTH).to(tl.int32)
    if width > 0:
        at = tl.load(plan + AT_INDEX)
        _pack(index_ptr + stripe * channels, at, width, channels, out32_ptr, BLOCK)
    width = tl.load(plan + PLAN_PARAM_WIDTH).to(tl.int32)
    if width > 0:
        at = tl.load(plan + AT_PARAM)
        _pack(params_ptr + stripe * channels, at, width, channels, out32_ptr, BLOCK)


@triton.jit
def _unpack(data8_ptr, at, width, c, channels):
    """int32 values of fixed width, at most 16 bits, of channels c."""
    bit = c * width
    mask = tl.where(c < channels, width, 0) > 0
    byte = data8_ptr + at + bit // 8
    # A value reaches into its third byte only where it ends there, so nothing is read beyond.
    low = tl.load(byte, mask=mask, other=0).to(tl.int32)
    middle = tl.load(byte + 1, mask=mask & (bit % 8 + width > 8), other=0).to(tl.int32)
    high = tl.load(byte + 2, mask=mask & (bit % 8 + width > 16), other=0).to(tl.int32)
    packed = low | middle << 8 | high << 16
    return (packed >> (bit % 8)) & ((1 << width) - 1)


@triton.jit
def unpack_channels(
    data8_ptr,
    plan_ptr,  # int64 [S, PLAN_WIDTH]
    index_ptr,  # int32 [S, C]
    params_ptr,  # int32 [S, C]
    channels,
    BLOCK: tl.constexpr,
):
    stripe = tl.program_id(0).to(tl.int64)
    plan = plan_ptr + stripe * PLAN_WIDTH
    if tl.load(plan + PLAN_MODE) == RAW:
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = tl.load(plan + PLAN_INDEX_WIDTH).to(tl.int32)
    index = _unpack(data8_ptr, tl.load(plan + AT_INDEX), width, c, channels)
    index += tl.load(plan + PLAN_INDEX_BASE).to(tl.int32)
    width = tl.load(plan + PLAN_PARAM_WIDTH).to(tl.int32)
    param = _unpack(data8_ptr, tl.load(plan + AT_PARAM), width, c, channels)
    param += tl.load(plan + PLAN_PARAM_BASE).to(tl.int32)
    tl.store(index_ptr + stripe * channels + c, index, mask=c < channels)
    tl.store(params_ptr + stripe * channels + c, param, mask=c < channels)


@triton.jit
def write_maxima(
    maxima_ptr,  # float32 [S, T]
    plan_ptr,  # int64 [S, PLAN_WIDTH]
    out_ptr,  # the sections, in the items of the tensor
    tokens,
    CODE: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    MAX_FINITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    stripe = tl.program_id(0).to(tl.int64)
    plan = plan_ptr + stripe * PLAN_WIDTH
    if tl.load(plan + PLAN_MODE) != TOKEN_MAX:
        return
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(maxima_ptr + stripe * tokens + t, mask=t < tokens, other=0.0)
    target = out_ptr + tl.load(plan + AT_MAXIMA) // ITEMSIZE + t
    store_bits(target, bits_of(value, CODE, MAX_FINITE), t < tokens, ITEMSIZE)


@triton.jit
def write_words(
    words_ptr,  # int16 [S, segments, capacity]: the words, at the end of each row
    counts_ptr,  # int32 [S, segments]
    states_ptr,  # int32 [S, segments, LANES]
    word_at_ptr,  # int64 [S, segments]: where each segment's go, in words
    plan_ptr,  # int64 [S, PLAN_WIDTH]
    out16_ptr,
    out32_ptr,
    segments,
    capacity,
    BLOCK: tl.constexpr,
):
    """Words and final states of a segment."""
    row = tl.program_id(0).to(tl.int64)
    stripe = row // segments
    plan = plan_ptr + stripe * PLAN_WIDTH
    count = tl.load(counts_ptr + row)
    coded = tl.load(plan + PLAN_CODED)
    segment = row - stripe * segments
    # A stripe that is RAW has no coded channels in its plan.
    if segment * SEGMENT >= coded:
        return
    source = words_ptr + (row + 1) * capacity - count
    target = out16_ptr + tl.load(word_at_ptr + row)
    for start in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        word = tl.load(source + i, mask=i < count, other=0)
        tl.store(target + i, word, mask=i < count)
    if tl.program_id(1) == 0:
        lane = tl.arange(0, LANES)
        state = tl.load(states_ptr + row * LANES + lane)
        at = tl.load(plan + AT_STATES) // 4 + segment * LANES
        tl.store(out32_ptr + at + lane, state)


@triton.jit
def write_planes(
    bits_ptr,  # [S, T, C]
    order_ptr,  # int64 [S, C]
    plan_ptr,  # int64 [S, PLAN_WIDTH]
    out8_ptr,
    tokens,
    channels,
    ITEMSIZE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """LOSSLESS byte and bit planes; a program for eight tokens, a byte of the bit planes."""
    stripe = tl.program_id(0).to(tl.int64)
    plan = plan_ptr + stripe * PLAN_WIDTH
    if tl.load(plan + PLAN_MODE) != LOSSLESS:
        return
    coded = tl.load(plan + PLAN_CODED)
    group = tl.program_id(1)
    p = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, 8)[:, None]
    t = (group * 8 + j).to(tl.int64)
    mask = (t < tokens) & (p < coded)[None, :]
    channel = tl.load(order_ptr + stripe * channels + p, mask=p < coded, other=0)
    source = bits_ptr + stripe * tokens * channels + t * channels + channel[None, :]
    bits = load_bits(source, mask, ITEMSIZE)
    byte_planes: tl.constexpr = MANTISSA_BITS // 8
    bit_planes: tl.constexpr = MANTISSA_BITS % 8
    aux = tl.load(plan + PLAN_AUX).to(tl.int32)
    plane = out8_ptr + tl.load(plan + AT_BYTE_PLANES)
    for k in tl.static_range(byte_planes):
        kept = 1 - ((aux >> k) & 1)
        byte = ((bits >> (8 * k)) & 255).to(tl.uint8)
        tl.store(plane + t * coded + p[None, :], byte, mask=tl.where(mask, kept, 0) != 0)
        plane += kept * tokens * coded
    plane = out8_ptr + tl.load(plan + AT_BIT_PLANES) + group.to(tl.int64) * bit_planes * coded
    for b in tl.static_range(bit_planes):
        bit = (bits >> (8 * byte_planes + b)) & 1
        byte = tl.sum(bit << j, 0).to(tl.uint8)
        tl.store(plane + b * coded + p, byte, mask=p < coded)


@triton.jit
def write_raw_channels(
    bits_ptr,  # [S, T, C]
    order_ptr,  # int64 [S, C]
    plan_ptr,  # int64 [S, PLAN_WIDTH]
    out_ptr,  # the sections, in the items of the tensor
    tokens,
    channels,
    ITEMSIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for the position of one channel."""
    stripe = tl.program_id(0).to(tl.int64)
    plan = plan_ptr + stripe * PLAN_WIDTH
    position = tl.program_id(1)
    rank = position - tl.load(plan + PLAN_PLACED)
    if (rank < 0) | (tl.load(plan + PLAN_MODE) == RAW):
        return
    channel = tl.load(order_ptr + stripe * channels + position)
    source = bits_ptr + stripe * tokens * channels + channel
    target = out_ptr + tl.load(plan + AT_RAW) // ITEMSIZE + rank * tokens
    for start in range(0, tokens, BLOCK):
        t = start + tl.arange(0, BLOCK)
        bits = load_bits(source + t.to(tl.int64) * channels, t < tokens, ITEMSIZE)
        store_bits(target + t, bits, t < tokens, ITEMSIZE)
