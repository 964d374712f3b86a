"""What every store promises, run over every registered store and over stacks of them."""

import random
import threading
import time

import pytest

from vllm_kvcompress.stores import (
    StoreConfigError,
    create_stack,
    create_store,
    parse_size,
    register_store,
    store_types,
)

CAPACITY = 1000
SEAL_KEY = "5ea1" * 16

# Each makes a store from a folder and the fixtures.
BOUNDED = {
    "memory": lambda path, _: create_store({"type": "memory", "bytes": CAPACITY}),
    "disk": lambda path, _: create_store({"type": "disk", "path": path, "bytes": CAPACITY}),
    "disk-namespace": lambda path, _: create_store(
        {"type": "disk", "path": path, "bytes": CAPACITY, "namespace": "one"}
    ),
    "stack-of-one": lambda path, _: create_stack([{"type": "memory", "bytes": CAPACITY}]),
    "memory-over-disk": lambda path, _: create_stack(
        [{"type": "memory", "bytes": 300}, {"type": "disk", "path": path, "bytes": CAPACITY}]
    ),
    "memory-over-disk-write-back": lambda path, _: create_stack(
        [{"type": "memory", "bytes": 300}, {"type": "disk", "path": path, "bytes": CAPACITY}],
        write_back=True,
    ),
}
SINGLE = ["memory", "disk", "disk-namespace", "stack-of-one"]
# A server decides how much it holds and what goes first.
SERVED = {
    "valkey": lambda path, fixture: create_store(valkey(fixture)),
    "valkey-sealed": lambda path, fixture: create_store(
        {**valkey(fixture), "seal_key": "env:SEAL_KEY"}
    ),
    "disk-sealed": lambda path, _: create_store(
        {"type": "disk", "path": path, "seal_key": "env:SEAL_KEY"}
    ),
    "object": lambda path, fixture: create_store(bucket(fixture)),
    "object-in-files": lambda path, _: create_store({"type": "object", "url": f"file://{path}"}),
    "memory-over-valkey": lambda path, fixture: create_stack(
        [{"type": "memory", "bytes": 300}, valkey(fixture)]
    ),
    "memory-over-valkey-over-disk-write-back": lambda path, fixture: create_stack(
        [
            {"type": "memory", "bytes": 300},
            valkey(fixture),
            {"type": "disk", "path": path, "bytes": "1MB"},
        ],
        write_back=True,
    ),
}
ALL = {**BOUNDED, **SERVED}


def valkey(fixture) -> dict:
    server = fixture("valkey_server")
    return {"type": "valkey", "url": server.url, "namespace": f"t{time.time_ns()}"}


def bucket(fixture) -> dict:
    return {**fixture("bucket"), "namespace": f"t{time.time_ns()}"}


def test_every_registered_store_is_tested():
    assert set(store_types()) <= set(ALL)


def making(*tables):
    """A fixture that runs a test over every store of these tables."""

    @pytest.fixture(params=[name for table in tables for name in table])
    def make(request, tmp_path, monkeypatch):
        monkeypatch.setenv("SEAL_KEY", SEAL_KEY)
        store = ALL[request.param](str(tmp_path / "store"), request.getfixturevalue)
        yield store
        store.close()

    return make


store = making(BOUNDED, SERVED)
bounded_store = making(BOUNDED)
single_store = making(SINGLE)


def blob_of(key: bytes, size: int = 100) -> bytes:
    return random.Random(key).randbytes(size)


def keys_of(count: int) -> list[bytes]:
    return [random.Random(number).randbytes(40) for number in range(count)]


def test_put_then_get(store):
    assert store.get(b"a") is None
    assert store.put(b"a", b"blob")
    assert store.get(b"a") == b"blob"
    assert store.contains([b"a", b"b", b"a"]) == [True, False, True]
    assert store.contains([]) == []
    assert store.keys() == [b"a"]


def test_get_returns_bytes_of_its_own(store):
    blob = bytearray(b"blob")
    assert store.put(b"a", memoryview(blob))
    blob[:] = b"xxxx"
    assert store.get(b"a") == b"blob"
    assert type(store.get(b"a")) is bytes


def test_put_replaces(store):
    store.put(b"a", b"first")
    store.put(b"a", b"second, longer")
    assert store.get(b"a") == b"second, longer"
    assert store.keys() == [b"a"]


@pytest.mark.parametrize(
    "key",
    [
        b"\0",
        b"\xff" * 128,
        bytes(128),
        b"a" * 120,
        b"a" * 121,
        b"../../etc/passwd",
        b"/",
        b".",
        b"z",
    ],
    ids=repr,
)
def test_any_key_round_trips(store, key):
    assert store.put(key, b"blob")
    assert store.put(key[:-1] + b"!", b"other")
    assert store.get(key) == b"blob"
    assert set(store.keys()) == {key, key[:-1] + b"!"}
    store.remove([key])
    assert store.contains([key]) == [False]


@pytest.mark.parametrize(
    "key", [b"", b"k" * 129, "text", None], ids=["empty", "long", "text", "none"]
)
def test_bad_keys_are_refused(store, key):
    for action in (
        lambda: store.get(key),
        lambda: store.put(key, b""),
        lambda: store.contains([key]),
        lambda: store.remove([key]),
    ):
        with pytest.raises(ValueError, match="1 to 128 bytes"):
            action()


def test_empty_blob(store):
    assert store.put(b"a", b"")
    assert store.get(b"a") == b""


def test_remove(store):
    for key in (b"a", b"b", b"c"):
        store.put(key, blob_of(key))
    store.remove([b"a", b"missing", b"c"])
    assert store.contains([b"a", b"b", b"c"]) == [False, True, False]
    assert store.get(b"a") is None
    assert store.stats().evictions == 0


def test_clear(store):
    for key in keys_of(20):
        store.put(key, blob_of(key))
    store.clear()
    assert store.keys() == []
    assert store.contains(keys_of(20)) == [False] * 20
    assert store.put(b"a", b"blob") and store.get(b"a") == b"blob"


def test_nothing_is_left_to_count_after_clear(bounded_store):
    for key in keys_of(20):
        bounded_store.put(key, blob_of(key))
    bounded_store.clear()
    stats = bounded_store.stats()
    assert (stats.entries, stats.bytes_held) == (0, 0)


def test_remove_prefix_leaves_the_others(store):
    folder = bytes(range(8))
    inside = [folder + b"one", folder + b"two", folder]
    outside = [bytes(range(1, 9)) + b"one", b"*" + folder[1:] + b"x", folder[:-1], b"\xff" * 40]
    for key in inside + outside:
        assert store.put(key, b"blob")
    store.remove_prefix(folder)
    assert store.contains(inside) == [False] * len(inside)
    assert store.contains(outside) == [True] * len(outside)
    assert set(store.keys()) == set(outside)


def test_close_can_be_called_twice(store):
    store.put(b"a", b"blob")
    store.close()
    store.close()


def test_accounting_is_exact(single_store):
    store = single_store
    assert store.stats().capacity_bytes == CAPACITY
    store.put(b"a", bytes(100))
    store.put(b"b", bytes(7))
    store.put(b"a", bytes(300))
    stats = store.stats()
    assert (stats.entries, stats.bytes_held) == (2, 307)
    store.remove([b"a"])
    stats = store.stats()
    assert (stats.entries, stats.bytes_held) == (1, 7)


def test_gets_are_counted_and_lookups_are_not(store):
    store.put(b"a", b"blob")
    store.contains([b"a", b"b"])
    store.get(b"a")
    store.get(b"a")
    store.get(b"b")
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.errors) == (2, 1, 0)


def test_least_recently_used_goes_first(single_store):
    store = single_store
    for key in (b"a", b"b", b"c", b"d", b"e"):
        assert store.put(key, blob_of(key, 200))
    store.get(b"a")
    store.put(b"b", blob_of(b"b", 200))
    store.contains([b"c"])
    store.put(b"f", blob_of(b"f", 400))
    assert store.contains([b"a", b"b", b"c", b"d", b"e", b"f"]) == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    assert store.keys() == [b"e", b"a", b"b", b"f"]
    stats = store.stats()
    assert (stats.bytes_held, stats.evictions) == (1000, 2)


def test_eviction_reports_what_left(bounded_store):
    store = bounded_store
    left = {}
    store.on_evict = left.__setitem__
    keys = keys_of(30)
    for key in keys:
        assert store.put(key, blob_of(key))
    assert left
    assert all(blob == blob_of(key) for key, blob in left.items())
    held = [key for key, is_held in zip(keys, store.contains(keys), strict=True) if is_held]
    assert len(held) + len(left) == 30 and not set(held) & set(left)
    assert store.stats().evictions == len(left)


def test_on_evict_may_use_the_store(bounded_store):
    store = bounded_store
    seen = []

    def on_evict(key, blob):
        seen.append((key, store.contains([key]), store.get(key)))

    store.on_evict = on_evict
    for key in keys_of(20):
        store.put(key, blob_of(key))
    assert seen and all(not held[0] and blob is None for _, held, blob in seen)


def test_too_large_a_blob_is_refused_and_counted(bounded_store):
    store = bounded_store
    store.put(b"a", b"old")
    store.put(b"b", b"kept")
    assert not store.put(b"a", bytes(CAPACITY + 1))
    assert store.get(b"a") is None
    assert store.get(b"b") == b"kept"
    assert store.stats().refused >= 1
    assert store.put(b"a", bytes(CAPACITY))
    assert store.get(b"a") == bytes(CAPACITY)


def test_random_operations_against_a_model(single_store):
    """The same bounded dictionary, whatever keeps it."""
    store, model, chance = single_store, {}, random.Random(1)
    keys = keys_of(12)
    for _ in range(1000):
        key = chance.choice(keys)
        match chance.randrange(5):
            case 0 | 1:
                blob = chance.randbytes(chance.randrange(300))
                model.pop(key, None)
                while sum(map(len, model.values())) + len(blob) > CAPACITY:
                    del model[next(iter(model))]
                model[key] = blob
                assert store.put(key, blob)
            case 2:
                if key in model:
                    model[key] = model.pop(key)
                assert store.get(key) == model.get(key)
            case 3:
                assert store.contains(keys) == [key in model for key in keys]
            case 4 if chance.random() < 0.3:
                model.pop(key, None)
                store.remove([key])
        stats = store.stats()
        assert (stats.entries, stats.bytes_held) == (len(model), sum(map(len, model.values())))
    assert store.keys() == list(model)


def hammer(store, keys, rounds):
    """Every method from six threads at once; each ``get`` finds a key's own blob or none."""
    failures = []
    evicted = []
    store.on_evict = lambda key, blob: evicted.append(blob == blob_of(key))

    def work(seed):
        chance = random.Random(seed)
        try:
            for _ in range(rounds):
                key = chance.choice(keys)
                action = chance.randrange(10)
                if action < 4:
                    assert store.put(key, blob_of(key))
                elif action < 8:
                    assert store.get(key) in (None, blob_of(key))
                elif action < 9:
                    store.contains(keys)
                else:
                    store.remove([key])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and all(evicted)


def test_threads_find_what_was_put_and_nothing_else(store):
    hammer(store, keys_of(25), rounds=40)
    assert store.stats().errors == 0


def test_threads_leave_an_exact_account(bounded_store):
    store, keys = bounded_store, keys_of(25)
    hammer(store, keys, rounds=300)
    stats = store.stats()
    assert stats.bytes_held <= stats.capacity_bytes
    assert stats.errors == 0
    assert stats.bytes_held == 100 * stats.entries
    held = store.contains(keys)
    assert set(store.keys()) == {key for key, is_held in zip(keys, held, strict=True) if is_held}
    # A hit that moves up may push another blob out at the bottom.
    assert all(
        store.get(key) is None for key, is_held in zip(keys, held, strict=True) if not is_held
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("1.5KiB", 1536),
        ("20GB", 20 * 10**9),
        ("3kb", 3000),
        ("7 B", 7),
        ("2TiB", 2 << 40),
    ],
    ids=str,
)
def test_parse_size(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [0, -1, "-1GiB", "0", "", "GiB", "8Gi", "8 parsecs", "1e3", "nan", 1.5, True, None, "1 2"],
    ids=repr,
)
def test_parse_size_names_setting_and_choices(text):
    with pytest.raises(StoreConfigError, match=r"^limit: .* is not a size; .*GiB"):
        parse_size(text, setting="limit")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "tape"}, r"type: .*'tape'.* choose from disk, memory, object, valkey"),
        ({}, r"type: .* choose from disk, memory, object, valkey"),
        ({"type": ["memory"]}, r"type: .* choose from"),
        ("memory", r"'memory'.*give an object such as"),
        ({"type": "memory", "bytes": 10, "path": "x"}, r"path: .*its settings are bytes"),
        ({"type": "memory"}, r"bytes: .*needs this setting"),
        ({"type": "memory", "bytes": "-5"}, r"bytes: '-5' is not a size"),
        ({"type": "disk", "bytes": 10}, r"path: .*needs this setting"),
        ({"type": "disk", "path": 7}, r"path: 7 is not a path"),
        ({"type": "disk", "path": ""}, r"path: '' is not a path"),
        ({"type": "disk", "path": "a\0b"}, r"path: .* is not a path"),
    ],
)
def test_bad_settings_are_named(config, message):
    with pytest.raises(StoreConfigError, match=message):
        create_store(config)


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ([], "stores: the list is empty"),
        ({"type": "memory", "bytes": 1}, "stores: .*give a list"),
        ("memory", "stores: .*give a list"),
        (None, "stores: .*give a list"),
        ([{"type": "memory", "bytes": 1}, {"type": "tape"}], r"stores\[1\]\.type: .*'tape'"),
    ],
)
def test_bad_stacks_are_named(configs, message):
    with pytest.raises(StoreConfigError, match=message):
        create_stack(configs)


def test_a_new_type_only_needs_to_be_registered(monkeypatch):
    from vllm_kvcompress import stores

    monkeypatch.setattr(stores, "_REGISTRY", dict(stores._REGISTRY))
    register_store("other", "vllm_kvcompress.stores.memory:MemoryStore")
    assert create_store({"type": "other", "bytes": 5}).stats().capacity_bytes == 5
