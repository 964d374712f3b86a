"""Codes of 8 bits with one scale for each token and head, on any device.

Per row of ``head_size`` values, from those that are finite:

    scale = bfloat16(max |x| / 127);  code = rint(x / scale), limited to +-127, 0 where scale is 0
    x' = code * scale, limited to the dtype's finite range

in float32, whose product of a code and a scale is exact; only the last rounding, to nearest and
even, is the dtype's own.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

MAX_CODE = 127


def quantise_reference(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Codes int8 of the shape of ``kv``, scales bfloat16 of that shape without its last axis, and
    whether all values are finite. Those that are not count as zero.
    """
    values = kv.float()
    finite = values.isfinite()
    values = torch.where(finite, values, 0)
    scales = (values.abs().amax(-1) / MAX_CODE).bfloat16()
    codes = (values / scales.float().unsqueeze(-1)).round()
    # 0 / 0 where a row is zero, and larger where its scale was rounded to zero.
    codes = torch.where(codes.isfinite(), codes, 0).clamp(-MAX_CODE, MAX_CODE)
    return codes.to(torch.int8), scales, bool(finite.all())


def quantise(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """``quantise_reference``, compiled for contiguous bfloat16 on the CPU."""
    if kv.device.type != "cpu" or kv.dtype != torch.bfloat16 or not kv.is_contiguous():
        return quantise_reference(kv)
    codes = torch.empty(kv.shape, dtype=torch.int8)
    scales = torch.empty(kv.shape[:-1], dtype=torch.bfloat16)
    size = kv.shape[-1]
    all_finite = _quantise_bfloat16(
        kv.view(torch.int16).view(-1, size).numpy().view(np.uint16),
        codes.view(-1, size).numpy(),
        scales.view(-1).view(torch.int16).numpy().view(np.uint16),
    )
    return codes, scales, all_finite


def restore_reference(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Write the values of ``codes [..., head_size]`` and ``scales [...]`` into ``out``."""
    limit = torch.finfo(out.dtype).max
    values = codes.float() * scales.float().unsqueeze(-1)
    out.copy_(values.clamp_(-limit, limit))


def restore(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """``restore_reference``, compiled where ``out`` is contiguous bfloat16 on the CPU."""
    if out.device.type == "cpu" and out.dtype == torch.bfloat16 and out.is_contiguous():
        size = codes.shape[-1]
        _restore_bfloat16(
            codes.reshape(-1, size).numpy(),
            scales.reshape(-1).view(torch.int16).numpy().view(np.uint16),
            out.view(torch.int16).view(-1, size).numpy().view(np.uint16),
        )
    else:
        restore_reference(codes, scales, out)


@numba.njit(nogil=True, cache=True)
def _quantise_bfloat16(values, codes, scales):  # bits [rows, D], int8 [rows, D], bits [rows]
    rows, size = values.shape
    row = np.empty(size, np.float32)
    bits = row.view(np.uint32)
    scale = np.empty(1, np.float32)
    scale_bits = scale.view(np.uint32)
    top = np.uint32(0x7F800000)
    all_finite = True
    for r in range(rows):
        largest = np.uint32(0)
        for c in range(size):
            b = np.uint32(values[r, c]) << np.uint32(16)
            b = b if (b & top) != top else np.uint32(0)
            bits[c] = b
            # Magnitudes are ordered as their bits are.
            magnitude = b & np.uint32(0x7FFFFFFF)
            largest = magnitude if magnitude > largest else largest
        for c in range(size):
            all_finite &= (values[r, c] & 0x7F80) != 0x7F80
        scale_bits[0] = largest
        scale[0] = scale[0] / np.float32(MAX_CODE)
        b = scale_bits[0]
        b = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        scales[r] = np.uint16(b)
        scale_bits[0] = b << np.uint32(16)
        s = scale[0]
        if b == 0:
            codes[r] = 0
            continue
        for c in range(size):
            x = np.rint(row[c] / s)
            codes[r, c] = np.int8(min(max(x, np.float32(-MAX_CODE)), np.float32(MAX_CODE)))
    return all_finite


@numba.njit(nogil=True, cache=True)
def _restore_bfloat16(codes, scales, out):  # int8 [rows, D], bits of bf16 [rows], [rows, D]
    rows, size = codes.shape
    row = np.empty(size, np.float32)
    bits = row.view(np.uint32)
    scale = np.empty(1, np.float32)
    scale_bits = scale.view(np.uint32)
    largest = np.float32(3.3895313892515355e38)
    for r in range(rows):
        scale_bits[0] = np.uint32(scales[r]) << np.uint32(16)
        s = scale[0]
        for c in range(size):
            x = np.float32(codes[r, c]) * s
            row[c] = min(max(x, -largest), largest)
        for c in range(size):
            b = bits[c]
            even = (b >> np.uint32(16)) & np.uint32(1)
            out[r, c] = np.uint16((b + np.uint32(0x7FFF) + even) >> np.uint32(16))
