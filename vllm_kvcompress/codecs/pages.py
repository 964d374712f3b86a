"""Blobs of blocks that a backend has compressed in place: packed pages beside exact tokens.

The common container with codec ``pages``: shape ``[layers, 1, blocks, 1, bytes of a page]`` in
bytes, and these sections:

1.  a byte a block, 0 packed or 1 exact;
2.  if any block is exact, the blob of another codec with the exact blocks' tokens,
    ``[layers, 2, tokens, kv_heads, head_size]``;
3.  if any block is packed, how pages are cut: per cut its bytes and those of an item, u32 each. A
    page of all heads is a whole number of these cuts, one row after another;
4.  of each cut, for each byte of its items: that byte of all items of all rows, layer by layer, as
    one Zstandard frame. Codes of two bits are not evenly distributed, and neighbouring scales share
    their exponent: both are left to its entropy coder.

Nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import zstandard

from vllm_kvcompress.codecs import container
from vllm_kvcompress.codecs.base import Codec
from vllm_kvcompress.codecs.container import BytesLike, Header, MalformedBlob

NAME = "pages"
VERSION = 2

ZSTD_LEVEL = 1
"""The lowest with Huffman codes for literals, which is all there is in codes and scales."""

Cut = tuple[int, int]
"""Bytes of a stretch of a page, and of the items in it."""


@dataclass(frozen=True)
class Pages:
    """Some blocks of a cache group."""

    exact: tuple[bool, ...]
    """Whether each block is exact."""
    packed_pages: torch.Tensor
    """uint8 ``[layers, packed blocks, page bytes]``."""
    exact_tokens: torch.Tensor | None
    """``[layers, 2, tokens of the exact blocks, kv_heads, head_size]``, None without any."""


def encode(pages: Pages, cuts: Sequence[Cut], codec: Codec, fingerprint: bytes) -> bytes:
    """One blob. ``codec`` codes the exact tokens and must not lose anything.

    Raises ValueError if pages are not a whole number of ``cuts``.
    """
    layers, packed, page_bytes = pages.packed_pages.shape
    header = Header(
        codec=NAME,
        level="",
        dtype=torch.uint8,
        shape=(layers, 1, len(pages.exact), 1, page_bytes),
        fingerprint=fingerprint,
        codec_version=VERSION,
    )
    sections: list[bytes] = [bytes(pages.exact), b"", b""]
    if pages.exact_tokens is not None:
        sections[1] = codec.encode(pages.exact_tokens, fingerprint=fingerprint)
    if packed:
        row = sum(length for length, _ in cuts)
        if not row or page_bytes % row or any(length % item for length, item in cuts):
            raise ValueError(f"pages of {page_bytes} bytes are not made of cuts {list(cuts)}")
        sections[2] = np.array(cuts, "<u4").tobytes()
        rows = pages.packed_pages.cpu().contiguous().numpy().reshape(-1, row)
        compressor = zstandard.ZstdCompressor(
            level=ZSTD_LEVEL, write_checksum=False, write_content_size=True
        )
        sections += [
            compressor.compress(np.ascontiguousarray(plane)) for plane in _planes(rows, cuts)
        ]
    return container.pack(header, sections)


def decode(blob: BytesLike, codec: Codec, device: torch.device) -> tuple[bytes, Pages]:
    """The fingerprint and what was encoded. Raises a subclass of BlobError for a damaged blob."""
    header, sections = container.unpack(blob, codec=NAME, codec_version=VERSION)
    layers, values, blocks, heads, page_bytes = header.shape
    if header.dtype != torch.uint8 or values != 1 or heads != 1 or len(sections) < 3:
        raise MalformedBlob(f"pages of {header.dtype} {list(header.shape)}")
    forms, exact, cut_bytes, *frames = sections
    if len(forms) != blocks or any(form > 1 for form in forms):
        raise MalformedBlob(f"forms of {blocks} blocks are {bytes(forms[:16])!r}")
    packed = blocks - sum(forms)
    if bool(exact) != (packed < blocks) or bool(cut_bytes) != (packed > 0):
        raise MalformedBlob("the sections and the blocks' forms do not agree")
    tokens = None
    if exact:
        tokens = codec.decode(exact, device=device)
        shape = tokens.shape
        if shape[0] != layers or shape[1] != 2 or shape[2] % sum(forms):
            raise MalformedBlob(f"exact tokens {list(shape)} in a blob of {layers} layers")
    pages = np.empty((layers, packed, page_bytes), np.uint8)
    if packed:
        _decode_packed(pages, cut_bytes, frames)
    elif frames:
        raise MalformedBlob(f"{len(frames)} frames and no packed page")
    return header.fingerprint, Pages(
        exact=tuple(bool(form) for form in forms),
        packed_pages=torch.from_numpy(pages).to(device),
        exact_tokens=tokens,
    )


def _planes(rows: np.ndarray, cuts: Sequence[Cut]) -> Iterator[np.ndarray]:
    """Views ``[rows, items]`` of each byte of each cut's items, of ``rows [rows, bytes]``."""
    start = 0
    for length, item in cuts:
        items = rows[:, start : start + length].reshape(len(rows), -1, item)
        yield from (items[:, :, byte] for byte in range(item))
        start += length


def _decode_packed(pages: np.ndarray, cut_bytes: BytesLike, frames: Sequence[BytesLike]) -> None:
    if len(cut_bytes) % 8:
        raise MalformedBlob(f"cuts of {len(cut_bytes)} bytes")
    cuts = [(int(a), int(b)) for a, b in np.frombuffer(cut_bytes, "<u4").reshape(-1, 2)]
    row = sum(length for length, _ in cuts)
    if any(not 1 <= item <= 8 or length % item for length, item in cuts):
        raise MalformedBlob(f"cuts {cuts[:8]}")
    if not row or pages.shape[2] % row or len(frames) != sum(item for _, item in cuts):
        raise MalformedBlob(f"{len(frames)} frames of cuts of {row} bytes, {pages.shape[2]} a page")
    decompressor = zstandard.ZstdDecompressor()
    for plane, frame in zip(_planes(pages.reshape(-1, row), cuts), frames, strict=True):
        try:
            # The size is checked first: it is what the decompressor allocates.
            size = zstandard.get_frame_parameters(frame).content_size
            if size != plane.size:
                raise MalformedBlob(f"a frame of {size} bytes for {plane.size}")
            plane[:] = np.frombuffer(decompressor.decompress(frame), np.uint8).reshape(plane.shape)
        except (zstandard.ZstdError, ValueError) as error:
            raise MalformedBlob(f"a frame does not decompress: {error}") from error


def place_of(exact: Sequence[bool], block: int) -> int:
    """The place of a block among those of its own form."""
    return sum(1 for form in exact[:block] if form == exact[block])
