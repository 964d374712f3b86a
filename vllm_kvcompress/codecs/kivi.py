"""The ``kivi`` codec: KIVI pages as a blob, for what is offloaded at 16 bits.

A chunk becomes blocks of tokens, packed as ``kernels/kivi/format.py`` says with the settings that
in-place pages have by default; its first token, if it is an attention sink, stays exact.

Sections: a byte, the number of sinks, 0 or 1, or 255 where the tensor is kept as it is; and the
pages ``[layers, blocks, kv_heads, page bytes]``, or the tensor. Kept as they are: what has no such
pages (FP8, latents of K and V in one, other head sizes), and values that are not finite.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_kvcompress.codecs import container
from vllm_kvcompress.codecs.base import Codec, output_tensor
from vllm_kvcompress.codecs.container import BytesLike, Header, MalformedBlob
from vllm_kvcompress.kernels.cachegen.sinks import find_sinks
from vllm_kvcompress.kernels.kivi import implementation
from vllm_kvcompress.kernels.kivi.format import DTYPES, HEAD_SIZES, PageFormat
from vllm_kvcompress.kernels.openmp import torch_on_this_thread

CODEC_VERSION = 1

LEVELS = {"4bit": (4, 4), "k4v2": (4, 2), "2bit": (2, 2)}
"""Bits of the codes of K and of V."""

_GROUP = 64
_BLOCK = 128
_KEPT = 255
_EXACT = (torch.float8_e4m3fn, torch.float8_e5m2)


class KiviCodec(Codec):
    """Codes bf16, fp16 and fp32 tensors of K and V; keeps others as they are.

    level: ``4bit``, ``k4v2`` (K at 4 bits, V at 2) or ``2bit``. Raises ValueError, naming the
    choices, for an unknown one.
    """

    name = "kivi"

    def __init__(self, level: str = "4bit"):
        if level not in LEVELS:
            raise ValueError(
                f"codec 'kivi' has no level {level!r}; choose from {', '.join(LEVELS)}"
            )
        self.level = level

    def encode(self, kv: torch.Tensor, fingerprint: bytes = b"") -> bytes:
        self.check_input(kv)
        if kv.dtype not in (*DTYPES, *_EXACT):
            raise ValueError(
                f"kv has dtype {kv.dtype}; kivi takes bfloat16, float16, float32 and FP8"
            )
        header = self.header(kv, fingerprint, CODEC_VERSION)
        kv = kv.detach()
        paged = kv.dtype in DTYPES and kv.shape[1] == 2 and kv.shape[4] in HEAD_SIZES
        if not paged or not bool(kv.isfinite().all()):
            kept = kv.cpu().contiguous().flatten().view(torch.uint8)
            return container.pack(header, [bytes([_KEPT]), kept.numpy()])
        sinks = int(0 in find_sinks(kv))
        pages = _pages(kv, header, sinks)
        return container.pack(header, [bytes([sinks]), pages.cpu().numpy().reshape(-1)])

    def decode(
        self,
        blob: BytesLike,
        device: torch.device | str | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        header, sinks, section = self._unpack(blob)
        kv = output_tensor(header, device, out)
        data = torch.from_numpy(np.frombuffer(section, np.uint8).copy())
        if sinks == _KEPT:
            return kv.copy_(data.view(header.dtype).view(header.shape))
        fmt, blocks = _format(header, sinks)
        layers, _, tokens, heads, size = header.shape
        pages = data.view(layers * blocks, heads, fmt.block_tokens, fmt.token_bytes).to(kv.device)
        chosen = fmt.section(pages.flatten(2), "boosted")
        if chosen.numel() and bool((chosen >= size).any()):
            raise MalformedBlob(f"a page of kivi names a channel beyond its {size}")
        shape = (layers * blocks, fmt.block_tokens, heads, size)
        keys, values = torch.zeros(2, *shape, dtype=header.dtype, device=kv.device)
        with torch_on_this_thread():
            implementation(kv.device).unpack(
                fmt, pages, *_blocks(header, fmt, blocks, kv.device), keys, values,
                torch.arange(layers * blocks, dtype=torch.int32, device=kv.device),
            )  # fmt: skip
        for index, part in enumerate((keys, values)):
            kv[:, index].copy_(part.view(layers, -1, heads, size)[:, :tokens])
        return kv

    def inspect(self, blob: BytesLike) -> dict[str, Any]:
        header, sinks, section = self._unpack(blob)
        description = container.describe(header, [bytes([sinks]), section])
        description["bits_per_value"] = 8 * len(blob) * header.dtype.itemsize / header.decoded_bytes
        return description

    def cache_key(self) -> bytes:
        return f"{self.name}/{CODEC_VERSION}/{self.level}".encode()

    def _unpack(self, blob: BytesLike) -> tuple[Header, int, memoryview]:
        header, sections = container.unpack(
            blob,
            codec=self.name,
            codec_version=CODEC_VERSION,
            max_decoded_bytes=self.max_decoded_bytes,
        )
        if header.dtype not in (*DTYPES, *_EXACT) or header.level not in LEVELS:
            raise MalformedBlob(f"kivi does not code {header.dtype} at level {header.level!r}")
        if len(sections) != 2 or len(sections[0]) != 1:
            raise MalformedBlob("a kivi blob has two sections, the first a byte")
        sinks = sections[0][0]
        expected = header.decoded_bytes
        if sinks != _KEPT:
            layers, values, _, heads, size = header.shape
            if sinks > 1 or values != 2 or size not in HEAD_SIZES or header.dtype in _EXACT:
                raise MalformedBlob(f"kivi has no pages of {sinks} sinks for {list(header.shape)}")
            fmt, blocks = _format(header, sinks)
            expected = layers * blocks * heads * fmt.page_bytes
        if len(sections[1]) != expected:
            raise MalformedBlob(f"{len(sections[1])} bytes of pages; expected {expected}")
        return header, sinks, sections[1]


def _format(header: Header, sinks: int) -> tuple[PageFormat, int]:
    """The format of a chunk's pages, and how many blocks a layer has."""
    tokens, size = header.shape[2], header.shape[4]
    key_bits, value_bits = LEVELS[header.level]
    block = min(_BLOCK, -(-tokens // _GROUP) * _GROUP)
    fmt = PageFormat(
        block_tokens=block,
        head_size=size,
        dtype=header.dtype,
        group=_GROUP,
        key_bits=key_bits,
        value_bits=value_bits,
        boosted=round(size / 64) * 16 if key_bits == 2 else 0,
        sinks=sinks,
        fit="unbiased",
        rotated=True,
    )
    return fmt, -(-tokens // block)


def _blocks(
    header: Header, fmt: PageFormat, blocks: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, fills and firsts of all blocks of all layers, int32."""
    layers, tokens = header.shape[0], header.shape[2]
    number = torch.arange(layers * blocks, dtype=torch.int32, device=device)
    within = number % blocks
    fills = (tokens - within * fmt.block_tokens).clamp(max=fmt.block_tokens)
    return number, fills, (within == 0).to(torch.int32)


def _pages(kv: torch.Tensor, header: Header, sinks: int) -> torch.Tensor:
    """uint8 ``[layers * blocks, kv_heads, block_tokens, token_bytes]``."""
    fmt, blocks = _format(header, sinks)
    layers, _, tokens, heads, size = kv.shape
    padded = kv.new_zeros(layers, 2, blocks * fmt.block_tokens, heads, size)
    padded[:, :, :tokens] = kv
    shape = (layers * blocks, fmt.block_tokens, heads, size)
    keys, values = (padded[:, index].reshape(shape) for index in range(2))
    pages = torch.zeros(
        layers * blocks, heads, fmt.block_tokens, fmt.token_bytes, dtype=torch.uint8,
        device=kv.device,
    )  # fmt: skip
    number, fills, firsts = _blocks(header, fmt, blocks, kv.device)
    with torch_on_this_thread():
        implementation(kv.device).pack(fmt, keys, values, number, pages, number, fills, firsts)
    return pages
