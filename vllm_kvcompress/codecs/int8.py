"""The ``int8`` codec: 8 bits a value at a fixed width, decoded faster than any entropy coder could.

The common container with four sections: the scales, bfloat16 ``[layers, K and V, tokens, heads]``;
the codes, int8 in the shape of the tensor; and the values that are not finite: their places in the
flattened tensor, u32 and strictly increasing, and the values in the tensor's dtype. A tensor of one
byte a value is stored as it is in place of the codes, and the other sections are empty. What codes
and scales mean stands in ``vllm_kvcompress.kernels.int8``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_kvcompress.codecs import container
from vllm_kvcompress.codecs.base import Codec, output_tensor
from vllm_kvcompress.codecs.container import BytesLike, Header, MalformedBlob
from vllm_kvcompress.kernels import int8

CODEC_VERSION = 1
_DTYPES = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


class Int8Codec(Codec):
    """Codes bf16, fp16 and fp32 with a scale for each token and head, FP8 without loss."""

    name = "int8"

    def encode(self, kv: torch.Tensor, fingerprint: bytes = b"") -> bytes:
        self.check_input(kv)
        if kv.dtype not in _DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise ValueError(f"kv has dtype {kv.dtype}; int8 takes {names}")
        kv = kv.detach().contiguous()
        if kv.element_size() == 1:
            sections = [b"", _bytes(kv), b"", b""]
        else:
            codes, scales, all_finite = int8.quantise(kv)
            flat = kv.view(-1)
            places = torch.empty(0, dtype=torch.int64, device=kv.device)
            if not all_finite:
                places = (~flat.isfinite()).nonzero().view(-1)
            positions = places.cpu().numpy().astype("<u4").view(np.uint8)
            sections = [_bytes(scales), _bytes(codes), positions, _bytes(flat[places])]
        header = self.header(kv, fingerprint, CODEC_VERSION)
        return container.pack(header, sections)

    def decode(
        self,
        blob: BytesLike,
        device: torch.device | str | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        header, sections = self._unpack(blob)
        kv = output_tensor(header, device, out)
        target = (
            kv
            if kv.is_contiguous()
            else torch.empty_like(kv, memory_format=torch.contiguous_format)
        )
        scales, codes, positions, values = (np.frombuffer(part, np.uint8) for part in sections)
        if header.dtype.itemsize == 1:
            target.view(torch.uint8).copy_(_tensor(codes, torch.uint8, kv).view(header.shape))
        else:
            int8.restore(
                _tensor(codes, torch.int8, kv).view(header.shape),
                _tensor(scales, torch.bfloat16, kv).view(header.shape[:-1]),
                target,
            )
            if len(positions):
                places = torch.from_numpy(positions.view("<u4").astype(np.int64)).to(kv.device)
                target.view(-1)[places] = _tensor(values, header.dtype, kv)
        return kv if kv is target else kv.copy_(target)

    def inspect(self, blob: BytesLike) -> dict[str, Any]:
        header, sections = self._unpack(blob)
        return container.describe(header, sections)

    def cache_key(self) -> bytes:
        return f"{self.name}/{CODEC_VERSION}".encode()

    def _unpack(self, blob: BytesLike) -> tuple[Header, list[memoryview]]:
        header, sections = container.unpack(
            blob,
            codec=self.name,
            codec_version=CODEC_VERSION,
            max_decoded_bytes=self.max_decoded_bytes,
        )
        if header.dtype not in _DTYPES or len(sections) != 4:
            raise MalformedBlob(f"{len(sections)} sections of {header.dtype} are no int8 blob")
        size = header.dtype.itemsize
        count = header.decoded_bytes // size
        scales, codes, positions, values = sections
        rows = 0 if size == 1 else count // header.shape[-1]
        exceptions = len(positions) // 4
        if (
            len(scales) != 2 * rows
            or len(codes) != count
            or len(positions) != 4 * exceptions
            or len(values) != exceptions * size
            or (exceptions and size == 1)
        ):
            raise MalformedBlob("the sections of an int8 blob do not have the tensor's size")
        places = np.frombuffer(positions, "<u4")
        if exceptions and (places[-1] >= count or np.any(places[1:] <= places[:-1])):
            raise MalformedBlob("exceptions of an int8 blob are not increasing places")
        return header, sections


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().cpu().view(torch.uint8).numpy().reshape(-1)


def _tensor(data: np.ndarray, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """The bytes of a section as a tensor on the device of another."""
    return torch.from_numpy(data.copy()).view(dtype).to(like.device)
