"""Chunks of a transfer, and what the manager knows, without an engine."""

from __future__ import annotations

import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ReqContext, make_offload_key

from vllm_kvcompress.connector.fingerprint import KEY_BYTES, blob_key, split_blob_key
from vllm_kvcompress.connector.manager import ChunkKeys, ChunkManager
from vllm_kvcompress.connector.metrics import WorkerReport
from vllm_kvcompress.connector.worker import split_into_chunks
from vllm_kvcompress.stores.memory import MemoryStore

GROUPS = [SimpleNamespace(group_id=0), SimpleNamespace(group_id=3)]


def split(block_ids, sizes, firsts, keys):
    chunks, unclear = split_into_chunks(
        GROUPS,
        4,
        GPULoadStoreSpec(block_ids, group_sizes=sizes, block_indices=firsts),
        ChunkKeys(tuple(key for key, _ in keys), tuple(group for _, group in keys)),
    )
    return [(c.key, c.group.group_id, c.first_block, c.block_ids) for c in chunks], unclear


def test_blocks_go_to_the_chunks_of_their_group_in_order():
    chunks, unclear = split(list(range(10, 22)), [8, 4], [4, 0], [(b"a", 0), (b"b", 0), (b"c", 3)])
    assert unclear == []
    assert chunks == [
        (b"a", 0, 0, [10, 11, 12, 13]),
        (b"b", 0, 0, [14, 15, 16, 17]),
        (b"c", 3, 0, [18, 19, 20, 21]),
    ]


def test_a_transfer_may_begin_and_end_within_a_chunk():
    chunks, unclear = split([10, 11, 12, 13, 14], [5, 0], [6, 0], [(b"a", 0), (b"b", 0)])
    assert unclear == []
    assert chunks == [(b"a", 0, 2, [10, 11]), (b"b", 0, 0, [12, 13, 14])]


def test_chunks_whose_blocks_cannot_be_told_apart_are_left_out():
    # Two chunks, but blocks for one and a half: the window took blocks of the second one.
    chunks, unclear = split([10, 11, 12], [3, 0], [0, 0], [(b"a", 0), (b"b", 0)])
    assert chunks == []
    assert unclear == [b"a", b"b"]


CONTEXT = ReqContext(req_id="r")
KEYS = [make_offload_key(bytes([i]) * 32, 0) for i in range(4)]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def manager(ranks=2, shared=(), workers_hold=True, levels=1, clock=None):
    made = ChunkManager(
        b"f" * 32, ranks, list(shared), workers_hold, levels, 30.0, clock or Clock()
    )
    made.set_worker_fingerprints([b"w"] * ranks)
    return made


def look_up(made, context=None, key=KEYS[0]):
    """The answer of the shared stores, for a request of its own unless one is given."""
    context = context or ReqContext(req_id="own")
    while (result := made.lookup(key, context)) is LookupResult.RETRY:
        time.sleep(0.001)
    return result


def test_nothing_is_offered_until_every_worker_told_its_fingerprint():
    lonely = ChunkManager(b"f" * 32, 2, [], True, 1, 30.0)
    lonely.set_worker_fingerprints([b"w"])
    assert lonely.lookup(KEYS[0], CONTEXT) is LookupResult.MISS
    assert lonely.prepare_store(KEYS, CONTEXT).keys_to_store == []


def test_a_chunk_is_stored_once_and_found_at_once():
    made = manager()
    assert made.prepare_store(KEYS[:2], CONTEXT).keys_to_store == KEYS[:2]
    assert made.has_pending_work()
    assert made.prepare_store(KEYS, CONTEXT).keys_to_store == KEYS[2:]
    assert made.lookup(KEYS[0], CONTEXT) is LookupResult.HIT
    chunks = [made.key_of(key) for key in KEYS]
    made.take_report(WorkerReport(stored=Counter({chunk: 1 for chunk in chunks})))
    assert made.has_pending_work()  # the other rank has not stored them yet
    made.take_report(WorkerReport(stored=Counter({chunk: 1 for chunk in chunks})))
    assert not made.has_pending_work()
    assert made.lookup(KEYS[0], CONTEXT) is LookupResult.HIT


def test_a_chunk_that_one_rank_dropped_is_gone_and_may_be_stored_again():
    made = manager()
    made.prepare_store(KEYS[:1], CONTEXT)
    chunk = made.key_of(KEYS[0])
    made.take_report(WorkerReport(stored=Counter({chunk: 1}), gone={chunk}))
    assert made.lookup(KEYS[0], CONTEXT) is LookupResult.MISS
    assert not made.has_pending_work()
    assert made.prepare_store(KEYS[:1], CONTEXT).keys_to_store == KEYS[:1]


def test_a_shared_store_has_a_chunk_only_with_the_parts_of_all_ranks():
    store = MemoryStore("1MiB")
    made = manager(shared=[store], workers_hold=False)
    chunk = made.key_of(KEYS[0])
    store.put(blob_key(chunk, 0), b"x")
    assert look_up(made) is LookupResult.MISS
    store.put(blob_key(chunk, 1), b"x")
    request = ReqContext(req_id="r")
    assert look_up(made, request) is LookupResult.HIT
    assert made.prepare_store(KEYS[:1], request).keys_to_store == []


def test_a_chunk_is_found_at_any_level_and_stored_unless_it_is_there_at_all():
    store = MemoryStore("1MiB")
    made = manager(shared=[store], workers_hold=False, levels=2)
    chunk = made.key_of(KEYS[0])
    store.put(blob_key(chunk, 0, level=1), b"x")
    assert look_up(made) is LookupResult.MISS
    store.put(blob_key(chunk, 1, level=0), b"x")
    assert look_up(made) is LookupResult.HIT
    for rank in range(2):
        for level in range(2):
            request = ReqContext(req_id="r")
            look_up(made, request)
            assert made.prepare_store(KEYS[:1], request).keys_to_store == KEYS[:1]
            made.take_report(WorkerReport(gone={chunk}))
            store.put(blob_key(chunk, rank, level), b"x")
    request = ReqContext(req_id="r")
    look_up(made, request)
    assert made.prepare_store(KEYS[:1], request).keys_to_store == []


def test_a_request_asks_the_shared_stores_once_for_all_of_its_chunks():
    store = MemoryStore("1MiB")
    made = manager(ranks=2, shared=[store])
    request = ReqContext(req_id="r")
    for place, key in enumerate(KEYS):
        request.set_offload_key_position(key, 64 * place)
        for rank in range(2):
            store.put(blob_key(made.key_of(key), rank), b"x")
    asked = []
    contains = store.contains
    store.contains = lambda keys: asked.append(len(keys)) or contains(keys)
    assert [look_up(made, request, key) for key in KEYS] == [LookupResult.HIT] * len(KEYS)
    assert asked == [2 * len(KEYS)]


def test_a_lookup_ends_as_a_miss_when_its_deadline_has_passed():
    clock = Clock()
    store = MemoryStore("1MiB")
    answering = threading.Event()
    contains = store.contains
    store.contains = lambda keys: answering.wait(60) and contains(keys)
    made = manager(ranks=1, shared=[store], clock=clock)
    store.put(blob_key(made.key_of(KEYS[0]), 0), b"x")
    request = ReqContext(req_id="r")
    assert made.lookup(KEYS[0], request) is LookupResult.RETRY
    assert made.lookup(KEYS[0], request) is LookupResult.RETRY
    clock.now += 1
    assert made.lookup(KEYS[0], request) is LookupResult.MISS
    # While the store is late, other requests do not wait for it at all.
    assert made.lookup(KEYS[0], ReqContext(req_id="s")) is LookupResult.MISS
    answering.set()
    deadline = time.monotonic() + 30
    while look_up(made) is LookupResult.MISS and time.monotonic() < deadline:
        time.sleep(0.001)
    assert look_up(made) is LookupResult.HIT


def test_the_key_of_a_blob_tells_its_chunk_and_level():
    chunk = manager().key_of(KEYS[0])
    keys = {blob_key(chunk, rank, level) for rank in range(3) for level in range(3)}
    assert len(keys) == 9
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert split_blob_key(blob_key(chunk, 2, 1)) == (chunk, 1)


def test_a_chunk_that_was_given_up_is_a_miss_for_a_while_and_is_not_stored_again():
    clock = Clock()
    made = manager(ranks=1, clock=clock)
    made.prepare_store(KEYS[:1], CONTEXT)
    chunk = made.key_of(KEYS[0])
    made.take_report(WorkerReport(stored=Counter({chunk: 1})))
    made.take_report(WorkerReport(given_up={chunk}))
    assert made.lookup(KEYS[0], CONTEXT) is LookupResult.MISS
    assert made.prepare_store(KEYS[:1], CONTEXT).keys_to_store == []
    clock.now += 31
    assert made.lookup(KEYS[0], CONTEXT) is LookupResult.HIT


def test_a_chunk_that_failed_to_load_is_a_miss_for_a_while_even_where_a_store_lists_it():
    clock = Clock()
    store = MemoryStore("1MiB")
    made = manager(ranks=1, shared=[store], clock=clock)
    chunk = made.key_of(KEYS[0])
    store.put(blob_key(chunk, 0), b"unreadable")
    made.take_report(WorkerReport(failed_loads={7: {chunk}}))
    assert look_up(made) is LookupResult.MISS
    clock.now += 31
    assert look_up(made) is LookupResult.HIT


def test_a_chunk_that_failed_to_load_is_stored_anew_whatever_a_store_lists():
    store = MemoryStore("1MiB")
    made = manager(ranks=1, shared=[store])
    chunk = made.key_of(KEYS[0])
    store.put(blob_key(chunk, 0), b"unreadable")
    request = ReqContext(req_id="r")
    assert look_up(made, request) is LookupResult.HIT
    assert made.prepare_store(KEYS[:1], request).keys_to_store == []
    made.take_report(WorkerReport(failed_loads={7: {chunk}}))
    assert made.prepare_store(KEYS[:1], request).keys_to_store == KEYS[:1]


def test_a_reset_forgets_everything_and_nothing_of_before_is_found_again():
    store = MemoryStore("1MiB")
    made = manager(ranks=1, shared=[store])
    made.prepare_store(KEYS[:1], CONTEXT)
    before = made.key_of(KEYS[0])
    store.put(blob_key(before, 0), b"x")
    store.put(b"another server's", b"x")
    told = made.tell_namespace()
    made.reset_cache()
    assert made.has_pending_work()  # until the workers have been told
    assert made.tell_namespace() != told
    assert not made.has_pending_work()
    assert look_up(made) is LookupResult.MISS  # asked after the removal
    assert store.keys() == [b"another server's"]
    made.take_report(WorkerReport(stored=Counter({before: 1})))  # a straggler
    assert look_up(made) is LookupResult.MISS
    assert made.key_of(KEYS[0]) != before


def test_reports_of_several_ranks_add_up():
    one = WorkerReport(
        completed_jobs={1: 1},
        stored=Counter({b"a": 1}),
        failed_loads={5: {b"x"}},
        usable_blocks={5: 4, 6: 1},
        counters=Counter({("stored_chunks", ()): 2}),
        gauges={("store_bytes", ("memory", "0")): 10.0},
    )
    two = WorkerReport(
        completed_jobs={1: 1, 2: 1},
        stored=Counter({b"a": 1, b"b": 1}),
        gone={b"c"},
        given_up={b"z"},
        failed_loads={5: {b"y"}},
        usable_blocks={5: 2},
        counters=Counter({("stored_chunks", ()): 3}),
        gauges={("store_bytes", ("memory", "1")): 20.0},
    )
    both = one.aggregate(two)
    assert both.completed_jobs == {1: 2, 2: 1}
    assert both.stored == {b"a": 2, b"b": 1}
    assert both.gone == {b"c"}
    assert both.given_up == {b"z"}
    assert both.usable_blocks == {5: 2, 6: 1}
    assert both.failed_loads == {5: {b"x", b"y"}}
    assert both.counters["stored_chunks", ()] == 5
    assert len(both.gauges) == 2


@pytest.fixture(scope="module")
def config(llama):
    from vllm.engine.arg_utils import EngineArgs

    def make(**settings):
        return EngineArgs(
            **{"model": str(llama), "skip_tokenizer_init": True, **settings}
        ).create_engine_config()

    return make


def test_every_setting_that_changes_the_bytes_changes_the_fingerprint(
    config, llama, tmp_path, monkeypatch
):
    import shutil
    from dataclasses import replace

    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vllm_kvcompress.connector.fingerprint import server_fingerprint, worker_fingerprint

    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype="bfloat16")

    def groups(spec, names=("layer.0", "layer.1")):
        group = SimpleNamespace(layer_names=list(names), kv_cache_spec=spec)
        return SimpleNamespace(kv_cache_groups=[group])

    def of(codec=b"cachegen/1/high", blocks=8, cache=None, **settings):
        return server_fingerprint(config(**settings), cache or groups(spec), codec, blocks)

    base = of()
    assert of() == base
    assert of(max_num_seqs=7, gpu_memory_utilization=0.5) == base
    copied = shutil.copytree(llama, tmp_path / "copy")
    assert of(model=str(copied)) == base
    weights = bytearray((copied / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copied / "model.safetensors").write_bytes(weights)
    different = [
        of(model=str(copied)),
        of(codec=b"cachegen/1/medium"),
        of(blocks=4),
        of(max_model_len=512),
        of(cache=groups(replace(spec, block_size=64))),
        of(cache=groups(spec, ("layer.0",))),
        of(dtype="float32"),
        of(hf_overrides={"rope_theta": 5000.0}),
        of(load_format="dummy"),
        of(load_format="dummy", seed=3),
        of(prefix_caching_hash_algo="sha256_cbor"),
        of(additional_config={"something": 1}),
    ]
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    different.append(of())
    assert len({base, *different}) == 1 + len(different)

    scales = [("layer.0", [1.0], [1.0]), ("layer.1", [1.0], [1.0])]
    assert worker_fingerprint(scales) == worker_fingerprint(list(scales))
    assert worker_fingerprint(scales) != worker_fingerprint([scales[0], ("layer.1", [0.5], [1.0])])
