"""Pages to exact tokens: what ``reference.unpack`` writes; and tiles of a page, dequantised."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_page import (
    ROWS,
    boosted_channels,
    boosted_rows,
    load_float,
    plane_codes,
    store_float,
    turned,
)


@triton.jit
def key_tile(words, items, data, tile, WHOLE: tl.constexpr, PAGE: tl.constexpr):
    """``code * s + m`` of K, float32 [channels, group], of one group of tokens of a page.

    words, items, data: the page in its three views. Without WHOLE, what ``boosted_tile`` has is
    left out.
    """
    t = tile * PAGE.group + tl.arange(0, PAGE.group)[None, :]
    r = tl.arange(0, PAGE.rows)[:, None]
    d = tl.arange(0, PAGE.channels)
    at = words + r * PAGE.block + t
    inside = (r < PAGE.size // ROWS) & (t >= 0)
    codes = plane_codes(tl.load(at, mask=inside, other=0))
    if PAGE.key_bits == 4:
        codes = 4 * codes + plane_codes(tl.load(at + PAGE.key_extra, mask=inside, other=0))
    elif PAGE.boosted:
        four, row = boosted_rows(boosted_channels(data, PAGE), PAGE)
        four, row = (four != 0)[:, None], row[:, None]
        codes = tl.where(four, 4 * codes, codes)
        if WHOLE:
            at = words + PAGE.key_extra + (row // ROWS) * PAGE.block + t
            extra = tl.load(at, mask=four & (t >= 0), other=0) >> (2 * (row % ROWS))
            codes = tl.where(four, codes + (extra & 3), codes)
    at = items + PAGE.key_scale + tile * PAGE.size + d
    scale = load_float(at, d < PAGE.size, PAGE.kind)
    low = load_float(at + (PAGE.key_min - PAGE.key_scale), d < PAGE.size, PAGE.kind)
    return codes.to(tl.float32) * scale[:, None] + low[:, None]


@triton.jit
def boosted_tile(words, items, chosen, tile, PAGE: tl.constexpr):
    """``code * s`` of the second plane of K, float32 [boosted, group], of the chosen channels."""
    r = tl.arange(0, PAGE.boosted_padded // ROWS)[:, None]
    t = tile * PAGE.group + tl.arange(0, PAGE.group)[None, :]
    at = words + PAGE.key_extra + r * PAGE.block + t
    codes = plane_codes(tl.load(at, mask=(r < PAGE.boosted // ROWS) & (t >= 0), other=0))
    at = items + PAGE.key_scale + tile * PAGE.size + chosen
    return codes.to(tl.float32) * load_float(at, chosen >= 0, PAGE.kind)[:, None]


@triton.jit
def value_tile(words, items, tile, PAGE: tl.constexpr):
    """``code * s + m`` of V, float32 [group, channels], of as many tokens of a page.

    Of rotated V, as rotated: ``(code - middle) * s``.
    """
    t = tile * PAGE.group + tl.arange(0, PAGE.group)[:, None]
    r = tile * (PAGE.group // ROWS) + tl.arange(0, PAGE.group // ROWS)[:, None]
    d = tl.arange(0, PAGE.channels)[None, :]
    g = tl.arange(0, PAGE.value_groups_padded)[None, :]
    at = words + PAGE.value_codes + r * PAGE.size + d
    inside = (d < PAGE.size) & (r >= 0)
    codes = plane_codes(tl.load(at, mask=inside, other=0))
    if PAGE.value_bits == 4:
        at += PAGE.value_extra - PAGE.value_codes
        codes = 4 * codes + plane_codes(tl.load(at, mask=inside, other=0))
    shape: tl.constexpr = [PAGE.group, PAGE.value_groups_padded, PAGE.value_tile]
    codes = tl.reshape(codes, shape)
    at = items + PAGE.value_scale + g * PAGE.block + t
    inside = (g < PAGE.value_groups) & (t >= 0)
    scale = load_float(at, inside, PAGE.kind)
    if PAGE.rotated:
        low = scale * (-0.5 * ((1 << PAGE.value_bits) - 1))
    else:
        low = load_float(at + (PAGE.value_min - PAGE.value_scale), inside, PAGE.kind)
    value = codes.to(tl.float32) * scale[:, :, None] + low[:, :, None]
    return tl.reshape(value, [PAGE.group, PAGE.channels])


@triton.jit
def unpack_pages(
    words_ptr,  # int32, the cache
    items_ptr,  # the same memory
    bytes_ptr,  # the same memory
    blocks_ptr,  # int32 [n]
    fills_ptr,  # int32 [n]
    firsts_ptr,  # int32 [n]
    keys_ptr,  # [slots, B, H, D]
    values_ptr,  # [slots, B, H, D]
    slots_ptr,  # int32 [n]
    block_bytes,  # of the cache
    head_bytes,
    key_slot_stride,
    key_token_stride,
    key_head_stride,
    value_slot_stride,
    value_token_stride,
    value_head_stride,
    PAGE: tl.constexpr,
    DOT: tl.constexpr,
):
    """``code * s + m`` of K and V of one group of tokens, rounded to the dtype.

    Program (i, head, tile of tokens).
    """
    i = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(2)
    fill = tl.load(fills_ptr + i)
    if tile * PAGE.group >= fill:
        return
    page = tl.load(blocks_ptr + i).to(tl.int64) * block_bytes + head * head_bytes
    words = words_ptr + page // 4
    items = items_ptr + (page // 4) * PAGE.per_word
    slot = tl.load(slots_ptr + i).to(tl.int64)

    d = tl.arange(0, PAGE.channels)
    t = tile * PAGE.group + tl.arange(0, PAGE.group)
    x = key_tile(words, items, bytes_ptr + page, tile, True, PAGE)
    if PAGE.sinks:
        sink = t < tl.where(tl.load(firsts_ptr + i) != 0, PAGE.sinks, 0)
        at = items + PAGE.sink_keys + t[None, :] * PAGE.size + d[:, None]
        exact = load_float(at, sink[None, :] & (d < PAGE.size)[:, None], PAGE.kind)
        x = tl.where(sink[None, :], exact, x)
    at = keys_ptr + slot * key_slot_stride + head * key_head_stride
    at += t.to(tl.int64)[None, :] * key_token_stride + d[:, None]
    store_float(at, x, (t < fill)[None, :] & (d < PAGE.size)[:, None], PAGE.kind)

    x = value_tile(words, items, tile, PAGE)
    if PAGE.rotated:
        x = turned(x, True, DOT, PAGE)
        if PAGE.sinks:
            sink = t < tl.where(tl.load(firsts_ptr + i) != 0, PAGE.sinks, 0)
            at = items + PAGE.sink_values + t[:, None] * PAGE.size + d[None, :]
            exact = load_float(at, sink[:, None] & (d < PAGE.size)[None, :], PAGE.kind)
            x = tl.where(sink[:, None], exact, x)
    at = values_ptr + slot * value_slot_stride + head * value_head_stride
    at += t.to(tl.int64)[:, None] * value_token_stride + d[None, :]
    store_float(at, x, (t < fill)[:, None] & (d < PAGE.size)[None, :], PAGE.kind)
