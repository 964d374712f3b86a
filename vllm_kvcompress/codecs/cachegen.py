"""The ``cachegen`` codec: quantisation and entropy coding of KV, one section per layer and K or V.

After CacheGen (SIGCOMM 2024): layer-wise quantisation, then entropy coding with one distribution
per (layer, K or V, channel), here one of a bank of parametric ones. What the bytes of a section
mean stands in ``vllm_kvcompress.kernels.cachegen.format``; they travel in the common container.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_kvcompress.codecs import container
from vllm_kvcompress.codecs.base import Codec, output_tensor
from vllm_kvcompress.codecs.container import BytesLike, Header, MalformedBlob
from vllm_kvcompress.kernels.cachegen import format as fmt
from vllm_kvcompress.kernels.cachegen import implementation
from vllm_kvcompress.kernels.cachegen.rotary import estimate_turns
from vllm_kvcompress.kernels.cachegen.sinks import cover, find_sinks

_DTYPES = {getattr(torch, name): d for name, d in fmt.DTYPES.items()}


class CacheGenCodec(Codec):
    """Codes bf16, fp16, fp32 and FP8 tensors; FP8 without loss at every level.

    level: ``lossless``; ``high``, ``medium`` or ``low``, uniform quantisation with one step per
    layer and K or V; or ``paper``, the layer-wise bins of CacheGen. The lossy levels give back
    values that are not finite exactly, and finite ones as finite.
    profile: None; calibrated profiles are not read by this version.

    Raises ValueError, naming the choices, for an unknown level.
    """

    name = "cachegen"

    def __init__(self, level: str = "high", profile: None = None):
        if level not in fmt.LEVELS:
            raise ValueError(
                f"codec 'cachegen' has no level {level!r}; choose from {', '.join(fmt.LEVELS)}"
            )
        if profile is not None:
            raise ValueError(f"codec 'cachegen' takes no profile {profile!r}; the choice is None")
        self.level = level

    def encode(self, kv: torch.Tensor, fingerprint: bytes = b"") -> bytes:
        self.check_input(kv)
        if kv.dtype not in _DTYPES:
            names = ", ".join(fmt.DTYPES)
            raise ValueError(f"kv has dtype {kv.dtype}; cachegen takes {names}")
        layers, values, tokens, heads, head_size = kv.shape
        if tokens > fmt.MAX_TOKENS or heads * head_size > fmt.MAX_CHANNELS:
            raise ValueError(
                f"kv has shape {list(kv.shape)}; cachegen takes at most {fmt.MAX_TOKENS} tokens "
                f"and kv_heads * head_size up to {fmt.MAX_CHANNELS}"
            )
        level = "lossless" if kv.element_size() == 1 else self.level
        quantisers = [
            fmt.quantiser(level, layers, layer, value)
            for layer in range(layers)
            for value in range(values)
        ]
        chosen, kernels = implementation(kv.device)
        source = kv.detach()
        if chosen != "triton":
            source = source.cpu()
        stripes = source.contiguous().view(layers * values, tokens, heads * head_size)
        turns = estimate_turns(source[:, 0]) if any(q.rotary for q in quantisers) else None
        sinks, rows = [], b""
        if any(q.mode == fmt.UNIFORM for q in quantisers):
            sinks = find_sinks(source)
        if sinks:
            rows = stripes[:, sinks].cpu().view(torch.uint8).numpy().tobytes()
            stripes = cover(stripes, sinks)
        header = Header(
            codec=self.name,
            level=self.level,
            dtype=kv.dtype,
            shape=tuple(kv.shape),
            fingerprint=fingerprint,
            codec_version=fmt.CODEC_VERSION,
        )
        sections = kernels.encode(stripes, quantisers, turns)
        return container.pack(
            header, [fmt.pack_turns(turns), fmt.pack_sinks(sinks, rows), *sections]
        )

    def decode(
        self,
        blob: BytesLike,
        device: torch.device | str | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        header, sections = self._unpack(blob)
        layers, values, tokens, heads, head_size = header.shape
        kv = output_tensor(header, device, out)
        chosen, kernels = implementation(kv.device)
        direct = kv.is_contiguous() and (chosen == "triton" or kv.device.type == "cpu")
        target = kv
        if not direct:
            place = kv.device if chosen == "triton" else "cpu"
            target = torch.empty(header.shape, dtype=header.dtype, device=place)
        stripes = target.view(layers * values, tokens, heads * head_size)
        try:
            turns = fmt.unpack_turns(sections[0], head_size)
            row_bytes = stripes.shape[0] * stripes.shape[2] * stripes.element_size()
            sinks, rows = fmt.unpack_sinks(sections[1], tokens, row_bytes)
            if sinks and kv.element_size() == 1:
                raise fmt.SectionError("tokens are kept exactly beside a lossless coding")
            kernels.decode(sections[2:], stripes, turns)
        except fmt.SectionError as error:
            raise MalformedBlob(str(error)) from error
        if sinks:
            exact = torch.frombuffer(bytearray(rows), dtype=kv.dtype)
            stripes[:, sinks] = exact.view(stripes.shape[0], len(sinks), -1).to(stripes.device)
        return kv if direct else kv.copy_(target)

    def inspect(self, blob: BytesLike) -> dict[str, Any]:
        header, sections = self._unpack(blob)
        description = container.describe(header, sections)
        description["bits_per_value"] = 8 * len(blob) * header.dtype.itemsize / header.decoded_bytes
        return description

    def cache_key(self) -> bytes:
        return f"{self.name}/{fmt.CODEC_VERSION}/{self.level}".encode()

    def _unpack(self, blob: BytesLike) -> tuple[Header, list[memoryview]]:
        header, sections = container.unpack(
            blob,
            codec=self.name,
            codec_version=fmt.CODEC_VERSION,
            max_decoded_bytes=self.max_decoded_bytes,
        )
        layers, values, tokens, heads, head_size = header.shape
        if header.dtype not in _DTYPES:
            raise MalformedBlob(f"cachegen does not code dtype {header.dtype}")
        if tokens > fmt.MAX_TOKENS or heads * head_size > fmt.MAX_CHANNELS:
            raise MalformedBlob(f"shape {list(header.shape)} is beyond what cachegen codes")
        if len(sections) != 2 + layers * values:
            raise MalformedBlob(f"{len(sections)} sections for {layers * values} stripes")
        return header, sections
