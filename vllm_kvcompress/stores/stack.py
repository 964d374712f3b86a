"""A stack of stores that acts as one: fast and small above, slow and large below."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from vllm_kvcompress.stores.base import Store, StoreConfigError, StoreError, StoreStats, check_keys

FLUSH_SECONDS = 30.0
"""How long a close writes down what only memory holds."""


class StoreStack(Store):
    """Stores from the top, asked first, to the bottom; ``stores`` are in this order.

    A hit is copied into every store above the one that had it. ``put`` writes to all stores, or,
    with ``write_back``, only to the first that takes it, and the others get it when it is evicted
    from above or when the stack is closed. What a store evicts goes to the one below unless that
    already holds it; what the bottom evicts goes to ``on_evict``. A store that fails is passed
    over: a blob is served as long as any store can read it.
    """

    name = "stack"
    shared = False

    def __init__(self, stores: Sequence[Store], write_back: bool = False) -> None:
        if not stores:
            raise StoreConfigError("stores: the list is empty; give at least one store")
        self.stores = list(stores)
        self.shared = any(store.shared for store in self.stores)
        self._write_back = write_back
        self._lock = threading.Lock()
        self._hits = self._misses = 0
        # With write_back, per store, the keys of which the stores below have no or an older blob.
        self._dirty: list[set[bytes]] = [set() for _ in self.stores]
        self._on_evict: Callable[[bytes, bytes], None] | None = None
        self.on_forget: Callable[[bytes], None] | None = None
        """Called with a key that no store of this process alone holds any more: whether the
        stack has it is now for the shared stores to say."""
        for level, store in enumerate(self.stores):
            if level + 1 < len(self.stores) or not store.shared:
                store.on_evict = self._eviction_handler(level)

    @property
    def on_evict(self) -> Callable[[bytes, bytes], None] | None:
        """Called with what the bottom evicts."""
        return self._on_evict

    @on_evict.setter
    def on_evict(self, handler: Callable[[bytes, bytes], None] | None) -> None:
        self._on_evict = handler
        bottom = self.stores[-1]
        if bottom.shared:
            # A disk need not read what it evicts where nobody wants it.
            bottom.on_evict = handler

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        keys = check_keys(keys)
        found = dict.fromkeys(keys, False)
        for store in self.stores:
            unknown = [key for key, held in found.items() if not held]
            if not unknown:
                break
            found.update(zip(unknown, _contains(store, unknown), strict=True))
        return [found[key] for key in keys]

    def get(self, key: bytes) -> bytes | None:
        failures = []
        for level, store in enumerate(self.stores):
            try:
                blob = store.get(key)
            except StoreError as error:
                failures.append(f"{store.name}: {error}")
                continue
            if blob is not None:
                for upper in self.stores[:level]:
                    _put(upper, key, blob)
                with self._lock:
                    self._hits += 1
                return blob
        with self._lock:
            self._misses += 1
        if failures:
            raise StoreError("; ".join(failures))
        return None

    def put(self, key: bytes, blob: bytes) -> bool:
        stored = False
        for level, store in enumerate(self.stores):
            took = self._put_at(level, key, blob)
            stored |= took
            # What a store evicts without a word has to be below it already.
            if took and self._write_back and store.reports_evictions:
                break
        return stored

    def remove(self, keys: Sequence[bytes]) -> None:
        keys = check_keys(keys)
        with self._lock:
            for dirty in self._dirty:
                dirty.difference_update(keys)
        self._for_all(lambda store: store.remove(keys))

    def clear(self) -> None:
        with self._lock:
            for dirty in self._dirty:
                dirty.clear()
        self._for_all(lambda store: store.clear())

    def keys(self) -> list[bytes]:
        """The keys of all stores: those that only lower stores hold come first."""
        order = {key: None for store in self.stores for key in reversed(store.keys())}
        return list(reversed(order))

    def stats(self) -> StoreStats:
        """The stack as a whole.

        A ``get`` counts once, whichever store had the blob. Entries, bytes, errors and refusals
        are summed over the stores, so that a blob in two of them counts twice; evictions are
        those of the bottom, which leave the stack.
        """
        levels = [store.stats() for store in self.stores]
        with self._lock:
            return StoreStats(
                name=self.name,
                entries=sum(level.entries for level in levels),
                bytes_held=sum(level.bytes_held for level in levels),
                capacity_bytes=sum(level.capacity_bytes for level in levels),
                hits=self._hits,
                misses=self._misses,
                evictions=levels[-1].evictions,
                errors=sum(level.errors for level in levels),
                refused=sum(level.refused for level in levels),
            )

    def flush(self) -> None:
        """Bring what a store that dies with this process holds to the store below it.

        It ends after ``FLUSH_SECONDS``: a process that is told to stop may be killed soon.
        """
        deadline = time.monotonic() + FLUSH_SECONDS
        for level, store in enumerate(self.stores[:-1]):
            if store.shared:
                continue
            below = self.stores[level + 1]
            keys = store.keys()
            for key, held in zip(keys, _contains(below, keys), strict=True):
                if time.monotonic() > deadline:
                    return
                dirty = self._clean(level, key)
                if (dirty or not held) and (blob := store.get(key)) is not None:
                    self._put_at(level + 1, key, blob)

    def close(self) -> None:
        self.flush()
        self._for_all(lambda store: store.close())

    def _eviction_handler(self, level: int) -> Callable[[bytes, bytes], None]:
        def handle(key: bytes, blob: bytes) -> None:
            if level + 1 == len(self.stores):
                if self._on_evict is not None:
                    self._on_evict(key, blob)
            elif self._clean(level, key) or not _contains(self.stores[level + 1], [key])[0]:
                self._put_at(level + 1, key, blob)
            if self.on_forget is not None and not any(
                _contains(store, [key])[0] for store in self.stores if not store.shared
            ):
                self.on_forget(key)

        return handle

    def _put_at(self, level: int, key: bytes, blob: bytes) -> bool:
        # Before the put, which may already evict the key again.
        store = self.stores[level]
        if self._write_back and store.reports_evictions and level + 1 < len(self.stores):
            with self._lock:
                self._dirty[level].add(key)
        stored = _put(store, key, blob)
        if not stored:
            self._clean(level, key)
        return stored

    def _clean(self, level: int, key: bytes) -> bool:
        with self._lock:
            dirty = key in self._dirty[level]
            self._dirty[level].discard(key)
            return dirty

    def _for_all(self, action: Callable[[Store], None]) -> None:
        failures = []
        for store in self.stores:
            try:
                action(store)
            except StoreError as error:
                failures.append(f"{store.name}: {error}")
        if failures:
            raise StoreError("; ".join(failures))


def _contains(store: Store, keys: Sequence[bytes]) -> list[bool]:
    try:
        return store.contains(keys)
    except StoreError:
        return [False] * len(keys)


def _put(store: Store, key: bytes, blob: bytes) -> bool:
    try:
        return store.put(key, blob)
    except StoreError:
        return False
