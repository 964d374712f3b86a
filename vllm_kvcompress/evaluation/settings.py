"""Settings that are compared, by name: pages of the KV cache, and codecs of the offload."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_kvcompress.capacity import CACHE_DTYPES
from vllm_kvcompress.config import (
    FP8_DTYPES,
    KIVI_DTYPES,
    PROFILE,
    KiviSettings,
    OffloadSettings,
)
from vllm_kvcompress.page_profile import load_page_profile

BASE = "auto"
"""The setting that the others are compared with: the model's own dtype, nothing offloaded."""

DEFAULT = (
    BASE,
    "fp8",
    "kivi_2bit",
    "kivi_4bit",
    "offload:cachegen/high",
    "offload:cachegen/low",
)
"""What is compared unless others are named."""

FORM = "DTYPE[,NAME=VALUE]...[+offload:CODEC[/LEVEL]] or offload:CODEC[/LEVEL]"

_OFFLOAD = "offload:"
_WHOLE_DTYPES = (BASE, "bfloat16", "float16")


@dataclass(frozen=True)
class Setting:
    """One way to keep the KV cache of a model."""

    name: str
    """As a user writes it."""
    cache_dtype: str = BASE
    """vLLM's ``kv_cache_dtype``."""
    kivi: dict[str, Any] = field(default_factory=dict)
    """Settings of KIVI pages that differ from their defaults."""
    skip_layers: tuple[str, ...] = ()
    """vLLM's ``kv_cache_dtype_skip_layers``."""
    model: str | None = None
    """Another checkpoint of the same model, such as one with quantised weights."""
    pages_profile: str | None = None
    """Directory with a calibrated profile of the pages."""
    codec_profile: str | None = None
    """Directory with a calibrated profile of the codec."""
    codec: str | None = None
    """Codec of the offload; None: nothing is offloaded."""
    level: str | None = None
    """Level of the codec; None: its default."""

    @property
    def offloads(self) -> bool:
        return self.codec is not None

    def engine_arguments(self, stores: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Arguments of ``vllm.LLM``; ``stores``: the stack of an offload."""
        found: dict[str, Any] = {"kv_cache_dtype": self.cache_dtype}
        if self.skip_layers:
            found["kv_cache_dtype_skip_layers"] = list(self.skip_layers)
        pages: dict[str, Any] = {}
        if self.pages_profile is not None:
            pages[PROFILE] = self.pages_profile
        if self.kivi:
            pages["kivi"] = self.kivi
        if pages:
            found["additional_config"] = {"kvcompress": pages}
        if self.codec is not None:
            extra: dict[str, Any] = {"codec": self.codec, "stores": list(stores)}
            if self.level is not None:
                extra["level"] = self.level
            if self.codec_profile is not None:
                extra["profile"] = self.codec_profile
            found["kv_transfer_config"] = {
                "kv_connector": "KVCompressConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        return found

    def server_arguments(self, stores: Sequence[dict[str, Any]]) -> list[str]:
        """The same as options of ``vllm serve``."""
        options: list[str] = []
        for name, value in self.engine_arguments(stores).items():
            options.append("--" + name.replace("_", "-"))
            if isinstance(value, list):
                options += value
            else:
                options.append(value if isinstance(value, str) else json.dumps(value))
        return options


def parse_setting(text: str) -> Setting:
    """A setting by its name, such as ``kivi_2bit,group_size=128`` or ``offload:cachegen/high``.

    NAME is a setting of KIVI pages, ``skip_layers`` with numbers between colons, ``model``, the
    folder of another checkpoint, or ``profile``, a folder that calibration wrote: for pages that
    are packed, else for the codec. Raises ValueError that says what to write.
    """
    pages, plus, offload = text.partition("+" + _OFFLOAD)
    if not plus and text.startswith(_OFFLOAD):
        pages, offload = BASE, text.removeprefix(_OFFLOAD)
    cache_dtype, *given = pages.split(",")
    if cache_dtype not in CACHE_DTYPES:
        raise ValueError(
            f"setting {text!r}: {cache_dtype!r} is no kv_cache_dtype; choose from "
            f"{', '.join(CACHE_DTYPES)}, and write {FORM}"
        )
    found: dict[str, Any] = {"name": text, "cache_dtype": cache_dtype}
    kivi: dict[str, Any] = {}
    seen: set[str] = set()
    for part in given:
        name, equals, value = part.partition("=")
        if not equals or not value or name in seen:
            raise ValueError(f"setting {text!r}: {part!r} is given twice, or is not NAME=VALUE")
        seen.add(name)
        if name == "skip_layers":
            found[name] = tuple(value.split(":"))
        elif name == "model":
            found[name] = value
        elif name == "profile":
            packed = cache_dtype in (*FP8_DTYPES, *KIVI_DTYPES)
            found["pages_profile" if packed else "codec_profile"] = os.path.abspath(value)
        elif name in KiviSettings.__dataclass_fields__ and cache_dtype in KIVI_DTYPES:
            kivi[name] = _value(value)
        else:
            choices = ["skip_layers", "model", "profile"]
            if cache_dtype in KIVI_DTYPES:
                choices += KiviSettings.__dataclass_fields__
            raise ValueError(
                f"setting {text!r}: {name!r} does not belong to {cache_dtype}; choose from "
                f"{', '.join(choices)}"
            )
    if "skip_layers" in found and cache_dtype in _WHOLE_DTYPES:
        raise ValueError(f"setting {text!r}: skip_layers changes nothing without packed pages")
    offloads = bool(plus) or text.startswith(_OFFLOAD)
    if "codec_profile" in found and not offloads:
        raise ValueError(
            f"setting {text!r}: profile changes nothing without packed pages or an offload"
        )
    try:
        KiviSettings.parse({"kvcompress": {"kivi": kivi}})
        if "pages_profile" in found:
            load_page_profile(found["pages_profile"])
        if offloads:
            found["codec"], slash, level = offload.partition("/")
            found["level"] = level if slash else None
            profile = found.get("codec_profile")
            OffloadSettings.parse(
                {"codec": found["codec"], "level": found["level"], "profile": profile}
            )
    except ValueError as error:
        raise ValueError(f"setting {text!r}: {error}") from error
    return Setting(**found, kivi=kivi)


def parse_settings(names: Sequence[str]) -> list[Setting]:
    """Settings by their names, ``all`` for every one, with BASE first.

    Raises ValueError for what cannot be read and for names that are given twice.
    """
    wanted = all_settings() if list(names) == ["all"] else list(names)
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"settings {' '.join(wanted)}: one of them is given twice")
    return [parse_setting(name) for name in (BASE, *(name for name in wanted if name != BASE))]


def all_settings() -> list[str]:
    """Every kind of page, and every level of every codec."""
    from vllm_kvcompress.codecs import fp8, kivi  # they import torch
    from vllm_kvcompress.kernels.cachegen.format import LEVELS

    pages = ["fp8", "fp8_e5m2"]
    pages += ["kivi_2bit", "kivi_2bit,group_size=128", "kivi_2bit,preset=kivi"]
    pages += [dtype for dtype in KIVI_DTYPES if dtype != "kivi_2bit"]
    offloads = ["raw", "int8", *(f"cachegen/{level}" for level in LEVELS)]
    offloads += [f"fp8/{level}" for level in fp8.LEVELS]
    offloads += [f"kivi/{level}" for level in kivi.LEVELS]
    return [BASE, *pages, *(_OFFLOAD + name for name in offloads)]


def _value(text: str) -> Any:
    """What JSON makes of it, else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
