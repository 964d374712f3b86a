"""The worker with pages of its own, a link of settable speed, and no engine."""

from __future__ import annotations

import math
import time

import pytest
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from benchmarks import streaming_link
from vllm_kvcompress.codecs import create_codec
from vllm_kvcompress.connector.fingerprint import CHUNK_BYTES, split_blob_key
from vllm_kvcompress.connector.groups import PlainGroup
from vllm_kvcompress.connector.manager import ChunkKeys
from vllm_kvcompress.connector.worker import ChunkWorker, Level
from vllm_kvcompress.layout import PageLayout
from vllm_kvcompress.stores import create_stack
from vllm_kvcompress.streaming import Prior, Speeds

LAYERS, TOKENS, HEADS, SIZE = 2, 16, 2, 32
PER_CHUNK = 2
CHUNKS = 6
KEYS = tuple(bytes([i]) * CHUNK_BYTES for i in range(CHUNKS))
LINK_ONLY = ({"type": "link", "name": "link"},)
UNDER_MEMORY = ({"type": "memory", "bytes": "1GiB"}, *LINK_ONLY)


@pytest.fixture
def link():
    with streaming_link.registered():
        yield streaming_link.link("link")


def made(stores=LINK_ONLY, levels=("raw", "low"), recompute=0.0, deadline=math.inf):
    """A worker, and its pages of as many blocks for storing as for loading."""
    elements = 2 * TOKENS * HEADS * SIZE
    order = torch.randperm(elements, generator=torch.Generator().manual_seed(0))
    layout = PageLayout(
        LAYERS, TOKENS, HEADS, SIZE, torch.bfloat16, order.to(torch.int32).view(2, -1)
    )
    blocks = CHUNKS * PER_CHUNK
    values = torch.randn(LAYERS, 2 * blocks, elements, generator=torch.Generator().manual_seed(1))
    pages = list(values.bfloat16().view(torch.int8).unbind(0))
    for layer in pages:
        layer[blocks:] = 0
    speeds = Speeds([Prior(1.0, 1e9)] * len(levels), threads=1)
    worker = ChunkWorker(
        [PlainGroup(0, layout, pages)],
        blocks_per_chunk=PER_CHUNK,
        levels=[
            Level(
                name, create_codec(name) if name == "raw" else create_codec("cachegen", level=name)
            )
            for name in levels
        ],
        stores=create_stack(list(stores)),
        rank=0,
        threads=1,
        staging_bytes=1 << 30,
        speeds=speeds,
        deadline=deadline,
    )
    worker.begin_step(recompute, idle=True)
    return worker, pages


def store(worker):
    ids = range(CHUNKS * PER_CHUNK)
    spec = GPULoadStoreSpec(list(ids), group_sizes=[len(ids)], block_indices=[0])
    assert worker.submit_store(0, spec, ChunkKeys(KEYS, (0,) * CHUNKS))
    end = time.monotonic() + 20
    stored = 0
    while stored < CHUNKS and time.monotonic() < end:
        stored += len(worker.take_report().stored)
        time.sleep(0.01)
    assert stored == CHUNKS


def load(worker, job=1):
    """Load everything into the other blocks; returns what the worker reports."""
    first = CHUNKS * PER_CHUNK
    spec = GPULoadStoreSpec(list(range(first, 2 * first)), group_sizes=[first], block_indices=[0])
    assert worker.submit_load(job, ChunkKeys(KEYS, (0,) * CHUNKS), spec)
    end = time.monotonic() + 20
    while not any(result.job_id == job for result in worker.get_finished()):
        assert time.monotonic() < end
    return worker.take_report()


def chunks_restored(pages):
    """Which chunks came back bit for bit."""
    half = CHUNKS * PER_CHUNK
    same = torch.stack([(layer[:half] == layer[half:]).all(1) for layer in pages]).all(0)
    return same.view(CHUNKS, PER_CHUNK).all(1).tolist()


def levels_carried(link):
    return [split_blob_key(key)[1] for key, _ in link.carried]


def test_every_level_is_stored_under_its_own_key_and_the_best_comes_back_exactly(link):
    worker, pages = made()
    store(worker)
    assert sorted(map(split_blob_key, link.blobs)) == sorted((k, n) for k in KEYS for n in (0, 1))
    report = load(worker)
    assert levels_carried(link) == [0] * CHUNKS
    assert chunks_restored(pages) == [True] * CHUNKS
    assert report.counters["loaded_level_chunks", ("raw",)] == CHUNKS
    assert not report.usable_blocks
    worker.shutdown()


def test_memory_holds_the_first_level_and_needs_no_link(link):
    worker, pages = made(UNDER_MEMORY)
    store(worker)
    memory = worker._stores.stores[0]
    assert sorted(map(split_blob_key, memory.keys())) == sorted((key, 0) for key in KEYS)
    link.bytes_per_second = 0.0
    worker.begin_step(1000.0, idle=True)
    load(worker)
    assert chunks_restored(pages) == [True] * CHUNKS
    worker.shutdown()


def test_what_came_at_a_lower_level_moves_up_and_is_not_told_to_the_scheduler_when_it_goes(link):
    worker, _ = made(UNDER_MEMORY)
    store(worker)
    memory = worker._stores.stores[0]
    memory.clear()
    link.visible = lambda key: split_blob_key(key)[1] == 1
    load(worker)
    assert sorted(map(split_blob_key, memory.keys())) == sorted((key, 1) for key in KEYS)
    worker._on_forget(memory.keys()[0])
    assert not worker.take_report().gone
    worker.shutdown()


def test_a_deadline_brings_the_lower_level_when_the_link_is_slow(link):
    worker, _ = made(deadline=1.0)
    store(worker)
    raw = next(len(blob) for key, blob in link.blobs.items() if not split_blob_key(key)[1])
    link.bytes_per_second = raw * CHUNKS / 3
    report = load(worker)
    assert levels_carried(link)[0] == 0
    assert levels_carried(link)[1:3] == [1, 1]
    assert report.counters["loaded_level_chunks", ("low",)] >= 2
    worker.shutdown()


def test_a_link_that_stops_leaves_what_came_and_a_gap(link):
    worker, pages = made(recompute=TOKENS * PER_CHUNK / 0.1)
    store(worker)

    def let_two_pass(key):
        if len(link.carried) == 2:
            link.bytes_per_second = 0.0
        return True

    link.bytes_per_second = 1e9
    link.visible = let_two_pass
    report = load(worker)
    assert chunks_restored(pages) == [True, True, False, False, False, False]
    assert report.usable_blocks == {1: 2 * PER_CHUNK}
    assert report.given_up == set(KEYS[2:])
    assert not report.failed_loads
    assert report.counters["given_up_chunks", ()] == CHUNKS - 2
    link.bytes_per_second = math.inf
    worker.shutdown()
    assert chunks_restored(pages) == [True, True, False, False, False, False]


def test_without_a_known_speed_of_recomputing_a_slow_link_is_waited_for(link):
    worker, pages = made()
    store(worker)
    raw = next(len(blob) for key, blob in link.blobs.items() if not split_blob_key(key)[1])
    link.bytes_per_second = raw * CHUNKS / 1.0
    report = load(worker)
    assert chunks_restored(pages) == [True] * CHUNKS
    assert not report.given_up
    worker.shutdown()


def test_a_blob_of_another_level_is_a_failure_and_is_removed(link):
    worker, _ = made(levels=("lossless", "low"))
    store(worker)
    victim = next(key for key in link.blobs if split_blob_key(key) == (KEYS[3], 0))
    other = next(key for key in link.blobs if split_blob_key(key) == (KEYS[3], 1))
    link.blobs[victim] = link.blobs[other]
    report = load(worker)
    assert report.failed_loads == {1: {KEYS[3]}}
    assert report.usable_blocks == {1: 3 * PER_CHUNK}
    assert report.counters["load_failures", ("foreign",)] == 1
    assert victim not in link.blobs
    worker.shutdown()
