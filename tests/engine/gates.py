"""A codec and a store that wait until a test lets them go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_kvcompress import codecs, stores
from vllm_kvcompress.codecs.raw import RawCodec
from vllm_kvcompress.stores import StoreError
from vllm_kvcompress.stores.memory import MemoryStore

encoding_allowed = threading.Event()
reading_allowed = threading.Event()
writing_allowed = threading.Event()
reads_fail = threading.Event()


def open_all() -> None:
    """Nothing waits and nothing fails."""
    for gate in (encoding_allowed, reading_allowed, writing_allowed):
        gate.set()
    reads_fail.clear()


class GatedCodec(RawCodec):
    """The raw codec, with an encoder that waits."""

    name = "gated"

    def encode(self, kv, fingerprint=b""):
        if kv.abs().sum() > 0 and fingerprint:  # the warm-up at start has no fingerprint
            assert encoding_allowed.wait(120)
        return super().encode(kv, fingerprint)


class GatedStore(MemoryStore):
    """A memory store that waits, and fails to read on demand."""

    name = "gated"

    def get(self, key):
        assert reading_allowed.wait(120)
        if reads_fail.is_set():
            raise StoreError("told to fail")
        return super().get(key)

    def put(self, key, blob):
        assert writing_allowed.wait(120)
        return super().put(key, blob)


@contextmanager
def registered() -> Iterator[None]:
    """Make both known by the name ``gated``, with every gate open, for a while."""
    known = dict(codecs._REGISTRY), dict(stores._REGISTRY)
    codecs.register_codec("gated", "tests.engine.gates:GatedCodec")
    stores.register_store("gated", "tests.engine.gates:GatedStore")
    open_all()
    try:
        yield
    finally:
        open_all()
        for registry, before in zip((codecs._REGISTRY, stores._REGISTRY), known, strict=True):
            registry.clear()
            registry.update(before)
