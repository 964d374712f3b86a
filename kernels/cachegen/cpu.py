"""Encode and decode of cachegen sections with numba: one thread, without the interpreter lock.

Writes and reads the bytes that ``reference.py`` does; what each step means stands in ``format.py``.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path

import numba
import numpy as np
import torch
from numba import njit

from . import _vector as vec
from . import format as fmt
from ._vector import (
    array_at,
    bfloat16_of,
    bits_of,
    decode_block_vector,
    encode_block_vector,
    float16_of,
    float_of,
    lossless_bits,
    lossless_symbol,
    move_bit,
    never_inline,
    rint,
    token_max_code,
    uniform_symbol,
    uniform_value,
)
from .format import SectionError

_compiled = njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True)
_parts = _compiled(fmt.parts)
_header_in_range = _compiled(fmt.header_in_range)

Tables = namedtuple("Tables", "decode entries cost low high constant")
Kind = namedtuple("Kind", "code itemsize exponent_bits mantissa_bits escapes_top max_finite")
Scratch = namedtuple("Scratch", "symbols words stream positions")

_TORCH_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
_BF16, _FP16, _FP32 = (fmt.DTYPES[n].code for n in ("bfloat16", "float16", "float32"))
_FLOAT16_SCALE = np.float32(2.0**112)
_SMALLEST_MAX = np.float32(fmt.SMALLEST_MAX)
_MAX_FIXED = np.float32(fmt.MAX_FIXED)
# Sums of 2^26 each fit 32 bits over so many rows.
_FLUSH_ROWS = 32
_TILE = 64
_ERRORS = {
    1: "a field of the section header is out of range",
    2: "the length of the section does not match its parts",
    3: "a channel's index is out of range",
    4: "the number of raw channels is wrong",
    5: "a lane's state is out of range",
    6: "a segment's words do not match its symbols",
    7: "the positions of the exceptions are out of range or order",
    8: "rotary means without rotary frequencies",
    9: "a token's maximum is negative or not finite",
}


def decode_tables(bank: fmt.Bank) -> np.ndarray:
    """uint32 [(TABLES + 1) * 2^11]: symbol << 24 | freq << 11 | slot - cum, per table and slot."""
    tables = np.empty((fmt.TABLES + 1, fmt.PROB_SCALE), np.uint32)
    slot = np.arange(fmt.PROB_SCALE)
    for table, freq, cum in zip(tables, bank.freq, bank.cum, strict=True):
        symbol = np.repeat(np.arange(256), freq)
        table[:] = symbol << 24 | freq[symbol] << fmt.PROB_BITS | (slot - cum[symbol])
    return tables.ravel()


def encode_tables(bank: fmt.Bank) -> np.ndarray:
    """uint64 [(TABLES + 1) * 256]: m << 32 | shift << 24 | f << 12 | bias.

    f: the frequency; m: its reciprocal, with x / f = (x * m >> 32) >> shift for x < 2^31; bias:
    cum. For f = 1 the product gives x - 1, which bias makes good."""
    freq = bank.freq.astype(np.int64)
    # Idle lanes code whatever symbol they find with the whole range: a step that changes nothing.
    freq[fmt.TABLES] = fmt.PROB_SCALE
    freq = np.maximum(freq, 1)
    log2 = np.array([(int(f) - 1).bit_length() for f in freq.ravel()]).reshape(freq.shape)
    reciprocal = ((np.int64(1) << (31 + log2)) + freq - 1) // freq
    bias = bank.cum.astype(np.int64)
    bias[fmt.TABLES] = 0
    one = freq == 1
    reciprocal[one] = 0xFFFFFFFF
    bias[one] += fmt.PROB_SCALE - 1
    shift = np.where(one, 0, log2 - 1)
    entries = shift << 24 | freq << 12 | bias
    both = reciprocal.astype(np.uint64) << np.uint64(32) | entries.astype(np.uint64)
    return both.ravel()


@functools.cache
def _tables(mode: int, itemsize: int) -> Tables:
    bank = fmt.bank(mode)
    return Tables(
        decode_tables(bank), encode_tables(bank), fmt.costs(mode, itemsize).copy(),
        bank.low.copy(), bank.high.copy(), bank.constant,
    )  # fmt: skip


def _kind(tensor: torch.Tensor) -> Kind:
    d = fmt.DTYPES[str(tensor.dtype).removeprefix("torch.")]
    limit = np.float32(d.max_finite)
    return Kind(d.code, d.itemsize, d.exponent_bits, d.mantissa_bits, int(d.escapes_top), limit)


def _as_bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(_TORCH_BITS[tensor.element_size()]).numpy()


def _scratch(tokens: int, channels: int) -> Scratch:
    width = channels + 2 * LANES
    return Scratch(
        np.empty(tokens * width + vec.SYMBOL_SLACK, np.uint8),
        np.empty(tokens * SEGMENT + 2 * vec.WORD_SLACK, np.uint16),
        np.empty(tokens * channels, np.uint16),
        np.empty(tokens * channels, np.uint32),
    )


def encode(
    kv: torch.Tensor, quantisers: Sequence[fmt.Quantiser], turns: np.ndarray | None = None
) -> list[memoryview]:
    """Sections of ``kv[stripes, tokens, channels]``, contiguous on the CPU; a quantiser a stripe.

    turns: rotary frequencies uint32 [D / 2] of heads of D channels, or None.
    """
    stripes, tokens, channels = kv.shape
    kind = _kind(kv)
    room = fmt.raw_section_bytes(tokens, channels, kind.itemsize)
    out = np.empty(stripes * room, np.uint8)
    ends = np.empty(stripes, np.int64)
    plan = np.array(
        [(q.mode, q.alpha, q.dead_zone, q.rotary, q.max_code) for q in quantisers], np.float64
    )
    _encode_stripes(
        _as_bits(kv), plan, kind, _tables(UNIFORM, kind.itemsize), _tables(LOSSLESS, kind.itemsize),
        vec.COMPRESS, _scratch(tokens, channels), *_cos_sin(turns, tokens), out, ends,
    )  # fmt: skip
    view = memoryview(out)
    return [view[a:b] for a, b in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)]


def decode(
    sections: Sequence[memoryview | bytes], out: torch.Tensor, turns: np.ndarray | None = None
) -> None:
    """Decode one section a stripe into ``out[stripes, tokens, channels]``, contiguous on the CPU.

    turns: as in ``encode``. Raises SectionError for inconsistent sections.
    """
    stripes, tokens, channels = out.shape
    arrays = [np.frombuffer(s, np.uint8) for s in sections]
    if len(arrays) != stripes or any(a.size < fmt.HEADER_BYTES for a in arrays):
        raise SectionError("a section is missing or shorter than its header")
    addresses = np.array([a.__array_interface__["data"][0] for a in arrays], np.uintp)
    lengths = np.array([a.size for a in arrays], np.int64)
    kind = _kind(out)
    status = _decode_stripes(
        addresses, lengths, _as_bits(out), kind, _tables(UNIFORM, kind.itemsize),
        _tables(LOSSLESS, kind.itemsize), vec.SPREAD, _scratch(tokens, channels),
        *_cos_sin(turns, tokens),
    )  # fmt: skip
    if status:
        stripe, error = divmod(status, 16)
        raise SectionError(f"section {stripe}: {_ERRORS[error]}")


def _cos_sin(turns: np.ndarray | None, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """int32 [T, D / 2] each, in units of 2^-12; [0, 0] without frequencies."""
    if turns is None:
        return np.empty((0, 0), np.int32), np.empty((0, 0), np.int32)
    phase = np.arange(tokens, dtype=np.uint32)[:, None] * turns + np.uint32(
        1 << (31 - fmt.TURN_BITS)
    )
    k = phase >> (32 - fmt.TURN_BITS)
    quarter = 1 << (fmt.TURN_BITS - 2)
    table = fmt.cosine()
    return table[k], table[(k - quarter) & ((1 << fmt.TURN_BITS) - 1)]


def warm_up(dtype: torch.dtype = torch.bfloat16) -> None:
    """Compile, or load from numba's cache, what coding this dtype needs."""
    kv = torch.zeros(2, 2, 8).to(dtype)
    out = torch.empty_like(kv)
    decode(encode(kv, [fmt.quantiser("lossless", 1, 0, v) for v in (0, 1)]), out)


RAW, LOSSLESS, UNIFORM, TOKEN_MAX = fmt.RAW, fmt.LOSSLESS, fmt.UNIFORM, fmt.TOKEN_MAX
TABLES, CONSTANT, RAW_CHANNEL = fmt.TABLES, fmt.CONSTANT, fmt.RAW_CHANNEL
LANES, SEGMENT = fmt.LANES, fmt.SEGMENT


@_compiled
def _read(data, at, size):
    value = np.int64(0)
    for i in range(size):
        value |= np.int64(data[at + i]) << (8 * i)
    return value


@_compiled
def _write(out, at, value, size):
    never_inline()
    for i in range(size):
        out[at + i] = (np.int64(value) >> (8 * i)) & 255


@_compiled
def _write_fixed(out, at, end, values, base, width):
    """Fixed-width integers, least significant bit first, zeros up to *end*."""
    never_inline()
    pending, bits = np.int64(0), 0
    if width:
        for value in values:
            pending |= (np.int64(value) - base) << bits
            bits += width
            while bits >= 8:
                out[at] = pending & 255
                at += 1
                pending >>= 8
                bits -= 8
    if bits:
        out[at] = pending
        at += 1
    out[at:end] = 0


@_compiled
def _read_fixed(data, at, values, base, width):
    never_inline()
    pending, bits = np.int64(0), 0
    for i in range(len(values)):
        while bits < width:
            pending |= np.int64(data[at]) << bits
            at += 1
            bits += 8
        values[i] = base + (pending & ((1 << width) - 1))
        pending >>= width
        bits -= width


@_compiled
def _bit_length(value):
    bits = 0
    while value > 0:
        value >>= 1
        bits += 1
    return bits


@_compiled
def _load_row(row, code, value):
    """float32 values of a row of bit patterns; zero for those that are not finite."""
    never_inline()
    if code == _BF16:
        for c in range(len(row)):
            finite = (row[c] & 0x7F80) != 0x7F80
            value[c] = float_of(np.uint32(row[c]) << 16) if finite else np.float32(0)
    elif code == _FP16:
        for c in range(len(row)):
            finite = (row[c] & 0x7C00) != 0x7C00
            size = float_of(np.uint32(row[c] & 0x7FFF) << 13) * _FLOAT16_SCALE
            size = size if finite else np.float32(0)
            value[c] = -size if row[c] & 0x8000 else size
    else:
        for c in range(len(row)):
            finite = (row[c] & 0x7F800000) != 0x7F800000
            value[c] = float_of(row[c]) if finite else np.float32(0)


@_compiled
def _store_row(value, count, kind, bits):
    """Bit patterns of the first *count* float32 values, limited to the dtype's finite range."""
    never_inline()
    limit = kind.max_finite
    if kind.code == _BF16:
        for p in range(count):
            v = value[p]
            v = limit if v > limit else v
            v = -limit if v < -limit else v
            bits[p] = bfloat16_of(v)
    elif kind.code == _FP16:
        for p in range(count):
            v = value[p]
            v = limit if v > limit else v
            v = -limit if v < -limit else v
            bits[p] = float16_of(v)
    else:
        for p in range(count):
            v = value[p]
            v = limit if v > limit else v
            v = -limit if v < -limit else v
            bits[p] = bits_of(v)


@_compiled
def _float_bits_limit(kind):
    """The pattern of infinity: magnitudes from here on are not finite."""
    return ((1 << kind.exponent_bits) - 1) << kind.mantissa_bits


@_compiled
def _largest(bits, kind):
    """(largest finite |x| as a bit pattern, whether all values are finite)."""
    never_inline()
    tokens, channels = bits.shape
    magnitude = (1 << (kind.exponent_bits + kind.mantissa_bits)) - 1
    highest = np.zeros_like(bits[0])
    for t in range(tokens):
        row = bits[t]
        for c in range(channels):
            m = row[c] & magnitude
            highest[c] = m if m > highest[c] else highest[c]
    largest = np.int64(0)
    for c in range(channels):
        largest = max(largest, np.int64(highest[c]))
    infinity = _float_bits_limit(kind)
    if largest < infinity:
        return largest, True
    largest = np.int64(0)
    for t in range(tokens):
        for c in range(channels):
            m = np.int64(bits[t, c] & magnitude)
            if m < infinity and m > largest:
                largest = m
    return largest, False


@_compiled
def _escape_non_finite(bits, kind, symbols):
    never_inline()
    tokens, channels = bits.shape
    infinity = _float_bits_limit(kind)
    for t in range(tokens):
        for c in range(channels):
            if (bits[t, c] & infinity) == infinity:
                symbols[t, c] = fmt.ESCAPE


@_compiled
def _rounded_mean(total, scale):
    mean = np.int64(math.floor(np.float64(total) * scale + 0.5))
    return min(max(mean, -fmt.MAX_PARAM), fmt.MAX_PARAM)


@_compiled
def _fill_base(base, param, rotary, cos, sin, t):
    """base[t, c] of one token."""
    never_inline()
    if not rotary:
        for c in range(len(base)):
            base[c] = param[c] << fmt.MEAN_BITS
        return
    half = cos.shape[1]
    for head in range(0, len(base), 2 * half):
        first, second = param[head : head + half], param[head + half : head + 2 * half]
        base_a, base_b = base[head : head + half], base[head + half : head + 2 * half]
        for i in range(half):
            base_a[i] = first[i] * cos[t, i] - second[i] * sin[t, i]
            base_b[i] = first[i] * sin[t, i] + second[i] * cos[t, i]


@_compiled
def _uniform_symbols(bits, kind, alpha, dead_zone, rotary, cos, sin, symbols, param):
    """Returns the step, 0 where the range of the stripe is beyond UNIFORM; and whether rotary."""
    never_inline()
    tokens, channels = bits.shape
    pattern, all_finite = _largest(bits, kind)
    value = np.empty(channels, np.float32)
    one = np.empty(1, bits.dtype)
    one[0] = pattern
    _load_row(one, kind.code, value[:1])
    exponent = np.int64(bits_of(value[0]) >> 23) - 127
    if pattern > 0 and abs(exponent) > fmt.EXPONENT_LIMIT:
        return np.float32(0), False
    step = np.float32(1)
    param[:] = 0
    rotary = rotary and pattern > 0 and len(cos) == tokens
    if pattern > 0:
        unit = 2.0 ** np.float64(exponent - fmt.FIXED_BITS)
        scale = np.float32(1 / unit)
        fixed = np.empty(channels, np.int32)
        square = np.zeros(channels, np.int32)
        part = np.zeros(channels, np.int32)
        turned_part = np.zeros(channels, np.int32)
        total = np.int64(0)
        sums = np.zeros(channels, np.int64)
        turned = np.zeros(channels, np.int64)
        half = cos.shape[1]
        for t in range(tokens):
            _load_row(bits[t], kind.code, value)
            for c in range(channels):
                fixed[c] = np.int32(rint(value[c] * scale))
            for c in range(channels):
                part[c] += fixed[c]
                square[c] += fixed[c] * fixed[c]
            if rotary:
                for head in range(0, channels, 2 * half):
                    a, b = fixed[head : head + half], fixed[head + half : head + 2 * half]
                    to_a = turned_part[head : head + half]
                    to_b = turned_part[head + half : head + 2 * half]
                    for i in range(half):
                        to_a[i] += a[i] * cos[t, i] + b[i] * sin[t, i]
                        to_b[i] += b[i] * cos[t, i] - a[i] * sin[t, i]
            if t % _FLUSH_ROWS == _FLUSH_ROWS - 1 or t == tokens - 1:
                for c in range(channels):
                    total += np.int64(square[c])
                    sums[c] += part[c]
                    turned[c] += turned_part[c]
                square[:] = 0
                part[:] = 0
                turned_part[:] = 0
        mean_square = np.float64(total) / np.float64(tokens * channels)
        step = np.float32(alpha * (math.sqrt(mean_square) * unit))
        factor = 4 * unit / (np.float64(tokens) * np.float64(step))
        plain_power, turned_power = np.int64(0), np.int64(0)
        for c in range(channels):
            param[c] = _rounded_mean(sums[c], factor)
            sums[c] = _rounded_mean(turned[c], factor / (1 << fmt.TURN_BITS))
            plain_power += np.int64(param[c]) * np.int64(param[c])
            turned_power += sums[c] * sums[c]
        rotary = rotary and turned_power > plain_power
        if rotary:
            param[:] = sums
    inverse = np.float32(1 << fmt.CODE_BITS) / step
    base = np.empty(channels, np.int32)
    nearest = np.int32((1 << (fmt.CODE_BITS - 1)) - dead_zone)
    for t in range(tokens):
        _load_row(bits[t], kind.code, value)
        if t == 0 or rotary:
            _fill_base(base, param, rotary, cos, sin, t)
        row = symbols[t]
        for c in range(channels):
            row[c] = uniform_symbol(value[c] * inverse, base[c], nearest)
    if not all_finite:
        _escape_non_finite(bits, kind, symbols)
    return step, rotary


@_compiled
def _token_max_symbols(bits, kind, max_code, symbols, param, maxima):
    never_inline()
    tokens, channels = bits.shape
    value = np.empty(channels, np.float32)
    sums = np.zeros(channels, np.int32)
    codes = np.float32(max_code)
    all_finite = True
    for t in range(tokens):
        pattern, finite = _largest(bits[t : t + 1], kind)
        all_finite = all_finite and finite
        maxima[t] = pattern
        _load_row(maxima[t : t + 1], kind.code, value[:1])
        factor = codes / max(value[0], _SMALLEST_MAX)
        _load_row(bits[t], kind.code, value)
        row = symbols[t]
        for c in range(channels):
            code = np.int32(rint(value[c] * factor))
            sums[c] += code
            row[c] = code + fmt.CENTRE
    for c in range(channels):
        param[c] = (2 * np.int64(sums[c]) + tokens) // (2 * tokens)
    for t in range(tokens):
        row = symbols[t]
        for c in range(channels):
            row[c] -= param[c]
    if not all_finite:
        _escape_non_finite(bits, kind, symbols)


@_compiled
def _lossless_symbols(bits, kind, symbols, param, used):
    """used: set to the disjunction of each channel's bit patterns."""
    never_inline()
    tokens, channels = bits.shape
    top_field = (1 << kind.exponent_bits) - 1
    limit = top_field if kind.escapes_top else top_field + 1
    count = np.zeros(channels, np.int32)
    total = np.zeros(channels, np.int32)
    negative = np.zeros(channels, np.int32)
    used[:] = 0
    sign_shift = kind.exponent_bits + kind.mantissa_bits
    for t in range(tokens):
        row = bits[t]
        for c in range(channels):
            x = np.int64(row[c])
            exponent = (x >> kind.mantissa_bits) & top_field
            counted = np.int64(exponent != 0 and exponent < limit)
            count[c] += counted
            total[c] += exponent * counted
            negative[c] += (x >> sign_shift) * counted
            used[c] |= row[c]
    for c in range(channels):
        n, top = np.int64(count[c]), np.int64(0)
        if n:
            top = (2 * np.int64(total[c]) + n) // (2 * n) + fmt.TOP_ABOVE_MEAN
        param[c] = 2 * top + np.int64(2 * np.int64(negative[c]) > n)
    for t in range(tokens):
        row, target = bits[t], symbols[t]
        for c in range(channels):
            target[c] = lossless_symbol(
                row[c], param[c], kind.exponent_bits, kind.mantissa_bits, limit
            )


@_compiled
def _choose(symbols, tables, constant, raw_cost, index):
    """Index of each channel; constant: bool [C], raw_cost: that of a channel as it is."""
    never_inline()
    tokens, channels = symbols.shape
    histogram = np.zeros(_TILE * 256, np.int32)
    cost = np.empty(TABLES, np.int32)
    lowest = np.full(channels, 255, np.uint8)
    highest = np.zeros(channels, np.uint8)
    for t in range(tokens):
        row = symbols[t]
        for c in range(channels):
            lowest[c] = row[c] if row[c] < lowest[c] else lowest[c]
            highest[c] = row[c] if row[c] > highest[c] else highest[c]
    for first in range(0, channels, _TILE):
        width = min(_TILE, channels - first)
        for t in range(tokens):
            row = symbols[t, first : first + width]
            for i in range(width):
                histogram[(np.uint64(i) << np.uint64(8)) + np.uint64(row[i])] += 1
        for i in range(width):
            c = first + i
            if constant[c]:
                index[c] = CONSTANT
                histogram[256 * i + lowest[c]] = 0
                continue
            cost[:] = 0
            for s in range(lowest[c], np.int64(highest[c]) + 1):
                n = histogram[256 * i + s]
                histogram[256 * i + s] = 0
                if n:
                    line = tables.cost[s]
                    for k in range(TABLES):
                        cost[k] += n * line[k]
            # The number below the cost makes the first of equals the smallest.
            best = np.int64(cost[0]) << 8
            for k in range(1, TABLES):
                key = np.int64(cost[k]) << 8 | k
                best = key if key < best else best
            index[c] = RAW_CHANNEL if best >> 8 > raw_cost else best & 255


@_compiled
def _collect_escapes(symbols, index, tables, positions):
    """Turn symbols without a frequency into escapes; positions of all escapes, and their number."""
    never_inline()
    tokens, channels = symbols.shape
    low = np.zeros(channels, np.uint8)
    high = np.full(channels, 255, np.uint8)
    for c in range(channels):
        if index[c] < TABLES:
            low[c] = tables.low[index[c]]
            high[c] = tables.high[index[c]]
    found = 0
    for t in range(tokens):
        row = symbols[t]
        outside = 0
        for c in range(channels):
            outside |= np.int64(row[c] < low[c]) | np.int64(row[c] > high[c])
        if outside:
            for c in range(channels):
                if row[c] < low[c] or row[c] > high[c]:
                    row[c] = fmt.ESCAPE
                    positions[found] = t * channels + c
                    found += 1
    return found


@_compiled
def _sort_channels(index, order):
    """order: the channels by index, stably. Returns how many are coded, and constant."""
    never_inline()
    start = np.zeros(RAW_CHANNEL + 2, np.int64)
    for c in range(len(index)):
        start[index[c] + 1] += 1
    for i in range(1, len(start)):
        start[i] += start[i - 1]
    coded, constant = start[CONSTANT], start[RAW_CHANNEL] - start[CONSTANT]
    for c in range(len(index)):
        order[start[index[c]]] = c
        start[index[c]] += 1
    return coded, constant


@_compiled
def _encode_segment(symbols, order, index, first, coded, tables, compress, state, words):
    """Code positions first to first + SEGMENT; returns where in *words* the stream begins."""
    never_inline()
    tokens, channels = symbols.shape
    flat = symbols.reshape(-1)
    positions = min(SEGMENT, coded - first)
    offset = np.empty(LANES, np.int32)
    channel = np.empty(LANES, np.int32)
    state[:] = fmt.STATE_LOW
    at = len(words) - vec.WORD_SLACK
    for block in range((positions + LANES - 1) // LANES - 1, -1, -1):
        for lane in range(LANES):
            p = block * LANES + lane
            idle = p >= positions
            channel[lane] = 0 if idle else order[first + p]
            offset[lane] = 256 * (TABLES if idle else index[order[first + p]])
        at = encode_block_vector(
            state, words, at, tables.entries, offset, compress, flat,
            0, channel, channels, tokens,
        )  # fmt: skip
    return at


@_compiled
def _write_planes(bits, kind, left_out, order, coded, out, offsets):
    """The mantissas as byte planes, without those of the mask *left_out*, and bit planes."""
    never_inline()
    tokens = bits.shape[0]
    planes = kind.mantissa_bits // 8
    rest_bits = kind.mantissa_bits % 8
    at = offsets[6]
    for k in range(planes):
        if (left_out >> k) & 1 == 0:
            for t in range(tokens):
                row = bits[t]
                line = out[at : at + coded]
                for p in range(coded):
                    line[p] = np.int64(row[order[p]]) >> (8 * k)
                at += coded
    out[at : offsets[7]] = 0
    at = offsets[7]
    rest = np.empty((8, coded), np.uint8)
    for group in range(0, tokens, 8):
        rows = min(8, tokens - group)
        for j in range(rows):
            row = bits[group + j]
            line = rest[j]
            for p in range(coded):
                line[p] = np.int64(row[order[p]]) >> (8 * planes)
        for b in range(rest_bits):
            line = out[at : at + coded]
            line[:] = 0
            for j in range(rows):
                source = rest[j]
                for p in range(coded):
                    line[p] = move_bit(line[p], source[p], b, j)
            at += coded
    out[at : offsets[8]] = 0


@_compiled
def _encode_stripe(bits, plan, kind, lossy, lossless, compress, scratch, cos, sin, out, start):
    """Write the section of bits [T, C] to out[start:]; returns its end."""
    never_inline()
    tokens, channels = bits.shape
    itemsize = kind.itemsize
    symbols = scratch.symbols[: tokens * channels].reshape(tokens, channels)
    param = np.empty(channels, np.int32)
    constant = np.empty(channels, np.bool_)
    maxima = np.empty(tokens, bits.dtype)
    mode = np.int64(plan[0])
    aux = np.int64(0)
    step, rotary = np.float32(0), False
    plain_bits = 0
    tables = lossy
    if mode == UNIFORM:
        step, rotary = _uniform_symbols(
            bits, kind, plan[1], np.int64(plan[2]), plan[3] != 0, cos, sin, symbols, param
        )
        aux = np.int64(rotary)
        if step == 0:
            mode = LOSSLESS
    elif mode == TOKEN_MAX:
        aux = np.int64(plan[4])
        _token_max_symbols(bits, kind, aux, symbols, param, maxima)
    if mode == LOSSLESS:
        aux = np.int64(0)
        tables = lossless
        plain_bits = kind.mantissa_bits
        used = np.empty(channels, bits.dtype)
        _lossless_symbols(bits, kind, symbols, param, used)
        for c in range(channels):
            constant[c] = used[c] == 0
    else:
        differs = np.zeros(channels, np.uint8)
        for t in range(tokens):
            row = symbols[t]
            for c in range(channels):
                differs[c] |= row[c] ^ np.uint8(fmt.CENTRE)
        for c in range(channels):
            constant[c] = differs[c] == 0

    index = np.empty(channels, np.uint8)
    raw_cost = np.int64(tokens) * (8 * itemsize - plain_bits) * fmt.COST_UNIT
    _choose(symbols, tables, constant, raw_cost, index)
    escapes = _collect_escapes(symbols, index, tables, scratch.positions)
    order = np.empty(channels, np.int64)
    coded, constants = _sort_channels(index, order)
    raw_channels = channels - coded - constants

    param_base, found = np.int64(0), False
    for c in range(channels):
        if rotary or index[c] < TABLES or (index[c] == CONSTANT and mode != LOSSLESS):
            param_base = min(param_base, np.int64(param[c])) if found else np.int64(param[c])
            found = True
    highest = np.int64(0)
    index_low, index_high = np.int64(255), np.int64(0)
    for c in range(channels):
        if not (rotary or index[c] < TABLES or (index[c] == CONSTANT and mode != LOSSLESS)):
            param[c] = param_base
        highest = max(highest, param[c] - param_base)
        index_low, index_high = min(index_low, index[c]), max(index_high, index[c])
    index_width = _bit_length(index_high - index_low)
    param_width = _bit_length(highest)

    segments = (coded + SEGMENT - 1) // SEGMENT
    counts = np.empty(segments, np.int64)
    states = np.empty((segments, LANES), np.uint32)
    total = 0
    for i in range(segments):
        at = _encode_segment(
            symbols, order, index, i * SEGMENT, coded, tables, compress, states[i], scratch.words
        )
        counts[i] = len(scratch.words) - vec.WORD_SLACK - at
        scratch.stream[total : total + counts[i]] = scratch.words[at : at + counts[i]]
        total += counts[i]

    byte_planes = bit_planes = 0
    if mode == LOSSLESS:
        bit_planes = kind.mantissa_bits % 8
        for k in range(kind.mantissa_bits // 8):
            any_bit = np.int64(0)
            for c in range(channels):
                if index[c] < TABLES:
                    any_bit |= (np.int64(used[c]) >> (8 * k)) & 255
            if any_bit:
                byte_planes += 1
            else:
                aux |= 1 << k
    offsets = _parts(
        mode, index_width, param_width, tokens, channels, itemsize, coded, total, byte_planes,
        bit_planes, raw_channels, escapes,
    )  # fmt: skip
    raw_end = fmt.HEADER_BYTES + (tokens * channels * itemsize + 3) // 4 * 4
    if offsets[11] >= raw_end:
        out[start : start + fmt.HEADER_BYTES] = 0
        flat = bits.reshape(-1).view(np.uint8)
        out[start + fmt.HEADER_BYTES : start + fmt.HEADER_BYTES + len(flat)] = flat
        out[start + fmt.HEADER_BYTES + len(flat) : start + raw_end] = 0
        return start + raw_end

    section = out[start : start + offsets[11]]
    section[0] = mode
    section[1] = aux
    section[2] = index_low
    section[3] = index_width
    section[4] = param_width
    section[5] = 0
    _write(section, 6, raw_channels, 2)
    _write(section, 8, param_base, 4)
    _write(section, 12, escapes, 4)
    _write(section, 16, bits_of(step), 4)
    _write_fixed(section, offsets[0], offsets[1], index, index_low, index_width)
    _write_fixed(section, offsets[1], offsets[2], param, param_base, param_width)
    at = offsets[2]
    if mode == TOKEN_MAX:
        for t in range(tokens):
            _write(section, at, maxima[t], itemsize)
            at += itemsize
    section[at : offsets[3]] = 0
    for i in range(segments):
        _write(section, offsets[3] + 4 * i, counts[i], 4)
        for lane in range(LANES):
            _write(section, offsets[4] + 4 * (LANES * i + lane), states[i, lane], 4)
    section[offsets[5] : offsets[5] + 2 * total] = scratch.stream[:total].view(np.uint8)
    section[offsets[5] + 2 * total : offsets[6]] = 0
    if mode == LOSSLESS:
        _write_planes(bits, kind, aux, order, coded, section, offsets)
    at = offsets[8]
    for i in range(channels - raw_channels, channels):
        for t in range(tokens):
            _write(section, at, bits[t, order[i]], itemsize)
            at += itemsize
    section[at : offsets[9]] = 0
    flat_bits = bits.reshape(-1)
    for i in range(escapes):
        position = np.int64(scratch.positions[i])
        _write(section, offsets[9] + 4 * i, position, 4)
        _write(section, offsets[10] + itemsize * i, flat_bits[position], itemsize)
    section[offsets[10] + itemsize * escapes :] = 0
    return start + offsets[11]


@_compiled
def _decode_segment(
    data, count_at, states_at, source, segment, coded, order, index, tables, spread, scratch,
    stride, tokens,
):  # fmt: skip
    """Decode the symbols of a segment, whose words begin at *source*. Returns words, or -error."""
    never_inline()
    count = _read(data, count_at, 4)
    scratch.words[:count] = data[source : source + 2 * count].view(np.uint16)
    scratch.words[count : count + vec.WORD_SLACK] = 0
    state = np.empty(LANES, np.uint32)
    for lane in range(LANES):
        value = _read(data, states_at + 4 * lane, 4)
        if value < fmt.STATE_LOW or value >= 1 << 31:
            return -5
        state[lane] = value
    offset = np.empty(LANES, np.int32)
    first = segment * SEGMENT
    last = min(first + SEGMENT, coded)
    at = 0
    for start in range(first, last, LANES):
        for lane in range(LANES):
            table = index[order[start + lane]] if start + lane < last else np.uint8(TABLES)
            offset[lane] = fmt.PROB_SCALE * np.int64(table)
        at = decode_block_vector(
            state, scratch.words, at, count, tables.decode, offset, spread, scratch.symbols,
            start, stride, tokens,
        )  # fmt: skip
    if at != count:
        return -6
    for lane in range(LANES):
        if state[lane] != fmt.STATE_LOW:
            return -6
    return count


@_compiled
def _decode_stripe(data, bits, kind, lossy, lossless, spread, scratch, cos, sin):
    """Decode one section to bits [T, C]. Returns 0 or an error."""
    never_inline()
    tokens, channels = bits.shape
    itemsize = kind.itemsize
    mode, aux = np.int64(data[0]), np.int64(data[1])
    size = len(data)
    if mode == RAW:
        flat = bits.reshape(-1).view(np.uint8)
        if size != fmt.HEADER_BYTES + (len(flat) + 3) // 4 * 4:
            return 2
        flat[:] = data[fmt.HEADER_BYTES : fmt.HEADER_BYTES + len(flat)]
        return 0
    index_base, index_width, param_width = np.int64(data[2]), np.int64(data[3]), np.int64(data[4])
    raw_channels = _read(data, 6, 2)
    param_base = np.int64(np.int32(_read(data, 8, 4)))
    exceptions = _read(data, 12, 4)
    step = float_of(np.uint32(_read(data, 16, 4)))
    byte_planes = kind.mantissa_bits // 8
    if not _header_in_range(
        mode, aux, index_width, param_width, np.int64(data[5]), param_base, step, byte_planes
    ):
        return 1
    if mode == UNIFORM and aux and len(cos) != tokens:
        return 8
    kept_planes = bit_planes = 0
    tables = lossy
    if mode == LOSSLESS:
        tables = lossless
        bit_planes = kind.mantissa_bits % 8
        for k in range(byte_planes):
            kept_planes += 1 - ((aux >> k) & 1)
    offsets = _parts(
        mode, index_width, param_width, tokens, channels, itemsize, 0, 0, kept_planes, bit_planes,
        raw_channels, exceptions,
    )  # fmt: skip
    if offsets[11] > size:
        return 2
    index = np.empty(channels, np.uint8)
    param = np.empty(channels, np.int32)
    _read_fixed(data, offsets[0], index, index_base, index_width)
    _read_fixed(data, offsets[1], param, param_base, param_width)
    # The largest sum fits a byte, so nothing has wrapped around.
    for c in range(channels):
        if index[c] > RAW_CHANNEL:
            return 3
    order = np.empty(channels, np.int64)
    coded, constants = _sort_channels(index, order)
    if channels - coded - constants != raw_channels:
        return 4
    offsets = _parts(
        mode, index_width, param_width, tokens, channels, itemsize, coded, 0, kept_planes,
        bit_planes, raw_channels, exceptions,
    )  # fmt: skip
    if offsets[11] > size:
        return 2
    segments = (coded + SEGMENT - 1) // SEGMENT
    words = np.int64(0)
    for i in range(segments):
        count = _read(data, offsets[3] + 4 * i, 4)
        if count > tokens * SEGMENT:
            return 6
        words += count
    offsets = _parts(
        mode, index_width, param_width, tokens, channels, itemsize, coded, words, kept_planes,
        bit_planes, raw_channels, exceptions,
    )  # fmt: skip
    if offsets[11] != size:
        return 2
    last = np.int64(-1)
    for i in range(exceptions):
        position = _read(data, offsets[9] + 4 * i, 4)
        if position <= last or position >= tokens * channels:
            return 7
        last = position
    if mode == TOKEN_MAX:
        infinity = _float_bits_limit(kind)
        for t in range(tokens):
            if _read(data, offsets[2] + itemsize * t, itemsize) >= infinity:
                return 9

    stride = (channels + LANES - 1) // LANES * LANES
    symbols = scratch.symbols[: tokens * stride].reshape(tokens, stride)
    source = offsets[5]
    for i in range(segments):
        count = _decode_segment(
            data, offsets[3] + 4 * i, offsets[4] + 4 * LANES * i, source, i, coded, order, index,
            tables, spread, scratch, stride, tokens,
        )  # fmt: skip
        if count < 0:
            return -count
        source += 2 * count
    placed = coded + constants
    symbols[:, coded:placed] = tables.constant

    # Unsigned, so that looking up needs no test for negative ones.
    slot = np.empty(channels, np.uint32)
    for p in range(channels):
        slot[order[p]] = p
    if mode == LOSSLESS:
        _restore_lossless(
            data, offsets, aux, kind, symbols, param, order, slot, coded, constants, bits
        )
    else:
        _restore_values(data, offsets, mode, aux, step, kind, symbols, param, slot, cos, sin, bits)
    at = offsets[8]
    for i in range(placed, channels):
        for t in range(tokens):
            bits[t, order[i]] = _read(data, at, itemsize)
            at += itemsize
    flat_bits = bits.reshape(-1)
    for i in range(exceptions):
        position = _read(data, offsets[9] + 4 * i, 4)
        flat_bits[position] = _read(data, offsets[10] + itemsize * i, itemsize)
    return 0


@_compiled
def _restore_values(data, offsets, mode, aux, step, kind, symbols, param, slot, cos, sin, bits):
    never_inline()
    tokens, channels = bits.shape
    value = np.empty(channels, np.float32)
    base = np.empty(channels, np.int32)
    scale = step * np.float32(2.0**-fmt.CODE_BITS)
    codes = np.float32(aux)
    maximum = np.empty(1, bits.dtype)
    largest = np.empty(1, np.float32)
    symbol = np.empty(channels, np.uint8)
    for t in range(tokens):
        row = symbols[t]
        for c in range(channels):
            symbol[c] = row[slot[c]]
        if mode == UNIFORM:
            if t == 0 or aux:
                _fill_base(base, param, aux != 0, cos, sin, t)
            for c in range(channels):
                value[c] = uniform_value(symbol[c], base[c]) * scale
        else:
            maximum[0] = _read(data, offsets[2] + t * kind.itemsize, kind.itemsize)
            _load_row(maximum, kind.code, largest)
            for c in range(channels):
                value[c] = token_max_code(symbol[c], param[c]) / codes * largest[0]
        _store_row(value, channels, kind, bits[t])


@_compiled
def _restore_lossless(
    data, offsets, left_out, kind, symbols, param, order, slot, coded, constants, bits
):
    never_inline()
    tokens, channels = bits.shape
    planes = kind.mantissa_bits // 8
    rest_bits = kind.mantissa_bits % 8
    settings = np.zeros(channels, np.int32)
    for p in range(coded):
        settings[p] = param[order[p]]
    rest = np.empty((8, coded), np.uint8)
    mantissa = np.zeros(channels, np.uint32)
    placed_bits = np.zeros(channels, bits.dtype)
    for t in range(tokens):
        if t % 8 == 0:
            rest[:] = 0
            at = offsets[7] + t // 8 * rest_bits * coded
            for b in range(rest_bits):
                source = data[at + b * coded : at + (b + 1) * coded]
                for j in range(8):
                    line = rest[j]
                    for p in range(coded):
                        line[p] = move_bit(line[p], source[p], j, b)
        line = rest[t % 8]
        for p in range(coded):
            mantissa[p] = np.uint32(line[p]) << (8 * planes)
        at = offsets[6] + t * coded
        for k in range(planes):
            if (left_out >> k) & 1 == 0:
                source = data[at : at + coded]
                for p in range(coded):
                    mantissa[p] |= np.uint32(source[p]) << (8 * k)
                at += tokens * coded
        row = symbols[t]
        for p in range(coded + constants):
            placed_bits[p] = lossless_bits(
                row[p], settings[p], mantissa[p], kind.exponent_bits, kind.mantissa_bits
            )
        target = bits[t]
        for c in range(channels):
            target[c] = placed_bits[slot[c]]


def _sources() -> str:
    """A digest of everything that the compiled code is made of: numba's own cache looks only at the
    file of a function, and would keep code with the constants of an older format."""
    digest = hashlib.sha256()
    for module in (fmt, vec):
        digest.update(Path(module.__file__).read_bytes())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()


def _entry_points(sources):
    """The functions called from Python; *sources* becomes a part of their keys in numba's cache."""
    cached = njit(nogil=True, cache=True, error_model="numpy", no_cfunc_wrapper=True)

    @cached
    def encode_stripes(bits, plan, kind, lossy, lossless, compress, scratch, cos, sin, out, ends):
        """Sections of all stripes to *out*, one after another; where each ends."""
        _ = sources
        end = np.int64(0)
        for i in range(len(bits)):
            end = _encode_stripe(
                bits[i], plan[i], kind, lossy, lossless, compress, scratch, cos, sin, out, end
            )
            ends[i] = end

    @cached
    def decode_stripes(addresses, lengths, bits, kind, lossy, lossless, spread, scratch, cos, sin):
        """Returns 0, or 16 * stripe + error."""
        _ = sources
        for i in range(len(bits)):
            data = numba.carray(array_at(addresses[i]), (lengths[i],), np.uint8)
            error = _decode_stripe(data, bits[i], kind, lossy, lossless, spread, scratch, cos, sin)
            if error:
                return 16 * i + error
        return 0

    return encode_stripes, decode_stripes


_encode_stripes, _decode_stripes = _entry_points(_sources())
