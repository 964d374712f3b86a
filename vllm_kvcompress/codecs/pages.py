"""Blobs of blocks that a backend has compressed in place: packed pages beside exact tokens.

The common container with codec ``pages``: shape ``[layers, 1, blocks, 1, bytes of a page]`` in
bytes, and three sections: a byte a block, 0 packed or 1 exact; the packed blocks' pages as they
are, ``[layers, packed blocks, page bytes]``; and, if any block is exact, the blob of another codec
with the exact blocks' tokens, ``[layers, 2, tokens, kv_heads, head_size]``. Nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_kvcompress.codecs import container
from vllm_kvcompress.codecs.base import Codec
from vllm_kvcompress.codecs.container import BytesLike, Header, MalformedBlob

NAME = "pages"
VERSION = 1


@dataclass(frozen=True)
class Pages:
    """Some blocks of a cache group."""

    exact: tuple[bool, ...]
    """Whether each block is exact."""
    packed_pages: torch.Tensor
    """uint8 ``[layers, packed blocks, page bytes]``."""
    exact_tokens: torch.Tensor | None
    """``[layers, 2, tokens of the exact blocks, kv_heads, head_size]``, None without any."""


def encode(pages: Pages, codec: Codec, fingerprint: bytes) -> bytes:
    """One blob. ``codec`` codes the exact tokens and must not lose anything."""
    layers, _, page_bytes = pages.packed_pages.shape
    header = Header(
        codec=NAME,
        level="",
        dtype=torch.uint8,
        shape=(layers, 1, len(pages.exact), 1, page_bytes),
        fingerprint=fingerprint,
        codec_version=VERSION,
    )
    exact = b""
    if pages.exact_tokens is not None:
        exact = codec.encode(pages.exact_tokens, fingerprint=fingerprint)
    packed = pages.packed_pages.cpu().contiguous().numpy().reshape(-1)
    return container.pack(header, [bytes(pages.exact), packed, exact])


def decode(blob: BytesLike, codec: Codec, device: torch.device) -> tuple[bytes, Pages]:
    """The fingerprint and what was encoded. Raises a subclass of BlobError for a damaged blob."""
    header, sections = container.unpack(blob, codec=NAME, codec_version=VERSION)
    layers, values, blocks, heads, page_bytes = header.shape
    if header.dtype != torch.uint8 or values != 1 or heads != 1 or len(sections) != 3:
        raise MalformedBlob(f"pages of {header.dtype} {list(header.shape)}")
    forms, packed, exact = sections
    if len(forms) != blocks or any(form > 1 for form in forms):
        raise MalformedBlob(f"forms of {blocks} blocks are {bytes(forms[:16])!r}")
    count = blocks - sum(forms)
    if len(packed) != layers * count * page_bytes:
        raise MalformedBlob(f"{len(packed)} bytes of {count} packed pages in {layers} layers")
    if bool(exact) != bool(sum(forms)):
        raise MalformedBlob("exact tokens and the blocks' forms do not agree")
    tokens = None
    if exact:
        tokens = codec.decode(exact, device=device)
        shape = tokens.shape
        if shape[0] != layers or shape[1] != 2 or shape[2] % sum(forms):
            raise MalformedBlob(f"exact tokens {list(shape)} in a blob of {layers} layers")
    pages = torch.from_numpy(np.frombuffer(packed, np.uint8).copy())
    return header.fingerprint, Pages(
        exact=tuple(bool(form) for form in forms),
        packed_pages=pages.view(layers, count, page_bytes).to(device),
        exact_tokens=tokens,
    )


def place_of(exact: Sequence[bool], block: int) -> int:
    """The place of a block among those of its own form."""
    return sum(1 for form in exact[:block] if form == exact[block])
