"""Attention over paged K and V on the CPU: what all page formats share, in numba.

Every entry point of a format fills an array of parameters, addresses and sizes as int64, and lets
workers take tasks by an atomic counter. Those of attention are

*   a span of what is stored of one sequence and KV head, where there are few new tokens: the
    format multiplies its codes as they are, and the last worker to finish a sequence's head merges
    its spans;
*   a tile of new tokens of one sequence and KV head otherwise: blocks are written out as float32
    one at a time.

Both keep the maximum, the sum and the weighted sum of a softmax that goes on from block to block.
How the work is split depends on shapes alone, so that results do not depend on threads.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numba import cfunc, njit, types

from . import openmp, vector
from .attention import Attention
from .vector import (
    BF16,
    FP16,
    FP32,
    capped,
    exp2,
    fetch_add,
    filled,
    get_f32,
    get_i32,
    get_i64,
    kept_outside,
    product_row,
    put_f32,
    put_i64,
    row_exp,
    row_max,
    scaled,
    with_slope,
)

compiled = njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True)

KINDS = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}

_LOG2E = math.log2(math.e)
_MINUS_INF = np.float32(-np.inf)

FEW_ROWS = 16
"""So many queries of a KV head read codes as they are; more are worth a block written out."""

SPAN = 512
"""Stored tokens of a task with few queries, a whole number of blocks."""

TILE_ROWS = 192
"""Queries of a task with many."""

# Places in the array of parameters. A format's own begin at FORMAT.
(
    NEXT, WORKER, TASKS, SCRATCH, SCRATCH_BYTES,
    BLOCK, SIZE, KIND, KV_HEADS, CACHE, CACHE_BLOCK, CACHE_HEAD,
    QUERY, QUERY_TOKEN, QUERY_HEAD, OUT, OUT_TOKEN, OUT_HEAD, TABLE, TABLE_ROW, STARTS, LENGTHS,
    SEQUENCES, QUERIES, WINDOW, CAP, SLOPES, LOGIT_SINKS, FLOATS, ROWS, TILE, NEW_STORED, LIST,
    PARTIALS, COUNTERS, PARTIAL_FLOATS, COUNTER_COUNT,
    FORMAT,
) = range(38)  # fmt: skip
_PARAMETERS = 128

# A task in the list of attention: int64 each.
T_SEQUENCE, T_FEW, T_BEGIN, T_END, T_SPANS, T_SPAN, T_PARTIAL, T_COUNTER = range(8)
TASK_BYTES = 64


class Local(threading.local):
    """What a thread that calls keeps between calls: parameters and scratch, grown when needed."""

    def __init__(self) -> None:
        self.parameters = np.zeros(_PARAMETERS, np.int64)
        self.address = self.parameters.ctypes.data
        self.floats = np.zeros(8, np.float32)
        self.buffers: dict[str, tuple[np.ndarray, int, int]] = {}

    def room(self, name: str, size: int) -> int:
        """The address of so many bytes, aligned."""
        held = self.buffers.get(name)
        if held is None or held[2] < size:
            size = max(4096, size + size // 2)
            array = np.zeros(size + 64, np.uint8)
            address = array.ctypes.data
            held = array, address + -address % 64, size
            self.buffers[name] = held
        return held[1]


# ------------------------------------------------------------------------------------- rows


@compiled
def param(P, name):
    return get_i64(P + 8 * name)


def _of_kind(bf16, fp16, fp32):
    """The operation on rows for the dtype that is given when it runs."""

    @compiled
    def run(kind, source, stride, target, target_stride, rows, columns):
        rows = kept_outside(rows)
        if kind == BF16:
            bf16(source, stride, target, target_stride, rows, columns)
        elif kind == FP16:
            fp16(source, stride, target, target_stride, rows, columns)
        else:
            fp32(source, stride, target, target_stride, rows, columns)

    return run


widen = _of_kind(vector.widen_bf16, vector.widen_fp16, vector.widen_fp32)
narrow = _of_kind(vector.narrow_bf16, vector.narrow_fp16, vector.narrow_fp32)
turn = _of_kind(vector.turn_bf16, vector.turn_fp16, vector.turn_fp32)


@compiled
def products(values, stride, count, coef, coef_stride, out, out_stride, rows, columns):
    """``out += coef @ values`` in tiles of 16 columns; one of values stays in the cache for all
    rows of coefficients."""
    rows = kept_outside(rows)
    for x in range(0, columns, 16):
        v, c, o = values + 4 * x, coef, out + 4 * x
        left = rows
        while left > 0:
            now = 6 if left >= 6 else min(left, 3)
            if now == 6:
                vector.product62(v, stride, count, c, coef_stride, o, out_stride)
            elif now == 3:
                vector.product32(v, stride, count, c, coef_stride, o, out_stride)
            elif now == 2:
                vector.product22(v, stride, count, c, coef_stride, o, out_stride)
            else:
                vector.product12(v, stride, count, c, coef_stride, o, out_stride)
            left -= now
            c += now * coef_stride
            o += now * out_stride


# --------------------------------------------------------------------------------- attention


@compiled
def state_layout(P):
    """Where a worker's scratch has what, in bytes: queries, outputs, scores, maxima, sums,
    corrections, K ``[size][tile + 16]`` and V ``[tile][size]`` in float32; and what is free."""
    size, rows, tile = param(P, SIZE), param(P, ROWS), param(P, TILE)
    queries = 0
    outputs = queries + 4 * rows * size
    scores = outputs + 4 * rows * size
    maxima = scores + 4 * rows * tile
    sums = maxima + 4 * rows
    corrections = sums + 4 * rows
    keys = corrections + 4 * rows
    # Keys a page apart would share the sets of the cache.
    values = keys + 4 * size * (tile + 16)
    end = values + 4 * size * tile
    return queries, outputs, scores, maxima, sums, corrections, keys, values, end


@compiled
def load_queries(P, W, start, tokens, head, factor):
    """Queries of a KV head, scaled, to scratch: row ``token * queries + query``; no softmax yet."""
    queries, size = param(P, QUERIES), param(P, SIZE)
    at, outputs, _, maxima, sums = state_layout(P)[:5]
    scale = get_f32(param(P, FLOATS)) * factor
    for i in range(tokens):
        for g in range(queries):
            r = i * queries + g
            source = param(P, QUERY) + (start + i) * param(P, QUERY_TOKEN)
            source += (head * queries + g) * param(P, QUERY_HEAD)
            row = W + at + 4 * r * size
            widen(param(P, KIND), source, 0, row, 0, 1, size)
            scaled(row, size, scale, np.float32(0))
            filled(W + outputs + 4 * r * size, size, np.float32(0))
            put_f32(W + maxima + 4 * r, _MINUS_INF)
            put_f32(W + sums + 4 * r, np.float32(0))


@compiled
def soften(P, W, rows, head, width, valid, key_position, query_position):
    """Scores of a block become weights, and the softmax goes on.

    width: of the row, a multiple of 8; valid: its keys that are there.
    """
    rows = kept_outside(rows)
    queries, window, tile = param(P, QUERIES), param(P, WINDOW), param(P, TILE)
    _, _, scores, maxima, sums, corrections = state_layout(P)[:6]
    for r in range(rows):
        row = W + scores + 4 * r * tile
        position = query_position + r // queries
        begin = max(0, position - window + 1 - key_position) if window else 0
        end = min(valid, position - key_position + 1)
        if end <= begin:
            filled(row, width, np.float32(0))
            put_f32(W + corrections + 4 * r, np.float32(1))
            continue
        if param(P, CAP):
            floats = param(P, FLOATS)
            capped(row, width, get_f32(floats + 4), get_f32(floats + 8))
        if param(P, SLOPES):
            slope = get_f32(param(P, SLOPES) + 4 * (head * queries + r % queries))
            with_slope(row, width, slope * np.float32(_LOG2E), key_position - position)
        for t in range(begin):
            put_f32(row + 4 * t, _MINUS_INF)
        for t in range(end, width):
            put_f32(row + 4 * t, _MINUS_INF)
        before = get_f32(W + maxima + 4 * r)
        largest = max(before, row_max(row, width))
        if not largest > _MINUS_INF:
            filled(row, width, np.float32(0))
            put_f32(W + corrections + 4 * r, np.float32(1))
            continue
        correction = exp2(before - largest)
        total = row_exp(row, width, largest)
        put_f32(W + maxima + 4 * r, largest)
        put_f32(W + sums + 4 * r, get_f32(W + sums + 4 * r) * correction + total)
        put_f32(W + corrections + 4 * r, correction)


@compiled
def attend_tile(P, W, rows, head, count, key_position, query_position):
    """Keys and values that stand in scratch as float32."""
    rows = kept_outside(rows)
    size, tile = param(P, SIZE), param(P, TILE)
    queries, outputs, scores, _, _, corrections, keys, values, _ = state_layout(P)
    width = (count + 15) // 16 * 16
    for r in range(rows):
        filled(W + scores + 4 * r * tile, width, np.float32(0))
    products(
        W + keys, 4 * (tile + 16), size, W + queries, 4 * size, W + scores, 4 * tile, rows, width
    )
    soften(P, W, rows, head, width, count, key_position, query_position)
    for r in range(rows):
        correction = get_f32(W + corrections + 4 * r)
        scaled(W + outputs + 4 * r * size, size, correction, np.float32(0))
    products(W + values, 4 * size, count, W + scores, 4 * tile, W + outputs, 4 * size, rows, size)


@compiled
def finish(P, W, start, tokens, head, factor):
    """Divide by the sums, and write the output times a factor."""
    queries, size = param(P, QUERIES), param(P, SIZE)
    _, outputs, _, maxima, sums = state_layout(P)[:5]
    for r in range(tokens * queries):
        h = head * queries + r % queries
        total, above = get_f32(W + sums + 4 * r), factor
        if param(P, LOGIT_SINKS):
            sink = get_f32(param(P, LOGIT_SINKS) + 4 * h) * np.float32(_LOG2E)
            before = get_f32(W + maxima + 4 * r)
            largest = max(before, sink)
            correction = exp2(before - largest)
            above *= correction
            total = total * correction + exp2(sink - largest)
        row = W + outputs + 4 * r * size
        scaled(row, size, above / total, np.float32(0))
        to = param(P, OUT) + (start + r // queries) * param(P, OUT_TOKEN) + h * param(P, OUT_HEAD)
        narrow(param(P, KIND), row, 0, to, 0, 1, size)


@compiled
def _merge(P, W, partial, stride, spans, rows):
    """The spans of a sequence's head into one, in their order."""
    size = param(P, SIZE)
    _, outputs, _, maxima, sums = state_layout(P)[:5]
    for r in range(rows):
        largest = _MINUS_INF
        for s in range(spans):
            largest = max(largest, get_f32(partial + s * stride + 4 * r))
        total = np.float32(0)
        out = W + outputs + 4 * r * size
        filled(out, size, np.float32(0))
        for s in range(spans):
            at = partial + s * stride
            factor = exp2(get_f32(at + 4 * r) - largest)
            total += factor * get_f32(at + 4 * (rows + r))
            source = at + 4 * (2 * rows + r * size)
            product_row(source, factor, out, size)
        put_f32(W + maxima + 4 * r, largest)
        put_f32(W + sums + 4 * r, total)


@compiled
def merged(P, W, item, head, rows):
    """Hand in a span; whether it was the last of its sequence's head, and all now stand in
    scratch as one."""
    spans, span = param(item, T_SPANS), param(item, T_SPAN)
    if spans == 1:
        return True
    size = param(P, SIZE)
    stride = 4 * rows * (size + 2)
    partial = param(P, PARTIALS) + 4 * param(item, T_PARTIAL) + head * spans * stride
    _, outputs, _, maxima, sums = state_layout(P)[:5]
    at = partial + span * stride
    for r in range(rows):
        put_f32(at + 4 * r, get_f32(W + maxima + 4 * r))
        put_f32(at + 4 * (rows + r), get_f32(W + sums + 4 * r))
    widen(FP32, W + outputs, 0, at + 8 * rows, 0, 1, rows * size)
    if fetch_add(param(P, COUNTERS) + 8 * (param(item, T_COUNTER) + head), 1) < spans - 1:
        return False
    _merge(P, W, partial, stride, spans, rows)
    return True


@compiled
def plan_attend(P):
    """Write the list of tasks, the long ones first; how many there are, a KV head."""
    block, window, kv_heads = param(P, BLOCK), param(P, WINDOW), param(P, KV_HEADS)
    queries, size = param(P, QUERIES), param(P, SIZE)
    starts, lengths = param(P, STARTS), param(P, LENGTHS)
    tile = max(1, TILE_ROWS // queries)
    step = max(1, SPAN // block)
    count, floats, counters = 0, 0, 0
    for turn_ in range(2):
        for sequence in range(param(P, SEQUENCES)):
            start = get_i32(starts + 4 * sequence)
            new = get_i32(starts + 4 * (sequence + 1)) - start
            if new <= 0:
                continue
            few = new == 1 or new * queries <= FEW_ROWS
            if few != (turn_ == 1):
                continue
            length = get_i32(lengths + 4 * sequence)
            history = length - new
            if not few:
                tiles = (new + tile - 1) // tile
                for i in range(tiles - 1, -1, -1):
                    item = param(P, LIST) + TASK_BYTES * count
                    put_i64(item + 8 * T_SEQUENCE, sequence)
                    put_i64(item + 8 * T_FEW, 0)
                    put_i64(item + 8 * T_BEGIN, i * tile)
                    put_i64(item + 8 * T_END, min(new, (i + 1) * tile))
                    count += 1
                continue
            stored = length if param(P, NEW_STORED) else history
            blocks = (stored + block - 1) // block
            begin = max(0, history - window + 1) // block if window else 0
            begin = min(begin, blocks)
            spans = max(1, (blocks - begin + step - 1) // step)
            for i in range(spans):
                item = param(P, LIST) + TASK_BYTES * count
                put_i64(item + 8 * T_SEQUENCE, sequence)
                put_i64(item + 8 * T_FEW, 1)
                put_i64(item + 8 * T_BEGIN, begin + i * step)
                put_i64(item + 8 * T_END, min(blocks, begin + (i + 1) * step))
                put_i64(item + 8 * T_SPANS, spans)
                put_i64(item + 8 * T_SPAN, i)
                put_i64(item + 8 * T_PARTIAL, floats)
                put_i64(item + 8 * T_COUNTER, counters)
                count += 1
            if spans > 1:
                floats += spans * kv_heads * new * queries * (size + 2)
                counters += kv_heads
    put_i64(P + 8 * PARTIAL_FLOATS, floats)
    put_i64(P + 8 * COUNTER_COUNT, counters)
    put_i64(P + 8 * TASKS, count * kv_heads)
    return count


# ------------------------------------------------------------------------------ entry points

# Functions of an entry point: the planner, called from Python before the workers, completes the
# parameters; a worker takes tasks until there are none left. Their only free variable is the digest
# of the sources: numba's cache takes a function's free variables for a part of it, and those that
# are compiled functions themselves would look new in every process.

worker = functools.partial(cfunc, types.void(types.int64), cache=True, error_model="numpy")
planner = functools.partial(
    njit, types.int64(types.int64), nogil=True, cache=True, error_model="numpy"
)


def sources(*files: str) -> str:
    """A digest of everything that compiled code is made of: these files of a format and what is
    shared. numba's own cache looks only at the file of a function."""
    digest = hashlib.sha256()
    for path in (vector.__file__, __file__, *files):
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


@compiled
def scratch(P):
    """The scratch memory of the worker that asks."""
    return param(P, SCRATCH) + fetch_add(P + 8 * WORKER, 1) * param(P, SCRATCH_BYTES)


@compiled
def next_task(P):
    """The next task, or one behind the last."""
    return fetch_add(P + 8 * NEXT, 1)


def run(work, local: Local) -> None:
    """Let workers do the tasks that the parameters say."""
    p = local.parameters
    p[SCRATCH] = local.room("scratch", int(p[SCRATCH_BYTES]) * torch.get_num_threads())
    p[NEXT] = p[WORKER] = 0
    openmp.run(work.address, local.address, int(p[TASKS]))


def int32(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous int32."""
    if tensor.dtype != torch.int32 or not tensor.is_contiguous():
        return tensor.to(torch.int32).contiguous()
    return tensor


def strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """In bytes, but for the last axis, of four axes."""
    item = tensor.element_size()
    first, second, third, _ = tensor.stride()
    return first * item, second * item, third * item


def set_attention(
    local: Local,
    attention: Attention,
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tokens: int,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    max_query: int,
    max_seq: int,
    *,
    tile: int,
    new_stored: bool,
) -> Sequence[torch.Tensor | None]:
    """Fill in the shared parameters of attention; returns tensors to keep until it has run.

    cache: bytes ``[blocks, kv_heads, ...]``; tile: tokens that are written out at once, at most;
    new_stored: whether the pages hold the new tokens too. The others are those of an ``attend``.
    """
    sequences, (heads, size) = len(seq_lens), query.shape[1:]
    kv_heads = cache.shape[1]
    queries = heads // kv_heads
    slopes, sinks = attention.slopes, attention.sinks
    if slopes is not None and slopes.dtype != torch.float32:
        slopes = slopes.float()
    if sinks is not None and sinks.dtype != torch.float32:
        sinks = sinks.float()
    query_start, seq_lens = int32(query_start), int32(seq_lens)
    if block_table.dtype != torch.int32 or block_table.stride(-1) != 1:
        block_table = block_table.to(torch.int32).contiguous()
    cap = attention.soft_cap
    local.floats[:3] = attention.scale * _LOG2E, 2 / cap if cap else 0, cap * _LOG2E
    # Few queries, at most FEW_ROWS or those of one token; many, at most a tile.
    rows = max(FEW_ROWS, TILE_ROWS if max_query > 1 else 0, queries)
    step = max(1, SPAN // block_tokens) * block_tokens
    tasks = sequences * (max_seq // step + 3) + len(query) // max(1, TILE_ROWS // queries)
    item, q, o = query.element_size(), query.stride(), out.stride()
    p = local.parameters
    p[BLOCK:PARTIALS] = [
        block_tokens, size, KINDS[query.dtype], kv_heads, cache.data_ptr(), *strides(cache)[:2],
        query.data_ptr(), q[0] * item, q[1] * item, out.data_ptr(), o[0] * item, o[1] * item,
        block_table.data_ptr(), 4 * block_table.stride(0), query_start.data_ptr(),
        seq_lens.data_ptr(), sequences, queries, attention.window, int(cap != 0),
        0 if slopes is None else slopes.data_ptr(), 0 if sinks is None else sinks.data_ptr(),
        local.floats.ctypes.data, rows, tile, int(new_stored),
        local.room("list", TASK_BYTES * tasks),
    ]  # fmt: skip
    return slopes, sinks, query_start, seq_lens, block_table


def run_attention(code, local: Local) -> None:
    """Plan and run an entry point of attention whose parameters are set."""
    plan, work = code
    plan(local.address)
    p = local.parameters
    counters = int(p[COUNTER_COUNT])
    if counters:
        p[PARTIALS] = local.room("partials", 4 * int(p[PARTIAL_FLOATS]))
        p[COUNTERS] = local.room("counters", 8 * counters)
        local.buffers["counters"][0][: 8 * counters + 64] = 0
    run(work, local)
