"""What a codec promises: one chunk of KV in, one self-describing blob out, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from vllm_kvcompress.codecs.container import DEFAULT_MAX_DECODED_BYTES, BytesLike, Header


class Codec(ABC):
    """Turns a chunk of KV into a blob and back.

    An instance is thread-safe. One call runs on one thread and releases the interpreter lock in
    its heavy parts, so that a pool of threads scales and the model beside it is not held up.
    """

    name: ClassVar[str]
    """The codec's name in the registry and in the header of its blobs."""

    level: str = ""
    """The level of this instance, empty for a codec that has none."""

    max_decoded_bytes: int = DEFAULT_MAX_DECODED_BYTES
    """The largest tensor in bytes that this instance encodes, or decodes a blob to."""

    @abstractmethod
    def encode(self, kv: torch.Tensor, fingerprint: bytes = b"") -> bytes:
        """Encode ``kv`` of shape ``[layers, K and V, tokens, kv_heads, head_size]``.

        Axis 1 has size 2, or 1 where K and V share one latent; no axis is empty. The tensor may
        be strided and on any device, and is not changed. ``fingerprint``, at most 32 bytes, is
        stored in the header as it is. Raises ValueError for a shape or dtype that the codec does
        not take.
        """

    @abstractmethod
    def decode(
        self,
        blob: BytesLike,
        device: torch.device | str | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode a blob to the shape and dtype of the tensor that was encoded.

        The tensor is made on ``device`` (the CPU if None), or is ``out``, whose shape and dtype
        must be those of the blob; ``out`` may be strided. Raises a subclass of BlobError for a
        blob that is damaged, of another codec or of an unknown version; what ``out`` holds is
        then undefined. Raises ValueError when ``out`` does not fit the blob.
        """

    @abstractmethod
    def inspect(self, blob: BytesLike) -> dict[str, Any]:
        """The header of a blob, and the sizes of its sections, as plain JSON-able values."""

    @abstractmethod
    def cache_key(self) -> bytes:
        """Everything about this instance that changes the meaning of its bytes.

        Codec, version of its format, level and digest of its profile: blobs of two instances may
        stand for each other only where their keys are equal.
        """

    def header(self, kv: torch.Tensor, fingerprint: bytes, version: int, **more: Any) -> Header:
        """The header of a chunk's blob; ``more`` are fields beyond those that every codec has."""
        return Header(
            codec=self.name,
            level=self.level,
            dtype=kv.dtype,
            shape=tuple(kv.shape),
            fingerprint=fingerprint,
            codec_version=version,
            **more,
        )

    def check_input(self, kv: torch.Tensor) -> None:
        """Raise ValueError unless ``kv`` is a chunk of five non-empty axes within the limit."""
        if kv.dim() != 5 or kv.shape[1] not in (1, 2) or kv.numel() == 0:
            raise ValueError(
                f"kv has shape {list(kv.shape)}; expected "
                "[layers, 1 or 2, tokens, kv_heads, head_size] with no empty axis"
            )
        size = kv.numel() * kv.element_size()
        if size > self.max_decoded_bytes:
            raise ValueError(f"kv takes {size} bytes; the limit is {self.max_decoded_bytes}")


def output_tensor(
    header: Header, device: torch.device | str | None, out: torch.Tensor | None
) -> torch.Tensor:
    """The tensor to decode into: ``out`` if it fits the header, else a new one on ``device``.

    Raises ValueError when ``out`` has another shape, dtype or device than was asked for. Call it
    after the header has been checked by ``container.unpack``, which bounds what it may claim.
    """
    if out is None:
        return torch.empty(header.shape, dtype=header.dtype, device=device or "cpu")
    if tuple(out.shape) != header.shape or out.dtype != header.dtype:
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)}; the blob holds "
            f"{header.dtype} {list(header.shape)}"
        )
    if device is not None and torch.device(device).type != out.device.type:
        raise ValueError(f"out is on {out.device}; device is {device}")
    return out
