"""Compiled mode: the connector is the same under torch.compile."""

from __future__ import annotations

import pytest

from tests.engine.conftest import BLOCK, CHUNK, prompt, running_engine


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_a_compiled_model_restores_what_it_stored(llama, cache_dtype):
    offload = {
        "codec": "cachegen",
        "level": "lossless",
        "stores": [{"type": "memory", "bytes": "64MiB"}],
    }
    with running_engine(llama, offload, enforce_eager=False, kv_cache_dtype=cache_dtype) as engine:
        text = prompt(4 * CHUNK + BLOCK // 2)
        engine.generate(text)
        local = engine.generate(text)[0]
        engine.settle()
        engine.forget_local()
        restored = engine.generate(text)[0]
        assert (local.cached, restored.cached) == (4 * CHUNK, 4 * CHUNK)
        assert (restored.tokens, restored.logprobs) == (local.tokens, local.logprobs)
