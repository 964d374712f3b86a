"""The ``fp8`` codec: e4m3 codes with a scale per tensor, per head, or per token and head.

One byte a value, by arithmetic that every device does exactly: a value divided by its scale in
float32 is rounded to nearest, ties to even, and comes back times the scale. There is no entropy
coding, so it is fast, and lossy by about 2.5% of a value whatever its size.

Sections: a byte, 1 for codes and 0 where the tensor is kept as it is; scales, bfloat16,
``[layers, K and V]``, then ``, kv_heads`` or ``, tokens, kv_heads``; codes in C order, or the
tensor. Kept as they are: tensors of a byte a value, and those with values that are not finite.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_kvcompress.codecs import container
from vllm_kvcompress.codecs.base import Codec, output_tensor
from vllm_kvcompress.codecs.container import BytesLike, Header, MalformedBlob
from vllm_kvcompress.kernels.fp8.reference import quantise
from vllm_kvcompress.kernels.openmp import torch_on_this_thread

CODEC_VERSION = 1

LEVELS = {"tensor": (2, 3, 4), "head": (2, 4), "token_head": (4,)}
"""The axes of ``[layers, K and V, tokens, kv_heads, head_size]`` that share a scale."""

_WIDE = (torch.bfloat16, torch.float16, torch.float32)
_EXACT = (torch.float8_e4m3fn, torch.float8_e5m2)
_LARGEST = 448.0


class Fp8Codec(Codec):
    """Codes bf16, fp16 and fp32 tensors; keeps FP8 ones as they are.

    level: what shares a scale, ``tensor`` (all of a layer's K, or V), ``head`` or ``token_head``.
    Raises ValueError, naming the choices, for an unknown level.
    """

    name = "fp8"

    def __init__(self, level: str = "head"):
        if level not in LEVELS:
            raise ValueError(f"codec 'fp8' has no level {level!r}; choose from {', '.join(LEVELS)}")
        self.level = level

    def encode(self, kv: torch.Tensor, fingerprint: bytes = b"") -> bytes:
        self.check_input(kv)
        if kv.dtype not in (*_WIDE, *_EXACT):
            raise ValueError(
                f"kv has dtype {kv.dtype}; fp8 takes bfloat16, float16, float32 and FP8"
            )
        header = self.header(kv, fingerprint, CODEC_VERSION)
        with torch_on_this_thread():
            return container.pack(header, self._sections(kv.detach()))

    def _sections(self, kv: torch.Tensor) -> list[Any]:
        if kv.dtype in _EXACT or not bool(kv.isfinite().all()):
            return [b"\0", b"", _bytes(kv)]
        scales = kv.abs().amax(LEVELS[self.level], keepdim=True).float() / _LARGEST
        # What is largest may then be a little above the largest code, and becomes that.
        scales = scales.clamp(torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
        codes = quantise(kv, scales.float(), "e4m3")
        return [b"\1", _bytes(scales), _bytes(codes)]

    def decode(
        self,
        blob: BytesLike,
        device: torch.device | str | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        header, coded, scales, codes = self._unpack(blob)
        kv = output_tensor(header, device, out)
        if not coded:
            return kv.copy_(_tensor(codes, header.dtype).view(header.shape))
        shape = _scale_shape(header)
        scale = _tensor(scales, torch.bfloat16).view(shape).to(kv.device).float()
        limit = torch.finfo(header.dtype).max
        with torch_on_this_thread():
            values = _tensor(codes, torch.float8_e4m3fn).view(header.shape).to(kv.device)
            return kv.copy_((values.float() * scale).clamp(-limit, limit))

    def inspect(self, blob: BytesLike) -> dict[str, Any]:
        header, coded, scales, codes = self._unpack(blob)
        description = container.describe(header, [b"\1" if coded else b"\0", scales, codes])
        description["bits_per_value"] = 8 * len(blob) * header.dtype.itemsize / header.decoded_bytes
        return description

    def cache_key(self) -> bytes:
        return f"{self.name}/{CODEC_VERSION}/{self.level}".encode()

    def _unpack(self, blob: BytesLike) -> tuple[Header, bool, memoryview, memoryview]:
        header, sections = container.unpack(
            blob,
            codec=self.name,
            codec_version=CODEC_VERSION,
            max_decoded_bytes=self.max_decoded_bytes,
        )
        if header.dtype not in (*_WIDE, *_EXACT) or header.level not in LEVELS:
            raise MalformedBlob(f"fp8 does not code {header.dtype} at level {header.level!r}")
        if len(sections) != 3 or bytes(sections[0]) not in (b"\0", b"\1"):
            raise MalformedBlob("an fp8 blob has three sections, the first a byte of 0 or 1")
        coded = bytes(sections[0]) == b"\1"
        values = header.decoded_bytes // header.dtype.itemsize
        expected = (0, header.decoded_bytes)
        if coded:
            expected = (2 * int(np.prod(_scale_shape(header))), values)
        if (coded and header.dtype in _EXACT) or (len(sections[1]), len(sections[2])) != expected:
            raise MalformedBlob(f"sections of an fp8 blob have {expected} bytes")
        return header, coded, sections[1], sections[2]


def _scale_shape(header: Header) -> tuple[int, ...]:
    shared = LEVELS[header.level]
    return tuple(1 if axis in shared else size for axis, size in enumerate(header.shape))


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()


def _tensor(section: memoryview, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(section, np.uint8).copy()).view(dtype)
