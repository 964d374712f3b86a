"""What the Triton kernels share: constants as ``constexpr``, bit patterns and their floats.

Kernels see tensors as bit patterns: uint8, int16 or int32, widened to int32 without their sign.
Float arithmetic must round each operation on its own, so every launch passes ``EXACT``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import format as fmt

EXACT = {"enable_fp_fusion": False}
"""No contraction of a product and a sum, whatever the default of the Triton release."""

LOSSLESS = tl.constexpr(fmt.LOSSLESS)
UNIFORM = tl.constexpr(fmt.UNIFORM)
TOKEN_MAX = tl.constexpr(fmt.TOKEN_MAX)

LANES = tl.constexpr(fmt.LANES)
SEGMENT = tl.constexpr(fmt.SEGMENT)
PROB_BITS = tl.constexpr(fmt.PROB_BITS)
PROB_SCALE = tl.constexpr(fmt.PROB_SCALE)
STATE_LOW = tl.constexpr(fmt.STATE_LOW)

TABLES = tl.constexpr(fmt.TABLES)
CONSTANT = tl.constexpr(fmt.CONSTANT)
RAW_CHANNEL = tl.constexpr(fmt.RAW_CHANNEL)
ESCAPE = tl.constexpr(fmt.ESCAPE)
CENTRE = tl.constexpr(fmt.CENTRE)
CONSTANT_SYMBOL_LOSSLESS = tl.constexpr(fmt.CONSTANT_SYMBOL_LOSSLESS)
MAX_CODE = tl.constexpr(fmt.MAX_CODE)

BFLOAT16 = tl.constexpr(fmt.DTYPES["bfloat16"].code)
FLOAT16 = tl.constexpr(fmt.DTYPES["float16"].code)

TURN_SHIFT = tl.constexpr(32 - fmt.TURN_BITS)
TURN_HALF = tl.constexpr(1 << (31 - fmt.TURN_BITS))
TURN_MASK = tl.constexpr((1 << fmt.TURN_BITS) - 1)
TURN_QUARTER = tl.constexpr(1 << (fmt.TURN_BITS - 2))

# Columns of the int64 plan of each stripe that the host makes once all sizes are known. The first
# ones are the offsets of its parts, in bytes from the start of all sections.
PARTS = 12
PLAN_MODE = tl.constexpr(PARTS)
PLAN_AUX = tl.constexpr(PARTS + 1)
PLAN_CODED = tl.constexpr(PARTS + 2)
PLAN_PLACED = tl.constexpr(PARTS + 3)
PLAN_INDEX_WIDTH = tl.constexpr(PARTS + 4)
PLAN_PARAM_WIDTH = tl.constexpr(PARTS + 5)
PLAN_INDEX_BASE = tl.constexpr(PARTS + 6)
PLAN_PARAM_BASE = tl.constexpr(PARTS + 7)
PLAN_EXCEPTIONS = tl.constexpr(PARTS + 8)
PLAN_WIDTH = tl.constexpr(PARTS + 9)

(
    AT_INDEX, AT_PARAM, AT_MAXIMA, AT_COUNTS, AT_STATES, AT_STREAM, AT_BYTE_PLANES, AT_BIT_PLANES,
    AT_RAW, AT_POSITIONS, AT_VALUES, AT_END,
) = (tl.constexpr(i) for i in range(PARTS))  # fmt: skip


@triton.jit
def load_bits(pointer, mask, ITEMSIZE: tl.constexpr):
    """Bit patterns as int32 >= 0 (of four bytes: any)."""
    bits = tl.load(pointer, mask=mask, other=0).to(tl.int32)
    if ITEMSIZE == 2:
        bits = bits & 0xFFFF
    return bits


@triton.jit
def store_bits(pointer, bits, mask, ITEMSIZE: tl.constexpr):
    if ITEMSIZE == 1:
        tl.store(pointer, bits.to(tl.uint8), mask=mask)
    elif ITEMSIZE == 2:
        tl.store(pointer, bits.to(tl.int16), mask=mask)
    else:
        tl.store(pointer, bits, mask=mask)


@triton.jit
def float_of(bits, CODE: tl.constexpr):
    """float32 of finite patterns of a dtype of two or four bytes."""
    if CODE == BFLOAT16:
        value = (bits << 16).to(tl.float32, bitcast=True)
    elif CODE == FLOAT16:
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = bits.to(tl.float32, bitcast=True)
    return value


@triton.jit
def bits_of(value, CODE: tl.constexpr, MAX_FINITE: tl.constexpr):
    """Patterns of float32 values limited to the dtype's finite range, rounded to nearest even."""
    value = tl.minimum(tl.maximum(value, -MAX_FINITE), MAX_FINITE)
    if CODE == BFLOAT16:
        wide = value.to(tl.int32, bitcast=True)
        bits = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16) & 0xFFFF
    elif CODE == FLOAT16:
        bits = value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    else:
        bits = value.to(tl.int32, bitcast=True)
    return bits


@triton.jit
def rint(value):
    """float32 rounded to the nearest integer, halves to the even one.

    Below 2^23 adding and subtracting 2^23 drops the fraction; from there on there is none.
    """
    size = tl.abs(value)
    whole = tl.where(size < 8388608.0, (size + 8388608.0) - 8388608.0, size)
    return tl.where(value < 0, -whole, whole)


@triton.jit
def turn_of(t, turn, cosine_ptr, mask):
    """(cos, sin) int32 of the rotary phase of tokens t with frequencies turn (both int32)."""
    phase = t.to(tl.uint32) * turn.to(tl.uint32) + TURN_HALF
    k = (phase >> TURN_SHIFT).to(tl.int32)
    cos = tl.load(cosine_ptr + k, mask=mask, other=0)
    sin = tl.load(cosine_ptr + ((k - TURN_QUARTER) & TURN_MASK), mask=mask, other=0)
    return cos, sin


@triton.jit
def pair_of(c, half):
    """(pair i, its other channel, -1 in the first half of a head and 1 in the second)."""
    within = c % (2 * half)
    second = (within >= half).to(tl.int32)
    return within - half * second, c + half - 2 * half * second, 2 * second - 1


@triton.jit
def popcount(bits):
    """int32 number of ones in uint32 patterns."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def rank_of(flag, lane):
    """(how many lower lanes have the flag, how many have it at all), int32."""
    # The lanes' bits are disjoint, so their sum is the ballot; sums of int32 take one instruction.
    ballot = tl.sum(flag.to(tl.int32) << lane, 0).to(tl.uint32, bitcast=True)
    below = (tl.full(lane.shape, 1, tl.uint32) << lane.to(tl.uint32)) - 1
    return popcount(ballot & below), popcount(ballot)
