"""KIVI pages in the engine: capacity, kinds of models, and what a request may go through."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.conftest import Engine, prompt, running_engine
from tests.engine.kivi_truth import checked_layers, model_of
from tests.engine.test_kivi_stress import crowd, pool_share
from vllm_kvcompress.config import KIVI_DTYPES

# Scales from minimum and maximum: all kernels write the same bytes, so the truth can be strict.
KIVI = {
    "preset": "kivi",
    "group_size": 32,
    "residual_length": 48,
    "sink_tokens": 2,
    "boosted_channels": 16,
}
DEFAULTS = {"group_size": 32, "residual_length": 48}

# Of the largest V. In 16 bits, queries and weights of packed tokens may be rounded to it.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}


def kivi(**settings: Any) -> dict[str, Any]:
    return {"kvcompress": {"kivi": {**KIVI, **settings}}}


def packed_layers(engine: Engine) -> list[Any]:
    """The attention layers of KIVI pages."""
    from vllm_kvcompress.attention.kivi import KiviImpl

    modules = model_of(engine).modules()
    return [m for m in modules if isinstance(getattr(m, "impl", None), KiviImpl)]


def served(model: Path, *, requests: int = 6, **settings: Any) -> list[Any]:
    """Check every layer's attention over prompts in chunks and decodes of a few requests; returns
    what computes the attention of each layer."""
    settings = {
        "kv_cache_dtype": "kivi_2bit",
        "dtype": "float32",
        "additional_config": kivi(),
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_model_len": 512,
        **settings,
    }
    dtype = settings["dtype"]
    with (
        checked_layers(TOLERANCE[dtype]) as layers,
        running_engine(model, None, **settings) as engine,
    ):
        answers = engine.generate(*[prompt(9 + 37 * i, i) for i in range(requests)], tokens=12)
        assert all(np.isfinite(answer.logprobs).all() for answer in answers)
        assert layers.rows and layers.events.retire and layers.events.mixed
        return [layer.impl for layer in packed_layers(engine)]


# --- capacity -----------------------------------------------------------------------------------


def tokens_and_bytes(model: Path, **settings: Any) -> tuple[int, int, int, int]:
    """Tokens that an engine holds, bytes of its pages, of its pool, and of both as configured."""
    from vllm import envs

    with running_engine(model, None, block_size=128, max_num_seqs=4, **settings) as engine:
        config = engine.scheduler.kv_cache_config
        impls = [layer.impl for layer in packed_layers(engine)]
        pages = sum(tensor.size for tensor in config.kv_cache_tensors)
        pool = 0
        if impls:
            engine.generate(prompt(10), tokens=2)  # the pool is made with the first step
            pool = sum(
                part.numel() * part.element_size()
                for impl in impls
                for part in (impl.exact_keys, impl.exact_values)
            )
            assert pool == sum(impl.pool_tokens * impl.exact_token_bytes for impl in impls)
        return config.num_blocks * 128, pages, pool, envs.VLLM_CPU_KVCACHE_SPACE << 30


def test_the_same_memory_holds_five_to_seven_times_the_tokens(tmp_path):
    from tests.engine.models import tiny_llama

    model = tiny_llama(tmp_path, head_dim=64)
    plain, plain_bytes, _, memory = tokens_and_bytes(model)
    assert memory - (1 << 20) < plain_bytes <= memory
    for group, factor in ((32, 5.3), (64, 6.3), (128, 7.0)):
        tokens, pages, pool, memory = tokens_and_bytes(
            model,
            kv_cache_dtype="kivi_2bit",
            additional_config={"kvcompress": {"kivi": {"preset": "kivi", "group_size": group}}},
        )
        assert 0 < pool <= memory // 10
        assert memory - (1 << 20) < pages + pool <= memory
        assert tokens * memory / (memory - pool) / plain >= factor


# --- kinds of pages and of models -----------------------------------------------------------------


@pytest.mark.parametrize("cache_dtype", KIVI_DTYPES)
def test_every_dtype_computes_what_the_truth_does(llama, cache_dtype):
    served(llama, kv_cache_dtype=cache_dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_in_sixteen_bits_compute_what_the_truth_does(llama, dtype):
    served(llama, dtype=dtype)


def test_the_default_preset_computes_what_the_truth_does(llama):
    served(llama, additional_config={"kvcompress": {"kivi": DEFAULTS}})


def saved(model: Any, path: Path) -> Path:
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def gemma2(path: Path) -> Path:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=64,
        attn_logit_softcapping=3.0,
        max_position_embeddings=1024,
        initializer_range=0.2,
    )
    return saved(Gemma2ForCausalLM(config), path)


def bloom(path: Path) -> Path:
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    config = BloomConfig(vocab_size=512, hidden_size=128, n_layer=2, n_head=4)
    return saved(BloomForCausalLM(config), path)


def gpt_oss(path: Path) -> Path:
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=64,
        max_position_embeddings=1024,
    )
    return saved(GptOssForCausalLM(config), path)


@pytest.mark.parametrize(
    ("make", "dtype", "has"),
    [
        (gemma2, "float32", lambda impl: impl.soft_cap == 3.0),
        (bloom, "float32", lambda impl: impl.alibi_slopes is not None),
        (gpt_oss, "bfloat16", lambda impl: impl.sinks is not None),
    ],
    ids=["soft cap", "alibi", "sinks"],
)
def test_what_attention_does_beside_softmax_is_what_the_truth_does(
    tmp_path, make: Callable, dtype, has
):
    impls = served(make(tmp_path), dtype=dtype)
    assert impls and all(has(impl) for impl in impls)
    if make is gemma2:
        assert {impl.sliding_window for impl in impls} == {None, 64}


@pytest.mark.parametrize(
    ("model", "skip"),
    [
        ("llama", ["0"]),
        ("gemma3", []),
        ("gemma3", ["sliding_window"]),
        ("gemma3", ["2", "4"]),
    ],
    ids=["one layer", "all packed", "windows left out", "some left out"],
)
def test_groups_that_share_memory_leave_each_others_tokens_alone(request, model, skip):
    """Block numbers and memory go from group to group. A block that one group still has in its
    pool when another writes it must not be packed into what the other has written."""
    with (
        checked_layers(1e-3) as layers,
        running_engine(
            request.getfixturevalue(model),
            None,
            kv_cache_dtype="kivi_2bit",
            kv_cache_dtype_skip_layers=skip,
            dtype="float32",
            additional_config=kivi(pool_share=pool_share(6)),
            num_gpu_blocks_override=60,
            max_num_seqs=6,
            max_num_batched_tokens=64,
            max_model_len=256,
        ) as engine,
    ):
        crowd(engine, 40, seed=1)
    assert layers.events.evict
    assert bool(layers.exact_rows) == bool(skip)


# --- a request's life -----------------------------------------------------------------------------


def test_a_prefix_is_found_packed_and_exact(llama):
    settings = {
        "kv_cache_dtype": "kivi_2bit",
        "dtype": "float32",
        "additional_config": kivi(),
        "max_num_batched_tokens": 64,
    }
    with checked_layers(1e-4) as layers, running_engine(llama, None, **settings) as engine:
        text = prompt(200)
        first = engine.generate(text, tokens=4)[0]
        pool = packed_layers(engine)[0].impl.group.pool
        exact = set(np.flatnonzero(pool.slot_of_block >= 0).tolist())
        assert first.cached == 0
        assert len(exact) >= 2 and layers.events.retire >= 3
        for cached in (32, 64, 96, 128, 160, 192):
            again = engine.generate(text[:cached] + prompt(30, seed=2), tokens=4)[0]
            assert again.cached == cached
        assert engine.generate(text, tokens=4)[0].cached == 192


def test_beam_search_computes_what_the_truth_does(llama):
    from vllm.sampling_params import BeamSearchParams

    settings = {
        "kv_cache_dtype": "kivi_2bit",
        "dtype": "float32",
        "additional_config": kivi(),
        "max_num_batched_tokens": 64,
    }
    with checked_layers(1e-4) as layers, running_engine(llama, None, **settings) as engine:

        class Tokenizer:
            eos_token_id = None

            @staticmethod
            def decode(tokens, **_):
                return ""

        engine.llm.get_tokenizer = lambda: Tokenizer
        engine.llm.renderer.get_tokenizer = lambda: Tokenizer
        found = engine.llm.beam_search(
            [{"prompt_token_ids": prompt(90)}],
            BeamSearchParams(beam_width=3, max_tokens=40, ignore_eos=True),
        )
    assert len(found[0].sequences) == 3 and layers.events.retire


@pytest.mark.slow
def test_compiled_and_eager_give_the_same(llama):
    settings = {"kv_cache_dtype": "kivi_2bit", "dtype": "float32", "additional_config": kivi()}
    texts = [prompt(9 + 37 * i, i) for i in range(6)]
    answers = []
    for eager in (True, False):
        with running_engine(llama, None, enforce_eager=eager, **settings) as engine:
            answers.append(engine.generate(*texts, tokens=20))
    for eager, compiled in zip(*answers, strict=True):
        assert eager.tokens == compiled.tokens
        assert np.median(np.abs(np.subtract(eager.logprobs, compiled.logprobs))) < 1e-4


# --- processes of their own -----------------------------------------------------------------------

SCRIPT = """
import json, sys

from vllm import LLM, SamplingParams

from tests.engine.conftest import prompt


def main(output, settings, lengths, tokens):
    llm = LLM(skip_tokenizer_init=True, enforce_eager=True, seed=0, **settings)
    answers = llm.generate(
        [{"prompt_token_ids": prompt(length, length)} for length in lengths],
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=1),
        use_tqdm=False,
    )
    found = []
    for answer in answers:
        best = answer.outputs[0]
        logprobs = [step[t].logprob for step, t in zip(best.logprobs, best.token_ids)]
        found.append([list(best.token_ids), logprobs])
    with open(output, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
"""


def answers_of_a_process(
    path: Path,
    settings: dict[str, Any],
    lengths: list[int],
    tokens: int,
    **environment: str,
) -> list[tuple[list[int], list[float]]]:
    script, output = path / "script.py", path / "answers"
    script.write_text(SCRIPT)
    settings = {
        "kv_cache_dtype": "kivi_2bit",
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": 512,
        "max_num_batched_tokens": 64,
        "additional_config": kivi(),
        **settings,
    }
    run = subprocess.run(
        [sys.executable, str(script), json.dumps([str(output), settings, lengths, tokens])],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def gentle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights small enough that one code more or less does not change everything after it."""
    from tests.engine.models import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("gentle"), initializer_range=0.08)


def assert_close(one: list[Any], other: list[Any]) -> None:
    differences = []
    for (tokens, logprobs), (tokens_too, logprobs_too) in zip(one, other, strict=True):
        assert tokens == tokens_too
        differences += np.abs(np.subtract(logprobs, logprobs_too)).tolist()
    assert np.median(differences) < 1e-4
    assert max(differences) < 0.05


@pytest.mark.slow
def test_two_ranks_give_what_one_gives(gentle, tmp_path):
    lengths, found = [20, 100, 150], []
    for ranks, cores in ((1, "0"), (2, "0|1")):
        found.append(
            answers_of_a_process(
                tmp_path,
                {"model": str(gentle), "tensor_parallel_size": ranks},
                lengths,
                12,
                VLLM_CPU_OMP_THREADS_BIND=cores,
                # In one process all requests are there before the first step: the same chunks.
                VLLM_ENABLE_V1_MULTIPROCESSING="0",
            )
        )
    # The ranks add in another order, which moves a value over the border between two codes now and
    # then, and with it what is generated later.
    for (tokens, logprobs), (tokens_too, logprobs_too) in zip(*found, strict=True):
        assert tokens[0] == tokens_too[0]
        assert abs(logprobs[0] - logprobs_too[0]) < 0.05


@pytest.mark.slow
def test_the_triton_kernels_in_the_engine_give_what_the_others_give(gentle, tmp_path):
    settings = {"model": str(gentle)}
    found = [
        answers_of_a_process(
            tmp_path, settings, [70, 40], 4, VLLM_KVCOMPRESS_KERNELS=kernels, **more
        )
        for kernels, more in (("reference", {}), ("triton", {"TRITON_INTERPRET": "1"}))
    ]
    assert_close(*found)
