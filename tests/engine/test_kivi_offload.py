"""KIVI pages with the connector: stored and restored bit for bit, packed or exact."""

from __future__ import annotations

import pytest
import torch

from tests.engine.conftest import prompt, running_engine

SETTINGS = {"group_size": 32, "sink_tokens": 4, "boosted_channels": 16}
STORES = {"chunk_tokens": 64, "stores": [{"type": "memory", "bytes": "256MiB"}]}


def kivi(**settings):
    return {
        "kv_cache_dtype": "kivi_2bit",
        "additional_config": {"kvcompress": {"kivi": {**SETTINGS, **settings}}},
    }


def blocks_of(engine, tokens):
    """Per cached block of a prompt: whether it is exact, and its page or its tokens, all layers."""
    from vllm.v1.core.kv_cache_utils import get_block_hash

    pool = engine.scheduler.kv_cache_manager.block_pool
    request = engine.hashed[tuple(tokens)]
    found = []
    group = next(iter(engine.worker._groups)).pooled
    for block_hash in request:
        for block in pool.blocks:
            if block.block_hash is not None and get_block_hash(block.block_hash) == block_hash:
                exact = group.exact_blocks([block.block_id])[0]
                if exact:
                    content = [
                        t.clone() for pair in group.exact_tokens(block.block_id) for t in pair
                    ]
                else:
                    content = [layer.kv_cache[block.block_id].clone() for layer in group.layers]
                found.append((exact, content))
    return found


@pytest.mark.parametrize(
    ("residual", "exact"),
    [(8, [False] * 8), (137, [False] * 4 + [True] * 4), (512, [True] * 8)],
    ids=["packed", "mixed", "exact"],
)
def test_blocks_come_back_bit_for_bit_in_their_form_and_give_the_same_answers(
    llama, remember_hashes, residual, exact
):
    tokens = prompt(8 * 32 + 9)
    with running_engine(llama, STORES, **kivi(residual_length=residual)) as engine:
        engine.hashed = remember_hashes
        engine.generate(tokens, tokens=1)
        before = blocks_of(engine, tokens)
        assert [form for form, _ in before] == exact
        local = engine.generate(tokens)[0]
        assert local.cached == 256
        engine.settle()
        engine.forget_local()
        restored = engine.generate(tokens)[0]
        assert restored.cached == 256
        assert engine.metrics()["loaded_chunks"] == 4
        after = blocks_of(engine, tokens)
        assert [form for form, _ in after] == exact
        for (_, old), (_, new) in zip(before, after, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
        assert restored.tokens == local.tokens
        assert restored.logprobs == local.logprobs


def test_exact_blocks_that_the_pool_has_no_room_for_come_back_packed(llama):
    tokens = prompt(8 * 32 + 9)
    small = kivi(residual_length=96, pool_share=0.9)
    with running_engine(llama, STORES, max_num_seqs=1, **small) as engine:
        engine.generate(tokens)
        engine.settle()
        engine.forget_local()
        for seed in range(2, 5):
            engine.generate(prompt(200, seed))
        engine.settle()
        restored = engine.generate(tokens)[0]
        assert restored.cached == 256
        pool = engine.worker._groups[0].pooled.pool
        assert pool.slots == 4
        assert not engine.metrics().get("load_failures")


@pytest.mark.slow
def test_other_kivi_settings_share_nothing(llama, tmp_path):
    path = str(tmp_path / "store")
    stores = {"chunk_tokens": 64, "stores": [{"type": "disk", "path": path, "bytes": "64MiB"}]}
    tokens = prompt(150)
    for settings, cached in (
        (kivi(), 0),
        (kivi(), 128),
        (kivi(clipping="none"), 0),
        (kivi(group_size=32, boosted_channels=0), 0),
        ({"kv_cache_dtype": "kivi_4bit"} | {"additional_config": kivi()["additional_config"]}, 0),
        ({}, 0),
    ):
        with running_engine(llama, stores, **settings) as engine:
            assert engine.generate(tokens, tokens=1)[0].cached == cached
            engine.settle()
