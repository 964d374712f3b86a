"""A busy engine whose only store fails in one way after another: every request ends with the right
answer, nothing grows, and the store heals by itself."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tests import servers
from tests.engine.conftest import CHUNK, prompt, running_engine
from tests.engine.outages import DISK_OUTAGES, OUTAGES, healed, valkey_store
from vllm_kvcompress.stores import remote

LOAD = [prompt(2 * CHUNK + 9 * i, seed=30 + i // 2) for i in range(8)]


@pytest.fixture(scope="module")
def short_pauses():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "FIRST_PAUSE", 0.2)
        patch.setattr(remote, "LONGEST_PAUSE", 0.2)
        yield


@pytest.fixture(scope="module")
def strained(llama, short_pauses, tmp_path_factory):
    """An engine, the link to its only store, the store's server, and the answers to ``LOAD``."""
    with servers.valkey_server(tmp_path_factory.mktemp("server")) as server:
        link = servers.Link(server.port)
        offload = {
            "codec": "raw",
            "stores": [valkey_store(link.port)],
            "retry_seconds": 0.2,
            "lookup_seconds": 0.1,
        }
        with running_engine(llama, offload) as engine:
            answers = [answer.tokens for answer in engine.generate(*LOAD)]
            yield engine, link, server, answers
        link.down()


@pytest.mark.parametrize("outage", OUTAGES)
def test_requests_under_load_outlive_an_outage_and_the_store_heals(strained, outage):
    engine, link, server, expected = strained
    assert healed(engine)
    threads = threads_of_the_engine()
    errors = engine.metrics().get("store_errors", 0)
    timer = threading.Timer(0.1, OUTAGES[outage].begin, (link, server))
    timer.start()
    for _ in range(4):
        engine.forget_local()
        assert [answer.tokens for answer in engine.generate(*LOAD)] == expected
    timer.join()
    engine.forget_local()
    fresh = prompt(2 * CHUNK + 5, seed=sum(outage.encode()))
    answers = engine.generate(fresh, *LOAD)
    assert [answer.tokens for answer in answers[1:]] == expected
    OUTAGES[outage].end(link, server)

    deadline = time.monotonic() + 60
    while not healed(engine):
        assert time.monotonic() < deadline, engine.metrics()
        time.sleep(0.1)
    engine.forget_local()
    again = engine.generate(fresh, *LOAD)
    assert [answer.tokens for answer in again] == [answers[0].tokens, *expected]
    assert threads_of_the_engine() <= threads + 4  # those of pools that had yet to start
    assert engine.metrics()["store_errors"] > errors


def threads_of_the_engine() -> int:
    return sum(not thread.name.startswith("link") for thread in threading.enumerate())


@pytest.mark.parametrize("outage", DISK_OUTAGES)
def test_requests_under_load_outlive_a_broken_disk_and_the_store_heals(
    llama, small_file_system, outage
):
    begin, end = DISK_OUTAGES[outage]
    store = {"type": "disk", "path": f"{small_file_system}/store", "bytes": "512KiB"}
    with running_engine(llama, {"codec": "raw", "stores": [store], "retry_seconds": 0.2}) as engine:
        expected = [answer.tokens for answer in engine.generate(*LOAD)]
        assert healed(engine)
        threads, files = threads_of_the_engine(), len(os.listdir("/proc/self/fd"))
        timer = threading.Timer(0.1, begin, (small_file_system,))
        timer.start()
        for _ in range(4):
            engine.forget_local()
            assert [answer.tokens for answer in engine.generate(*LOAD)] == expected
        timer.join()
        engine.forget_local()
        assert [answer.tokens for answer in engine.generate(*LOAD)] == expected
        end(small_file_system)

        deadline = time.monotonic() + 60
        while not healed(engine):
            assert time.monotonic() < deadline, engine.metrics()
            time.sleep(0.1)
        engine.forget_local()
        assert [answer.tokens for answer in engine.generate(*LOAD)] == expected
        assert threads_of_the_engine() <= threads
        assert len(os.listdir("/proc/self/fd")) <= files


def test_a_burst_of_two_hundred_requests_on_a_tiny_pool_ends_with_the_right_answers(
    llama, valkey_server
):
    texts = [prompt(CHUNK + 7 * number, seed=200 + number) for number in range(25)]
    tight = {"num_gpu_blocks_override": 40, "max_model_len": 512, "max_num_seqs": 64}
    with running_engine(llama, None, **tight) as engine:
        expected = [answer.tokens for answer in engine.generate(*texts)]
    stores = [{"type": "memory", "bytes": "256KiB"}, valkey_store(valkey_server.port)]
    with running_engine(llama, {"codec": "raw", "stores": stores}, **tight) as engine:
        for _ in range(2):
            answers = engine.generate(*(8 * texts))
            assert [answer.tokens for answer in answers] == 8 * expected
            engine.settle()
            engine.forget_local()
        metrics = engine.metrics()
        assert metrics["loaded_chunks"] >= len(texts)
        assert metrics["evictions"] > 0
        assert not metrics.get("load_failures{error}")
