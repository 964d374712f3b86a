"""Sealed stores: what is encrypted, what cannot be opened, and which keys are refused."""

from __future__ import annotations

import logging
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvcompress.stores import StoreConfigError, create_stack, create_store
from vllm_kvcompress.stores.memory import MemoryStore
from vllm_kvcompress.stores.sealed import OVERHEAD, SealedStore, read_seal_key

ONE, TWO = bytes(range(32)), bytes(range(1, 33))


@pytest.fixture
def inner():
    return MemoryStore(bytes=1 << 20)


@pytest.fixture
def store(inner):
    return SealedStore(inner, ONE)


def test_the_store_below_sees_neither_the_blob_nor_the_same_bytes_twice(store, inner):
    blob = b"a secret of some length" * 10
    store.put(b"a", blob)
    first = inner.get(b"a")
    store.put(b"a", blob)
    second = inner.get(b"a")
    assert store.get(b"a") == blob
    assert len(first) == len(second) == len(blob) + OVERHEAD
    assert b"secret" not in first
    assert not set(zip(*[iter(first[4:])] * 16, strict=False)) & set(
        zip(*[iter(second[4:])] * 16, strict=False)
    )


def test_the_format_is_aes_gcm_under_the_hmac_of_the_key_with_the_key_as_associated_data(
    store, inner
):
    import hashlib
    import hmac

    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    store.put(b"some key", b"blob")
    sealed = inner.get(b"some key")
    cipher = AESGCM(hmac.new(ONE, b"some key", hashlib.sha256).digest())
    assert sealed[:4] == b"KVS1"
    assert cipher.decrypt(sealed[4:16], sealed[16:], b"some key") == b"blob"


def test_a_wrong_key_is_a_miss_that_is_counted_and_logged_once_and_destroys_nothing(
    store, inner, caplog
):
    stranger = SealedStore(inner, TWO)
    for key in (b"a", b"b", b"c"):
        store.put(key, b"blob of " + key)
    with caplog.at_level(logging.WARNING):
        assert [stranger.get(key) for key in (b"a", b"b", b"c")] == [None] * 3
    assert len(caplog.records) == 1 and "seal_key" in caplog.records[0].getMessage()
    stats = stranger.stats()
    assert (stats.rejected, stats.misses, stats.hits) == (3, 3, 0)
    assert [store.get(key) for key in (b"a", b"b", b"c")] == [
        b"blob of a",
        b"blob of b",
        b"blob of c",
    ]


def test_a_blob_that_lies_under_another_key_is_a_miss(store, inner):
    store.put(b"a", b"blob a")
    store.put(b"b", b"blob b")
    a, b = inner.get(b"a"), inner.get(b"b")
    inner.put(b"a", b)
    inner.put(b"b", a)
    assert store.get(b"a") is None and store.get(b"b") is None


def test_every_flipped_bit_and_every_truncation_is_a_miss(store, inner):
    store.put(b"a", b"blob")
    sealed = inner.get(b"a")
    for bit in range(8 * len(sealed)):
        damaged = bytearray(sealed)
        damaged[bit // 8] ^= 1 << bit % 8
        inner.put(b"a", bytes(damaged))
        assert store.get(b"a") is None
    for length in range(len(sealed)):
        inner.put(b"a", sealed[:length])
        assert store.get(b"a") is None
    inner.put(b"a", sealed + b"\0")
    assert store.get(b"a") is None
    inner.put(b"a", sealed)
    assert store.get(b"a") == b"blob"


def test_a_blob_that_was_never_sealed_is_a_miss(store, inner):
    inner.put(b"a", b"plain")
    assert store.get(b"a") is None


@given(st.binary(max_size=200))
def test_anything_at_all_that_a_store_may_hold_is_a_miss(content):
    inner = MemoryStore(bytes=1000)
    inner.put(b"a", content)
    assert SealedStore(inner, ONE).get(b"a") is None


@given(st.binary(min_size=1, max_size=128), st.binary(max_size=2000))
def test_any_blob_under_any_key_comes_back(key, blob):
    store = SealedStore(MemoryStore(bytes=10_000), ONE)
    assert store.put(key, blob) and store.get(key) == blob


def test_what_a_sealed_store_evicts_is_opened_and_moves_down(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY_ONE", ONE.hex())
    stack = create_stack(
        [
            {"type": "memory", "bytes": 200, "seal_key": "env:KEY_ONE"},
            {"type": "disk", "path": str(tmp_path / "disk")},
        ],
        write_back=True,
    )
    for key in (b"a", b"b", b"c", b"d"):
        stack.put(key, key * 50)
    assert stack.stores[1].get(b"a") == b"a" * 50
    assert all(stack.get(key) == key * 50 for key in (b"a", b"b", b"c", b"d"))
    stack.close()


def test_a_key_is_read_from_a_file_or_the_environment(tmp_path, monkeypatch):
    (tmp_path / "key").write_text(f"  {ONE.hex().upper()}\n")
    monkeypatch.setenv("KEY_ONE", ONE.hex())
    assert read_seal_key(f"file:{tmp_path / 'key'}") == read_seal_key("env:KEY_ONE") == ONE


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty or not set"),
        (b" \n", "is empty or not set"),
        (b"ab" * 31, "not a key of 64 hex digits.*openssl rand -hex 32"),
        (b"ab" * 33, "not a key of 64 hex digits"),
        (b"xy" * 32, "not a key of 64 hex digits"),
        (b"0" * 64, "not a key of 64 hex digits"),
        (os.urandom(31) + b"\xff", "is not text"),
        (b"ab" * 40_000, "longer than 4096 bytes"),
        (None, "cannot be read"),
    ],
    ids=["empty", "space", "short", "long", "letters", "zeros", "binary", "huge", "missing"],
)
def test_bad_key_files_are_refused_before_anything_is_opened(tmp_path, content, message):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StoreConfigError, match=f"^seal_key: .*{message}") as caught:
        create_store({"type": "disk", "path": str(tmp_path / "disk"), "seal_key": f"file:{path}"})
    assert "abab" not in str(caught.value)
    assert not (tmp_path / "disk").exists()


@pytest.mark.parametrize("source", [ONE.hex(), "", None, 7, "file:", "env:", "vault:x", "env:a\0b"])
def test_a_key_in_the_settings_themselves_is_refused_and_not_repeated(source):
    with pytest.raises(StoreConfigError, match="seal_key: settings are logged") as caught:
        create_store({"type": "memory", "bytes": 10, "seal_key": source})
    assert ONE.hex() not in str(caught.value)
