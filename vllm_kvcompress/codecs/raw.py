"""The ``raw`` codec: the bytes of the tensor as they are, in the common container."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_kvcompress.codecs import container
from vllm_kvcompress.codecs.base import Codec, output_tensor
from vllm_kvcompress.codecs.container import DTYPE_CODES, BytesLike, Header, MalformedBlob

CODEC_VERSION = 1


class RawCodec(Codec):
    """Stores every dtype of the container exactly, in C order, in one section."""

    name = "raw"

    def encode(self, kv: torch.Tensor, fingerprint: bytes = b"") -> bytes:
        self.check_input(kv)
        if kv.dtype not in DTYPE_CODES:
            raise ValueError(f"kv has dtype {kv.dtype}; the container has no code for it")
        header = self.header(kv, fingerprint, CODEC_VERSION)
        return container.pack(header, [_as_bytes(kv.detach().cpu().contiguous()).numpy()])

    def decode(
        self,
        blob: BytesLike,
        device: torch.device | str | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        header, section = self._unpack(blob)
        kv = output_tensor(header, device, out)
        source = torch.empty(header.shape, dtype=header.dtype)
        if kv.device.type == "cpu" and kv.is_contiguous():
            source = kv
        np.copyto(_as_bytes(source).numpy(), np.frombuffer(section, np.uint8))
        return kv if kv is source else kv.copy_(source)

    def inspect(self, blob: BytesLike) -> dict[str, Any]:
        header, section = self._unpack(blob)
        return container.describe(header, [section])

    def cache_key(self) -> bytes:
        return f"{self.name}/{CODEC_VERSION}".encode()

    def _unpack(self, blob: BytesLike) -> tuple[Header, memoryview]:
        header, sections = container.unpack(
            blob,
            codec=self.name,
            codec_version=CODEC_VERSION,
            max_decoded_bytes=self.max_decoded_bytes,
        )
        if len(sections) != 1 or len(sections[0]) != header.decoded_bytes:
            raise MalformedBlob("the section of a raw blob must be as long as the tensor")
        return header, sections[0]


def _as_bytes(kv: torch.Tensor) -> torch.Tensor:
    return kv.flatten().view(torch.uint8)
