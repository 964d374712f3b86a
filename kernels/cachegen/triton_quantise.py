"""Values to symbols and back: statistics, the three quantisers, and what undoes them.

What each step computes stands in ``format.py``. A stripe of another mode than a kernel's is left
alone, so one launch covers the stripes of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import format as fmt
from .triton_common import (
    AT_BIT_PLANES,
    AT_BYTE_PLANES,
    AT_MAXIMA,
    AT_RAW,
    CENTRE,
    CONSTANT_SYMBOL_LOSSLESS,
    ESCAPE,
    LOSSLESS,
    MAX_CODE,
    PLAN_AUX,
    PLAN_CODED,
    PLAN_MODE,
    PLAN_PLACED,
    PLAN_WIDTH,
    TOKEN_MAX,
    UNIFORM,
    bits_of,
    float_of,
    load_bits,
    pair_of,
    rint,
    store_bits,
    turn_of,
)

CODE_BITS = tl.constexpr(fmt.CODE_BITS)
MEAN_BITS = tl.constexpr(fmt.MEAN_BITS)
HALF_CODE = tl.constexpr(1 << (fmt.CODE_BITS - 1))
MAX_FIXED = tl.constexpr(float(fmt.MAX_FIXED))
SMALLEST_MAX = tl.constexpr(fmt.SMALLEST_MAX)
MAX_DISTANCE = tl.constexpr(fmt.MAX_DISTANCE)
TOP_ABOVE_MEAN = tl.constexpr(fmt.TOP_ABOVE_MEAN)
# TOKEN_MAX codes plus this many are not negative, so that dividing them rounds down everywhere.
CODE_OFFSET = tl.constexpr(fmt.MAX_CODE + 1)


@triton.jit
def row_maxima(
    bits_ptr,  # [rows, C]
    maxima_ptr,  # int32 [rows]: float32 patterns of the largest finite magnitudes
    channels,
    CODE: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    INFINITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.int32)
    for start in range(0, channels, BLOCK):
        c = start + tl.arange(0, BLOCK)
        bits = load_bits(bits_ptr + row * channels + c, c < channels, ITEMSIZE)
        magnitude = bits & ((1 << (8 * ITEMSIZE - 1)) - 1)
        largest = tl.maximum(largest, tl.where(magnitude < INFINITY, magnitude, 0))
    value = float_of(tl.max(largest, 0), CODE)
    tl.store(maxima_ptr + row, value.to(tl.int32, bitcast=True))


@triton.jit
def _finite_values(pointer, mask, CODE: tl.constexpr, ITEMSIZE: tl.constexpr, INFINITY):
    """float32 values, zero for those that are not finite; and which are."""
    bits = load_bits(pointer, mask, ITEMSIZE)
    finite = (bits & INFINITY) != INFINITY
    return float_of(tl.where(finite, bits, 0), CODE), finite


@triton.jit
def uniform_sums(
    bits_ptr,  # [S, T, C]
    modes_ptr,  # int32 [S]
    rotary_ptr,  # int32 [S]: whether rotary means are wanted
    scale_ptr,  # float32 [S]: 2^(FIXED_BITS - E)
    turns_ptr,  # int32 [half]
    cosine_ptr,  # int32 [2^TURN_BITS]
    sums_ptr,  # int64 [S, C]: S1
    turned_ptr,  # int64 [S, C]: Ra and Rb
    squares_ptr,  # int64 [S, C]: S2 of each channel
    tokens,
    channels,
    half,
    CODE: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    INFINITY: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_T: tl.constexpr,  # at most 32, so that a block's sums fit 32 bits
    BLOCK_C: tl.constexpr,
):
    stripe = tl.program_id(0).to(tl.int64)
    if tl.load(modes_ptr + stripe) != UNIFORM:
        return
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    scale = tl.load(scale_ptr + stripe)
    source = bits_ptr + stripe * tokens * channels
    sums = tl.zeros([BLOCK_C], tl.int64)
    squares = tl.zeros([BLOCK_C], tl.int64)
    turned = tl.zeros([BLOCK_C], tl.int64)
    rotary = 0
    if TURNED:
        rotary = tl.load(rotary_ptr + stripe)
        i, other, sign = pair_of(c, half)
        turn = tl.load(turns_ptr + i, mask=c < channels, other=0)[None, :]
    for start in range(0, tokens, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)[:, None]
        mask = (t < tokens) & (c < channels)[None, :]
        row = source + t.to(tl.int64) * channels
        value, _ = _finite_values(row + c[None, :], mask, CODE, ITEMSIZE, INFINITY)
        fixed = rint(value * scale).to(tl.int32)
        sums += tl.sum(fixed, 0).to(tl.int64)
        squares += tl.sum(fixed * fixed, 0).to(tl.int64)
        # One condition is known when compiling, the other is not: the compiler wants them apart.
        if TURNED:  # noqa: SIM102
            if rotary != 0:
                value, _ = _finite_values(row + other[None, :], mask, CODE, ITEMSIZE, INFINITY)
                cos, sin = turn_of(t, turn, cosine_ptr, mask)
                twin = rint(value * scale).to(tl.int32)
                turned += tl.sum(fixed * cos - sign[None, :] * twin * sin, 0).to(tl.int64)
    at = stripe * channels + c
    tl.store(sums_ptr + at, sums, mask=c < channels)
    tl.store(squares_ptr + at, squares, mask=c < channels)
    if TURNED:
        tl.store(turned_ptr + at, turned, mask=c < channels)


@triton.jit
def _means(
    params_ptr, t, c, mask, rotary, turns_ptr, cosine_ptr, half, channels, TURNED: tl.constexpr
):
    """base int32 [T, C] of tokens t [T, 1] and channels c [C]; params_ptr: those of the stripe."""
    param = tl.load(params_ptr + c, mask=c < channels, other=0)[None, :]
    base = tl.where(mask, param << MEAN_BITS, 0)
    if TURNED:  # noqa: SIM102
        if rotary != 0:
            i, other, sign = pair_of(c, half)
            turn = tl.load(turns_ptr + i, mask=c < channels, other=0)[None, :]
            twin = tl.load(params_ptr + other, mask=c < channels, other=0) * sign
            cos, sin = turn_of(t, turn, cosine_ptr, mask)
            base = param * cos + twin[None, :] * sin
    return base


@triton.jit
def uniform_symbols(
    bits_ptr,  # [S, T, C]
    modes_ptr,  # int32 [S]
    rotary_ptr,  # int32 [S]: whether the parameters are rotary means
    factor_ptr,  # float32 [S]: 2^CODE_BITS / step
    dead_zone_ptr,  # int32 [S]
    params_ptr,  # int32 [S, C]
    turns_ptr,  # int32 [half]
    cosine_ptr,  # int32 [2^TURN_BITS]
    symbols_ptr,  # uint8 [S, T, C]
    tokens,
    channels,
    half,
    CODE: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    INFINITY: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    stripe = tl.program_id(0).to(tl.int64)
    if tl.load(modes_ptr + stripe) != UNIFORM:
        return
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (t < tokens) & (c < channels)[None, :]
    at = stripe * tokens * channels + t.to(tl.int64) * channels + c[None, :]
    value, finite = _finite_values(bits_ptr + at, mask, CODE, ITEMSIZE, INFINITY)
    fine = rint(value * tl.load(factor_ptr + stripe))
    xi = tl.minimum(tl.maximum(fine, -MAX_FIXED), MAX_FIXED).to(tl.int32)
    rotary = tl.load(rotary_ptr + stripe)
    d = xi - _means(
        params_ptr + stripe * channels, t, c, mask, rotary, turns_ptr, cosine_ptr, half, channels,
        TURNED,
    )  # fmt: skip
    n = (tl.abs(d) + HALF_CODE - tl.load(dead_zone_ptr + stripe)) >> CODE_BITS
    symbol = tl.where(d < 0, -n, n) + CENTRE
    symbol = tl.where((n > MAX_CODE) | (finite == 0), ESCAPE, symbol)
    tl.store(symbols_ptr + at, symbol.to(tl.uint8), mask=mask)


@triton.jit
def token_max_symbols(
    bits_ptr,  # [S, T, C]
    modes_ptr,  # int32 [S]
    codes_ptr,  # int32 [S]: Q
    maxima_ptr,  # float32 [S, T]
    params_ptr,  # int32 [S, C]
    symbols_ptr,  # uint8 [S, T, C]
    tokens,
    channels,
    CODE: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    INFINITY: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    stripe = tl.program_id(0).to(tl.int64)
    if tl.load(modes_ptr + stripe) != TOKEN_MAX:
        return
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    codes = tl.load(codes_ptr + stripe).to(tl.float32)
    origin = stripe * tokens * channels
    sums = tl.zeros([BLOCK_C], tl.int32)
    for start in range(0, tokens, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)[:, None]
        mask = (t < tokens) & (c < channels)[None, :]
        at = origin + t.to(tl.int64) * channels + c[None, :]
        maximum = tl.load(maxima_ptr + stripe * tokens + t, mask=t < tokens, other=1.0)
        factor = tl.div_rn(codes, tl.maximum(maximum, SMALLEST_MAX))
        value, _ = _finite_values(bits_ptr + at, mask, CODE, ITEMSIZE, INFINITY)
        sums += tl.sum(rint(value * factor).to(tl.int32), 0)
    positive = sums + CODE_OFFSET * tokens
    param = (2 * positive + tokens) // (2 * tokens) - CODE_OFFSET
    tl.store(params_ptr + stripe * channels + c, param, mask=c < channels)
    for start in range(0, tokens, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)[:, None]
        mask = (t < tokens) & (c < channels)[None, :]
        at = origin + t.to(tl.int64) * channels + c[None, :]
        maximum = tl.load(maxima_ptr + stripe * tokens + t, mask=t < tokens, other=1.0)
        factor = tl.div_rn(codes, tl.maximum(maximum, SMALLEST_MAX))
        value, finite = _finite_values(bits_ptr + at, mask, CODE, ITEMSIZE, INFINITY)
        symbol = rint(value * factor).to(tl.int32) - param[None, :] + CENTRE
        tl.store(symbols_ptr + at, tl.where(finite, symbol, ESCAPE).to(tl.uint8), mask=mask)


@triton.jit
def lossless_symbols(
    bits_ptr,  # [S, T, C]
    modes_ptr,  # int32 [S]
    params_ptr,  # int32 [S, C]
    used_ptr,  # int32 [S, C]: disjunction of each channel's patterns
    symbols_ptr,  # uint8 [S, T, C]
    tokens,
    channels,
    ITEMSIZE: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    ESCAPES_TOP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    stripe = tl.program_id(0).to(tl.int64)
    if tl.load(modes_ptr + stripe) != LOSSLESS:
        return
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    ones: tl.constexpr = (1 << EXPONENT_BITS) - 1
    limit: tl.constexpr = ones if ESCAPES_TOP else ones + 1
    origin = stripe * tokens * channels
    count = tl.zeros([BLOCK_C], tl.int32)
    total = tl.zeros([BLOCK_C], tl.int32)
    negative = tl.zeros([BLOCK_C], tl.int32)
    used = tl.zeros([BLOCK_T, BLOCK_C], tl.int32)
    for start in range(0, tokens, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)[:, None]
        mask = (t < tokens) & (c < channels)[None, :]
        bits = load_bits(bits_ptr + origin + t.to(tl.int64) * channels + c[None, :], mask, ITEMSIZE)
        exponent = (bits >> MANTISSA_BITS) & ones
        counted = ((exponent != 0) & (exponent < limit)).to(tl.int32)
        sign = (bits >> (EXPONENT_BITS + MANTISSA_BITS)) & 1
        count += tl.sum(counted, 0)
        total += tl.sum(counted * exponent, 0)
        negative += tl.sum(counted * sign, 0)
        used |= bits
    flip = (2 * negative > count).to(tl.int32)
    top = (2 * total + count) // tl.maximum(2 * count, 1) + TOP_ABOVE_MEAN
    top = tl.where(count > 0, top, 0)
    channel = stripe * channels + c
    tl.store(params_ptr + channel, 2 * top + flip, mask=c < channels)
    tl.store(used_ptr + channel, tl.reduce_or(used, 0), mask=c < channels)
    for start in range(0, tokens, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)[:, None]
        mask = (t < tokens) & (c < channels)[None, :]
        at = origin + t.to(tl.int64) * channels + c[None, :]
        bits = load_bits(bits_ptr + at, mask, ITEMSIZE)
        exponent = (bits >> MANTISSA_BITS) & ones
        sign = (bits >> (EXPONENT_BITS + MANTISSA_BITS)) & 1
        distance = top[None, :] - exponent
        outside = (distance < 1) | (distance > MAX_DISTANCE) | (exponent >= limit)
        distance = tl.where(exponent == 0, 0, distance)
        symbol = 1 + 2 * distance + (sign ^ flip[None, :])
        symbol = tl.where((exponent != 0) & outside, ESCAPE, symbol)
        tl.store(symbols_ptr + at, symbol.to(tl.uint8), mask=mask)


@triton.jit
def _raw_values(raw_ptr, plan, rank, t, tokens, mask, ITEMSIZE: tl.constexpr):
    """Patterns [T, C] of the RAW channels of these ranks."""
    at = tl.load(plan + AT_RAW) // ITEMSIZE + rank.to(tl.int64)[None, :] * tokens + t
    return load_bits(raw_ptr + at, mask, ITEMSIZE)


@triton.jit
def restore_values(
    symbols_ptr,  # uint8 [S, T, C]: by position
    slot_ptr,  # int32 [S, C]: position of each channel
    plan_ptr,  # int64 [S, PLAN_WIDTH]
    steps_ptr,  # float32 [S]: step * 2^-CODE_BITS
    params_ptr,  # int32 [S, C]
    turns_ptr,  # int32 [half]
    cosine_ptr,  # int32 [2^TURN_BITS]
    data_ptr,  # the sections, in the items of the tensor
    out_ptr,  # [S, T, C]
    tokens,
    channels,
    half,
    CODE: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    MAX_FINITE: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """UNIFORM and TOKEN_MAX, all but the exceptions."""
    stripe = tl.program_id(0).to(tl.int64)
    plan = plan_ptr + stripe * PLAN_WIDTH
    mode = tl.load(plan + PLAN_MODE)
    if (mode != UNIFORM) & (mode != TOKEN_MAX):
        return
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (t < tokens) & (c < channels)[None, :]
    slot = tl.load(slot_ptr + stripe * channels + c, mask=c < channels, other=0)
    row = stripe * tokens * channels + t.to(tl.int64) * channels
    coded = mask & (slot < tl.load(plan + PLAN_CODED))[None, :]
    symbol = tl.load(symbols_ptr + row + slot[None, :], mask=coded, other=CENTRE).to(tl.int32)
    code = symbol - CENTRE
    aux = tl.load(plan + PLAN_AUX).to(tl.int32)
    if mode == UNIFORM:
        base = _means(
            params_ptr + stripe * channels, t, c, mask, aux, turns_ptr, cosine_ptr, half, channels,
            TURNED,
        )  # fmt: skip
        value = ((code << CODE_BITS) + base).to(tl.float32) * tl.load(steps_ptr + stripe)
    else:
        at = tl.load(plan + AT_MAXIMA) // ITEMSIZE + t
        maximum = float_of(load_bits(data_ptr + at, t < tokens, ITEMSIZE), CODE)
        param = tl.load(params_ptr + stripe * channels + c, mask=c < channels, other=0)
        codes = tl.full([BLOCK_T, BLOCK_C], 0, tl.float32) + aux.to(tl.float32)
        value = tl.div_rn((code + param[None, :]).to(tl.float32), codes) * maximum
    bits = bits_of(value, CODE, MAX_FINITE)
    rank = slot - tl.load(plan + PLAN_PLACED).to(tl.int32)
    raw = mask & (rank >= 0)[None, :]
    bits = tl.where(raw, _raw_values(data_ptr, plan, rank, t, tokens, raw, ITEMSIZE), bits)
    store_bits(out_ptr + row + c[None, :], bits, mask, ITEMSIZE)


@triton.jit
def restore_lossless(
    symbols_ptr,  # uint8 [S, T, C]: by position
    slot_ptr,  # int32 [S, C]: position of each channel
    plan_ptr,  # int64 [S, PLAN_WIDTH]
    params_ptr,  # int32 [S, C]
    data8_ptr,  # uint8: the sections
    data_ptr,  # the sections, in the items of the tensor
    out_ptr,  # [S, T, C]
    tokens,
    channels,
    ITEMSIZE: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """LOSSLESS, all but the exceptions; a program for eight tokens, a byte of the bit planes."""
    stripe = tl.program_id(0).to(tl.int64)
    plan = plan_ptr + stripe * PLAN_WIDTH
    if tl.load(plan + PLAN_MODE) != LOSSLESS:
        return
    group = tl.program_id(1)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    j = tl.arange(0, 8)[:, None]
    t = group * 8 + j
    mask = (t < tokens) & (c < channels)[None, :]
    slot = tl.load(slot_ptr + stripe * channels + c, mask=c < channels, other=0)
    row = stripe * tokens * channels + t.to(tl.int64) * channels
    coded = tl.load(plan + PLAN_CODED)
    placed = slot < coded
    live = mask & placed[None, :]
    symbol = tl.load(symbols_ptr + row + slot[None, :], mask=live, other=CONSTANT_SYMBOL_LOSSLESS)
    symbol = symbol.to(tl.int32) - 1
    byte_planes: tl.constexpr = MANTISSA_BITS // 8
    bit_planes: tl.constexpr = MANTISSA_BITS % 8
    mantissa = tl.zeros([8, BLOCK_C], tl.int32)
    aux = tl.load(plan + PLAN_AUX).to(tl.int32)
    plane = data8_ptr + tl.load(plan + AT_BYTE_PLANES)
    for k in tl.static_range(byte_planes):
        kept = 1 - ((aux >> k) & 1)
        at = t.to(tl.int64) * coded + slot[None, :]
        byte = tl.load(plane + at, mask=tl.where(live, kept, 0) != 0, other=0).to(tl.int32)
        mantissa |= byte << (8 * k)
        plane += kept * tokens * coded
    plane = data8_ptr + tl.load(plan + AT_BIT_PLANES) + group.to(tl.int64) * bit_planes * coded
    for b in tl.static_range(bit_planes):
        byte = tl.load(plane + b * coded + slot, mask=placed & (c < channels), other=0)
        bit = (byte.to(tl.int32)[None, :] >> j) & 1
        mantissa |= bit << (8 * byte_planes + b)
    param = tl.load(params_ptr + stripe * channels + c, mask=c < channels, other=0)[None, :]
    distance = symbol >> 1
    sign = (symbol & 1) ^ (param & 1)
    sign = tl.where(placed[None, :], sign, 0)
    ones: tl.constexpr = (1 << EXPONENT_BITS) - 1
    exponent = tl.where(distance == 0, 0, ((param >> 1) - distance) & ones)
    bits = ((sign << EXPONENT_BITS | exponent) << MANTISSA_BITS) | mantissa
    rank = slot - tl.load(plan + PLAN_PLACED).to(tl.int32)
    raw = mask & (rank >= 0)[None, :]
    bits = tl.where(raw, _raw_values(data_ptr, plan, rank, t, tokens, raw, ITEMSIZE), bits)
    store_bits(out_ptr + row + c[None, :], bits, mask, ITEMSIZE)
