"""KIVI pages with Triton: ``pack``, ``unpack`` and ``attend`` as ``reference.py`` defines them.

The host never waits for the device. What ``attend`` allocates grows with the new tokens and the
stretches that histories are split into, not with the cache.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from ..attention import Attention
from . import triton_decode as decode
from . import triton_pack as packing
from . import triton_prefill as prefilling
from . import triton_unpack as unpacking
from .format import ROWS, PageFormat
from .triton_page import FP32, Page, items, page_of, views

EXACT = {"enable_fp_fusion": False}
"""No contraction of a product and a sum: packed and unpacked bytes are the reference's."""

FUSED = {"enable_fp_fusion": True}


@dataclass(frozen=True)
class Tiling:
    """How work is split; any choice gives the same result but for rounding.

    programs: of ``decode_history`` for a multiprocessor; stretch: tiles of a split, at least;
    splits: at most; rows: of a tile of ``prefill``, at most.
    """

    programs: int = 4
    stretch: int = 4
    splits: int = 128
    rows: int = 64


TILING = Tiling()


def _warps(elements: int, each: int, most: int = 8) -> int:
    """Warps for a tile, from how many of its elements a thread may hold."""
    return min(max(4, triton.next_power_of_2(elements // (32 * each))), most)


def pack_options(page: Page) -> dict[str, object]:
    return {**EXACT, "num_warps": _warps(page.channels * page.group, 16)}


def value_tokens(page: Page) -> int:
    """Tokens of V that a program packs: all of a group, or as many as its threads hold."""
    return min(page.group, max(ROWS, 8192 // page.channels))


def unpack_options(page: Page) -> dict[str, object]:
    return {**EXACT, "num_warps": _warps(page.channels * page.group, 32)}


def decode_options(page: Page, capability: int) -> dict[str, object]:
    """Options of ``decode_history``; capability: of CUDA, ten times, or 0 for another device."""
    options = {**FUSED, "num_warps": _warps(page.channels * page.group, 64), "num_stages": 1}
    if 0 < capability < 90:
        # The assembler would spill two registers to fit one more program on a multiprocessor.
        options["maxnreg"] = 255
    return options


def prefill_options(page: Page, rows: int) -> dict[str, object]:
    tile = page.channels * max(page.group, rows)
    return {**FUSED, "num_warps": _warps(tile, 32), "num_stages": 1}


def operands(page: Page) -> str:
    """The dtype of products' operands. The interpreter knows no product of bfloat16."""
    return FP32 if triton.knobs.runtime.interpret else page.kind


def decode_columns(grouped: int, amd: bool = torch.version.hip is not None) -> int:
    """Columns of a tile of queries of one KV head: what tensor cores take at least, or more."""
    return max(16 if amd else 8, triton.next_power_of_2(grouped))


def prefill_rows(page: Page, queries: int, capability: int) -> int:
    """Rows of a tile of ``prefill``; capability: of CUDA, ten times, or 0 for another device."""
    most = TILING.rows
    # More would spill registers. Before Hopper operands all pass through them; on AMD fewer rows
    # take fewer threads, and more registers of each.
    large = page.channels * page.group > 4096
    if (capability and large and page.rotated) or (0 < capability < 90 and (large or page.rotated)):
        most = min(most, 32)
    return min(most, max(16, triton.next_power_of_2(queries)))


@functools.cache
def _capability(device: torch.device) -> int:
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _splits(page: Page, device: torch.device, programs: int, tokens: int) -> int:
    """Stretches of a history of up to so many tokens, where one each makes so many programs."""
    wanted = triton.cdiv(TILING.programs * _multiprocessors(device), max(programs, 1))
    most = triton.cdiv(triton.cdiv(tokens, page.group), TILING.stretch)
    return max(1, min(wanted, most, TILING.splits))


def pack(
    fmt: PageFormat,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    blocks: torch.Tensor,
    fills: torch.Tensor,
    firsts: torch.Tensor,
) -> None:
    """Write pages, as ``reference.pack``."""
    if not len(blocks):
        return
    page = page_of(fmt)
    words, numbers, data = views(fmt, cache)
    heads = keys.shape[2]
    slots, blocks, fills, firsts = slots.int(), blocks.int(), fills.int(), firsts.int()
    with torch.cuda.device_of(cache):
        if fmt.boosted:
            packing.choose_channels[len(blocks), heads](
                items(keys), slots, data, blocks, fills, firsts, *keys.stride()[:3],
                *cache.stride()[:2], PAGE=page, **pack_options(page),
            )  # fmt: skip
        packing.pack_keys[len(blocks), heads, fmt.key_groups](
            items(keys), slots, words, numbers, data, blocks, fills, firsts,
            *keys.stride()[:3], *cache.stride()[:2], PAGE=page, **pack_options(page),
        )  # fmt: skip
        tokens = value_tokens(page)
        packing.pack_values[len(blocks), heads, fmt.block_tokens // tokens](
            items(values), slots, words, numbers, blocks, fills, firsts, *values.stride()[:3],
            *cache.stride()[:2], PAGE=page, TOKENS=tokens, DOT=operands(page),
            **pack_options(page),
        )  # fmt: skip


def unpack(
    fmt: PageFormat,
    cache: torch.Tensor,
    blocks: torch.Tensor,
    fills: torch.Tensor,
    firsts: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write exact tokens, as ``reference.unpack``."""
    if not len(blocks):
        return
    page = page_of(fmt)
    with torch.cuda.device_of(cache):
        unpacking.unpack_pages[len(blocks), keys.shape[2], fmt.key_groups](
            *views(fmt, cache), blocks.int(), fills.int(), firsts.int(), items(keys),
            items(values), slots.int(), *cache.stride()[:2], *keys.stride()[:3],
            *values.stride()[:3], PAGE=page, DOT=operands(page), **unpack_options(page),
        )  # fmt: skip


def attend(
    fmt: PageFormat,
    attention: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    exact_keys: torch.Tensor,
    exact_values: torch.Tensor,
    slot_of_block: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    max_query: int,
    max_seq: int,
) -> None:
    """Attention of new tokens, as ``reference.attend``.

    max_query and max_seq may be greater than the greatest, never less. Sequences with one new
    token take the decode kernels, others the prefill kernel; sequences without are left alone.
    """
    sequences = len(seq_lens)
    if not sequences or not len(query):
        return
    page = page_of(fmt)
    heads, kv_heads = query.shape[1], key.shape[1]
    grouped = heads // kv_heads
    data = views(fmt, cache)
    strides = (*cache.stride()[:2], *exact_keys.stride()[:3], *exact_values.stride()[:3])
    exact = items(exact_keys), items(exact_values), slot_of_block, block_table
    new = items(query), items(key), items(value), items(out)
    query, key, value, out = new
    between = {
        name: tensor.stride()[:2]
        for name, tensor in (("q", query), ("k", key), ("v", value), ("o", out))
    }
    # Kernels that want no slopes or sinks take any pointer.
    none = slot_of_block
    slopes = none if attention.slopes is None else attention.slopes.float()
    sinks = none if attention.sinks is None else attention.sinks.float()
    common = {
        "PAGE": page,
        "CAPPED": attention.soft_cap > 0,
    }
    matrices = {
        "DOT": operands(page),
        "SLOPES": attention.slopes is not None,
    }
    numbers = float(attention.scale), float(attention.soft_cap)
    capability = _capability(query.device)
    with torch.cuda.device_of(query):
        splits = _splits(page, query.device, sequences * kv_heads, max_seq)
        size = (sequences, heads, splits)
        sums = torch.empty(*size, fmt.head_size, dtype=torch.float32, device=query.device)
        tops = torch.empty(*size, 2, dtype=torch.float32, device=query.device)
        decode.decode_history[splits, kv_heads, sequences](
            query, *data, *exact, query_start, seq_lens, slopes, sums, tops, *numbers,
            attention.window, heads, grouped, *between["q"], block_table.stride(0), *strides,
            N=decode_columns(grouped), **common, **matrices, **decode_options(page, capability),
        )  # fmt: skip
        decode.decode_merge[sequences, heads](
            query, key, value, query_start, sinks, sums, tops, out, *numbers, splits, heads,
            grouped, *between["q"], *between["k"], *between["v"], *between["o"],
            SINKS=attention.sinks is not None, **common, **FUSED, num_warps=4,
        )  # fmt: skip
        if max_query < 2:
            return
        rows = prefill_rows(page, max_query * grouped, capability)
        prefilling.prefill[triton.cdiv(max_query * grouped, rows), kv_heads, sequences](
            query, key, value, *data, *exact, query_start, seq_lens, slopes, sinks, out,
            *numbers, attention.window, grouped, *between["q"], *between["k"], *between["v"],
            *between["o"], block_table.stride(0), *strides, M=rows,
            SINKS=attention.sinks is not None, **common, **matrices,
            **prefill_options(page, rows),
        )  # fmt: skip


def warm_up() -> None:
    """Triton compiles a kernel when it is first launched, and keeps it in a cache on disk."""
