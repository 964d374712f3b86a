"""The ``memory`` store: blobs in this process, bounded by bytes, least recently used first out."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from vllm_kvcompress.stores.base import Store, StoreStats, check_key, check_keys, parse_size


class MemoryStore(Store):
    """Settings: ``bytes``, the sum of the lengths of the blobs that it may hold."""

    name = "memory"
    shared = False

    def __init__(self, bytes: int | str) -> None:
        self._capacity = parse_size(bytes)
        self._lock = threading.Lock()
        self._blobs: OrderedDict[bytes, bytes] = OrderedDict()
        self._held = 0
        self._hits = self._misses = self._evictions = self._refused = 0

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        keys = check_keys(keys)
        with self._lock:
            return [key in self._blobs for key in keys]

    def get(self, key: bytes) -> bytes | None:
        check_key(key)
        with self._lock:
            blob = self._blobs.get(key)
            if blob is None:
                self._misses += 1
            else:
                self._hits += 1
                self._blobs.move_to_end(key)
            return blob

    def put(self, key: bytes, blob: bytes) -> bool:
        check_key(key)
        blob = bytes(blob)
        evicted = []
        with self._lock:
            self._drop(key)
            if len(blob) > self._capacity:
                self._refused += 1
                return False
            while self._held + len(blob) > self._capacity:
                victim = next(iter(self._blobs))
                evicted.append((victim, self._drop(victim)))
            self._evictions += len(evicted)
            self._blobs[key] = blob
            self._held += len(blob)
        if self.on_evict is not None:
            for victim in evicted:
                self.on_evict(*victim)
        return True

    def remove(self, keys: Sequence[bytes]) -> None:
        keys = check_keys(keys)
        with self._lock:
            for key in keys:
                self._drop(key)

    def clear(self) -> None:
        with self._lock:
            self._blobs.clear()
            self._held = 0

    def keys(self) -> list[bytes]:
        with self._lock:
            return list(self._blobs)

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                name=self.name,
                entries=len(self._blobs),
                bytes_held=self._held,
                capacity_bytes=self._capacity,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                refused=self._refused,
            )

    def close(self) -> None:
        self.clear()

    def _drop(self, key: bytes) -> bytes | None:
        blob = self._blobs.pop(key, None)
        if blob is not None:
            self._held -= len(blob)
        return blob
