"""FP8 pages in the real engine: against a plain torch model, per tensor and per head."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.fp8_models import declare_scheme, rescaled, with_scales
from tests.engine.conftest import prompt, running_engine
from vllm_kvcompress import compat
from vllm_kvcompress.kernels.fp8 import reference


class RoundedCache:
    """A transformers cache whose K and V are what FP8 pages hold of them."""

    def __new__(cls, scales, code="e4m3"):
        from transformers import DynamicCache

        def rounded(x, scale):  # [batch, kv_heads, tokens, size]
            scale = scale.view(-1, 1, 1)
            return (reference.quantise(x, scale, code).float() * scale).to(x.dtype)

        class Cache(DynamicCache):
            def update(self, key_states, value_states, layer_idx, *args, **options):
                k, v = scales[layer_idx]
                return super().update(
                    rounded(key_states, k), rounded(value_states, v), layer_idx, *args, **options
                )

        return Cache()


@torch.inference_mode()
def truth(model, tokens, scales, code="e4m3"):
    """Log-probabilities of the tokens after the first, of a model that reads rounded K and V."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([tokens])
    logits = network(ids, past_key_values=RoundedCache(scales, code), use_cache=True).logits
    return logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def kv_of(model, tokens):
    from transformers import AutoModelForCausalLM

    from vllm_kvcompress.calibration.dump import cache_to_kv, prefill

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return cache_to_kv(prefill(network, torch.tensor(tokens)))


def scales_of(kv, per_head):
    largest = kv.abs().amax((2, 4)) / 448
    return [[scale if per_head else scale.amax().view(1) for scale in layer] for layer in largest]


def prompt_logprobs(engine, tokens):
    from vllm import SamplingParams

    output = engine.llm.generate(
        [{"prompt_token_ids": tokens}],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
    )[0]
    return torch.tensor(
        [
            step[token].logprob
            for step, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
        ]
    )


def layers_of(engine):
    return compat.attention_layers(engine.llm.llm_engine.vllm_config)


def cached_pages(engine, hashes):
    """The pages of every block of a prompt that the prefix cache holds, all layers."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    caches = [layer.kv_cache for layer in layers_of(engine).values()]
    blocks = [pool.get_cached_block(block_hash, [0])[0] for block_hash in hashes]
    return [[cache[block.block_id].clone() for cache in caches] for block in blocks]


@pytest.fixture(scope="module")
def wide(llama, tmp_path_factory):
    """A model whose heads differ in range, by more than a scale per tensor serves well."""
    return rescaled(llama, tmp_path_factory.mktemp("wide"), (4, 16), (15, 5))


@pytest.mark.parametrize("per_head", [True, False], ids=["per-head", "per-tensor"])
def test_the_engine_computes_what_a_torch_model_over_rounded_keys_and_values_does(
    wide, tmp_path, per_head
):
    tokens = prompt(300)
    kv = kv_of(wide, tokens)
    checkpoint = with_scales(wide, tmp_path, kv, per_head)
    expected = truth(wide, tokens, scales_of(kv, per_head))
    other = truth(wide, tokens, scales_of(kv, not per_head))
    with running_engine(checkpoint, dtype="float32", max_num_batched_tokens=128) as engine:
        got = prompt_logprobs(engine, tokens)
        layers = layers_of(engine)
        assert all(layer._k_scale.numel() == (2 if per_head else 1) for layer in layers.values())
    # A sum in another order may round a code the other way, which the next layers carry on.
    assert (got - expected).abs().mean() < 2e-3
    assert (got - expected).abs().mean() < 0.05 * (got - other).abs().mean()


@pytest.mark.parametrize("dtype, code", [("fp8", "e4m3"), ("fp8_e5m2", "e5m2")])
def test_without_calibration_scales_are_one(llama, dtype, code):
    tokens = prompt(200)
    one = torch.ones(1)
    expected = truth(llama, tokens, [[one, one]] * 2, code)
    with running_engine(llama, dtype="float32", kv_cache_dtype=dtype) as engine:
        got = prompt_logprobs(engine, tokens)
    assert (got - expected).abs().mean() < 2e-3


def test_an_answer_does_not_depend_on_chunks_nor_on_the_prefix_cache(llama):
    tokens = prompt(500)
    answers = []
    for chunk in (64, 1024):
        with running_engine(llama, kv_cache_dtype="fp8", max_num_batched_tokens=chunk) as engine:
            answers += [engine.generate(tokens)[0], engine.generate(tokens)[0]]
    assert [answer.cached for answer in answers] == [0, 480, 0, 480]
    assert len({tuple(answer.tokens) for answer in answers}) == 1
    for answer in answers:
        assert answer.logprobs == pytest.approx(answers[0].logprobs, abs=0.03)


def test_skipped_layers_keep_the_models_dtype(llama):
    with running_engine(llama, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=["1"]) as engine:
        assert engine.generate(prompt(100))[0].tokens
        assert [layer.kv_cache_dtype for layer in layers_of(engine).values()] == ["fp8", "auto"]


@pytest.mark.slow
def test_twice_the_tokens_fit(llama):
    blocks = []
    for cache_dtype in ("auto", "fp8"):
        with running_engine(llama, kv_cache_dtype=cache_dtype) as engine:
            blocks.append(engine.core.scheduler.kv_cache_config.num_blocks)
    assert blocks[1] == 2 * blocks[0]


def test_layers_that_kivi_pages_skip_may_be_fp8(llama):
    with running_engine(
        llama,
        kv_cache_dtype="kivi_2bit",
        kv_cache_dtype_skip_layers=["0"],
        additional_config={"kvcompress": {"kivi": {"group_size": 32, "skip_dtype": "fp8"}}},
    ) as engine:
        dtypes = [layer.kv_cache_dtype for layer in layers_of(engine).values()]
        first = engine.generate(prompt(300), prompt(70, 2))
        second = engine.generate(prompt(300), prompt(70, 2))
    assert dtypes == ["fp8", "kivi_2bit"]
    assert second[0].cached == 288
    assert all(len(answer.tokens) == 8 for answer in first + second)


def test_several_cache_groups_with_windows(gemma3):
    with running_engine(gemma3, kv_cache_dtype="fp8") as engine:
        alone = engine.generate(prompt(400))[0]
        beside = engine.generate(prompt(60, 3), prompt(400))[1]
    assert beside.tokens == alone.tokens


STORES = {"codec": "cachegen", "stores": [{"type": "memory", "bytes": "256MiB"}]}


@pytest.mark.parametrize("per_head", [True, False], ids=["per-head", "per-tensor"])
@pytest.mark.parametrize("codec", ["raw", "cachegen"])
def test_pages_come_back_from_a_store_bit_for_bit(
    llama, tmp_path, remember_hashes, per_head, codec
):
    tokens = prompt(270)
    checkpoint = with_scales(llama, tmp_path, kv_of(llama, tokens), per_head)
    with running_engine(checkpoint, {**STORES, "codec": codec}) as engine:
        engine.generate(tokens, tokens=1)
        engine.settle()
        before = cached_pages(engine, remember_hashes[tuple(tokens)][:8])
        assert len(before) == 8
        local = engine.generate(tokens[:260])[0]
        engine.forget_local()
        for layer in layers_of(engine).values():
            layer.kv_cache.view(torch.uint8).fill_(0x7F)
        restored = engine.generate(tokens[:260])[0]
        after = cached_pages(engine, remember_hashes[tuple(tokens)][:8])
        assert engine.metrics()["loaded_chunks"] == 4
    assert (restored.tokens, restored.logprobs) == (local.tokens, local.logprobs)
    for ours, theirs in zip(before, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow
def test_a_recalibrated_checkpoint_finds_nothing_of_the_old_one(llama, tmp_path):
    tokens = prompt(270)
    kv = kv_of(llama, tokens)
    stores = {"stores": [{"type": "disk", "path": str(tmp_path / "store"), "bytes": "1GiB"}]}
    cached = []
    for name, scale in (("one", 1.0), ("one", 1.0), ("two", 1.5)):
        checkpoint = with_scales(llama, tmp_path / name, kv * scale, per_head=True)
        with running_engine(checkpoint, stores) as engine:
            cached.append(engine.generate(tokens, tokens=1)[0].cached)
            engine.settle()
    assert cached == [0, 256, 0]


# ----------------------------------------------------------------------------------- the audit


def test_strict_scales_refuse_a_layer_without_a_scale_by_its_number(llama, tmp_path):
    kv = torch.rand(2, 2, 8, 2, 32)
    checkpoint = with_scales(llama, tmp_path, kv, per_head=False, missing=(1,))
    strict = {"kvcompress": {"fp8": {"strict_scales": True}}}
    with (
        pytest.raises(ValueError, match=r"layers 1 have no scale.*strict_scales"),
        running_engine(checkpoint, additional_config=strict),
    ):
        pass


def test_the_audit_stands_at_metrics(llama, tmp_path):
    checkpoint = with_scales(llama, tmp_path, torch.rand(2, 2, 8, 2, 32), True, missing=(0,))
    with running_engine(checkpoint) as engine:
        found = {
            metric.labels["state"]: metric.value
            for metric in engine.llm.get_metrics()
            if metric.name == "vllm:kvcompress_kv_scale_layers"
        }
    assert found == {"ok": 1, "missing": 1}


# ------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"kv_cache_dtype": "int8_per_token_head"}, r"CPU engine cannot.*auto, bfloat16, fp8"),
        ({"kv_cache_dtype": "nvfp4"}, r"CPU engine cannot.*kivi_2bit"),
        ({"kv_cache_dtype": "turboquant_4bit_nc"}, r"CPU engine cannot"),
        ({"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["7"]}, r"no layer '7'.*0 to 1"),
        ({"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["first"]}, r"entry 'first'"),
        (
            {"additional_config": {"kvcompress": {"fp8": {"strict_scales": "yes"}}}},
            r"strict_scales is 'yes'; expected true or false",
        ),
        (
            {"additional_config": {"kvcompress": {"fp8": {"strict": True}}}},
            r"unknown setting 'strict'; choose from strict_scales",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else json.dumps(value)[:40],
)
def test_what_cannot_work_is_refused_with_what_can(llama, settings, message):
    with pytest.raises(ValueError, match=message), running_engine(llama, **settings):
        pass


def test_e5m2_with_calibrated_scales_explains_itself(llama, tmp_path):
    checkpoint = with_scales(llama, tmp_path, torch.rand(2, 2, 8, 2, 32), per_head=False)
    with (
        pytest.raises(ValueError, match=r"calibrated for fp8_e4m3.*choose fp8_e4m3"),
        running_engine(checkpoint, kv_cache_dtype="fp8_e5m2"),
    ):
        pass


def test_a_scheme_without_any_scale_in_the_files_is_found(llama, tmp_path, caplog):
    from benchmarks.fp8_models import copy_checkpoint

    checkpoint = copy_checkpoint(llama, tmp_path)
    declare_scheme(checkpoint, "tensor")
    strict = {"kvcompress": {"fp8": {"strict_scales": True}}}
    with (
        pytest.raises(ValueError, match=r"layers 0-1 have no scale"),
        running_engine(checkpoint, additional_config=strict),
    ):
        pass


@pytest.mark.slow
def test_the_triton_kernels_in_the_engine_give_what_the_others_give(tmp_path):
    from tests.engine.models import tiny_llama
    from tests.engine.test_kivi import answers_of_a_process

    settings = {
        "model": str(tiny_llama(tmp_path / "model", initializer_range=0.08)),
        "kv_cache_dtype": "fp8",
        "additional_config": {},
    }
    found = [
        answers_of_a_process(
            tmp_path, settings, [70, 40], 4, VLLM_KVCOMPRESS_KERNELS=kernels, **more
        )
        for kernels, more in (("reference", {}), ("cpu", {}), ("triton", {"TRITON_INTERPRET": "1"}))
    ]
    for (tokens, logprobs), *others in zip(*found, strict=True):
        for tokens_too, logprobs_too in others:
            assert tokens_too == tokens
            assert logprobs_too == pytest.approx(logprobs, abs=0.02)
