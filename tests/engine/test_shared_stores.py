"""Engines on shared stores: two that share one, tenants that share nothing, a server that comes
late, and one that hangs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import servers
from tests.engine.conftest import BLOCK, CHUNK, Answer, prompt, running_engine
from tests.engine.outages import valkey_store, wait_until_healed
from vllm_kvcompress.stores import remote

CHUNKS = 4
SCRIPT = Path(__file__).parent / "shared_store_script.py"
SEAL_KEY = "5ea1" * 16


class OtherEngine:
    """A second engine, alive beside the one in this process."""

    def __init__(self, model: Path, offload: dict, log: Path) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(model), json.dumps(offload)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "PYTHONUNBUFFERED": "1"},
        )
        self._read("ready")

    def send(self, *prompts: list[int], **request) -> None:
        self._process.stdin.write(json.dumps({"prompts": prompts, **request}) + "\n")
        self._process.stdin.flush()

    def generate(self, *prompts: list[int], **request) -> list[Answer]:
        self.send(*prompts, **request)
        told = json.loads(self._read("answer "))
        self.metrics = told["metrics"]
        return [Answer(**answer) for answer in told["answers"]]

    def _read(self, start: str) -> str:
        for line in self._process.stdout:
            if line.startswith(start):
                return line.removeprefix(start)
        raise AssertionError(self._log.read_text()[-3000:])

    def close(self) -> None:
        self._process.stdin.close()
        assert self._process.wait(120) == 0, self._log.read_text()[-3000:]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def other_engine(model: Path, offload: dict, log: Path):
    engine = OtherEngine(model, offload, log)
    try:
        yield engine
        engine.close()
    finally:
        engine.kill()


@pytest.mark.slow
def test_two_live_engines_share_a_sealed_store_and_both_may_restart(
    llama, valkey_server, tmp_path, monkeypatch
):
    monkeypatch.setenv("SEAL_KEY", SEAL_KEY)
    offload = {
        "codec": "cachegen",
        "level": "lossless",
        "stores": [
            {"type": "memory", "bytes": "16MiB"},
            valkey_store(valkey_server.port, seal_key="env:SEAL_KEY", timeout_seconds=10),
        ],
        "lookup_seconds": 10,
    }
    mine, theirs = (prompt(CHUNKS * CHUNK + BLOCK // 2, seed=seed) for seed in (11, 12))
    whole = CHUNKS * CHUNK
    with (
        other_engine(llama, offload, tmp_path / "one.log") as other,
        running_engine(llama, offload) as engine,
    ):
        # Prefilled here, served there; and the other way round.
        cold, local = engine.generate(mine)[0], engine.generate(mine)[0]
        engine.settle()
        assert (cold.cached, local.cached) == (0, whole)
        (there,) = other.generate(mine)
        assert (there.cached, there.tokens) == (whole, local.tokens)
        assert there.logprobs == local.logprobs
        (first,) = other.generate(theirs, params={"tokens": 1})  # prefill there,
        assert first.cached == 0
        rest = engine.generate(theirs, tokens=16)[0]  # decode here
        assert rest.cached == whole
        local = engine.generate(theirs, tokens=16)[0]
        assert (rest.tokens, rest.logprobs) == (local.tokens, local.logprobs)
        assert first.tokens == rest.tokens[:1]
        assert not other.metrics.get("load_failures")
    with (
        other_engine(llama, offload, tmp_path / "two.log") as other,
        running_engine(llama, offload) as engine,
    ):
        assert engine.generate(theirs)[0].cached == whole
        assert other.generate(mine)[0].cached == whole
        # With another key everything is a miss, which is counted, and nothing breaks.
    monkeypatch.setenv("SEAL_KEY", "0123456789abcdef" * 4)
    with running_engine(llama, offload) as engine:
        stranger = engine.generate(mine)[0]
        assert (stranger.cached, stranger.tokens) == (0, cold.tokens)
        assert engine.metrics()["load_failures{missing}"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["valkey", "disk"])
def test_an_engine_that_is_killed_while_it_stores_and_loads_leaves_a_store_others_go_on_with(
    llama, valkey_server, tmp_path, kind
):
    store = {
        "valkey": valkey_store(valkey_server.port, timeout_seconds=10),
        "disk": {"type": "disk", "path": str(tmp_path / "store"), "bytes": "64MiB"},
    }[kind]
    offload = {"codec": "raw", "stores": [store], "lookup_seconds": 10}
    texts = [prompt(CHUNKS * CHUNK + 5, seed=70 + number) for number in range(12)]
    with running_engine(llama, None) as engine:
        cold = [answer.tokens for answer in engine.generate(*texts)]
    with running_engine(llama, offload) as engine:
        other = OtherEngine(llama, offload, tmp_path / "killed.log")
        try:
            other.generate(*texts[:4])
            other.send(*texts, forget=True)
            deadline = time.monotonic() + 60
            store = engine.manager._shared_stores[0]
            while len(store.keys()) < 6 * CHUNKS:
                assert time.monotonic() < deadline
                store.refresh()
        finally:
            other.kill()
        answers = engine.generate(*texts)
        assert [answer.tokens for answer in answers] == cold
        assert sum(answer.cached for answer in answers) >= 6 * CHUNKS * CHUNK // 2


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


def test_a_server_that_is_down_at_the_start_is_used_when_it_comes(llama, server, short_pauses):
    server.stop()
    offload = {"codec": "raw", "stores": [valkey_store(server.port)], "retry_seconds": 0.2}
    with running_engine(llama, offload) as engine:
        text = prompt(CHUNKS * CHUNK + 5, seed=41)
        cold = engine.generate(text)[0]
        assert cold.cached == 0
        server.start()
        wait_until_healed(engine)
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
