"""Streaming on the real engine, through a link whose speed is set and changed in mid-stream."""

from __future__ import annotations

import threading
import time

import pytest

from benchmarks import streaming_link
from tests.engine.conftest import BLOCK, CHUNK, prompt, running_engine
from vllm_kvcompress.connector.fingerprint import split_blob_key

CHUNKS = 8
LEVELS = ["raw", "lossless", "low"]


@pytest.fixture(scope="module")
def engine(llama):
    with streaming_link.registered():
        offload = {
            "levels": LEVELS,
            "ttft_slo_ms": 2000,
            "stores": [{"type": "link", "name": "link"}],
            "retry_seconds": 0.2,
            "threads": 1,
        }
        with running_engine(llama, offload) as engine:
            yield engine


@pytest.fixture
def link(engine):
    link = streaming_link.link("link")
    link.bytes_per_second = float("inf")
    link.carried.clear()
    yield link
    link.bytes_per_second = float("inf")
    link.visible = lambda key: True
    time.sleep(0.3)  # until what was given up counts as there again


def known_speed(engine, tokens_per_second):
    """Let recomputing have a speed of its own: the machine's own is not what is tested."""
    engine.scheduler.connector._recompute_speed._speed.forget()
    engine.scheduler.connector._recompute_speed._speed.add(tokens_per_second, 1.0)


def restored(engine, text):
    """The answer of a prompt whose blocks vLLM no longer holds, and the levels it came at."""
    engine.settle()
    engine.forget_local()
    worker = engine.worker
    worker._speeds.link = type(worker._speeds.link)()
    link = streaming_link.link("link")
    link.carried.clear()
    answer = engine.generate(text)[0]
    return answer, [split_blob_key(key)[1] for key, _ in link.carried]


def make(engine, seed):
    text = prompt(CHUNKS * CHUNK + BLOCK // 2, seed=seed)
    known_speed(engine, 1.0)
    cold = engine.generate(text)[0]
    engine.settle()
    return text, cold


def size_at(link, level):
    sizes = [len(blob) for key, blob in link.blobs.items() if split_blob_key(key)[1] == level]
    return sum(sizes) / len(sizes)


def test_every_chunk_is_stored_at_every_level_and_a_fast_link_brings_the_best(engine, link):
    text, cold = make(engine, 1)
    stored = [split_blob_key(key)[1] for key in link.blobs]
    assert {level: stored.count(level) for level in range(3)} == dict.fromkeys(range(3), CHUNKS)
    known_speed(engine, 1.0)
    answer, levels = restored(engine, text)
    assert levels == [0] * CHUNKS
    assert answer.cached == CHUNKS * CHUNK
    assert answer.tokens == cold.tokens


def test_a_slow_link_brings_a_lower_level_after_the_first_chunk(engine, link):
    text, _ = make(engine, 2)
    known_speed(engine, 1.0)
    # The best level would take 6 s, the lowest 1.
    link.bytes_per_second = size_at(link, 0) * CHUNKS / 6
    answer, levels = restored(engine, text)
    assert levels[:2] == [0, 2]
    assert 0 not in levels[1:]
    assert answer.cached == CHUNKS * CHUNK
    assert engine.metrics()["loaded_level_chunks{low}"] >= levels.count(2)


def test_levels_follow_the_link_while_a_load_is_under_way(engine, link):
    text, _ = make(engine, 3)
    known_speed(engine, 1.0)
    link.bytes_per_second = size_at(link, 0) * CHUNKS / 4

    def speed_up():
        while len(link.carried) < 3:
            time.sleep(0.001)
        link.bytes_per_second = size_at(link, 0) * CHUNKS / 0.2

    watcher = threading.Thread(target=speed_up)
    watcher.start()
    _, levels = restored(engine, text)
    watcher.join()
    assert levels[1] == 2
    assert levels[-1] == 0


def test_a_link_that_stops_in_mid_stream_costs_the_rest_and_what_came_is_used(engine, link):
    text, cold = make(engine, 4)
    known_speed(engine, 300.0)
    link.bytes_per_second = size_at(link, 0) / 0.01

    def stop():
        while len(link.carried) < 3:
            time.sleep(0.001)
        link.bytes_per_second = 0.0

    watcher = threading.Thread(target=stop)
    watcher.start()
    before = engine.metrics().get("given_up_chunks", 0)
    answer, levels = restored(engine, text)
    watcher.join()
    link.bytes_per_second = float("inf")
    assert answer.tokens == cold.tokens
    assert answer.cached == len(levels) * CHUNK >= 3 * CHUNK
    assert engine.metrics()["given_up_chunks"] - before == CHUNKS - len(levels)


def test_a_link_that_never_answers_costs_a_recompute_and_not_the_request(engine, link):
    text, cold = make(engine, 5)
    known_speed(engine, 2000.0)
    link.bytes_per_second = 0.0
    answer, levels = restored(engine, text)
    link.bytes_per_second = float("inf")
    assert (answer.tokens, answer.cached, levels) == (cold.tokens, 0, [])
    time.sleep(0.3)
    known_speed(engine, 1.0)
    answer, levels = restored(engine, text)
    assert (answer.tokens, answer.cached) == (cold.tokens, CHUNKS * CHUNK)


def test_a_blob_under_the_key_of_another_level_is_never_served(engine, link):
    text, cold = make(engine, 6)
    keys = list(link.blobs)[-CHUNKS * len(LEVELS) :]
    lossless = {split_blob_key(key)[0]: key for key in keys if split_blob_key(key)[1] == 1}
    for key in keys:
        chunk, level = split_blob_key(key)
        if level == 2:
            link.blobs[lossless[chunk]] = link.blobs[key]
    link.visible = lambda key: split_blob_key(key)[1] == 1
    known_speed(engine, 1.0)
    answer, _ = restored(engine, text)
    assert answer.tokens == cold.tokens
    assert answer.cached == 0
    assert engine.metrics()["load_failures{foreign}"] >= CHUNKS


def test_a_crowd_shares_a_link_that_flaps_and_every_answer_is_right(engine, link):
    link.visible = lambda key: split_blob_key(key)[1] < 2  # the levels that lose nothing
    texts = [prompt(CHUNKS * CHUNK // 2 + 5 + i, seed=50 + i // 2) for i in range(12)]
    known_speed(engine, 1.0)
    cold = engine.generate(*texts)
    engine.settle()
    engine.forget_local()
    known_speed(engine, 3000.0)
    ended = threading.Event()

    def flap():
        while not ended.wait(0.03):
            link.bytes_per_second = 0.0 if link.bytes_per_second else size_at(link, 0) / 0.005

    watcher = threading.Thread(target=flap)
    watcher.start()
    try:
        answers = engine.generate(*texts)
    finally:
        ended.set()
        watcher.join()
    assert [a.tokens for a in answers] == [a.tokens for a in cold]
