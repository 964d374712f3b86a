"""Attention of several new tokens a sequence over its history and each other.

A program takes a tile of queries, all heads of a KV head together, through the packed tiles of the
history, which are dequantised in registers and rounded to the model's dtype, and then through its
exact tiles and the new tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_decode import LOG2_E, first_tile, hidden, risen, shaped
from .triton_page import boosted_channels, load_operand, operand, store_float, turned
from .triton_unpack import boosted_tile, key_tile, value_tile


@triton.jit
def prefill(
    query_ptr,  # [tokens, heads, D]
    key_ptr,  # [tokens, H, D]: of the new tokens
    value_ptr,  # [tokens, H, D]
    words_ptr,  # int32, the cache
    items_ptr,  # the same memory
    bytes_ptr,  # the same memory
    keys_ptr,  # [slots, B, H, D]: exact tokens
    values_ptr,  # [slots, B, H, D]
    slots_ptr,  # int32 [blocks]: slot_of_block
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
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    block_bytes,  # of the cache
    head_bytes,
    keys_slot_stride,
    keys_token_stride,
    keys_head_stride,
    values_slot_stride,
    values_token_stride,
    values_head_stride,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    DOT: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPES: tl.constexpr,
    SINKS: tl.constexpr,
):
    """``softmax(q k) v`` for M rows, each a new token and a head.

    Program (tile of queries, KV head, sequence). Sequences with one new token are left alone.
    """
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2)
    begin = tl.load(starts_ptr + sequence)
    new = tl.load(starts_ptr + sequence + 1) - begin
    first_row = tl.program_id(0) * M
    if (new <= 1) | (first_row >= new * grouped):
        return
    history = tl.load(lengths_ptr + sequence) - new
    row = first_row + tl.arange(0, M)
    token = row // grouped
    query_head = head * grouped + row % grouped
    d = tl.arange(0, PAGE.channels)
    real = (d < PAGE.size)[None, :]
    live = (token < new)[:, None] & real
    rows = query_ptr + (begin + token).to(tl.int64)[:, None] * query_token_stride
    rows += query_head[:, None] * query_head_stride
    query = load_operand(rows + d[None, :], live, PAGE.kind, DOT)
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes_ptr + query_head)[:, None] * LOG2_E
    position = history + token
    # The row's own token is always seen, so that the sums start from the sink's logit or nothing.
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if SINKS:
        peak = tl.load(sinks_ptr + query_head) * LOG2_E
        total += 1.0
    sums = tl.zeros([M, PAGE.channels], tl.float32)

    table = table_ptr + sequence.to(tl.int64) * table_stride
    per_block: tl.constexpr = PAGE.block // PAGE.group
    tiles = tl.cdiv(history, PAGE.group)
    first_token = first_row // grouped
    start = first_tile(history, history + first_token, window, PAGE.group)
    start = tl.minimum(start, tiles)
    last_token = tl.minimum((first_row + M - 1) // grouped, new - 1)
    # New tokens before this one, in whole tiles, are out of every row's window.
    skipped = tl.where(window == 0, 0, tl.maximum(first_token - window + 1, 0)) // PAGE.group
    skipped = tl.where(start < tiles, 0, skipped)
    t = tl.arange(0, PAGE.group)
    exact_tiles = 0
    for tile in range(start, tiles):
        block = tl.load(table + tile // per_block).to(tl.int64)
        if tl.load(slots_ptr + block) < 0:
            at_token = tile * PAGE.group + t
            page = block * block_bytes + head * head_bytes
            words = words_ptr + page // 4
            items = items_ptr + (page // 4) * PAGE.per_word
            within = tile % per_block
            data = bytes_ptr + page
            k = operand(key_tile(words, items, data, within, False, PAGE), DOT)
            if PAGE.sinks:
                sink = t < tl.where(tile == 0, PAGE.sinks, 0)
                at_sink = items + PAGE.sink_keys + t[None, :] * PAGE.size + d[:, None]
                mask = sink[None, :] & (d < PAGE.size)[:, None]
                k = tl.where(sink[None, :], load_operand(at_sink, mask, PAGE.kind, DOT), k)
            logits = tl.dot(query, k, input_precision="ieee")
            if PAGE.boosted:
                chosen = boosted_channels(data, PAGE)
                mask = (token < new)[:, None] & (chosen >= 0)[None, :]
                few = load_operand(rows + chosen[None, :], mask, PAGE.kind, DOT)
                extra = operand(boosted_tile(words, items, chosen, within, PAGE), DOT)
                logits = tl.dot(few, extra, logits, input_precision="ieee")
            logits = shaped(logits, scale, soft_cap, CAPPED)
            logits = hidden(logits, slope, at_token[None, :] - position[:, None], window, SLOPES)
            logits = tl.where((at_token < history)[None, :], logits, float("-inf"))
            peak, shrunk, p = risen(peak, logits, 1)
            total = total * shrunk + tl.sum(p, 1)
            v = operand(value_tile(words, items, within, PAGE), DOT)
            sums = sums * shrunk[:, None]
            sums = tl.dot(operand(p, DOT), v, sums, input_precision="ieee")
        else:
            exact_tiles += 1
    if PAGE.rotated:
        # Exact tokens' V, from here on, is not rotated.
        mean = sums / tl.where(total > 0, total, 1.0)[:, None]
        sums = turned(mean, True, DOT, PAGE) * total[:, None]
        # One condition is known when compiling, the other is not: the compiler wants them apart.
        if PAGE.sinks:  # noqa: SIM102
            if (start == 0) & (tiles > 0):
                block = tl.load(table).to(tl.int64)
                if tl.load(slots_ptr + block) < 0:
                    page = block * block_bytes + head * head_bytes
                    items = items_ptr + (page // 4) * PAGE.per_word
                    sink = (t < PAGE.sinks) & (t < history)
                    at_sink = t[None, :] * PAGE.size + d[:, None]
                    mask = sink[None, :] & (d < PAGE.size)[:, None]
                    k = load_operand(items + PAGE.sink_keys + at_sink, mask, PAGE.kind, DOT)
                    logits = tl.dot(query, k, input_precision="ieee")
                    logits = shaped(logits, scale, soft_cap, CAPPED)
                    logits = hidden(logits, slope, t[None, :] - position[:, None], window, SLOPES)
                    # Rows that see nothing yet have no sum to add to.
                    origin = tl.where(peak == float("-inf"), 0.0, peak)
                    p = tl.where(sink[None, :], tl.exp2(logits - origin[:, None]), 0.0)
                    v = load_operand(items + PAGE.sink_values + at_sink, mask, PAGE.kind, DOT)
                    v = tl.trans(v)
                    sums = tl.dot(operand(p, DOT), v, sums, input_precision="ieee")

    start = tl.where(exact_tiles > 0, start, tiles) + skipped
    for tile in range(start, tiles + last_token // PAGE.group + 1):
        new_tile = tile >= tiles
        slot = begin.to(tl.int64)
        if tile < tiles:
            block = tl.load(table + tile // per_block)
            slot = tl.load(slots_ptr + block).to(tl.int64)
        if new_tile | (slot >= 0):
            if new_tile:
                at_token = (tile - tiles) * PAGE.group + t
                some = at_token < new
                inside = (begin + at_token).to(tl.int64)
                at_token += history
                mask = some[None, :] & (d < PAGE.size)[:, None]
                at_k = inside[None, :] * key_token_stride + head * key_head_stride + d[:, None]
                k = load_operand(key_ptr + at_k, mask, PAGE.kind, DOT)
                at_v = inside[:, None] * value_token_stride + head * value_head_stride
                v = load_operand(
                    value_ptr + at_v + d[None, :], some[:, None] & real, PAGE.kind, DOT
                )
            else:
                at_token = tile * PAGE.group + t
                some = at_token < history
                inside = ((tile % per_block) * PAGE.group + t).to(tl.int64)
                mask = some[None, :] & (d < PAGE.size)[:, None]
                at_k = slot * keys_slot_stride + head * keys_head_stride + d[:, None]
                at_k += inside[None, :] * keys_token_stride
                k = load_operand(keys_ptr + at_k, mask, PAGE.kind, DOT)
                at_v = slot * values_slot_stride + head * values_head_stride
                at_v += inside[:, None] * values_token_stride
                v = load_operand(
                    values_ptr + at_v + d[None, :], some[:, None] & real, PAGE.kind, DOT
                )
            logits = shaped(tl.dot(query, k, input_precision="ieee"), scale, soft_cap, CAPPED)
            logits = hidden(logits, slope, at_token[None, :] - position[:, None], window, SLOPES)
            logits = tl.where(some[None, :], logits, float("-inf"))
            peak, shrunk, p = risen(peak, logits, 1)
            total = total * shrunk + tl.sum(p, 1)
            sums = sums * shrunk[:, None]
            sums = tl.dot(operand(p, DOT), v, sums, input_precision="ieee")

    at = (begin + token).to(tl.int64)[:, None] * out_token_stride
    at += query_head[:, None] * out_head_stride + d[None, :]
    store_float(out_ptr + at, sums / total[:, None], live, PAGE.kind)
