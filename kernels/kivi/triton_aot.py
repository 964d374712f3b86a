"""Ahead-of-time compilation of every kernel, and what each one needs; no GPU is asked for.

What a variant of a kernel is compiled with equals what ``triton_kivi.py`` launches it with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ..triton_aot import TARGETS, Resources, resources_of
from . import triton_decode as decode
from . import triton_pack as packing
from . import triton_prefill as prefilling
from . import triton_unpack as unpacking
from .format import PageFormat
from .triton_kivi import (
    FUSED,
    decode_columns,
    decode_options,
    pack_options,
    prefill_options,
    prefill_rows,
    unpack_options,
    value_tokens,
)
from .triton_page import Page, page_of

_ITEMS = {"bf16": "*i16", "fp16": "*fp16", "fp32": "*fp32"}
# Pointers that are neither items of the dtype nor int32.
_POINTERS = {"bytes": "*u8"} | dict.fromkeys(("slopes", "sinks", "sums", "tops"), "*fp32")
_INDICES = (
    "words", "slots", "blocks", "fills", "firsts", "table", "starts", "lengths",
)  # fmt: skip
# Integers that a launch may pass as any number; the others are strides, multiples of 16 items.
_COUNTS = ("window", "heads", "grouped", "splits", "table_stride")


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel."""

    name: str
    kernel: triton.JITFunction
    constants: dict[str, object]
    options: dict[str, object]

    def signature(self) -> dict[str, str]:
        items = _ITEMS[self.constants["PAGE"].kind]
        signature = {}
        for name in self.kernel.arg_names:
            short = name.removesuffix("_ptr")
            if name in self.constants:
                kind = "constexpr"
            elif name in ("scale", "soft_cap"):
                kind = "fp32"
            elif short == name:
                kind = "i32"
            else:
                kind = "*i32" if short in _INDICES else _POINTERS.get(short, items)
            signature[name] = kind
        return signature


def presets(
    sizes: tuple[int, ...] = (64, 128), dtype: torch.dtype = torch.bfloat16
) -> dict[str, PageFormat]:
    """The formats that are had without asking for more than a preset, for these head sizes."""
    found = {}
    for size in sizes:
        balanced = {"group": 64, "boosted": size // 4, "sinks": 1}
        found[f"kivi {size}"] = PageFormat(128, size, dtype)
        found[f"balanced {size}"] = PageFormat(
            128, size, dtype, fit="unbiased", rotated=True, **balanced
        )
    return found


def variants(
    formats: dict[str, PageFormat], target: str = "sm_90", grouped: int = 4
) -> Iterator[Variant]:
    """Every kernel for every format, as launched on a target; ``grouped`` heads share a KV head."""
    for name, fmt in formats.items():
        yield from _variants_of(name, page_of(fmt), TARGETS[target], grouped)


def _variants_of(name: str, page: Page, target: GPUTarget, grouped: int) -> Iterator[Variant]:
    def variant(kernel, options, **constants):
        return Variant(
            f"{kernel.__name__} {name}", kernel, {"PAGE": page, **constants}, options
        )  # fmt: skip

    plain = {"CAPPED": False, "SLOPES": False}
    if page.boosted:
        yield variant(packing.choose_channels, pack_options(page))
    yield variant(packing.pack_keys, pack_options(page))
    tokens = value_tokens(page)
    yield variant(packing.pack_values, pack_options(page), TOKENS=tokens, DOT=page.kind)
    yield variant(unpacking.unpack_pages, unpack_options(page), DOT=page.kind)
    amd = target.backend == "hip"
    capability = 0 if amd else target.arch
    columns = decode_columns(grouped, amd)
    options = decode_options(page, capability)
    yield variant(decode.decode_history, options, N=columns, DOT=page.kind, **plain)
    merge = {**FUSED, "num_warps": 4}
    yield variant(decode.decode_merge, merge, CAPPED=False, SINKS=False)
    rows = prefill_rows(page, 1 << 20, capability)
    yield variant(
        prefilling.prefill, prefill_options(page, rows), M=rows, DOT=page.kind, SINKS=False, **plain
    )


def compile_for(variant: Variant, target: str):
    """The compiled kernel for one of TARGETS."""
    names = variant.kernel.arg_names
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    signature = variant.signature()
    # Launches see tensors that are aligned to 16 bytes and strides that are multiples of 16.
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or (signature[name] == "i32" and name not in _COUNTS)
    }
    source = ASTSource(variant.kernel, signature, constants, attributes)
    return triton.compile(source, target=TARGETS[target], options=dict(variant.options))


def resources(variant: Variant, target: str) -> Resources:
    """Compile a kernel and read what it needs from its binary."""
    return resources_of(compile_for(variant, target), variant.name, target)
