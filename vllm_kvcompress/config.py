"""All settings, validated: of the offload connector and of pages in place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_kvcompress.kernels.kivi.format import PageFormat
from vllm_kvcompress.page_profile import PageProfile, load_page_profile
from vllm_kvcompress.stores import parse_size

if TYPE_CHECKING:
    from vllm_kvcompress.codecs import Codec

DEFAULT_STORES = ({"type": "memory", "bytes": "4GiB"},)

IN_PLACE = "in_place"
"""The setting that names a ``kv_cache_dtype`` of KIVI pages, as ``--kv-cache-dtype`` does."""

MAX_LEVELS = 8
"""More levels than a link could tell apart."""

PASSED_TO_VLLM = ("offload_prompt_only", "self_describing_kv_events")
"""Keys of vLLM's own offloading connector that keep their meaning."""


@dataclass(frozen=True)
class OffloadSettings:
    """What a user sets under ``kv_connector_extra_config``."""

    codec: str = "cachegen"
    """Name of the codec."""
    level: str | None = None
    """Level of the codec, None for its default."""
    levels: tuple[str, ...] | None = None
    """Several levels at which every chunk is stored, the best first; None: only ``level``."""
    ttft_slo_ms: float | None = None
    """Deadline for the loading of a prompt, in milliseconds."""
    profile: str | None = None
    """Directory that ``vllm-kvcompress calibrate`` wrote, for the codec; None: no profile."""
    stores: tuple[Mapping[str, Any], ...] = DEFAULT_STORES
    """The stack of stores, the fastest first."""
    write_back: bool = False
    """Whether a store gets a blob only when the one above evicts it, not at once."""
    chunk_tokens: int | None = None
    """Tokens of one blob; None: about 256, in whole blocks."""
    threads: int = field(default_factory=lambda: min(4, max(1, (os.cpu_count() or 2) // 2)))
    """Threads for encoding, and as many for decoding, in each worker."""
    staging_bytes: int = 512 << 20
    """Bound on pages that wait for their encoder, in bytes per worker."""
    retry_seconds: float = 30.0
    """How long a chunk that failed to load counts as a miss."""
    lookup_seconds: float = 0.25
    """How long a request waits for shared stores to say what they hold."""

    @property
    def streaming(self) -> bool:
        """Whether loads choose among levels and recomputing, chunk by chunk."""
        return self.levels is not None or self.ttft_slo_ms is not None

    def create_codecs(self) -> list[Codec]:
        """The codec of every level, the best first. Raises ValueError for what is not known."""
        from vllm_kvcompress.codecs import codec_names, create_codec  # they import torch

        named = {} if self.profile is None else {"profile": self.profile}
        if self.levels is None:
            named |= {} if self.level is None else {"level": self.level}
            return [create_codec(self.codec, **named)]
        return [
            create_codec(level)
            if level in codec_names()
            else create_codec(self.codec, level=level, **named)
            for level in self.levels
        ]

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> OffloadSettings:
        """Validate a ``kv_connector_extra_config``.

        Raises ValueError, which names the setting and the choices, for an unknown setting and for
        a value that cannot be used.
        """
        known = set(cls.__dataclass_fields__)
        others = {*PASSED_TO_VLLM, IN_PLACE}
        unknown = sorted(set(extra_config) - known - others)
        if unknown:
            raise ValueError(
                f"kv_connector_extra_config: unknown setting {unknown[0]!r}; "
                f"choose from {', '.join(sorted(known | others))}"
            )
        values: dict[str, Any] = {k: v for k, v in extra_config.items() if k in known}
        for name in (*PASSED_TO_VLLM, "write_back"):
            if not isinstance(extra_config.get(name, False), bool):
                raise _error(name, extra_config[name], "true or false")
        optional = {"level", "levels", "ttft_slo_ms", "profile", "chunk_tokens"}
        values = {k: v for k, v in values.items() if v is not None or k not in optional}
        for name in ("codec", "level", "profile"):
            if not isinstance(values.get(name, ""), str):
                raise _error(name, values[name], "a string")
        for name in ("chunk_tokens", "threads"):
            value = values.get(name, 1)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise _error(name, value, "a whole number of at least 1")
        if "staging_bytes" in values:
            try:
                values["staging_bytes"] = parse_size(values["staging_bytes"], "staging_bytes")
            except ValueError as error:
                raise ValueError(f"kv_connector_extra_config: {error}") from error
        for name, unit in (
            ("retry_seconds", "seconds"),
            ("lookup_seconds", "seconds"),
            ("ttft_slo_ms", "milliseconds"),
        ):
            value = values.get(name, 1)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e6:
                raise _error(name, value, f"a number of {unit} above 0")
        if "levels" in values:
            values["levels"] = _levels(values)
        stores = values.get("stores", DEFAULT_STORES)
        if (
            not isinstance(stores, list | tuple)
            or not stores
            or not all(isinstance(store, Mapping) and "type" in store for store in stores)
        ):
            raise _error("stores", stores, 'a list such as [{"type": "memory", "bytes": "4GiB"}]')
        values["stores"] = tuple(stores)
        settings = cls(**values)
        try:
            settings.create_codecs()
        except ValueError as error:
            raise ValueError(f"kv_connector_extra_config: {error}") from error
        return settings


def _levels(values: Mapping[str, Any]) -> tuple[str, ...]:
    levels = values["levels"]
    if (
        not isinstance(levels, list | tuple)
        or not 1 <= len(levels) <= MAX_LEVELS
        or not all(isinstance(level, str) for level in levels)
        or len(set(levels)) < len(levels)
    ):
        raise _error(
            "levels", levels, f'1 to {MAX_LEVELS} different levels, such as ["high", "low"]'
        )
    if "level" in values:
        raise ValueError(
            f"kv_connector_extra_config: level is {values['level']!r} and levels is {levels!r}; "
            "leave one of the two away"
        )
    return tuple(levels)


def _error(name: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"kv_connector_extra_config: {name} is {value!r}; expected {expected}")


SLIDING_WINDOW = "sliding_window"
"""The entry of ``kv_cache_dtype_skip_layers`` that stands for all layers with a window."""

KIVI_DTYPES = {
    "kivi_2bit": (2, 2),
    "kivi_4bit": (4, 4),
    "kivi_k4v2": (4, 2),
    "kivi_k2v4": (2, 4),
}
"""The ``kv_cache_dtype`` names of KIVI pages: bits of K, bits of V."""

SCALE_RANGE = (2.0**-30, 2.0**10)
"""Beyond these a scale of FP8 belongs to no model: K and V in the hundred thousands, or in the
millionths."""

FOUR_BIT_DTYPE = "kivi_4bit"
"""That of the layers to which a profile gives four bits."""

FP8_DTYPES = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
"""vLLM's ``kv_cache_dtype`` names of FP8 pages, and what their codes are."""

PRESETS: dict[str, dict[str, Any]] = {
    "kivi": {
        "group_size": 32,
        "sink_tokens": 0,
        "boosted_channels": 0,
        "clipping": "none",
        "rotate_values": "auto",
    },
    "balanced": {
        "group_size": 64,
        "sink_tokens": 1,
        "boosted_channels": 0.25,
        "clipping": "least_squares",
        "rotate_values": True,
    },
}
"""``kivi`` is the published method, which has groups of V within a head only: a wider group means
one scale a token, and V is rotated. ``balanced`` loses less at the same bits."""

_FITS = {"none": "minmax", "least_squares": "unbiased"}

CLIPPINGS = tuple(_FITS)
"""How scales of KIVI pages are found."""

PROFILE = "profile"
"""The setting, beside the sections, that names a directory that calibration wrote."""

_SECTIONS = ("kivi", "fp8")


def _ours(additional_config: Any) -> Mapping[str, Any]:
    """What ``additional_config["kvcompress"]`` holds.

    Raises ValueError, which names the choices, for what is no object and for unknown settings.
    """
    where = "additional_config: kvcompress"
    ours = additional_config.get("kvcompress", {}) if isinstance(additional_config, dict) else {}
    if not isinstance(ours, Mapping):
        raise ValueError(f'{where} is {ours!r}; expected an object such as {{"kivi": {{}}}}')
    unknown = sorted(set(ours) - {*_SECTIONS, PROFILE})
    if unknown:
        raise ValueError(
            f"{where}: unknown setting {unknown[0]!r}; choose from "
            f"{', '.join((*_SECTIONS, PROFILE))}"
        )
    return ours


def profile_folder(additional_config: Any) -> str | None:
    """The directory with a profile of the pages, ``additional_config["kvcompress"]["profile"]``.

    Raises ValueError for what cannot be one.
    """
    given = _ours(additional_config).get(PROFILE)
    if given is not None and (not isinstance(given, str) or not given):
        raise ValueError(
            f"additional_config: kvcompress: {PROFILE} is {given!r}; expected the directory that "
            "`vllm-kvcompress calibrate` wrote"
        )
    return given


def profile_of(additional_config: Any) -> PageProfile | None:
    """The profile of the pages, None if none is set. Raises ValueError for one that is not good."""
    folder = profile_folder(additional_config)
    try:
        return None if folder is None else load_page_profile(folder)
    except ValueError as error:
        raise ValueError(f"additional_config: kvcompress: {PROFILE}: {error}") from error


def _section(additional_config: Any, name: str, settings: type) -> tuple[str, Mapping[str, Any]]:
    """Where ``additional_config["kvcompress"][name]`` stands, in words, and what it holds.

    Raises ValueError, which names the choices, for what is no object and for unknown settings.
    """
    given = _ours(additional_config).get(name, {})
    where = f"additional_config: kvcompress.{name}"
    fields = settings.__dataclass_fields__
    if not isinstance(given, Mapping):
        first = next(iter(fields))
        raise ValueError(f'{where} is {given!r}; expected an object such as {{"{first}": ...}}')
    unknown = sorted(set(given) - set(fields))
    if unknown:
        raise ValueError(
            f"{where}: unknown setting {unknown[0]!r}; choose from {', '.join(fields)}"
        )
    return where, given


@dataclass(frozen=True)
class Fp8Settings:
    """What a user sets under ``additional_config``, ``{"kvcompress": {"fp8": {...}}}``."""

    strict_scales: bool = False
    """Whether an engine refuses to start with scales that the audit of FP8 scales warns of."""

    @classmethod
    def parse(cls, additional_config: Any) -> Fp8Settings:
        """Validate ``additional_config["kvcompress"]["fp8"]``. Raises ValueError."""
        where, given = _section(additional_config, "fp8", cls)
        strict = given.get("strict_scales", cls.strict_scales)
        if not isinstance(strict, bool):
            raise ValueError(f"{where}: strict_scales is {strict!r}; expected true or false")
        return cls(strict)


@dataclass(frozen=True)
class KiviSettings:
    """What a user sets under ``additional_config``, ``{"kvcompress": {"kivi": {...}}}``."""

    preset: str = "balanced"
    """Where the other settings' defaults come from."""
    group_size: int = 64
    """Tokens of a group of K and channels of a group of V that share a scale."""
    residual_length: int = 128
    """Most recent tokens of a request that stay exact."""
    sink_tokens: int = 1
    """First tokens of a request whose K, and V if it is rotated, stay exact."""
    boosted_channels: int | float = 0.25
    """K channels of a page with 4 bits under a dtype of 2: a number, or a share below 1."""
    clipping: str = "least_squares"
    """How scales are found: ``none``, from minimum and maximum, or ``least_squares``."""
    rotate_values: bool | str = True
    """Whether V is rotated over its channels and coded with one scale a token and head; ``auto``
    where a group is wider than a head."""
    pool_share: float = 0.1
    """Most that the exact tokens may take of the KV cache's memory."""
    skip_dtype: str = "auto"
    """``kv_cache_dtype`` of the layers in ``kv_cache_dtype_skip_layers``."""

    @classmethod
    def parse(cls, additional_config: Any) -> KiviSettings:
        """Validate ``additional_config["kvcompress"]["kivi"]``.

        A profile gives ``clipping`` where the user has not, but for the published method. Raises
        ValueError, which names the setting and the choices.
        """
        where, given = _section(additional_config, "kivi", cls)

        def check(name: str, good: bool, expected: str) -> None:
            if name in given and not good:
                raise ValueError(f"{where}: {name} is {given[name]!r}; expected {expected}")

        def number(name: str, *kinds: type) -> Any:
            value = given.get(name, 0)
            return value if isinstance(value, kinds) and not isinstance(value, bool) else None

        for name, choices in (
            ("preset", tuple(PRESETS)),
            ("clipping", CLIPPINGS),
            ("skip_dtype", ("auto", *FP8_DTYPES)),
        ):
            check(name, given.get(name) in choices, " or ".join(choices))
        check("group_size", number("group_size", int) in (32, 64, 128), "32, 64 or 128")
        length = number("residual_length", int)
        check("residual_length", length is not None and 1 <= length <= 1 << 20, "1 token or more")
        sinks = number("sink_tokens", int)
        check("sink_tokens", sinks is not None and 0 <= sinks <= 32, "0 to 32 tokens")
        boosted = number("boosted_channels", int, float)
        check(
            "boosted_channels",
            boosted is not None and (0 <= boosted < 1 or (boosted >= 1 and boosted % 16 == 0)),
            "a share from 0 to below 1, or a multiple of 16",
        )
        rotate = given.get("rotate_values")
        check("rotate_values", isinstance(rotate, bool) or rotate == "auto", "true, false or auto")
        share = number("pool_share", int, float)
        check("pool_share", share is not None and 0 < share <= 0.9, "a share above 0, up to 0.9")
        name = given.get("preset", cls.preset)
        profile = profile_of(additional_config) if name == "balanced" else None
        calibrated = {}
        if profile is not None and profile.kivi.clipping is not None:
            calibrated["clipping"] = profile.kivi.clipping
        return cls(**{**PRESETS[name], **calibrated, **given})

    def page_format(
        self, cache_dtype: str, block_tokens: int, head_size: int, dtype: Any
    ) -> PageFormat:
        """The format of pages under a KIVI dtype. Raises ValueError for what has no page."""
        key_bits, value_bits = KIVI_DTYPES[cache_dtype]
        rotated = self.rotate_values
        if rotated == "auto":
            rotated = self.group_size > head_size
        boosted = 0
        if key_bits == 2:
            boosted = self.boosted_channels
            if boosted < 1:
                boosted = round(boosted * head_size / 16) * 16
        return PageFormat(
            block_tokens=block_tokens,
            head_size=head_size,
            dtype=dtype,
            group=self.group_size,
            key_bits=key_bits,
            value_bits=value_bits,
            boosted=int(boosted),
            sinks=self.sink_tokens,
            fit=_FITS[self.clipping],
            rotated=bool(rotated),
        )
