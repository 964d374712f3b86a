"""Every kind of page is stored and restored: what comes back answers as what was there."""

from __future__ import annotations

import pytest

from tests.engine.conftest import BLOCK, CHUNK, prompt, running_engine

CHUNKS = 3
LOSSLESS = {
    "codec": "cachegen",
    "level": "lossless",
    "stores": [{"type": "memory", "bytes": "256MiB"}],
}


def kivi(cache_dtype, **settings):
    given = {"group_size": 32, "residual_length": 8, **settings}
    return {
        "kv_cache_dtype": cache_dtype,
        "additional_config": {"kvcompress": {"kivi": given}},
    }


KINDS = {
    "fp16": {"dtype": "float16"},
    "fp32": {"dtype": "float32"},
    "fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "fp8, a layer left out": {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1"]},
    "kivi_4bit": kivi("kivi_4bit"),
    "kivi_k4v2, preset kivi": kivi("kivi_k4v2", preset="kivi"),
    "kivi_2bit, a layer left out": {**kivi("kivi_2bit"), "kv_cache_dtype_skip_layers": ["1"]},
    "kivi_2bit, a layer left out at fp8": {
        **kivi("kivi_2bit", skip_dtype="fp8"),
        "kv_cache_dtype_skip_layers": ["1"],
    },
    "kivi_2bit, exact blocks, a layer left out": {
        **kivi("kivi_2bit", residual_length=512),
        "kv_cache_dtype_skip_layers": ["0"],
    },
}


def restored_equals_local(model, offload, chunks=CHUNKS, **settings):
    """The answer of a restored prefix and that of a local hit at the same boundary."""
    text = prompt(chunks * CHUNK + BLOCK // 2)
    with running_engine(model, offload, **settings) as engine:
        engine.generate(text)
        local = engine.generate(text)[0]
        engine.settle()
        engine.forget_local()
        for seed in (2, 3):  # in the blocks that the first one had
            engine.generate(prompt(len(text), seed), tokens=1)
        engine.settle()
        restored = engine.generate(text)[0]
        metrics = engine.metrics()
    assert local.cached == restored.cached == chunks * CHUNK
    assert metrics["loaded_chunks"] >= chunks
    assert not metrics.get("load_failures")
    return restored, local


@pytest.mark.parametrize("kind", KINDS)
def test_a_lossless_codec_gives_back_what_the_pages_held(llama, kind):
    restored, local = restored_equals_local(llama, LOSSLESS, **KINDS[kind])
    assert (restored.tokens, restored.logprobs) == (local.tokens, local.logprobs)


@pytest.mark.parametrize("residual", [8, 512], ids=["packed", "exact"])
def test_residual_pools_of_one_cache_group_give_back_what_all_of_them_held(gemma3, residual):
    """Without several cache groups, layers with a window and without one still are planned apart,
    each kind with its own pool."""
    restored, local = restored_equals_local(
        gemma3,
        LOSSLESS,
        **kivi("kivi_2bit", residual_length=residual),
        kv_cache_dtype_skip_layers=["0"],
        disable_hybrid_kv_cache_manager=True,
    )
    assert (restored.tokens, restored.logprobs) == (local.tokens, local.logprobs)


@pytest.mark.parametrize("level", ["lossless", "high"])
def test_latents_of_mla_are_stored_and_restored(tmp_path, level):
    from tests.engine.models import tiny_deepseek

    model = tiny_deepseek(tmp_path / "deepseek")
    restored, local = restored_equals_local(model, {**LOSSLESS, "level": level})
    if level == "lossless":
        assert (restored.tokens, restored.logprobs) == (local.tokens, local.logprobs)
    else:
        assert restored.logprobs[0] == pytest.approx(local.logprobs[0], abs=0.05)
