"""Attention of one new token a sequence over its history, in two kernels.

``decode_history`` takes a stretch of a sequence for all queries of a KV head; ``decode_merge`` adds
the stretches up, and the new token. With ``k = code s + m`` of a channel and group of tokens,

    q k = sum over channels of (q s) code + q m

so that the scale is multiplied into the query, once a group, and the codes enter the product as
they are; and with ``v = code s + m`` of a token and group of channels the same for probabilities:

    p v = sum over tokens of (p s) code + p m
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from .triton_page import (
    ROWS,
    bias,
    boosted_channels,
    boosted_rows,
    code_operand,
    load_float,
    load_operand,
    operand,
    plane_codes,
    store_float,
    turned,
    value_codes,
)

LOG2_E = tl.constexpr(math.log2(math.e))
MERGED = tl.constexpr(16)
"""Stretches that ``decode_merge`` takes at once."""


@triton.jit
def shaped(logits, scale, soft_cap, CAPPED: tl.constexpr):
    """Logits times ``log2 e``, for ``exp2``: scaled, then ``soft_cap * tanh(l / soft_cap)``."""
    if CAPPED:
        power = tl.exp2(logits * (2 * LOG2_E * scale / soft_cap))
        logits = (soft_cap * LOG2_E) * (1 - 2 / (power + 1))
    else:
        logits = logits * (scale * LOG2_E)
    return logits


@triton.jit
def hidden(logits, slope, distance, window, SLOPES: tl.constexpr):
    """Logits with ALiBi's bias, and -inf for tokens ahead or out of the window.

    slope, distance: of the token from the query, int32, 0 and less; both of shapes that broadcast
    to that of the logits.
    """
    if SLOPES:
        logits += slope * distance.to(tl.float32)
    seen = (distance <= 0) & ((window == 0) | (distance > -window))
    return tl.where(seen, logits, float("-inf"))


@triton.jit
def risen(peak, logits, AXIS: tl.constexpr):
    """(greatest logit so far, what to multiply sums so far by, probabilities) of a tile."""
    top = tl.maximum(peak, tl.max(logits, AXIS))
    origin = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(logits - tl.expand_dims(origin, AXIS))
    return top, tl.exp2(peak - origin), p


@triton.jit
def first_tile(history, query, window, GROUP: tl.constexpr):
    """The first tile of the history that a query sees any of."""
    start = tl.where(window == 0, 0, tl.maximum(query - window + 1, 0))
    return tl.minimum(start, history) // GROUP


@triton.jit
def _load_keys(words, items, data, within, PAGE: tl.constexpr):
    """(words, words of the second plane, scale, minimum, boosted channels) of a tile of K."""
    t = within * PAGE.group + tl.arange(0, PAGE.group)[None, :]
    r = tl.arange(0, PAGE.rows)[:, None]
    d = tl.arange(0, PAGE.channels)
    at = words + r * PAGE.block + t
    inside = (r < PAGE.size // ROWS) & (t >= 0)
    first = tl.load(at, mask=inside, other=0)
    second, chosen = 0, 0
    if PAGE.key_bits == 4:
        second = tl.load(at + PAGE.key_extra, mask=inside, other=0)
    elif PAGE.boosted:
        r = tl.arange(0, PAGE.boosted_padded // ROWS)[:, None]
        inside = (r < PAGE.boosted // ROWS) & (t >= 0)
        second = tl.load(words + PAGE.key_extra + r * PAGE.block + t, mask=inside, other=0)
        chosen = boosted_channels(data, PAGE)
    at = items + PAGE.key_scale + within * PAGE.size + d
    scale = load_float(at, d < PAGE.size, PAGE.kind)
    low = load_float(at + (PAGE.key_min - PAGE.key_scale), d < PAGE.size, PAGE.kind)
    return first, second, scale, low, chosen


@triton.jit
def _load_values(words, items, within, PAGE: tl.constexpr):
    """(words, words of the second plane, scale, minimum) of a tile of V, channels in groups."""
    g = tl.arange(0, PAGE.value_groups_padded)
    r = within * (PAGE.group // ROWS) + tl.arange(0, PAGE.group // ROWS)[None, :, None]
    c = g[:, None, None] * PAGE.value_tile + tl.arange(0, PAGE.value_tile)[None, None, :]
    at = words + PAGE.value_codes + r * PAGE.size + c
    inside = (c < PAGE.size) & (r >= 0)
    first = tl.load(at, mask=inside, other=0)
    second = 0
    if PAGE.value_bits == 4:
        second = tl.load(at + (PAGE.value_extra - PAGE.value_codes), mask=inside, other=0)
    t = within * PAGE.group + tl.arange(0, PAGE.group)[None, :]
    at = items + PAGE.value_scale + g[:, None] * PAGE.block + t
    inside = (g < PAGE.value_groups)[:, None] & (t >= 0)
    scale = load_float(at, inside, PAGE.kind)
    if PAGE.rotated:
        low = scale * (-0.5 * ((1 << PAGE.value_bits) - 1))
    else:
        low = load_float(at + (PAGE.value_min - PAGE.value_scale), inside, PAGE.kind)
    return first, second, scale, low


@triton.jit
def _code_logits(
    columns, real, items, within, first, second, scale, low, chosen,
    DOT: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """q k of a tile of K as loaded, float32 [group, N].

    columns: pointers to the queries [1, N], of those that are real. They are read again for every
    tile, from the nearest cache, because keeping them takes a third of a thread's registers.
    """
    d = tl.arange(0, PAGE.channels)[:, None]
    query = load_float(columns + d, real & (d < PAGE.size), PAGE.kind)
    codes = plane_codes(first)
    folded = query * scale[:, None]
    if PAGE.key_bits == 4:
        codes = 4 * codes + plane_codes(second)
    elif PAGE.boosted:
        four, _ = boosted_rows(chosen, PAGE)
        folded = tl.where((four != 0)[:, None], folded * 4, folded)
    folded = operand(folded, DOT)
    codes = tl.trans(code_operand(codes, DOT))
    logits = tl.dot(codes, folded, input_precision="ieee")
    rest = tl.sum(query * low[:, None] - folded.to(tl.float32) * bias(DOT), 0)
    if PAGE.boosted:
        mask = chosen >= 0
        at = items + PAGE.key_scale + within * PAGE.size + chosen
        few = load_float(columns + chosen[:, None], real & mask[:, None], PAGE.kind)
        few = operand(few * load_float(at, mask, PAGE.kind)[:, None], DOT)
        codes = tl.trans(code_operand(plane_codes(second), DOT))
        logits = tl.dot(codes, few, logits, input_precision="ieee")
        rest -= tl.sum(few.to(tl.float32), 0) * bias(DOT)
    return logits + rest[None, :]


@triton.jit
def decode_history(
    query_ptr,  # [tokens, heads, D]
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
    sums_ptr,  # float32 [sequences, heads, splits, D]: of p v
    tops_ptr,  # float32 [sequences, heads, splits, 2]: greatest logit, sum of p
    scale,
    soft_cap,
    window,
    heads,
    grouped,  # heads of a KV head
    query_token_stride,
    query_head_stride,
    table_stride,
    block_bytes,  # of the cache
    head_bytes,
    key_slot_stride,
    key_token_stride,
    key_head_stride,
    value_slot_stride,
    value_token_stride,
    value_head_stride,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    DOT: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPES: tl.constexpr,
):
    """``sum of exp(q k) v`` over a stretch of the history of a sequence with one new token.

    Program (split, KV head, sequence). Tokens are rows of the products and the KV head's queries
    columns, of which tensor cores take as few as eight. Loads run one tile ahead of the arithmetic.
    """
    split = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    begin = tl.load(starts_ptr + sequence)
    if tl.load(starts_ptr + sequence + 1) - begin != 1:
        return
    history = tl.load(lengths_ptr + sequence) - 1
    first = first_tile(history, history, window, PAGE.group)
    tiles = tl.cdiv(history, PAGE.group) - first
    share = tl.cdiv(tiles, tl.num_programs(0))
    start = first + split * share
    end = first + tl.minimum(split * share + share, tiles)

    n = tl.arange(0, N)
    query_head = head * grouped + n
    at = (sequence.to(tl.int64) * heads + query_head) * tl.num_programs(0) + split
    if start >= end:
        # Nothing else of it is read.
        tl.store(tops_ptr + at * 2, tl.full([N], float("-inf"), tl.float32), mask=n < grouped)
        return

    d = tl.arange(0, PAGE.channels)[:, None]
    real = (n < grouped)[None, :]
    columns = query_ptr + begin.to(tl.int64) * query_token_stride
    columns += query_head[None, :] * query_head_stride
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes_ptr + query_head, mask=n < grouped, other=0.0)[None, :] * LOG2_E
    table = table_ptr + sequence.to(tl.int64) * table_stride
    per_block: tl.constexpr = PAGE.block // PAGE.group
    head_offset = head.to(tl.int64) * head_bytes
    t = tl.arange(0, PAGE.group)[:, None]

    peak = tl.full([N], float("-inf"), tl.float32)
    total = tl.zeros([N], tl.float32)
    sums = tl.zeros([PAGE.value_groups_padded, PAGE.value_tile, N], tl.float32)

    block = tl.load(table + start // per_block).to(tl.int64)
    slot = tl.load(slots_ptr + block)
    page = block * block_bytes + head_offset
    words, items = words_ptr + page // 4, items_ptr + (page // 4) * PAGE.per_word
    within = start % per_block
    k_first, k_second, k_scale, k_low, chosen = _load_keys(
        words, items, bytes_ptr + page, within, PAGE
    )
    v_first, v_second, v_scale, v_low = _load_values(words, items, within, PAGE)
    next_block = tl.load(table + tl.minimum(start + 1, end - 1) // per_block)
    if PAGE.sinks:
        # In the sequence's first tile, whose codes the exact keys replace.
        sink = t < tl.where((start == 0) & (slot < 0), PAGE.sinks, 0)
        across = tl.arange(0, PAGE.channels)[None, :]
        sink_keys = load_operand(
            items + PAGE.sink_keys + t * PAGE.size + across, sink & (across < PAGE.size),
            PAGE.kind, DOT,
        )  # fmt: skip
        exact = load_operand(columns + d, real & (d < PAGE.size), PAGE.kind, DOT)
        sink_logits = tl.dot(sink_keys, exact, input_precision="ieee")
        has_sinks = (start == 0) & (slot < 0)
        first_items = items

    exact_tiles = 0
    for tile in range(start, end):
        following = tl.minimum(tile + 1, end - 1)
        block = next_block.to(tl.int64)
        next_slot = tl.load(slots_ptr + block)
        page = block * block_bytes + head_offset
        next_words, next_items = words_ptr + page // 4, items_ptr + (page // 4) * PAGE.per_word
        next_within = following % per_block
        nk_first, nk_second, nk_scale, nk_low, next_chosen = _load_keys(
            next_words, next_items, bytes_ptr + page, next_within, PAGE
        )
        nv_first, nv_second, nv_scale, nv_low = _load_values(
            next_words, next_items, next_within, PAGE
        )
        next_block = tl.load(table + tl.minimum(tile + 2, end - 1) // per_block)

        if slot < 0:
            logits = _code_logits(
                columns, real, items, within, k_first, k_second, k_scale, k_low, chosen,
                DOT, PAGE,
            )  # fmt: skip
            if PAGE.sinks:
                sink = t < tl.where(tile == 0, PAGE.sinks, 0)
                logits = tl.where(sink, sink_logits, logits)
            logits = shaped(logits, scale, soft_cap, CAPPED)
            # The query is at `history`, where the pages have nothing.
            distance = t + (tile * PAGE.group - history)
            logits = hidden(logits, slope, distance, window, SLOPES)
            logits = tl.where(distance < 0, logits, float("-inf"))
            peak, shrunk, p = risen(peak, logits, 0)
            total = total * shrunk + tl.sum(p, 0)

            codes = value_codes(v_first)
            if PAGE.value_bits == 4:
                codes = 4 * codes + value_codes(v_second)
            codes = tl.permute(code_operand(codes, DOT), (0, 2, 1))
            folded = operand(p[None, :, :] * v_scale[:, :, None], DOT)
            rest = p[None, :, :] * v_low[:, :, None] - folded.to(tl.float32) * bias(DOT)
            sums = sums * shrunk[None, None, :] + tl.sum(rest, 1)[:, None, :]
            sums = tl.dot(codes, folded, sums, input_precision="ieee")
        else:
            exact_tiles += 1
        slot, items, within = next_slot, next_items, next_within
        k_first, k_second, k_scale, k_low = nk_first, nk_second, nk_scale, nk_low
        chosen = next_chosen
        v_first, v_second, v_scale, v_low = nv_first, nv_second, nv_scale, nv_low

    if PAGE.rotated:
        # Exact tokens' V, from here on, is not rotated.
        shape: tl.constexpr = [PAGE.channels, N]
        mean = tl.reshape(sums, shape) / tl.where(total > 0, total, 1.0)[None, :]
        sums = tl.reshape(turned(mean, False, DOT, PAGE) * total[None, :], sums.shape)
        # One condition is known when compiling, the other is not: the compiler wants them apart.
        if PAGE.sinks:  # noqa: SIM102
            if has_sinks:
                distance = t - history
                logits = shaped(sink_logits, scale, soft_cap, CAPPED)
                logits = hidden(logits, slope, distance, window, SLOPES)
                sink = (t < PAGE.sinks) & (distance < 0)
                p = tl.where(sink, tl.exp2(logits - peak[None, :]), 0.0)
                sink_values = tl.trans(load_operand(
                    first_items + PAGE.sink_values + t * PAGE.size + across,
                    sink & (across < PAGE.size), PAGE.kind, DOT,
                ))  # fmt: skip
                more = tl.dot(sink_values, operand(p, DOT), input_precision="ieee")
                sums += tl.reshape(more, sums.shape)
    c = tl.arange(0, PAGE.value_groups_padded)[:, None, None] * PAGE.value_tile
    if exact_tiles > 0:
        keys = keys_ptr + head.to(tl.int64) * key_head_stride
        values = values_ptr + head.to(tl.int64) * value_head_stride
        across = tl.arange(0, PAGE.channels)[None, :]
        deep = c + tl.arange(0, PAGE.value_tile)[None, None, :]
        for tile in range(start, end):
            pool = tl.load(slots_ptr + tl.load(table + tile // per_block)).to(tl.int64)
            if pool >= 0:
                exact = load_operand(columns + d, real & (d < PAGE.size), PAGE.kind, DOT)
                token = (tile % per_block) * PAGE.group + t
                distance = t + (tile * PAGE.group - history)
                at_k = keys + pool * key_slot_stride + token * key_token_stride + across
                k = load_operand(at_k, (distance < 0) & (across < PAGE.size), PAGE.kind, DOT)
                logits = tl.dot(k, exact, input_precision="ieee")
                logits = shaped(logits, scale, soft_cap, CAPPED)
                logits = hidden(logits, slope, distance, window, SLOPES)
                logits = tl.where(distance < 0, logits, float("-inf"))
                peak, shrunk, p = risen(peak, logits, 0)
                total = total * shrunk + tl.sum(p, 0)
                at_v = values + pool * value_slot_stride + token[None] * value_token_stride + deep
                mask = (distance < 0)[None] & (deep < PAGE.size)
                v = tl.permute(load_operand(at_v, mask, PAGE.kind, DOT), (0, 2, 1))
                folded = tl.broadcast_to(operand(p, DOT)[None], [v.shape[0], PAGE.group, N])
                sums = tl.dot(v, folded, sums * shrunk[None, None, :], input_precision="ieee")

    tl.store(tops_ptr + at * 2, peak, mask=n < grouped)
    tl.store(tops_ptr + at * 2 + 1, total, mask=n < grouped)
    c += tl.arange(0, PAGE.value_tile)[None, :, None]
    at_sums = sums_ptr + at[None, None, :] * PAGE.size + c
    tl.store(at_sums, sums, mask=real[None, :, :] & (c < PAGE.size))


@triton.jit
def decode_merge(
    query_ptr,  # [tokens, heads, D]
    key_ptr,  # [tokens, H, D]: of the new tokens
    value_ptr,  # [tokens, H, D]
    starts_ptr,  # int32 [sequences + 1]
    sinks_ptr,  # float32 [heads]
    sums_ptr,  # float32 [sequences, heads, splits, D]
    tops_ptr,  # float32 [sequences, heads, splits, 2]
    out_ptr,  # [tokens, heads, D]
    scale,
    soft_cap,
    splits,
    heads,
    grouped,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    out_token_stride,
    out_head_stride,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """``sum of exp(l) v / sum of exp(l)`` over all stretches, the new token and the sink.

    Program (sequence, head).
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(starts_ptr + sequence).to(tl.int64)
    if tl.load(starts_ptr + sequence + 1) - begin != 1:
        return
    d = tl.arange(0, PAGE.channels)
    real = d < PAGE.size
    shared = (head // grouped).to(tl.int64)
    at = query_ptr + begin * query_token_stride + head.to(tl.int64) * query_head_stride
    query = load_float(at + d, real, PAGE.kind)
    at = key_ptr + begin * key_token_stride + shared * key_head_stride
    key = load_float(at + d, real, PAGE.kind)
    at = value_ptr + begin * value_token_stride + shared * value_head_stride
    sums = load_float(at + d, real, PAGE.kind)
    peak = shaped(tl.sum(query * key, 0), scale, soft_cap, CAPPED)
    total = 1.0
    if SINKS:
        sink = tl.load(sinks_ptr + head) * LOG2_E
        top = tl.maximum(peak, sink)
        shrunk = tl.exp2(peak - top)
        total = shrunk + tl.exp2(sink - top)
        sums *= shrunk
        peak = top
    at = (sequence.to(tl.int64) * heads + head) * splits
    for start in range(0, splits, MERGED):
        split = start + tl.arange(0, MERGED)
        tops = tops_ptr + (at + split) * 2
        peaks = tl.load(tops, mask=split < splits, other=float("-inf"))
        some = peaks > float("-inf")
        totals = tl.load(tops + 1, mask=some, other=0.0)
        rows = sums_ptr + (at + split)[:, None] * PAGE.size + d[None, :]
        parts = tl.load(rows, mask=some[:, None] & real[None, :], other=0.0)
        top = tl.maximum(peak, tl.max(peaks, 0))
        shrunk = tl.exp2(peak - top)
        weight = tl.exp2(peaks - top)
        total = total * shrunk + tl.sum(totals * weight, 0)
        sums = sums * shrunk + tl.sum(parts * weight[:, None], 0)
        peak = top
    at = out_ptr + begin * out_token_stride + head.to(tl.int64) * out_head_stride
    store_float(at + d, sums / total, real, PAGE.kind)
