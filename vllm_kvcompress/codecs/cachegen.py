"""The ``cachegen`` codec: quantisation and entropy coding of KV, one section per layer and K or V.

After CacheGen (SIGCOMM 2024): layer-wise quantisation, then entropy coding with one distribution
per (layer, K or V, channel), here one of a bank of parametric ones. What the bytes of a section
mean stands in ``vllm_kvcompress.kernels.cachegen.format``; they travel in the common container.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import torch

from vllm_kvcompress.codecs import container
from vllm_kvcompress.codecs.base import Codec, output_tensor
from vllm_kvcompress.codecs.container import (
    NO_PROFILE,
    BytesLike,
    Header,
    MalformedBlob,
    WrongProfile,
)
from vllm_kvcompress.codecs.profile import LEVELS as PROFILE_LEVELS
from vllm_kvcompress.codecs.profile import Profile, load_profile
from vllm_kvcompress.kernels.cachegen import format as fmt
from vllm_kvcompress.kernels.cachegen import implementation
from vllm_kvcompress.kernels.cachegen.rotary import estimate_turns
from vllm_kvcompress.kernels.cachegen.sinks import cover, find_sinks
from vllm_kvcompress.kernels.openmp import torch_on_this_thread

_DTYPES = {getattr(torch, name): d for name, d in fmt.DTYPES.items()}


class CacheGenCodec(Codec):
    """Codes bf16, fp16, fp32 and FP8 tensors; FP8 without loss at every level.

    level: ``lossless``; ``high``, ``medium`` or ``low``, uniform quantisation with one step per
    layer and K or V; or ``paper``, the layer-wise bins of CacheGen. The lossy levels give back
    values that are not finite exactly, and finite ones as finite.
    profile: a directory that `vllm-kvcompress calibrate` wrote, a ``Profile``, or None. With it,
        ``high``, ``medium`` and ``low`` code the chunks of that model in fewer bits; chunks of
        another shape are refused with ValueError.

    Raises ValueError, naming the choices, for an unknown level or a directory without a profile.
    """

    name = "cachegen"

    def __init__(
        self, level: str = "high", profile: str | os.PathLike[str] | Profile | None = None
    ):
        if level not in fmt.LEVELS:
            raise ValueError(
                f"codec 'cachegen' has no level {level!r}; choose from {', '.join(fmt.LEVELS)}"
            )
        self.level = level
        if profile is not None and not isinstance(profile, Profile):
            profile = load_profile(profile)
        self.profile = profile

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
        if self.profile is not None:
            self.profile.check_shape(kv.shape)
        level = "lossless" if kv.element_size() == 1 else self.level
        chosen, kernels = implementation(kv.device)
        source = kv.detach()
        if chosen != "triton":
            source = source.cpu()
        source = source.contiguous()
        stripes = source.view(layers * values, tokens, heads * head_size)
        sinks, rows = [], b""
        if level in fmt.UNIFORM_LEVELS:
            sinks = find_sinks(source)
        if sinks:
            rows = stripes[:, sinks].cpu().view(torch.uint8).numpy().tobytes()
            stripes = cover(stripes, sinks)
        digest, coded = NO_PROFILE, None
        if self.profile is not None and level in PROFILE_LEVELS:
            coded = self._encode_transformed(kernels, stripes.view(source.shape))
        if coded is not None:
            digest = self.profile.digest
        else:
            quantisers = [
                fmt.quantiser(level, layers, layer, value)
                for layer in range(layers)
                for value in range(values)
            ]
            turns = estimate_turns(source[:, 0]) if any(q.rotary for q in quantisers) else None
            coded = [fmt.pack_turns(turns), *kernels.encode(stripes, quantisers, turns)]
        header = self.header(kv, fingerprint, fmt.CODEC_VERSION, profile_digest=digest)
        first, *sections = coded
        return container.pack(header, [first, fmt.pack_sinks(sinks, rows), *sections])

    def _encode_transformed(
        self, kernels: ModuleType, kv: torch.Tensor
    ) -> list[bytes | memoryview] | None:
        """The first section and those of the coefficients; None where values are out of range."""
        transform, level = self.profile.transform, self.profile.levels[self.level]
        try:
            with torch_on_this_thread():
                start = transform.find_start(kv[:, 0])
                coefficients = transform.forward(kv, start, level.ranks)
        except OverflowError:
            return None
        sections: list[bytes | memoryview] = [fmt.pack_start(start)]
        for stripes, quantiser in zip(coefficients, level.quantisers, strict=True):
            sections += kernels.encode(stripes.contiguous(), [quantiser] * len(stripes))
        return sections

    def _decode_transformed(
        self, kernels: ModuleType, header: Header, sections: list[memoryview], out: torch.Tensor
    ) -> None:
        """Decode ``out`` ``[L, 2, T, H, D]``, but for its sinks. Raises SectionError."""
        transform, level = self.profile.transform, self.profile.levels[header.level]
        start = fmt.unpack_start(sections[0])
        groups = transform.layers // transform.group_layers
        coefficients = []
        for value, rank in enumerate(level.ranks):
            shape = (groups, header.shape[2], rank)
            stripes = torch.empty(shape, dtype=torch.float32, device=out.device)
            at = 2 + value * groups
            kernels.decode(sections[at : at + groups], stripes)
            coefficients.append(stripes)
        with torch_on_this_thread():
            transform.inverse(coefficients, start, out)

    def decode(
        self,
        blob: BytesLike,
        device: torch.device | str | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        header, sections = self._unpack(blob)
        if header.profile_digest != NO_PROFILE:
            self._check_profile(header, sections)
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
            row_bytes = stripes.shape[0] * stripes.shape[2] * stripes.element_size()
            sinks, rows = fmt.unpack_sinks(sections[1], tokens, row_bytes)
            if sinks and kv.element_size() == 1:
                raise fmt.SectionError("tokens are kept exactly beside a lossless coding")
            if header.profile_digest == NO_PROFILE:
                kernels.decode(sections[2:], stripes, fmt.unpack_turns(sections[0], head_size))
            else:
                self._decode_transformed(kernels, header, sections, target)
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
        profile = "" if self.profile is None else f"/{self.profile.digest.hex()}"
        return f"{self.name}/{fmt.CODEC_VERSION}/{self.level}{profile}".encode()

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
        if header.profile_digest == NO_PROFILE and len(sections) != 2 + layers * values:
            raise MalformedBlob(f"{len(sections)} sections for {layers * values} stripes")
        return header, sections

    def _check_profile(self, header: Header, sections: list[memoryview]) -> None:
        """Raise a BlobError unless the blob was coded with the profile of this codec."""
        made = header.profile_digest.hex()
        if self.profile is None:
            raise WrongProfile(
                f"the blob was coded with the profile {made}; give its directory as profile"
            )
        if self.profile.digest != header.profile_digest:
            raise WrongProfile(
                f"the blob was coded with the profile {made}, and this codec has "
                f"{self.profile.digest.hex()}"
            )
        if header.level not in self.profile.levels or header.dtype.itemsize == 1:
            raise MalformedBlob(f"level {header.level!r} of {header.dtype} takes no profile")
        try:
            self.profile.check_shape(header.shape)
        except ValueError as error:
            raise MalformedBlob(str(error)) from error
        transform = self.profile.transform
        stripes = 2 * (transform.layers // transform.group_layers)
        if len(sections) != 2 + stripes:
            raise MalformedBlob(f"{len(sections)} sections for {stripes} stripes of coefficients")
