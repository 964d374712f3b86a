"""What a store promises: blobs by key, bounded by bytes, safe to share between threads."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

MAX_KEY_BYTES = 128

_NAMESPACE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*")
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}


class StoreConfigError(ValueError):
    """A store cannot be made from these settings; the message names the setting and the choices."""


class StoreError(Exception):
    """A store could not do what was asked (I/O); asking again later may succeed."""


@dataclass(frozen=True)
class StoreStats:
    """What a store holds, and what has happened since it was made.

    ``hits`` and ``misses`` count calls of ``get``; ``evictions`` count what left to make room;
    ``refused`` counts blobs that ``put`` did not take because they are larger than the store;
    ``errors`` counts operations that failed for I/O; ``rejected`` counts blobs that were found and
    could not be authenticated. A capacity of 0 is none that the store knows of.
    """

    name: str
    entries: int
    bytes_held: int
    capacity_bytes: int
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    errors: int = 0
    refused: int = 0
    rejected: int = 0


class Store(ABC):
    """Blobs by key. Every method may be called from any thread at any time.

    A key is 1 to 128 opaque bytes. Blobs put under one key are taken to be interchangeable: where
    ``get`` and ``put`` of a key run at once, either blob may be found afterwards.
    """

    name: ClassVar[str]
    """The store's type in the registry."""

    shared: ClassVar[bool]
    """Other processes see the content, and it outlives this process."""

    reports_evictions: bool = True
    """``on_evict`` hears of every blob that leaves to make room; False where a server decides."""

    on_evict: Callable[[bytes, bytes], None] | None = None
    """Called with the key and the blob that an eviction has just removed, in the thread that
    caused it and outside every lock of the store."""

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are held. Never raises for I/O: what cannot be told is not there."""

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """The blob of a key, now the most recently used; None if it is not held.

        Raises StoreError where the store could not tell or could not read it.
        """

    @abstractmethod
    def put(self, key: bytes, blob: bytes) -> bool:
        """Hold ``blob`` under ``key``, in place of what was there; evict others to make room.

        False if it was not stored (larger than the store, or I/O); the key is then not held, as
        far as the store could still see to that.
        """

    @abstractmethod
    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget these keys; those that are not held are no error. May raise StoreError."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything that this store holds, and nothing else. May raise StoreError."""

    @abstractmethod
    def keys(self) -> list[bytes]:
        """The keys that this instance knows of, the least recently used first.

        Where a server keeps them, all of them, in no order. May raise StoreError.
        """

    @abstractmethod
    def stats(self) -> StoreStats:
        """Counters and sizes; does no I/O."""

    def refresh(self) -> None:  # noqa: B027
        """Learn what other processes have stored and removed. May raise StoreError."""

    def remove_prefix(self, prefix: bytes) -> None:
        """Forget every key that begins so, whoever stored it. May raise StoreError."""
        self.refresh()
        self.remove([key for key in self.keys() if key.startswith(prefix)])

    def close(self) -> None:  # noqa: B027
        """Release what the store holds open. What is shared stays."""


def check_key(key: bytes) -> bytes:
    """The key itself; ValueError unless it is 1 to 128 bytes long."""
    if not isinstance(key, bytes) or not 1 <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"key {key!r}: expected 1 to {MAX_KEY_BYTES} bytes")
    return key


def check_keys(keys: Iterable[bytes]) -> list[bytes]:
    """``check_key`` over several keys."""
    return [check_key(key) for key in keys]


def check_namespace(namespace: str) -> str:
    """The namespace itself, empty or a name. Raises StoreConfigError for anything else."""
    if namespace != "" and not (isinstance(namespace, str) and _NAMESPACE.fullmatch(namespace)):
        raise StoreConfigError(
            f"namespace: {namespace!r}; give up to 64 letters, digits, dots, hyphens and "
            "underscores, the first of them no dot"
        )
    return namespace


def parse_size(size: int | str, setting: str = "bytes") -> int:
    """Bytes from 4096, "4096", "8GiB" (2^30) or "8GB" (10^9), upper or lower case.

    Raises StoreConfigError, which names ``setting``, for anything else, and for less than one
    byte.
    """
    amount = 0
    if isinstance(size, int) and not isinstance(size, bool):
        amount = size
    elif isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        number, unit = match.groups()
        scale = _UNITS.get(unit.lower(), 0)
        amount = int(number) * scale if number.isdigit() else int(float(number) * scale)
    if amount < 1:
        raise StoreConfigError(
            f"{setting}: {size!r} is not a size; give a positive number of bytes, as an integer "
            "or with one of the units B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, such as '8GiB'"
        )
    return amount
