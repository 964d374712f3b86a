"""What the connector does on a real engine when all goes well."""

from __future__ import annotations

import pytest

from tests.engine import gates
from tests.engine.conftest import BLOCK, CHUNK, prompt, running_engine

CHUNKS = 4
MEMORY = {"type": "memory", "bytes": "64MiB"}


@pytest.mark.parametrize("codec", [{"codec": "raw"}, {"codec": "cachegen", "level": "lossless"}])
def test_a_losslessly_restored_prefix_gives_exactly_what_a_local_hit_gives(llama, codec):
    with running_engine(llama, {**codec, "stores": [MEMORY]}) as engine:
        text = prompt(CHUNKS * CHUNK + BLOCK // 2)
        cold = engine.generate(text)[0]
        local = engine.generate(text)[0]
        engine.settle()
        engine.forget_local()
        restored = engine.generate(text)[0]
        assert (cold.cached, local.cached, restored.cached) == (0, CHUNKS * CHUNK, CHUNKS * CHUNK)
        assert restored.tokens == local.tokens
        assert restored.logprobs == local.logprobs
        metrics = engine.metrics()
        assert metrics["stored_chunks"] == metrics["loaded_chunks"] == CHUNKS
        assert metrics["stored_raw_bytes"] == metrics["loaded_raw_bytes"]
        assert metrics["compression_ratio"] == pytest.approx(
            metrics["stored_raw_bytes"] / metrics["stored_blob_bytes"]
        )

        # A prompt that shares the first half.
        engine.forget_local()
        half = engine.generate(text[: 2 * CHUNK] + prompt(100, seed=2))[0]
        assert half.cached == 2 * CHUNK


def test_chunks_survive_a_restart_on_disk_and_other_weights_share_nothing(
    llama, tmp_path, tmp_path_factory
):
    from tests.engine.models import tiny_llama

    disk = {"type": "disk", "path": str(tmp_path / "store"), "bytes": "64MiB"}
    offload = {"codec": "raw", "stores": [MEMORY, disk]}
    text = prompt(CHUNKS * CHUNK + BLOCK // 2)
    with running_engine(llama, offload) as engine:
        engine.generate(text)
        local = engine.generate(text)[0]
        engine.settle()
    with running_engine(llama, offload) as engine:
        restored = engine.generate(text)[0]
        assert restored.cached == CHUNKS * CHUNK
        assert (restored.tokens, restored.logprobs) == (local.tokens, local.logprobs)
    # Other weights under the very same path.
    tiny_llama(tmp_path_factory.mktemp("other"), seed=1)
    other = tiny_llama(llama.parent / "other", seed=1)
    with running_engine(other, offload) as engine:
        assert engine.generate(text)[0].cached == 0


def test_preempted_and_chunked_requests_end_with_the_answers_of_an_engine_without_offload(llama):
    tight = {
        "num_gpu_blocks_override": 22,
        "max_model_len": 512,
        "max_num_batched_tokens": 96,
        "enable_chunked_prefill": True,
    }
    texts = [prompt(90 + 13 * i, seed=i) for i in range(6)]
    with running_engine(llama, None, **tight) as engine:
        expected = engine.generate(*texts, tokens=100)
    with running_engine(llama, {"codec": "raw", "stores": [MEMORY]}, **tight) as engine:
        got = engine.generate(*texts, tokens=100)
        metrics = engine.metrics()
        preemptions = sum(
            m.value for m in engine.llm.get_metrics() if m.name == "vllm:num_preemptions"
        )
        again = engine.generate(*texts, tokens=100)
        engine.settle()
    assert preemptions > 0
    assert metrics["stored_chunks"] > 0
    assert not metrics.get("load_failures")
    for want, first, second in zip(expected, got, again, strict=True):
        assert first.tokens == want.tokens
        assert second.tokens == want.tokens


def test_several_cache_groups_that_share_tensors_are_stored_and_restored(gemma3):
    with running_engine(gemma3, {"codec": "raw", "stores": [MEMORY]}) as engine:
        assert len(engine.scheduler.kv_cache_config.kv_cache_groups) > 1
        for length in (3 * CHUNK + 10, 7 * CHUNK + 20):
            text = prompt(length, seed=length)
            engine.generate(text)
            local = engine.generate(text)[0]
            engine.settle()
            engine.forget_local()
            before = engine.metrics().get("loaded_chunks", 0)
            restored = engine.generate(text)[0]
            assert restored.cached == length // CHUNK * CHUNK
            assert engine.metrics()["loaded_chunks"] > before
            assert restored.tokens == local.tokens
        assert not engine.metrics().get("load_failures")


def test_a_request_ends_while_its_chunks_still_wait_for_a_slow_codec_and_store(llama, gated):
    gates.open_all()
    offload = {"codec": "gated", "stores": [{"type": "gated", "bytes": "64MiB"}]}
    with running_engine(llama, offload) as engine:
        text = prompt(2 * CHUNK + 5)
        gates.encoding_allowed.clear()
        first = engine.generate(text)[0]  # would never return if a step waited for the codec
        assert engine.worker._staged
        # A request for the same prefix is served from the pages that wait for their encoder.
        engine.forget_local()
        assert engine.generate(text)[0].tokens == first.tokens
        gates.encoding_allowed.set()
        engine.settle()
        gates.writing_allowed.clear()
        engine.generate(prompt(2 * CHUNK + 5, seed=2))  # nor if it waited for the store
        gates.writing_allowed.set()
        assert engine.metrics()["stored_chunks"] == 4


def test_full_staging_drops_stores_and_counts_them(llama, gated):
    gates.open_all()
    chunk_bytes = 2 * 2 * CHUNK * 2 * 32 * 2
    offload = {
        "codec": "gated",
        "stores": [MEMORY],
        "staging_bytes": 2 * chunk_bytes,
    }
    with running_engine(llama, offload) as engine:
        gates.encoding_allowed.clear()
        text = prompt(5 * CHUNK + 5)
        engine.generate(text)
        gates.encoding_allowed.set()
        metrics = engine.metrics()
        assert metrics["stored_chunks"] == 2
        assert metrics["dropped_chunks{staging_full}"] == 3
        engine.forget_local()
        assert engine.generate(text)[0].cached == 2 * CHUNK


def test_an_aborted_request_does_not_disturb_the_one_after_it(llama, gated):
    from vllm import SamplingParams

    gates.open_all()
    offload = {"codec": "raw", "stores": [{"type": "gated", "bytes": "64MiB"}]}
    with running_engine(llama, offload) as engine:
        text = prompt(CHUNKS * CHUNK + BLOCK // 2)
        engine.generate(text)
        local = engine.generate(text)[0]
        engine.settle()
        engine.forget_local()
        gates.reading_allowed.clear()
        llm_engine = engine.llm.llm_engine
        llm_engine.add_request(
            "aborted", {"prompt_token_ids": text}, SamplingParams(temperature=0, max_tokens=8)
        )
        for _ in range(3):
            llm_engine.step()
        assert engine.worker._loads._loads
        llm_engine.abort_request(["aborted"])
        llm_engine.step()
        gates.reading_allowed.set()
        engine.settle()
        assert not engine.worker._loads._loads
        restored = engine.generate(text)[0]
        assert restored.cached == CHUNKS * CHUNK
        assert (restored.tokens, restored.logprobs) == (local.tokens, local.logprobs)


def test_a_reset_that_includes_the_connector_forgets_what_every_store_holds(llama, tmp_path):
    disk = {"type": "disk", "path": str(tmp_path), "bytes": "64MiB"}
    with running_engine(llama, {"codec": "raw", "stores": [MEMORY, disk]}) as engine:
        text = prompt(CHUNKS * CHUNK + 5)
        engine.generate(text)
        engine.settle()
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert engine.generate(text)[0].cached == 0
        engine.settle()
        for store in engine.worker._stores.stores:
            store.refresh()
            assert store.stats().entries == CHUNKS
        engine.forget_local()
        assert engine.generate(text)[0].cached == CHUNKS * CHUNK
        # A reset is the last thing that happens: what memory held is not written back.
        text = prompt(CHUNKS * CHUNK + 5, seed=3)
        engine.generate(text)
        engine.settle()
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        engine.settle()
    # The chunks of the earlier epochs are gone from the disk, not merely out of sight.
    with running_engine(llama, {"codec": "raw", "stores": [disk]}) as engine:
        assert engine.generate(text)[0].cached == 0
