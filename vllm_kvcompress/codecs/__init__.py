"""Codecs by name. ``create_codec("cachegen", level="high")`` needs no vLLM."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from vllm_kvcompress.codecs.base import Codec
from vllm_kvcompress.codecs.container import (
    BlobError,
    ChecksumMismatch,
    MalformedBlob,
    NotABlob,
    UnsupportedVersion,
    WrongCodec,
    WrongLength,
    WrongProfile,
)

__all__ = [
    "BlobError",
    "ChecksumMismatch",
    "Codec",
    "MalformedBlob",
    "NotABlob",
    "UnsupportedVersion",
    "WrongCodec",
    "WrongLength",
    "WrongProfile",
    "codec_names",
    "create_codec",
    "register_codec",
]

# name -> "module:class", imported on first use: a codec may bring a compiler along.
_REGISTRY: dict[str, str] = {
    "raw": "vllm_kvcompress.codecs.raw:RawCodec",
    "int8": "vllm_kvcompress.codecs.int8:Int8Codec",
    "cachegen": "vllm_kvcompress.codecs.cachegen:CacheGenCodec",
    "fp8": "vllm_kvcompress.codecs.fp8:Fp8Codec",
    "kivi": "vllm_kvcompress.codecs.kivi:KiviCodec",
}


def codec_names() -> list[str]:
    """The names that ``create_codec`` knows."""
    return sorted(_REGISTRY)


def register_codec(name: str, target: str) -> None:
    """Make ``target``, ``"module:class"`` of a Codec, known as ``name``."""
    _REGISTRY[name] = target


def create_codec(name: str, **settings: Any) -> Codec:
    """Make a codec: ``create_codec("cachegen", level="high", profile=None)``.

    Raises ValueError, which names the setting and the choices, for an unknown codec, setting or
    value of a setting.
    """
    if name not in _REGISTRY:
        raise ValueError(f"codec {name!r} is unknown; choose from {', '.join(codec_names())}")
    module, _, attribute = _REGISTRY[name].partition(":")
    codec_class = getattr(import_module(module), attribute)
    known = list(inspect.signature(codec_class).parameters)
    for setting in settings:
        if setting not in known:
            choices = f"its settings are {', '.join(known)}" if known else "it has no settings"
            raise ValueError(f"codec {name!r} has no setting {setting!r}; {choices}")
    return codec_class(**settings)
