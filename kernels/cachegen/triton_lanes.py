"""Lane encoding and decoding: one program of one warp for each segment of a stripe."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from . import format as fmt
from .triton_common import (
    EXACT,
    LANES,
    LOSSLESS,
    PROB_BITS,
    PROB_SCALE,
    SEGMENT,
    STATE_LOW,
    TABLES,
    rank_of,
)

ONE_WARP = {"num_warps": 1, **EXACT}
STATE_OUT_OF_RANGE, WORDS_MISMATCH = 1, 2
_OUT_OF_RANGE = tl.constexpr(STATE_OUT_OF_RANGE)
_MISMATCH = tl.constexpr(WORDS_MISMATCH)


def _banks() -> tuple[fmt.Bank, fmt.Bank]:
    return fmt.lossy_bank(), fmt.lossless_bank()


@functools.cache
def decode_entries(device: torch.device) -> torch.Tensor:
    """int32 [2, TABLES + 1, 2^11], lossy and lossless: symbol << 24 | freq << 11 | slot - cum."""
    made = torch.empty(2, fmt.TABLES + 1, fmt.PROB_SCALE, dtype=torch.int64)
    slot = torch.arange(fmt.PROB_SCALE)
    for tables, bank in zip(made, _banks(), strict=True):
        for table, f, c in zip(tables, bank.freq, bank.cum, strict=True):
            freq, cum = torch.from_numpy(f.astype("i8")), torch.from_numpy(c.astype("i8"))
            symbol = torch.repeat_interleave(torch.arange(256), freq)
            table[:] = symbol << 24 | freq[symbol] << fmt.PROB_BITS | slot - cum[symbol]
    return _int32(made).to(device)


@functools.cache
def encode_entries(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [2, TABLES + 1, 256] each: shift << 24 | freq << 12 | bias, and the reciprocal m.

    For x < 2^31, x / freq = (x * m >> 32) >> shift, and bias = cum. For freq = 1 the product gives
    x - 1, which bias makes good. Symbols without a frequency have the entry of ESCAPE; every symbol
    of the last table has the whole range, so that coding it changes nothing.
    """
    freq = torch.stack([torch.from_numpy(b.freq.astype("i8")) for b in _banks()])
    bias = torch.stack([torch.from_numpy(b.cum.astype("i8")) for b in _banks()])
    coded = torch.arange(fmt.TABLES + 1)[:, None] < fmt.TABLES
    missing = freq == 0
    freq = torch.where(missing, freq[..., fmt.ESCAPE, None], freq)
    bias = torch.where(missing, bias[..., fmt.ESCAPE, None], bias)
    freq = torch.where(coded, freq, fmt.PROB_SCALE)
    bias = torch.where(coded, bias, 0)
    log2 = torch.zeros_like(freq)
    for bit in range(fmt.PROB_BITS):
        log2 += freq > 1 << bit
    reciprocal = ((1 << 31 + log2) + freq - 1) // freq
    one = freq == 1
    reciprocal = torch.where(one, 0xFFFFFFFF, reciprocal)
    bias = torch.where(one, bias + fmt.PROB_SCALE - 1, bias)
    entries = torch.where(one, 0, log2 - 1) << 24 | freq << 12 | bias
    return _int32(entries).to(device), _int32(reciprocal).to(device)


def _int32(unsigned: torch.Tensor) -> torch.Tensor:
    """int32 patterns of int64 values below 2^32."""
    return torch.where(unsigned >= 1 << 31, unsigned - (1 << 32), unsigned).to(torch.int32)


@triton.jit
def _look_up(t, column, entry_ptr, reciprocal_ptr, table, channels, lanes):
    """(entry, reciprocal) uint32 of the symbols of token t; those that do nothing for t < 0."""
    live = tl.where(lanes, t, -1) >= 0
    symbol = tl.load(column + t.to(tl.int64) * channels, mask=live, other=0).to(tl.int32)
    at = tl.where(live, table, TABLES) * 256 + symbol
    entry = tl.load(entry_ptr + at).to(tl.uint32, bitcast=True)
    return entry, tl.load(reciprocal_ptr + at).to(tl.uint32, bitcast=True)


@triton.jit
def _push(state, at, entry, reciprocal, words, lane):
    """Code one symbol in every lane; words are written downwards from *at*."""
    freq = (entry >> 12) & 0xFFF
    full = state >= freq << (31 - PROB_BITS)
    rank, taken = rank_of(full, lane)
    at -= taken
    tl.store(words + at + rank, state.to(tl.uint16).to(tl.int16, bitcast=True), mask=full)
    state = tl.where(full, state >> 16, state)
    quotient = tl.umulhi(state, reciprocal) >> (entry >> 24)
    return state + (entry & 0xFFF) + quotient * (PROB_SCALE - freq), at


@triton.jit
def encode_segments(
    symbols_ptr,  # uint8 [S, T, C]
    order_ptr,  # int64 [S, C]: channels by index
    index_ptr,  # uint8 [S, C]: indices in that order
    coded_ptr,  # int32 [S]
    modes_ptr,  # int32 [S]
    entries_ptr,  # int32 [2, TABLES + 1, 256]
    reciprocals_ptr,  # int32 [2, TABLES + 1, 256]
    words_ptr,  # int16 [S, segments, T * SEGMENT]: the words, at the end of each row
    counts_ptr,  # int32 [S, segments]
    states_ptr,  # int32 [S, segments, LANES]
    tokens,
    channels,
    segments,
):
    stripe = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    row = stripe * segments + segment
    lane = tl.arange(0, LANES)
    coded = tl.load(coded_ptr + stripe)
    first = segment * SEGMENT
    blocks = tl.maximum(tl.minimum(coded - first, SEGMENT) + LANES - 1, 0) // LANES
    bank = (tl.load(modes_ptr + stripe) == LOSSLESS).to(tl.int32) * ((TABLES + 1) * 256)
    words = words_ptr + row * tokens * SEGMENT
    state = tl.full([LANES], STATE_LOW, tl.uint32)
    # A tensor, as loops need, even where tokens is compiled in as 1.
    at = blocks * 0 + tokens * SEGMENT
    for done in range(blocks):
        p = first + (blocks - 1 - done) * LANES + lane
        lanes = p < coded
        channel = tl.load(order_ptr + stripe * channels + p, mask=lanes, other=0)
        table = tl.load(index_ptr + stripe * channels + p, mask=lanes, other=0).to(tl.int32)
        column = symbols_ptr + stripe * tokens * channels + channel
        entry_ptr = entries_ptr + bank
        reciprocal_ptr = reciprocals_ptr + bank
        # What a step looks up does not depend on the state: four at once hide their latency.
        for start in range(0, tokens, 4):
            t = at * 0 + tokens - 1 - start
            e0, r0 = _look_up(t, column, entry_ptr, reciprocal_ptr, table, channels, lanes)
            e1, r1 = _look_up(t - 1, column, entry_ptr, reciprocal_ptr, table, channels, lanes)
            e2, r2 = _look_up(t - 2, column, entry_ptr, reciprocal_ptr, table, channels, lanes)
            e3, r3 = _look_up(t - 3, column, entry_ptr, reciprocal_ptr, table, channels, lanes)
            state, at = _push(state, at, e0, r0, words, lane)
            state, at = _push(state, at, e1, r1, words, lane)
            state, at = _push(state, at, e2, r2, words, lane)
            state, at = _push(state, at, e3, r3, words, lane)
    tl.store(counts_ptr + row, tokens * SEGMENT - at)
    tl.store(states_ptr + row * LANES + lane, state.to(tl.int32, bitcast=True))


@triton.jit
def decode_segments(
    data16_ptr,  # int16: the sections
    word_at_ptr,  # int64 [S, segments]: first word of each segment, in words
    counts_ptr,  # int32 [S, segments]
    states_ptr,  # int32 [S, segments, LANES]
    index_ptr,  # uint8 [S, C]: indices in ascending order
    coded_ptr,  # int32 [S]
    modes_ptr,  # int32 [S]
    entries_ptr,  # int32 [2, TABLES + 1, 2^11]
    symbols_ptr,  # uint8 [S, T, C]: by position, not by channel
    status_ptr,  # int32 [S, segments]
    tokens,
    channels,
    segments,
):
    stripe = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    row = stripe * segments + segment
    lane = tl.arange(0, LANES)
    coded = tl.load(coded_ptr + stripe)
    first = segment * SEGMENT
    if first >= coded:
        return
    blocks = (tl.minimum(coded - first, SEGMENT) + LANES - 1) // LANES
    bank = (tl.load(modes_ptr + stripe) == LOSSLESS).to(tl.int32) * ((TABLES + 1) * PROB_SCALE)
    words = data16_ptr + tl.load(word_at_ptr + row)
    count = tl.load(counts_ptr + row)
    state = tl.load(states_ptr + row * LANES + lane).to(tl.uint32, bitcast=True)
    outside = tl.max(((state < STATE_LOW) | (state >= 0x80000000)).to(tl.int32), 0)
    at = count * 0  # a tensor, as loops need
    for block in range(blocks):
        p = first + block * LANES + lane
        lanes = p < coded
        table = tl.load(index_ptr + stripe * channels + p, mask=lanes, other=TABLES).to(tl.int32)
        entries = entries_ptr + bank + table * PROB_SCALE
        target = symbols_ptr + stripe * tokens * channels + p
        for _ in range(tokens):
            slot = (state & (PROB_SCALE - 1)).to(tl.int32)
            entry = tl.load(entries + slot).to(tl.uint32, bitcast=True)
            freq = (entry >> PROB_BITS) & 0xFFF
            state = freq * (state >> PROB_BITS) + (entry & (PROB_SCALE - 1))
            empty = state < STATE_LOW
            rank, taken = rank_of(empty, lane)
            source = at + rank
            word = tl.load(words + source, mask=empty & (source < count), other=0)
            filled = state << 16 | (word.to(tl.uint32) & 0xFFFF)
            state = tl.where(empty, filled, state)
            at += taken
            tl.store(target, (entry >> 24).to(tl.uint8), mask=lanes)
            target += channels
    changed = tl.max((state != STATE_LOW).to(tl.int32), 0)
    wrong = tl.where((at != count) | (changed != 0), _MISMATCH, 0)
    tl.store(status_ptr + row, tl.where(outside != 0, _OUT_OF_RANGE, wrong))
