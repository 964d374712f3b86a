"""Crowds of random requests over far too few blocks and slots: every step against the truth.

The engine computes in float32, so that it and the truth differ by the order of additions only. A
value on the border between two codes may still fall to the other side, which moves one
log-probability by the step between two codes: nearly all must agree closely, and all loosely.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.conftest import BLOCK, Engine, prompt, running_engine
from tests.engine.kivi_truth import (
    LayerErrors,
    Recording,
    Replay,
    checked_layers,
    errors,
    recorded,
)
from vllm_kvcompress.config import KiviSettings

KIVI = {"preset": "kivi", "group_size": 32, "residual_length": 48}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights small enough that one code more or less does not change everything after it."""
    from tests.engine.models import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("llama"), initializer_range=0.08)


def pool_share(slots: float, dtype: str = "float32") -> float:
    """The share of the memory for the KV cache that so many blocks of two layers take."""
    from vllm import envs

    block = 2 * 2 * 2 * 32 * BLOCK * getattr(torch, dtype).itemsize
    return slots * block / (envs.VLLM_CPU_KVCACHE_SPACE << 30)


def crowd(engine: Engine, count: int, seed: int) -> dict[str, Any]:
    """Serve so many requests that come as they like; some share beginnings, some are given up."""
    from vllm import SamplingParams

    chance = random.Random(seed)
    step = engine.llm.llm_engine
    beginnings = [prompt(chance.randint(20, 110), seed=1000 + i) for i in range(4)]
    waiting = []
    for number in range(count):
        text = prompt(chance.choice((chance.randint(1, 40), chance.randint(1, 150))), seed=number)
        if chance.random() < 0.5:
            text = (chance.choice(beginnings) + text)[:190]
        waiting.append((f"r{number}", text))
    open_requests: set[str] = set()
    answers: dict[str, Any] = {}
    aborted = 0
    while waiting or step.has_unfinished_requests():
        while waiting and len(open_requests) < 12 and chance.random() < 0.7:
            name, text = waiting.pop()
            several = chance.random() < 0.15
            params = SamplingParams(
                temperature=0.8 if several else 0,
                n=2 if several else 1,
                max_tokens=chance.choice((1, 3, 8, 14, 40)),
                ignore_eos=True,
                detokenize=False,
                logprobs=1,
            )
            step.add_request(name, {"prompt_token_ids": text}, params)
            open_requests.add(name)
        for output in step.step():
            if output.finished:
                answers[output.request_id] = output
                open_requests.discard(output.request_id)
        if open_requests and chance.random() < 0.02:
            name = chance.choice(sorted(open_requests))
            step.abort_request([name])
            open_requests.discard(name)
            aborted += 1
    assert aborted and len(answers) + aborted == count
    return answers


def replay_of(llama: Path, dtype: str = "float32", kivi: dict[str, Any] = KIVI) -> Replay:
    kind = getattr(torch, dtype)
    settings = KiviSettings.parse({"kvcompress": {"kivi": kivi}})
    return Replay(llama, lambda size: settings.page_format("kivi_2bit", BLOCK, size, kind), kind)


def metric(engine: Engine, name: str) -> float:
    return sum(m.value for m in engine.llm.get_metrics() if m.name == f"vllm:{name}")


def serve(
    llama: Path, *, requests: int, slots: int, seed: int, dtype: str = "float32", **settings: Any
) -> tuple[LayerErrors, Recording, float]:
    """A crowd on a small engine; the errors of its layers, its steps, and its preemptions."""
    kivi = {**KIVI, **settings.pop("kivi", {}), "pool_share": pool_share(slots + 0.5, dtype)}
    settings = {
        "kv_cache_dtype": "kivi_2bit",
        "dtype": dtype,
        "additional_config": {"kvcompress": {"kivi": kivi}},
        "num_gpu_blocks_override": 17,
        "max_num_seqs": 8,
        "max_model_len": 256,
        "max_num_batched_tokens": 43,
        **settings,
    }
    # bfloat16: queries and weights of the packed part may be rounded to it, at this scale.
    tolerance = 1e-4 if dtype == "float32" else 0.05
    with ExitStack() as stack:
        layers = stack.enter_context(checked_layers(tolerance))
        engine = stack.enter_context(running_engine(llama, None, **settings))
        recording = stack.enter_context(recorded(engine))
        crowd(engine, requests, seed)
        return layers, recording, metric(engine, "num_preemptions")


def assert_everything_happened(layers: LayerErrors, preemptions: float) -> None:
    events = layers.events
    happened = (events.evict, events.reopen, events.append, events.grow, events.retire)
    assert all(happened) and events.mixed and preemptions, (events, preemptions)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_crowd_over_a_tiny_pool_gets_what_the_truth_gives(llama, prefix_caching):
    layers, recording, preemptions = serve(
        llama,
        requests=70,
        slots=5,
        seed=7 + prefix_caching,
        enable_prefix_caching=prefix_caching,
    )
    assert_everything_happened(layers, preemptions)
    found = np.array(errors(recording, replay_of(llama)))
    assert len(found) > 400
    assert np.median(found) < 1e-4
    assert np.quantile(found, 0.99) < 1e-2
    assert found.max() < 0.5


def test_a_crowd_with_the_default_preset_gets_what_the_truth_gives(llama):
    layers, recording, _ = serve(llama, requests=40, slots=5, seed=5, kivi={"preset": "balanced"})
    assert layers.events.append and layers.events.evict and layers.fitted
    found = np.array(errors(recording, replay_of(llama, kivi={**KIVI, "preset": "balanced"})))
    assert np.median(found) < 1e-3
    assert np.quantile(found, 0.9) < 1e-2
    assert found.max() < 0.5


def test_one_slot_for_everyone_loses_no_token(llama):
    layers, _, preemptions = serve(llama, requests=40, slots=1, seed=3)
    assert layers.events.append and layers.events.grow and preemptions


@pytest.mark.slow
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("slots", [1, 2, 4, 9, 17])
def test_larger_crowds_over_pools_of_any_size_get_what_the_truth_gives(
    llama, slots, prefix_caching
):
    layers, recording, preemptions = serve(
        llama,
        requests=400,
        slots=slots,
        seed=slots,
        enable_prefix_caching=prefix_caching,
        kivi={"residual_length": 20 + 13 * slots, "preset": "kivi" if slots == 4 else "balanced"},
    )
    # Seventeen slots hold every block that there is: nothing is packed.
    assert preemptions and bool(layers.events.append) == (slots < 17)
    kivi = {
        **KIVI,
        "residual_length": 20 + 13 * slots,
        "preset": "kivi" if slots == 4 else "balanced",
    }
    found = np.array(errors(recording, replay_of(llama, kivi=kivi)))
    assert np.median(found) < 1e-3
    assert np.quantile(found, 0.9) < 1e-2
    assert found.max() < 0.5


def test_in_bf16_every_layer_gives_what_the_truth_gives_and_answers_stay_near_it(llama):
    """Layers are compared on the engine's own K and V. The truth of the whole model computes its
    own in float32, so that rounding moves values over the borders between codes now and then."""
    layers, recording, _ = serve(llama, requests=30, slots=5, seed=11, dtype="bfloat16")
    assert layers.events.append and layers.events.evict
    found = np.array(errors(recording, replay_of(llama, "bfloat16")))
    assert np.median(found) < 0.1


def test_a_request_alone_and_in_a_crowd_gets_the_same(llama):
    """Every prompt in one chunk whoever else is there, and room for every window: only the order of
    additions is left to differ."""
    settings = {
        "kv_cache_dtype": "kivi_2bit",
        "dtype": "float32",
        "additional_config": {"kvcompress": {"kivi": KIVI}},
        "enable_prefix_caching": False,
        # A chunk needs slots for the window before it and the one after it.
        "max_num_seqs": 24,
        "max_num_batched_tokens": 4096,
    }
    texts = [prompt(30 + 29 * i, seed=i) for i in range(10)]
    with running_engine(llama, None, **settings) as engine:
        alone = [engine.generate(text, tokens=40)[0] for text in texts]
        together = engine.generate(*texts, tokens=40)
    differences = []
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens
        differences += np.abs(np.subtract(one.logprobs, other.logprobs)).tolist()
    assert np.median(differences) < 1e-4
    assert max(differences) < 0.05
