"""The settings of the offload connector: parsed from ``kv_connector_extra_config``, validated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_kvcompress.codecs import Codec, create_codec
from vllm_kvcompress.stores import parse_size

DEFAULT_STORES = ({"type": "memory", "bytes": "4GiB"},)

PASSED_TO_VLLM = ("offload_prompt_only", "self_describing_kv_events")
"""Keys of vLLM's own offloading connector that keep their meaning."""


@dataclass(frozen=True)
class OffloadSettings:
    """What a user sets under ``kv_connector_extra_config``."""

    codec: str = "cachegen"
    """Name of the codec."""
    level: str | None = None
    """Level of the codec, None for its default."""
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

    def create_codec(self) -> Codec:
        """The codec that these settings name. Raises ValueError for what it does not know."""
        return create_codec(self.codec, **({} if self.level is None else {"level": self.level}))

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> OffloadSettings:
        """Validate a ``kv_connector_extra_config``.

        Raises ValueError, which names the setting and the choices, for an unknown setting and for
        a value that cannot be used.
        """
        known = set(cls.__dataclass_fields__)
        unknown = sorted(set(extra_config) - known - set(PASSED_TO_VLLM))
        if unknown:
            raise ValueError(
                f"kv_connector_extra_config: unknown setting {unknown[0]!r}; "
                f"choose from {', '.join(sorted(known | set(PASSED_TO_VLLM)))}"
            )
        values: dict[str, Any] = {k: v for k, v in extra_config.items() if k in known}
        for name in (*PASSED_TO_VLLM, "write_back"):
            if not isinstance(extra_config.get(name, False), bool):
                raise _error(name, extra_config[name], "true or false")
        optional = {"level", "chunk_tokens"}
        values = {k: v for k, v in values.items() if v is not None or k not in optional}
        for name in ("codec", "level"):
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
        if "retry_seconds" in values:
            value = values["retry_seconds"]
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e6:
                raise _error("retry_seconds", value, "a number of seconds above 0")
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
            settings.create_codec()
        except ValueError as error:
            raise ValueError(f"kv_connector_extra_config: {error}") from error
        return settings


def _error(name: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"kv_connector_extra_config: {name} is {value!r}; expected {expected}")
