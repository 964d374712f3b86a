"""FP8 pages on the CPU: numba around the loops of ``_vector``, on torch's threads.

Reads and writes the bytes that ``reference.py`` does. Tasks of storing are a few tokens of one KV
head, those of attention stand in ``kernels.cpu_attention``. Where there are few new tokens, codes
become numbers in registers; scales never meet them: K's is multiplied into the query, V's into the
output.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from .. import cpu_attention
from ..attention import Attention
from ..cpu_attention import (
    BLOCK,
    CACHE,
    CACHE_BLOCK,
    CACHE_HEAD,
    FORMAT,
    KIND,
    KINDS,
    KV_HEADS,
    LENGTHS,
    LIST,
    QUERIES,
    SCRATCH_BYTES,
    SIZE,
    STARTS,
    T_BEGIN,
    T_END,
    T_FEW,
    T_SEQUENCE,
    TABLE,
    TABLE_ROW,
    TASK_BYTES,
    TASKS,
    TILE,
    WINDOW,
    Local,
    attend_tile,
    compiled,
    finish,
    load_queries,
    merged,
    next_task,
    param,
    plan_attend,
    planner,
    run,
    run_attention,
    scratch,
    set_attention,
    soften,
    state_layout,
    strides,
    worker,
)
from ..vector import (
    BF16,
    FP16,
    FP32,
    filled,
    get_f32,
    get_i32,
    get_i64,
    kept_outside,
    prefetched,
    put_i64,
    scaled,
)
from . import _vector as vec
from . import format as form
from .format import PageFormat

_CODES = tuple(form.CODES)
_UNITS = tuple(vec.UNIT[code] for code in _CODES)

STORE_TOKENS = 16
"""Tokens of a task of storing."""

# Places in the array of parameters.
CODE, UNIT, K_SCALES, V_SCALES, K_STEP, V_STEP, FIRST_OF_OP = range(FORMAT, FORMAT + 7)
(
    KEY, KEY_TOKEN, KEY_HEAD, VALUE, VALUE_TOKEN, VALUE_HEAD, SLOTS, COUNT, STORE_END,
) = range(FIRST_OF_OP, FIRST_OF_OP + 9)  # fmt: skip

_local = Local()


def _encode_of(code):
    bf16, fp16, fp32 = (vec.ENCODE[code][kind] for kind in (BF16, FP16, FP32))

    @compiled
    def encode(kind, source, target, count, scale):
        count = kept_outside(count)
        if kind == BF16:
            bf16(source, target, count, scale)
        elif kind == FP16:
            fp16(source, target, count, scale)
        else:
            fp32(source, target, count, scale)

    return encode


def _products_of(code):
    tiles = vec.PRODUCTS[code]
    p14, p24, p34, p62 = tiles[1, 4], tiles[2, 4], tiles[3, 4], tiles[6, 2]
    p12, p22, p32 = tiles[1, 2], tiles[2, 2], tiles[3, 2]

    @compiled
    def products(codes, stride, count, coef, coef_stride, out, out_stride, rows, columns):
        """``out += coef @ codes`` in tiles of at most six rows and 32 columns."""
        rows = kept_outside(rows)
        while rows > 0:
            now = 6 if rows >= 6 else min(rows, 3)
            x = 0
            while x < columns:
                c, o = codes + x, out + 4 * x
                wide = now < 6 and x + 32 <= columns
                if now == 6:
                    p62(c, stride, count, coef, coef_stride, o, out_stride)
                elif now == 3:
                    if wide:
                        p34(c, stride, count, coef, coef_stride, o, out_stride)
                    else:
                        p32(c, stride, count, coef, coef_stride, o, out_stride)
                elif now == 2:
                    if wide:
                        p24(c, stride, count, coef, coef_stride, o, out_stride)
                    else:
                        p22(c, stride, count, coef, coef_stride, o, out_stride)
                elif wide:
                    p14(c, stride, count, coef, coef_stride, o, out_stride)
                else:
                    p12(c, stride, count, coef, coef_stride, o, out_stride)
                x += 32 if wide else 16
            rows -= now
            coef += now * coef_stride
            out += now * out_stride

    return products


_encode_e4m3, _encode_e5m2 = (_encode_of(code) for code in _CODES)
_products_e4m3, _products_e5m2 = (_products_of(code) for code in _CODES)
_written_e4m3, _written_e5m2 = (vec.WRITTEN_OUT[code] for code in _CODES)


@compiled
def _encode(P, source, target, count, scale):
    if param(P, CODE) == 0:
        _encode_e4m3(param(P, KIND), source, target, count, scale)
    else:
        _encode_e5m2(param(P, KIND), source, target, count, scale)


@compiled
def _products(P, codes, stride, count, coef, coef_stride, out, out_stride, rows, columns):
    if param(P, CODE) == 0:
        _products_e4m3(codes, stride, count, coef, coef_stride, out, out_stride, rows, columns)
    else:
        _products_e5m2(codes, stride, count, coef, coef_stride, out, out_stride, rows, columns)


@compiled
def _written_out(P, source, stride, target, target_stride, rows, columns):
    rows = kept_outside(rows)
    if param(P, CODE) == 0:
        _written_e4m3(source, stride, target, target_stride, rows, columns)
    else:
        _written_e5m2(source, stride, target, target_stride, rows, columns)


# ------------------------------------------------------------------------------------- store


@compiled
def _store_task(P, W, task):
    kv_heads, block, size = param(P, KV_HEADS), param(P, BLOCK), param(P, SIZE)
    first, head = STORE_TOKENS * (task // kv_heads), task % kv_heads
    k_scale = get_f32(param(P, K_SCALES) + head * param(P, K_STEP))
    v_scale = get_f32(param(P, V_SCALES) + head * param(P, V_STEP))
    for token in range(first, min(param(P, COUNT), first + STORE_TOKENS)):
        slot = get_i64(param(P, SLOTS) + 8 * token)
        if slot < 0:
            continue
        place = slot % block
        page = param(P, CACHE) + slot // block * param(P, CACHE_BLOCK)
        page += head * param(P, CACHE_HEAD)
        key = param(P, KEY) + token * param(P, KEY_TOKEN) + head * param(P, KEY_HEAD)
        value = param(P, VALUE) + token * param(P, VALUE_TOKEN) + head * param(P, VALUE_HEAD)
        _encode(P, key, W, size, k_scale)
        vec.scattered(W, page + place, block, size)
        _encode(P, value, page + (block + place) * size, size, v_scale)


# --------------------------------------------------------------------------------- attention


@compiled
def _attend_page(P, W, page, rows, head, valid, key_position, query_position):
    """A block whose codes become numbers in registers."""
    rows = kept_outside(rows)
    block, size, tile = param(P, BLOCK), param(P, SIZE), param(P, TILE)
    queries, outputs, scores, _, _, corrections = state_layout(P)[:6]
    scores, outputs = W + scores, W + outputs
    width = (valid + 15) // 16 * 16
    for r in range(rows):
        filled(scores + 4 * r * tile, width, np.float32(0))
    _products(P, page, block, size, W + queries, 4 * size, scores, 4 * tile, rows, width)
    soften(P, W, rows, head, width, valid, key_position, query_position)
    for r in range(rows):
        scaled(outputs + 4 * r * size, size, get_f32(W + corrections + 4 * r), np.float32(0))
    _products(P, page + block * size, size, valid, scores, 4 * tile, outputs, 4 * size, rows, size)


@compiled
def _attend_blocks(P, W, sequence, head, begin, end, length, rows, position, few):
    """Blocks ``begin`` to ``end`` of a sequence of ``length`` stored tokens, for queries from
    ``position`` on."""
    block, size, window = param(P, BLOCK), param(P, SIZE), param(P, WINDOW)
    keys, values = state_layout(P)[6:8]
    table = param(P, TABLE) + sequence * param(P, TABLE_ROW)
    for b in range(begin, end):
        start = b * block
        valid = min(block, length - start)
        if window and start + valid <= position - window + 1:
            continue
        page = param(P, CACHE) + get_i32(table + 4 * b) * param(P, CACHE_BLOCK)
        page += head * param(P, CACHE_HEAD)
        if not few:
            width = (valid + 15) // 16 * 16
            _written_out(P, page, block, W + keys, 4 * (param(P, TILE) + 16), size, width)
            _written_out(P, page + block * size, size, W + values, 4 * size, valid, size)
            attend_tile(P, W, rows, head, valid, start, position)
            continue
        if b + 1 < end:
            following = param(P, CACHE) + get_i32(table + 4 * (b + 1)) * param(P, CACHE_BLOCK)
            prefetched(following + head * param(P, CACHE_HEAD), 2 * block * size)
        _attend_page(P, W, page, rows, head, valid, start, position)


@compiled
def _attend_task(P, W, task):
    kv_heads, queries, block = param(P, KV_HEADS), param(P, QUERIES), param(P, BLOCK)
    item, head = param(P, LIST) + TASK_BYTES * (task // kv_heads), task % kv_heads
    sequence, begin, end = param(item, T_SEQUENCE), param(item, T_BEGIN), param(item, T_END)
    start = get_i32(param(P, STARTS) + 4 * sequence)
    new = get_i32(param(P, STARTS) + 4 * (sequence + 1)) - start
    length = get_i32(param(P, LENGTHS) + 4 * sequence)
    unit = get_f32(P + 8 * UNIT)
    k_factor = unit * get_f32(param(P, K_SCALES) + head * param(P, K_STEP))
    v_factor = unit * get_f32(param(P, V_SCALES) + head * param(P, V_STEP))
    position = length - new
    if param(item, T_FEW):
        load_queries(P, W, start, new, head, k_factor)
        rows = new * queries
        _attend_blocks(P, W, sequence, head, begin, end, length, rows, position, True)
        if merged(P, W, item, head, rows):
            finish(P, W, start, new, head, v_factor)
        return
    start, tokens, position = start + begin, end - begin, position + begin
    load_queries(P, W, start, tokens, head, k_factor)
    seen = position + tokens
    blocks = (seen + block - 1) // block
    _attend_blocks(P, W, sequence, head, 0, blocks, seen, tokens * queries, position, False)
    finish(P, W, start, tokens, head, v_factor)


# ------------------------------------------------------------------------------ entry points


@compiled
def _rounded_up(size):
    return (size + 4095) // 4096 * 4096 + 64


def _store_code(sources):
    @planner()
    def plan(P):
        _ = sources
        put_i64(P + 8 * SCRATCH_BYTES, _rounded_up(param(P, SIZE)))
        return 0

    @worker()
    def work(P):
        _ = sources
        W, task = scratch(P), next_task(P)
        while task < param(P, TASKS):
            _store_task(P, W, task)
            task = next_task(P)

    return plan, work


def _attend_code(sources):
    @planner()
    def plan(P):
        _ = sources
        put_i64(P + 8 * SCRATCH_BYTES, _rounded_up(state_layout(P)[-1]))
        return plan_attend(P)

    @worker()
    def work(P):
        _ = sources
        W, task = scratch(P), next_task(P)
        while task < param(P, TASKS):
            _attend_task(P, W, task)
            task = next_task(P)

    return plan, work


@functools.cache
def _code(name: str):
    """The planner and the worker of an entry point; compiled, or loaded from numba's cache."""
    make = {"store": _store_code, "attend": _attend_code}[name]
    return make(cpu_attention.sources(vec.__file__, form.__file__, __file__))


def warm_up() -> None:
    """Compile everything, or load it from numba's cache, so that no request waits for it."""
    for name in ("store", "attend"):
        _code(name)


def _set_format(fmt: PageFormat, k_scale: torch.Tensor, v_scale: torch.Tensor) -> None:
    p = _local.parameters
    code = _CODES.index(fmt.code)
    p[CODE] = code
    p[UNIT : UNIT + 1].view("f4")[0] = _UNITS[code]
    p[K_SCALES:FIRST_OF_OP] = [
        k_scale.data_ptr(), v_scale.data_ptr(), 4 * (k_scale.numel() > 1),
        4 * (v_scale.numel() > 1),
    ]  # fmt: skip


def store(
    fmt: PageFormat,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Write tokens into pages, see ``reference.store``."""
    count, kv_heads = len(slots), cache.shape[1]
    if not count:
        return
    plan, work = _code("store")
    slots = slots.to(torch.int64).contiguous()
    item, k, v = key.element_size(), key.stride(), value.stride()
    p = _local.parameters
    p[BLOCK : CACHE_HEAD + 1] = [
        fmt.block_tokens, fmt.head_size, KINDS[key.dtype], kv_heads, cache.data_ptr(),
        *strides(cache)[:2],
    ]  # fmt: skip
    _set_format(fmt, k_scale, v_scale)
    p[KEY:STORE_END] = [
        key.data_ptr(), k[0] * item, k[1] * item, value.data_ptr(), v[0] * item, v[1] * item,
        slots.data_ptr(), count,
    ]  # fmt: skip
    p[TASKS] = -(-count // STORE_TOKENS) * kv_heads
    plan(_local.address)
    run(work, _local)


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
    """Attention of new tokens over what is stored, see ``reference.attend``."""
    if not len(seq_lens):
        return
    code = _code("attend")
    kept = set_attention(
        _local, attention, query, cache, fmt.block_tokens, block_table, query_start, seq_lens, out,
        max_query, max_seq, tile=fmt.block_tokens, new_stored=True,
    )  # fmt: skip
    _set_format(fmt, k_scale, v_scale)
    run_attention(code, _local)
    del kept
