"""Damage to the stores under a running engine: every request still ends with the right answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine import gates
from tests.engine.conftest import BLOCK, CHUNK, Engine, prompt, running_engine

CHUNKS = 4


@pytest.fixture(scope="module")
def engine(llama, gated):
    offload = {
        "codec": "raw",
        "stores": [{"type": "gated", "bytes": "64MiB"}],
        "retry_seconds": 0.2,
    }
    with running_engine(llama, offload) as engine:
        yield engine


def flip_a_bit(store, keys):
    blob = bytearray(store.get(keys[1]))
    blob[len(blob) // 2] ^= 4
    store.put(keys[1], bytes(blob))


def truncate(store, keys):
    store.put(keys[1], store.get(keys[1])[:-10])


def remove(store, keys):
    store.remove([keys[1]])


def swap(store, keys):
    second, third = store.get(keys[1]), store.get(keys[2])
    store.put(keys[1], third)
    store.put(keys[2], second)


def replace_with_rubbish(store, keys):
    store.put(keys[1], b"not a blob at all")


def empty(store, keys):
    store.put(keys[1], b"")


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (flip_a_bit, "corrupt"),
        (truncate, "corrupt"),
        (remove, "missing"),
        (swap, "foreign"),
        (replace_with_rubbish, "corrupt"),
        (empty, "corrupt"),
    ],
)
def test_a_damaged_chunk_is_recomputed_and_stored_anew_and_the_chunks_before_it_are_used(
    engine: Engine, damage: Callable, cause: str
):
    text = prompt(CHUNKS * CHUNK + BLOCK // 2, seed=sum(damage.__name__.encode()))
    store = engine.worker._stores.stores[0]
    cold = engine.generate(text)[0]
    engine.settle()
    keys = store.keys()[-CHUNKS:]  # the most recently used
    intact = {key: store.get(key) for key in keys}
    failures = engine.metrics().get(f"load_failures{{{cause}}}", 0)

    damage(store, keys)
    engine.forget_local()
    answer = engine.generate(text)[0]
    assert answer.tokens == cold.tokens
    assert answer.cached == CHUNK  # the chunk before the damage
    assert engine.metrics()[f"load_failures{{{cause}}}"] > failures

    engine.settle()
    assert {key: store.get(key) for key in keys} == intact
    engine.forget_local()
    assert engine.generate(text)[0].cached == CHUNKS * CHUNK


def test_an_unreadable_store_costs_a_recompute_and_is_used_again_when_it_heals(engine: Engine):
    import time

    text = prompt(CHUNKS * CHUNK + BLOCK // 2, seed=77)
    cold = engine.generate(text)[0]
    engine.settle()
    gates.reads_fail.set()
    engine.forget_local()
    broken = engine.generate(text)[0]
    assert broken.tokens == cold.tokens
    assert broken.cached == 0
    assert engine.metrics()["load_failures{store_error}"] > 0
    gates.reads_fail.clear()
    engine.settle()
    time.sleep(0.3)
    engine.forget_local()
    assert engine.generate(text)[0].cached == CHUNKS * CHUNK


def test_damage_in_the_middle_of_a_crowd_of_requests_reaches_none_of_them(engine: Engine):
    texts = [prompt(CHUNKS * CHUNK + i, seed=100 + i // 2) for i in range(12)]
    cold = engine.generate(*texts)
    engine.settle()
    store = engine.worker._stores.stores[0]
    keys = store.keys()
    for key in keys[::3]:
        store.put(key, store.get(key)[:50])
    for key in keys[1::7]:
        store.remove([key])
    engine.forget_local()
    answers = engine.generate(*texts)
    assert [a.tokens for a in answers] == [a.tokens for a in cold]
