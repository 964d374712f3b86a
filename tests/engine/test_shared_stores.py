"""Engines on shared stores: tenants that share nothing, and servers that fail under load. Every
request ends with the right answer."""

from __future__ import annotations

import threading
import time

import pytest

from tests import servers
from tests.engine.conftest import BLOCK, CHUNK, prompt, running_engine
from tests.engine.outages import OUTAGES, healed, valkey_store
from vllm_kvcompress.stores import remote

CHUNKS = 4


def test_tenants_of_different_cache_salt_share_nothing(llama, valkey_server):
    offload = {"codec": "raw", "stores": [valkey_store(valkey_server.port)], "lookup_seconds": 10}
    text = prompt(CHUNKS * CHUNK + BLOCK // 2, seed=21)

    with running_engine(llama, offload) as engine:

        def cached(**salt) -> int:
            engine.forget_local()
            from vllm import SamplingParams

            (output,) = engine.llm.generate(
                [{"prompt_token_ids": text, **salt}],
                SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
                use_tqdm=False,
            )
            engine.settle()
            return output.num_cached_tokens

        assert cached(cache_salt="one") == 0
        assert cached(cache_salt="two") == 0
        assert cached() == 0
        assert cached(cache_salt="one") == CHUNKS * CHUNK
        assert cached(cache_salt="two") == CHUNKS * CHUNK
        assert cached() == CHUNKS * CHUNK
        # Nothing is stored twice for one tenant, and nothing once for two.
        (store,) = engine.manager._shared_stores
        assert len(store.keys()) == 3 * CHUNKS


@pytest.fixture
def short_pauses(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.2)
    monkeypatch.setattr(remote, "LONGEST_PAUSE", 0.2)


@pytest.fixture
def server(tmp_path):
    with servers.valkey_server(tmp_path / "server") as server:
        yield server


@pytest.mark.parametrize("outage", OUTAGES)
def test_requests_under_load_outlive_an_outage_and_the_store_heals(
    llama, server, short_pauses, outage
):
    link = servers.Link(server.port)
    offload = {
        "codec": "raw",
        "stores": [valkey_store(link.port)],
        "retry_seconds": 0.2,
        "lookup_seconds": 0.1,
    }
    texts = [prompt(2 * CHUNK + 9 * i, seed=30 + i // 2) for i in range(8)]
    with running_engine(llama, offload) as engine:
        threads = threads_of_the_engine()
        cold = [answer.tokens for answer in engine.generate(*texts)]
        engine.settle()
        timer = threading.Timer(0.1, OUTAGES[outage].begin, (link, server))
        timer.start()
        for _ in range(4):
            engine.forget_local()
            assert [answer.tokens for answer in engine.generate(*texts)] == cold
        timer.join()
        engine.forget_local()
        fresh = prompt(2 * CHUNK + 5, seed=77)
        during = engine.generate(fresh, *texts)
        assert [answer.tokens for answer in during[1:]] == cold
        OUTAGES[outage].end(link, server)

        deadline = time.monotonic() + 60
        while engine.generate(fresh)[0].cached < 2 * CHUNK or not healed(engine):
            assert time.monotonic() < deadline, engine.metrics()
            time.sleep(0.1)
            engine.forget_local()
        engine.forget_local()
        assert [answer.tokens for answer in engine.generate(*texts)] == cold
        assert threads_of_the_engine() <= threads + 4  # those of pools that had yet to start
        assert engine.metrics()["store_errors"] > 0
    link.down()


def threads_of_the_engine() -> int:
    return sum(not thread.name.startswith("link") for thread in threading.enumerate())


def test_a_server_that_is_down_at_the_start_is_used_when_it_comes(llama, server, short_pauses):
    server.stop()
    offload = {"codec": "raw", "stores": [valkey_store(server.port)], "retry_seconds": 0.2}
    with running_engine(llama, offload) as engine:
        text = prompt(CHUNKS * CHUNK + 5, seed=41)
        cold = engine.generate(text)[0]
        assert cold.cached == 0
        server.start()
        deadline = time.monotonic() + 60
        while not healed(engine):
            assert time.monotonic() < deadline
        engine.forget_local()
        assert engine.generate(text)[0].tokens == cold.tokens


def test_a_store_that_hangs_costs_a_request_its_lookup_deadline_and_the_next_ones_nothing(
    llama, server, monkeypatch
):
    from vllm_kvcompress.connector.lookup import SharedLookup

    offload = {
        "codec": "raw",
        "stores": [valkey_store(server.port, timeout_seconds=600)],
        "lookup_seconds": 0.2,
    }
    asked = []
    ask = SharedLookup.ask
    monkeypatch.setattr(
        SharedLookup, "ask", lambda self, keys: asked.append(ask(self, keys)) or asked[-1]
    )
    with running_engine(llama, offload) as engine:
        text = prompt(CHUNK + 5, seed=51)
        cold = engine.generate(text)[0]
        engine.settle()
        engine.forget_local()
        server.pause()
        try:
            asked.clear()
            assert engine.generate(text)[0].tokens == cold.tokens
            for seed in range(52, 56):
                assert engine.generate(prompt(CHUNK + 5, seed=seed))[0].cached == 0
            # The first question is still open; nobody is asked the others.
            assert [answer._owed for answer in asked] == [1, 0, 0, 0, 0]
        finally:
            server.go_on()


@pytest.mark.slow
def test_a_bucket_serves_what_another_engine_run_stored(llama, bucket):
    offload = {
        "codec": "cachegen",
        "level": "lossless",
        "stores": [{**bucket, "namespace": f"e{time.time_ns()}"}],
        "lookup_seconds": 30,
    }
    text = prompt(CHUNKS * CHUNK + BLOCK // 2, seed=61)
    with running_engine(llama, offload) as engine:
        engine.generate(text)
        local = engine.generate(text)[0]
        engine.settle()
    with running_engine(llama, offload) as engine:
        restored = engine.generate(text)[0]
        assert (restored.cached, restored.tokens) == (CHUNKS * CHUNK, local.tokens)
        assert restored.logprobs == local.logprobs
