"""A store behind a link whose speed can be set, and changed while something crosses it.

with registered():
    ... {"type": "link", "name": "wan"} ...
    link("wan").bytes_per_second = 1e9 / 8
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from vllm_kvcompress import stores
from vllm_kvcompress.stores import Store, StoreStats

SLICE_SECONDS = 0.002
"""Time that a transfer sleeps before it looks at the link's speed again."""


class Link:
    """One link and what lies behind it.

    ``bytes_per_second`` counts for all transfers at once, which share it slice by slice; 0 stops
    them. ``visible`` tells which keys can be got at all.
    """

    def __init__(self) -> None:
        self.bytes_per_second = math.inf
        self.visible: Callable[[bytes], bool] = lambda key: True
        self.blobs: dict[bytes, bytes] = {}
        self.carried: list[tuple[bytes, int]] = []
        """(key, bytes) of every transfer that has ended, in order."""
        self.lock = threading.Lock()
        self._crossing = 0

    def carry(self, size: int) -> None:
        """Return when so many bytes have crossed."""
        with self.lock:
            self._crossing += 1
        left, last = float(size), time.monotonic()
        while left > 0 and self.bytes_per_second < math.inf:
            needed = left * self._crossing / self.bytes_per_second if self.bytes_per_second else 1.0
            time.sleep(min(SLICE_SECONDS, needed))
            now = time.monotonic()
            left -= (now - last) * self.bytes_per_second / self._crossing
            last = now
        with self.lock:
            self._crossing -= 1


_links: dict[str, Link] = {}


def link(name: str) -> Link:
    """The link of this name, the same for all stores of the process."""
    return _links.setdefault(name, Link())


class LinkStore(Store):
    """Settings: ``name`` of the link. Only ``get`` takes the time that its bytes need."""

    name = "link"
    shared = True

    def __init__(self, name: str) -> None:
        self._link = link(name)
        self._hits = self._misses = 0

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._link.blobs and self._link.visible(key) for key in keys]

    def get(self, key: bytes) -> bytes | None:
        blob = self._link.blobs.get(key) if self._link.visible(key) else None
        if blob is None:
            self._misses += 1
            return None
        self._hits += 1
        self._link.carry(len(blob))
        with self._link.lock:
            self._link.carried.append((key, len(blob)))
        return blob

    def put(self, key: bytes, blob: bytes) -> bool:
        self._link.blobs[key] = bytes(blob)
        return True

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._link.blobs.pop(key, None)

    def clear(self) -> None:
        self._link.blobs.clear()

    def keys(self) -> list[bytes]:
        return list(self._link.blobs)

    def stats(self) -> StoreStats:
        held = list(self._link.blobs.values())
        return StoreStats(
            name=self.name,
            entries=len(held),
            bytes_held=sum(map(len, held)),
            capacity_bytes=1 << 62,
            hits=self._hits,
            misses=self._misses,
        )


@contextmanager
def registered() -> Iterator[None]:
    """Make the store known as ``link`` for a while, with no link and nothing behind it."""
    known = dict(stores._REGISTRY)
    stores.register_store("link", f"{__name__}:LinkStore")
    _links.clear()
    try:
        yield
    finally:
        _links.clear()
        stores._REGISTRY.clear()
        stores._REGISTRY.update(known)
