"""Sealing: what another store holds is encrypted and authenticated under the key it lies under.

A sealed blob::

    4 bytes    "KVS1"
    12 bytes   nonce, random
    the rest   AES-256-GCM of the blob, and its tag of 16 bytes; associated data: the store key

AES-GCM allows about 2^32 random nonces under one key, which a fleet uses up in weeks. So each
store key has an AES key of its own, the HMAC-SHA256 of the store key under the sealing key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from vllm_kvcompress.stores.base import Store, StoreConfigError, StoreStats, check_key
from vllm_kvcompress.stores.secret import read_secret

logger = logging.getLogger("vllm.kvcompress.stores")

MAGIC = b"KVS1"
NONCE_BYTES = 12
OVERHEAD = len(MAGIC) + NONCE_BYTES + 16
"""Bytes by which a sealed blob is longer."""

_KEY = re.compile(r"[0-9a-fA-F]{64}")


def read_seal_key(source: str) -> bytes:
    """The 32 bytes of a sealing key, from the 64 hex digits at ``"file:PATH"`` or ``"env:NAME"``.

    Raises StoreConfigError for anything else.
    """
    text = read_secret(source, "seal_key")
    if not _KEY.fullmatch(text) or len(set(text)) == 1:
        raise StoreConfigError(
            f"seal_key: what {source} holds is not a key of 64 hex digits; make one with "
            "'openssl rand -hex 32'"
        )
    return bytes.fromhex(text)


class SealedStore(Store):
    """``store``, with all blobs sealed by ``seal_key``, 32 bytes.

    What cannot be opened (another key, another store key's blob, damage, or never sealed) is not
    held, as far as ``get`` goes; it stays where it is, because it may be somebody else's.
    """

    def __init__(self, store: Store, seal_key: bytes) -> None:
        if len(seal_key) != 32:
            raise ValueError(f"seal_key has {len(seal_key)} bytes; expected 32")
        self._store = store
        self._seal_key = seal_key
        self._lock = threading.Lock()
        self._rejected = 0
        self._on_evict: Callable[[bytes, bytes], None] | None = None

    @property
    def name(self) -> str:
        return self._store.name

    @property
    def shared(self) -> bool:
        return self._store.shared

    @property
    def reports_evictions(self) -> bool:
        return self._store.reports_evictions

    @property
    def on_evict(self) -> Callable[[bytes, bytes], None] | None:
        return self._on_evict

    @on_evict.setter
    def on_evict(self, handler: Callable[[bytes, bytes], None] | None) -> None:
        self._on_evict = handler
        self._store.on_evict = None if handler is None else self._evicted

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._store.contains(keys)

    def get(self, key: bytes) -> bytes | None:
        sealed = self._store.get(key)
        return None if sealed is None else self._open(key, sealed)

    def put(self, key: bytes, blob: bytes) -> bool:
        return self._store.put(check_key(key), self._seal(key, blob))

    def remove(self, keys: Sequence[bytes]) -> None:
        self._store.remove(keys)

    def clear(self) -> None:
        self._store.clear()

    def keys(self) -> list[bytes]:
        return self._store.keys()

    def stats(self) -> StoreStats:
        stats = self._store.stats()
        with self._lock:
            rejected = self._rejected
        return replace(
            stats, hits=stats.hits - rejected, misses=stats.misses + rejected, rejected=rejected
        )

    def refresh(self) -> None:
        self._store.refresh()

    def remove_prefix(self, prefix: bytes) -> None:
        self._store.remove_prefix(prefix)

    def close(self) -> None:
        self._store.close()

    def _cipher(self, key: bytes) -> AESGCM:
        return AESGCM(hmac.digest(self._seal_key, key, hashlib.sha256))

    def _seal(self, key: bytes, blob: bytes) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return b"".join((MAGIC, nonce, self._cipher(key).encrypt(nonce, blob, key)))

    def _open(self, key: bytes, sealed: bytes) -> bytes | None:
        view = memoryview(sealed)
        start = len(MAGIC) + NONCE_BYTES
        if len(sealed) >= OVERHEAD and view[: len(MAGIC)] == MAGIC:
            try:
                return self._cipher(key).decrypt(view[len(MAGIC) : start], view[start:], key)
            except InvalidTag:
                pass
        with self._lock:
            first = self._rejected == 0
            self._rejected += 1
        logger.log(
            logging.WARNING if first else logging.DEBUG,
            "KV offload: store %s holds a blob that seal_key does not open (another key, another "
            "place, or damage); it counts as a miss",
            self.name,
        )
        return None

    def _evicted(self, key: bytes, sealed: bytes) -> None:
        handler = self._on_evict
        if handler is not None and (blob := self._open(key, sealed)) is not None:
            handler(key, blob)
