"""What is computed of a KV cache is what vLLM computes: its log, to the token, and its own code."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.engine.conftest import BLOCK, running_engine
from tests.engine.models import tiny_deepseek, tiny_hybrid, tiny_llama
from tests.page_profiles import write_profile
from vllm_kvcompress.capacity import (
    CACHE_DTYPES,
    CacheOptions,
    CachePlan,
    EngineOptions,
    LayerPages,
    _group,
    _Layout,
    plan,
)
from vllm_kvcompress.config import KIVI_DTYPES, SLIDING_WINDOW, KiviSettings
from vllm_kvcompress.model_layers import AttentionLayer, ModelLayers
from vllm_kvcompress.page_profile import load_page_profile

MEMORY = 1 << 30


def logged(model: Path, cache: CacheOptions, **options: Any) -> tuple[int, int]:
    """Tokens and blocks of an engine in this process, of its KV cache alone."""
    given: dict[str, Any] = {"kv_cache_dtype": cache.kv_cache_dtype, **options}
    if cache.skip_layers:
        given["kv_cache_dtype_skip_layers"] = list(cache.skip_layers)
    if cache.is_kivi:
        asked = {"preset": cache.kivi.preset, "group_size": cache.kivi.group_size}
        given["additional_config"] = {"kvcompress": {"kivi": asked}}
    if cache.profile is not None:
        given.setdefault("additional_config", {"kvcompress": {}})
        given["additional_config"]["kvcompress"]["profile"] = cache.profile.folder
    with running_engine(model, **given) as engine:
        cached = engine.llm.llm_engine.vllm_config.cache_config
        return cached.kv_cache_size_tokens, cached.num_gpu_blocks


def kivi(**settings: Any) -> KiviSettings:
    return KiviSettings.parse({"kvcompress": {"kivi": settings}})


def computed(model: Path, cache: CacheOptions, **options: Any) -> CachePlan:
    engine = {
        "device": "cpu",
        "block_size": BLOCK,
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 256,
        **{name: value for name, value in options.items() if name != "seed"},
    }
    return plan(ModelLayers.read(model), EngineOptions(**engine), cache)


def check(model: Path, cache: CacheOptions, **options: Any) -> None:
    found = computed(model, cache, **options)
    assert logged(model, cache, **options) == (found.tokens(MEMORY), found.blocks(MEMORY))


CACHES = {
    "auto": CacheOptions(),
    "balanced": CacheOptions("kivi_2bit", kivi(group_size=32)),
    "published": CacheOptions("kivi_k4v2", kivi(preset="kivi")),
    "skipped": CacheOptions("kivi_2bit", kivi(group_size=32), ("0",)),
}


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_tokens_of_one_group_are_those_of_the_log(llama, cache):
    check(llama, cache, max_model_len=1000)


@pytest.mark.parametrize("dtype", ["kivi_2bit", "fp8"])
def test_tokens_with_a_profile_of_the_pages_are_those_of_the_log(tmp_path, dtype):
    model = tiny_llama(tmp_path / "model", num_hidden_layers=4)
    told = {"four_bits": (1, 3), "kivi_skip_layers": (2,), "fp8_skip_layers": (0, 3)}
    profile = load_page_profile(write_profile(tmp_path / "profile", layers=4, **told))
    check(model, CacheOptions(dtype, kivi(group_size=32), profile=profile))


@pytest.mark.parametrize(
    "cache",
    [
        *CACHES.values(),
        CacheOptions("kivi_4bit", kivi(preset="kivi", group_size=64), (SLIDING_WINDOW,)),
    ],
    ids=[*CACHES, "windows skipped"],
)
def test_tokens_of_sliding_windows_beside_full_attention_are_those_of_the_log(gemma3, cache):
    check(gemma3, cache, block_size=64, max_num_batched_tokens=256)


def test_tokens_of_a_model_of_windows_only_are_those_of_the_log(tmp_path):
    model = tiny_llama(tmp_path)
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "sliding_window": 96}))
    check(model, CacheOptions(), max_num_batched_tokens=128)


def test_tokens_of_latent_attention_are_those_of_the_log(tmp_path):
    check(tiny_deepseek(tmp_path), CacheOptions(), block_size=16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "pages", "net"),
    [
        (CacheOptions(), 93_184, 93_184),
        (CacheOptions("kivi_2bit"), 530_176, 477_696),
        (CacheOptions("kivi_2bit", kivi(preset="kivi")), 497_024, 447_872),
        (CacheOptions("kivi_2bit", kivi(preset="kivi", group_size=64)), 596_480, 537_472),
    ],
    ids=["auto", "balanced", "kivi", "kivi 64"],
)
def test_tokens_of_a_real_model_are_those_of_the_log(smollm2, cache, pages, net):
    options = {"block_size": 128, "max_model_len": 8192}
    found = computed(smollm2, cache, **options)
    assert found.tokens(2 << 30) == net
    assert replace(found, pool_block=0).tokens(2 << 30) == pages
    check(smollm2, cache, **options)


# --- against vLLM's own arithmetic, without an engine -------------------------------------------


def vllm_spec(pages: LayerPages) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        SlidingWindowSpec,
    )

    common = {
        "block_size": pages.block,
        "num_kv_heads": 1,
        "head_size": pages.head_size,
        "dtype": torch.uint8,
        "state_content_bytes": pages.token_bytes,
        "page_size_padded": pages.padded,
    }
    if pages.kind == "window":
        return SlidingWindowSpec(**common, sliding_window=pages.reach)
    if pages.kind == "chunk":
        return ChunkedLocalAttentionSpec(**common, attention_chunk_size=pages.reach)
    return FullAttentionSpec(**common)


def vllm_plan(layers: list[LayerPages], found: CachePlan) -> tuple[int, int, list[int]]:
    """Tokens, bytes of a block and layers of each group as vLLM computes them."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_layout import KVCacheLayout

    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=found.max_model_len, original_max_model_len=1),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=found.in_flight,
    )
    specs = {f"model.layers.{n}": vllm_spec(pages) for n, pages in enumerate(layers)}
    (cache,) = kv_cache_utils.get_kv_cache_configs(config, [specs], [MEMORY])
    tokens, _ = kv_cache_utils.get_kv_cache_capacity(config, cache)
    size = kv_cache_utils._pool_bytes_per_block(config, cache.kv_cache_groups)
    return tokens, size, [len(group.layer_names) for group in cache.kv_cache_groups]


page_kinds = st.builds(
    LayerPages,
    kind=st.sampled_from(["full", "window", "chunk"]),
    block=st.sampled_from([16, 64, 128]),
    token_bytes=st.sampled_from([45, 90, 256, 512]),
    dtype=st.just("auto"),
    heads=st.just(1),
    head_size=st.sampled_from([64, 128]),
    reach=st.sampled_from([100, 512]),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kinds=st.lists(page_kinds, min_size=1, max_size=3),
    pattern=st.lists(st.integers(0, 2), min_size=1, max_size=14),
    length=st.integers(1, 5000),
    in_flight=st.integers(1, 3000),
)
def test_any_mixture_of_layers_is_grouped_as_vllm_groups_it(kinds, pattern, length, in_flight):
    layers = [kinds[place % len(kinds)] for place in pattern]
    layers = [replace(pages, reach=0) if pages.kind == "full" else pages for pages in layers]
    found = CachePlan(tuple(_group(layers)), length, in_flight)
    assume(found.request_bytes(length) + found.block_bytes <= MEMORY)
    tokens, size, groups = vllm_plan(layers, found)
    assert found.block_bytes == size
    assert found.tokens(MEMORY) == tokens
    assert Counter(len(group) for group in found.groups) == Counter(groups)


def token_bytes(dtype: str, head_size: int) -> int:
    """Bytes of a token of one head in the middle of a model."""
    layers = tuple(AttentionLayer(number, 1, head_size, head_size) for number in range(5))
    model = ModelLayers("model", layers, "bfloat16", 4096)
    layout = _Layout(model, EngineOptions(), CacheOptions(dtype), frozenset())
    return layout.pages()[2].token_bytes


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
@pytest.mark.parametrize(
    "dtype",
    [
        *("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"),
        *("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"),
    ],
)
def test_bytes_of_a_token_are_those_of_the_backend(dtype, head_size):
    import torch
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    spec = FullAttentionSpec(
        block_size=1,
        num_kv_heads=1,
        head_size=head_size,
        dtype=STR_DTYPE_TO_TORCH_DTYPE.get(dtype, torch.bfloat16),
        kv_quant_mode=get_kv_quant_mode(dtype),
    )
    expected = TritonAttentionBackend.customize_spec(spec).page_size_bytes
    assert token_bytes(dtype, head_size) == expected


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_bytes_of_packed_formats_are_those_of_vllm(head_size):
    from vllm.model_executor.layers.quantization.turboquant import config as turboquant
    from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim
    from vllm.v1.attention.ops.ultraquant import format as ultraquant

    for dtype in turboquant.TQ_PRESETS:
        fmt = turboquant.TurboQuantConfig.from_cache_dtype(dtype, head_size)
        assert token_bytes(dtype, head_size) == fmt.slot_size_aligned
    assert token_bytes("ultraquant_4bit", head_size) == ultraquant.slot_size(head_size)
    assert token_bytes("nvfp4", head_size) == 2 * nvfp4_kv_cache_full_dim(head_size)


def test_every_dtype_of_vllm_is_counted():
    from typing import get_args

    from vllm.config import cache

    # The plugin, where it has been loaded, has added those of KIVI pages.
    assert {*get_args(cache.CacheDType), *KIVI_DTYPES} == set(CACHE_DTYPES)


@pytest.mark.parametrize("skip", ["0", "2"])
@pytest.mark.parametrize("dtype", ["kivi_2bit", "kivi_4bit"])
@pytest.mark.parametrize("head_size", [64, 128])
def test_blocks_beside_layers_left_out_are_those_of_vllm_on_a_gpu(dtype, skip, head_size, tmp_path):
    from vllm.config import set_current_vllm_config
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    from tests.engine.test_kivi_settings import configured
    from vllm_kvcompress.attention.kivi import KiviBackend

    model = tiny_llama(tmp_path, head_dim=head_size, num_hidden_layers=4)
    config = configured(model, dtype, block_size=64, kv_cache_dtype_skip_layers=[skip])
    # vLLM takes the backend of the first layer.
    backend = TritonAttentionBackend if skip == "0" else KiviBackend
    with set_current_vllm_config(config):
        Platform._align_heterogeneous_kv_block_size(config, backend)
    cache = CacheOptions(dtype, KiviSettings(), (skip,))
    found = plan(ModelLayers.read(model), EngineOptions(block_size=64), cache)
    assert {pages.block for pages in found.groups[0]} == {config.cache_config.block_size}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["qwen3_next", "granitemoehybrid", "lfm2"])
def test_blocks_that_cover_the_states_of_hybrids_are_those_of_vllm(
    kind, device, tmp_path, monkeypatch
):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import MambaSpec

    model = tiny_hybrid(tmp_path, kind)
    backend = CPUAttentionBackend if device == "cpu" else TritonAttentionBackend
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=32 if device == "cpu" else 16,
    ).create_engine_config()
    monkeypatch.setattr(Platform, "_find_non_ssm_backends", lambda config: [backend])
    Platform._align_hybrid_block_size(config, backend)
    block = 32 if device == "cpu" else None
    found = plan(ModelLayers.read(model), EngineOptions(device, block_size=block), CacheOptions())
    pages = {page.kind: page for group in found.groups for page in group}
    assert pages["full"].block == pages["state"].block == config.cache_config.block_size
    padded = config.cache_config.mamba_page_size_padded
    assert padded in (None, pages["state"].page_bytes)
    mamba = MambaSpec(
        block_size=1,
        shapes=((1,),),
        dtypes=(config.model_config.dtype,),
        mamba_cache_mode=config.cache_config.mamba_cache_mode,
        num_prefill_checkpoint_blocks=int(kind == "granitemoehybrid"),
    )
    held = mamba.max_memory_usage_bytes(config) // mamba.page_size_bytes
    assert pages["state"].blocks(1000, 0) == held
