"""What the Triton kernels share: a page's constants, and how they read numbers and codes.

Kernels see a cache as 32-bit words, as items of the model's dtype and as bytes, three views of one
memory. bfloat16 is read and written as its bit pattern and rounded by hand, which every target and
the interpreter do alike.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .format import ROWS as _ROWS
from .format import PageFormat

ROWS = tl.constexpr(_ROWS)
WORD = 4
"""Bytes of a word of a plane."""

BF16, FP16, FP32 = "bf16", "fp16", "fp32"
KINDS = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}


@dataclass(frozen=True)
class Page:
    """A ``PageFormat`` in numbers that kernels are compiled with; sizes of tiles in powers of two.

    Offsets of planes are in words, of scales, minima and sinks in items of the dtype.
    """

    kind: str
    """The dtype: one of KINDS."""
    per_word: int
    """Items of the dtype in a word."""
    block: int
    group: int
    size: int
    """The head size; ``channels`` is the next power of two, ``rows`` that many rows of words."""
    channels: int
    rows: int
    key_bits: int
    value_bits: int
    boosted: int
    boosted_padded: int
    sinks: int
    fit: str
    rotated: bool
    turned: int
    """Channels that the rotation of V mixes."""
    value_group: int
    value_groups: int
    """Groups of V's channels; times ``value_tile`` equals ``channels``."""
    value_groups_padded: int
    value_tile: int
    """Channels of a group of V, the next power of two."""
    tail: int
    """Bytes at the end of a page that hold nothing,."""
    key_extra: int
    value_codes: int
    value_extra: int
    key_scale: int
    key_min: int
    value_scale: int
    value_min: int
    sink_keys: int
    sink_values: int
    boosted_at: int
    """In bytes."""


@functools.cache
def page_of(fmt: PageFormat) -> Page:
    at = {name: offset for name, (offset, _) in fmt.sections.items()}
    item = fmt.dtype.itemsize
    channels = triton.next_power_of_2(fmt.head_size)
    groups = triton.next_power_of_2(fmt.value_groups)
    return Page(
        kind=KINDS[fmt.dtype],
        per_word=WORD // item,
        block=fmt.block_tokens,
        group=fmt.group,
        size=fmt.head_size,
        channels=channels,
        rows=channels // _ROWS,
        key_bits=fmt.key_bits,
        value_bits=fmt.value_bits,
        boosted=fmt.boosted,
        boosted_padded=triton.next_power_of_2(fmt.boosted) if fmt.boosted else 0,
        sinks=fmt.sinks,
        fit=fmt.fit,
        rotated=fmt.rotated,
        turned=fmt.head_size & -fmt.head_size,
        value_group=fmt.value_group,
        value_groups=fmt.value_groups,
        value_groups_padded=groups,
        value_tile=channels // groups,
        tail=fmt.page_bytes - at["boosted"] - fmt.boosted,
        key_extra=at["key_extra"] // WORD,
        value_codes=at["value_codes"] // WORD,
        value_extra=at["value_extra"] // WORD,
        key_scale=at["key_scale"] // item,
        key_min=at["key_min"] // item,
        value_scale=at["value_scale"] // item,
        value_min=at["value_min"] // item,
        sink_keys=at["sink_keys"] // item,
        sink_values=at["sink_values"] // item,
        boosted_at=at["boosted"],
    )


def items(tensor: torch.Tensor) -> torch.Tensor:
    """What a kernel is given for a tensor of the model's dtype: bfloat16 as bit patterns."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def views(fmt: PageFormat, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The start of a cache as words, items of the dtype and bytes; kernels take its strides."""
    start = cache.view(torch.uint8).as_strided((WORD,), (1,))
    return start.view(torch.int32), items(start.view(fmt.dtype)), start


@triton.jit
def load_float(pointer, mask, KIND: tl.constexpr):
    """float32 of items of the model's dtype, zero where masked."""
    value = tl.load(pointer, mask=mask, other=0)
    if KIND == "bf16":
        value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        value = value.to(tl.float32)
    return value


@triton.jit
def rounded(value, KIND: tl.constexpr):
    """float32 rounded to the model's dtype, to nearest even, as float32."""
    if KIND == "bf16":
        bits = value.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        value = tl.where(value == value, near.to(tl.float32, bitcast=True), value)
    elif KIND == "fp16":
        value = value.to(tl.float16).to(tl.float32)
    return value


@triton.jit
def store_float(pointer, value, mask, KIND: tl.constexpr):
    """Store float32 values, rounded to the model's dtype."""
    if KIND == "bf16":
        bits = rounded(value, KIND).to(tl.int32, bitcast=True) >> 16
        tl.store(pointer, bits.to(tl.int16), mask=mask)
    elif KIND == "fp16":
        tl.store(pointer, value.to(tl.float16), mask=mask)
    else:
        tl.store(pointer, value, mask=mask)


@triton.jit
def load_operand(pointer, mask, KIND: tl.constexpr, DOT: tl.constexpr):
    """Items of the model's dtype as operands of a product: unchanged, or float32."""
    if DOT == "fp32":
        value = load_float(pointer, mask, KIND)
    else:
        value = tl.load(pointer, mask=mask, other=0)
        if KIND == "bf16":
            value = value.to(tl.bfloat16, bitcast=True)
    return value


@triton.jit
def operand(value, DOT: tl.constexpr):
    """float32 values as operands of a product."""
    if DOT == "bf16":
        value = value.to(tl.bfloat16)
    elif DOT == "fp16":
        value = value.to(tl.float16)
    return value


@triton.jit
def code_operand(code, DOT: tl.constexpr):
    """Codes as operands of a product, plus ``bias``.

    From the bias on, a dtype's values are the integers, so that a code is or-ed into the mantissa:
    no conversion.
    """
    if DOT == "bf16":
        value = (code | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif DOT == "fp16":
        value = (code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        value = code.to(tl.float32)
    return value


@triton.jit
def bias(DOT: tl.constexpr):
    """What ``code_operand`` adds to a code."""
    if DOT == "bf16":
        value: tl.constexpr = 128.0
    elif DOT == "fp16":
        value: tl.constexpr = 1024.0
    else:
        value: tl.constexpr = 0.0
    return value


@triton.jit
def plane_codes(words):
    """Codes int32 [16 R, C] of words [R, C] of a plane."""
    shift = (2 * tl.arange(0, ROWS))[None, :, None]
    codes = (words[:, None, :] >> shift) & 3
    return tl.reshape(codes, [words.shape[0] * ROWS, words.shape[1]])


@triton.jit
def value_codes(words):
    """Codes int32 [g, 16 R, C] of words [g, R, C], channels in groups, of one of V's planes."""
    shift = (2 * tl.arange(0, ROWS))[None, None, :, None]
    codes = (words[:, :, None, :] >> shift) & 3
    return tl.reshape(codes, [words.shape[0], words.shape[1] * ROWS, words.shape[2]])


@triton.jit
def boosted_channels(data, PAGE: tl.constexpr):
    """The channels of a page, its bytes at data, that have four bits; int32, padded with -1."""
    e = tl.arange(0, PAGE.boosted_padded)
    mask = e < PAGE.boosted
    chosen = tl.load(data + PAGE.boosted_at + e, mask=mask, other=0).to(tl.int32)
    return tl.where(mask, chosen, -1)


@triton.jit
def boosted_rows(chosen, PAGE: tl.constexpr):
    """(which of the channels have four bits, their rows in K's second plane), both int32."""
    equal = chosen[:, None] == tl.arange(0, PAGE.channels)[None, :]
    row = tl.arange(0, PAGE.boosted_padded)[:, None]
    return tl.sum(equal.to(tl.int32), 0), tl.sum(tl.where(equal, row, 0), 0)


@triton.jit
def rotation_signs(DOT: tl.constexpr, PAGE: tl.constexpr):
    """``rotation(D)`` times the square root of ``turned``: 1, -1 and 0, operands of a product."""
    i = tl.arange(0, PAGE.channels)[:, None]
    j = tl.arange(0, PAGE.channels)[None, :]
    both = i & j & (PAGE.turned - 1)
    both ^= both >> 4
    both ^= both >> 2
    both ^= both >> 1
    mixed = (i // PAGE.turned == j // PAGE.turned) & (i < PAGE.size) & (j < PAGE.size)
    return operand(tl.where(mixed, 1.0 - 2.0 * (both & 1).to(tl.float32), 0.0), DOT)


@triton.jit
def turned(x, ROWS_TURN: tl.constexpr, DOT: tl.constexpr, PAGE: tl.constexpr):
    """Rows (or columns) of ``channels`` float32 numbers, times the rotation.

    What a 16-bit operand of a product leaves is a second one.
    """
    signs = rotation_signs(DOT, PAGE)
    high = operand(x, DOT)
    if ROWS_TURN:
        y = tl.dot(high, signs, input_precision="ieee")
    else:
        y = tl.dot(signs, high, input_precision="ieee")
    if DOT != "fp32":
        low = operand(x - high.to(tl.float32), DOT)
        if ROWS_TURN:
            y = tl.dot(low, signs, y, input_precision="ieee")
        else:
            y = tl.dot(signs, low, y, input_precision="ieee")
    return y * (PAGE.turned**-0.5)
