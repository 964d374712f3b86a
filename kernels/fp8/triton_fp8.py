"""FP8 pages with Triton, for GPUs without FP8 arithmetic: codes are made and read as integers.

A GPU that has float8 types needs none of this. Those of compute capability 8.0 and 8.6 do not, and
their compilers know no float8e4nv.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..attention import Attention
from ..kivi.triton_decode import LOG2_E, hidden, risen, shaped
from ..kivi.triton_page import items, load_float, load_operand, operand, store_float
from .format import PageFormat

_KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

UNIT = {"e4m3": 256.0, "e5m2": 1.0}
"""What a code's value is divided by when it is read."""

ROWS = 64
"""Queries, each a token and a head, of a program at most."""


@triton.jit
def encoded(x, CODE: tl.constexpr):
    """float32 as codes, int32, rounded to nearest, ties to even; see ``format``."""
    MANTISSA: tl.constexpr = 3 if CODE == "e4m3" else 2
    BIAS: tl.constexpr = 7 if CODE == "e4m3" else 15
    LARGEST: tl.constexpr = 0x43E00000 if CODE == "e4m3" else 0x47600000
    SMALLEST_NORMAL: tl.constexpr = (128 - BIAS) << 23
    DROPPED: tl.constexpr = 23 - MANTISSA
    # A number whose last bit is worth a step of the subnormal codes.
    ANCHOR: tl.constexpr = (128 - BIAS + DROPPED) << 23
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, LARGEST)
    odd = (magnitude >> DROPPED) & 1
    normal = (magnitude + odd + ((1 << (DROPPED - 1)) - 1)) >> DROPPED
    normal -= (127 - BIAS) << MANTISSA
    anchor = tl.full(x.shape, ANCHOR, tl.int32)
    low = magnitude.to(tl.float32, bitcast=True) + anchor.to(tl.float32, bitcast=True)
    low = low.to(tl.int32, bitcast=True) - ANCHOR
    code = tl.where(magnitude < SMALLEST_NORMAL, low, normal)
    return tl.where(is_nan, 0x7F, code) | sign


@triton.jit
def decoded(code, CODE: tl.constexpr):
    """float32 of codes, uint8, divided by the unit."""
    wide = code.to(tl.int32)
    if CODE == "e5m2":
        bits = wide << 8
    else:
        # float16 with the exponent's other bias: subnormal numbers stay what they are.
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        bits = tl.where((wide & 0x7F) == 0x7F, 0x7FFF, bits)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def store_tokens(
    key_ptr,  # [tokens, H, D]
    value_ptr,  # [tokens, H, D]
    cache_ptr,  # bytes
    slots_ptr,  # int64 [tokens]
    k_scale_ptr,  # float32 [1 or H]
    v_scale_ptr,  # float32 [1 or H]
    k_scale_step,
    v_scale_step,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_bytes,
    head_bytes,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    CODE: tl.constexpr,
    KIND: tl.constexpr,
):
    """Program (token, KV head)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    place = slot % BLOCK
    page = cache_ptr + slot // BLOCK * block_bytes + head * head_bytes
    d = tl.arange(0, CHANNELS)
    real = d < SIZE
    key = load_float(key_ptr + token * key_token_stride + head * key_head_stride + d, real, KIND)
    value = load_float(
        value_ptr + token * value_token_stride + head * value_head_stride + d, real, KIND
    )
    k_scale = tl.load(k_scale_ptr + head * k_scale_step)
    v_scale = tl.load(v_scale_ptr + head * v_scale_step)
    # Division that rounds as IEEE's does: codes are the reference's.
    key = encoded(tl.div_rn(key, tl.zeros([CHANNELS], tl.float32) + k_scale), CODE)
    value = encoded(tl.div_rn(value, tl.zeros([CHANNELS], tl.float32) + v_scale), CODE)
    tl.store(page + d * BLOCK + place, key.to(tl.uint8), mask=real)
    tl.store(page + (BLOCK + place) * SIZE + d, value.to(tl.uint8), mask=real)


@triton.jit
def attend_pages(
    query_ptr,  # [tokens, heads, D]
    cache_ptr,  # bytes
    k_scale_ptr,  # float32 [1 or H]
    v_scale_ptr,  # float32 [1 or H]
    table_ptr,  # int32 [sequences, width]
    starts_ptr,  # int32 [sequences + 1]
    lengths_ptr,  # int32 [sequences]
    slopes_ptr,  # float32 [heads]
    sinks_ptr,  # float32 [heads]
    out_ptr,  # [tokens, heads, D]
    scale,
    soft_cap,
    window,
    grouped,  # heads of a KV head
    k_scale_step,
    v_scale_step,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    block_bytes,
    head_bytes,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    UNIT_OF_CODE: tl.constexpr,
    CODE: tl.constexpr,
    KIND: tl.constexpr,
    DOT: tl.constexpr,
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPES: tl.constexpr,
    SINKS: tl.constexpr,
):
    """``softmax(q k) v`` for M rows, each a new token and a head; TOKENS keys at once.

    Program (tile of rows, KV head, sequence).
    """
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2)
    begin = tl.load(starts_ptr + sequence)
    new = tl.load(starts_ptr + sequence + 1) - begin
    first_row = tl.program_id(0) * M
    if first_row >= new * grouped:
        return
    length = tl.load(lengths_ptr + sequence)
    row = first_row + tl.arange(0, M)
    token = row // grouped
    query_head = head * grouped + row % grouped
    d = tl.arange(0, CHANNELS)
    real = d < SIZE
    live = (token < new)[:, None] & real[None, :]
    at_query = (begin + token).to(tl.int64)[:, None] * query_token_stride
    at_query += query_head[:, None] * query_head_stride + d[None, :]
    query = load_operand(query_ptr + at_query, live, KIND, DOT)
    k_unit = tl.load(k_scale_ptr + head * k_scale_step) * UNIT_OF_CODE
    v_unit = tl.load(v_scale_ptr + head * v_scale_step) * UNIT_OF_CODE
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes_ptr + query_head, mask=token < new, other=0.0)[:, None] * LOG2_E
    position = length - new + token
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if SINKS:
        peak = tl.load(sinks_ptr + query_head, mask=token < new, other=0.0) * LOG2_E
        total += 1.0
    sums = tl.zeros([M, CHANNELS], tl.float32)

    first = length - new + first_row // grouped
    last = tl.minimum(length - new + (first_row + M - 1) // grouped, length - 1)
    start = tl.where(window == 0, 0, tl.maximum(first - window + 1, 0)) // TOKENS
    table = table_ptr + sequence.to(tl.int64) * table_stride
    t = tl.arange(0, TOKENS)
    for tile in range(start, last // TOKENS + 1):
        at_token = tile * TOKENS + t
        stored = at_token < length
        block = tl.load(table + tile * TOKENS // BLOCK).to(tl.int64)
        page = cache_ptr + block * block_bytes + head * head_bytes
        place = tile * TOKENS % BLOCK + t
        codes = tl.load(
            page + d[:, None] * BLOCK + place[None, :],
            mask=real[:, None] & stored[None, :],
            other=0,
        )
        k = operand(decoded(codes, CODE), DOT)
        logits = tl.dot(query, k, input_precision="ieee")
        logits = shaped(logits, scale * k_unit, soft_cap, CAPPED)
        logits = hidden(logits, slope, at_token[None, :] - position[:, None], window, SLOPES)
        peak, shrunk, p = risen(peak, logits, 1)
        total = total * shrunk + tl.sum(p, 1)
        codes = tl.load(
            page + (BLOCK + place[:, None]) * SIZE + d[None, :],
            mask=stored[:, None] & real[None, :],
            other=0,
        )
        v = operand(decoded(codes, CODE), DOT)
        sums = sums * shrunk[:, None]
        sums = tl.dot(operand(p, DOT), v, sums, input_precision="ieee")
    at_out = (begin + token).to(tl.int64)[:, None] * out_token_stride
    at_out += query_head[:, None] * out_head_stride + d[None, :]
    total = tl.where(total > 0, total, 1.0)
    store_float(out_ptr + at_out, sums * (v_unit / total)[:, None], live, KIND)


# ---------------------------------------------------------------------------------- launches


def warm_up() -> None:
    """Kernels are compiled when they are first launched."""


@functools.cache
def constants_of(fmt: PageFormat) -> dict[str, object]:
    """What every kernel is compiled with for a format."""
    return {
        "BLOCK": fmt.block_tokens,
        "SIZE": fmt.head_size,
        "CHANNELS": triton.next_power_of_2(fmt.head_size),
        "CODE": fmt.code,
    }


def attend_constants(fmt: PageFormat, rows: int) -> dict[str, object]:
    """What ``attend_pages`` is compiled with besides, for so many rows of a sequence at most."""
    return {
        "UNIT_OF_CODE": UNIT[fmt.code],
        "TOKENS": min(64, fmt.block_tokens & -fmt.block_tokens),
        "M": min(ROWS, max(16, triton.next_power_of_2(rows))),
    }


def attend_options(fmt: PageFormat) -> dict[str, object]:
    """How ``attend_pages`` is compiled."""
    return {"num_warps": 4 if fmt.head_size <= 64 else 8, "num_stages": 1, "enable_fp_fusion": True}


STORE_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}


def store(
    fmt: PageFormat,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Write tokens into pages, as ``reference.store``."""
    if not len(slots):
        return
    data = cache.view(torch.uint8)
    with torch.cuda.device_of(cache):
        store_tokens[len(slots), cache.shape[1]](
            items(key), items(value), data, slots, k_scale, v_scale, int(k_scale.numel() > 1),
            int(v_scale.numel() > 1), *key.stride()[:2], *value.stride()[:2], *data.stride()[:2],
            KIND=_KINDS[key.dtype], **constants_of(fmt), **STORE_OPTIONS,
        )  # fmt: skip


def attend(
    fmt: PageFormat,
    attention: Attention,
    query: torch.Tensor,
    cache: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    max_query: int,
    max_seq: int,
) -> None:
    """Attention of new tokens over what is stored, as ``reference.attend``.

    max_query may be greater than the greatest, never less.
    """
    if not len(seq_lens) or not len(query):
        return
    kind = _KINDS[query.dtype]
    kv_heads = cache.shape[1]
    grouped = query.shape[1] // kv_heads
    data = cache.view(torch.uint8)
    # Kernels that want no slopes or sinks take any pointer.
    slopes = k_scale if attention.slopes is None else attention.slopes.float()
    sinks = k_scale if attention.sinks is None else attention.sinks.float()
    constants = attend_constants(fmt, max_query * grouped)
    tiles = triton.cdiv(max_query * grouped, constants["M"])
    with torch.cuda.device_of(query):
        attend_pages[tiles, kv_heads, len(seq_lens)](
            items(query), data, k_scale, v_scale, block_table, query_start, seq_lens, slopes, sinks,
            items(out), float(attention.scale), float(attention.soft_cap), attention.window,
            grouped, int(k_scale.numel() > 1), int(v_scale.numel() > 1), *query.stride()[:2],
            *out.stride()[:2], block_table.stride(0), *data.stride()[:2], KIND=kind,
            # The interpreter knows no product of bfloat16.
            DOT="fp32" if triton.knobs.runtime.interpret else kind,
            CAPPED=attention.soft_cap > 0, SLOPES=attention.slopes is not None,
            SINKS=attention.sinks is not None, **constants_of(fmt), **constants,
            **attend_options(fmt),
        )  # fmt: skip
