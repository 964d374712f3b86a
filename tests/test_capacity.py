"""Bytes of a KV cache from a config.json: known models by hand, and every wrong file refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.page_profiles import write_profile
from vllm_kvcompress.capacity import CacheOptions, EngineOptions, plan
from vllm_kvcompress.config import KIVI_DTYPES, KiviSettings
from vllm_kvcompress.model_layers import ModelLayers
from vllm_kvcompress.page_profile import load_page_profile

GIB = 1 << 30
CPU = EngineOptions(device="cpu", max_num_seqs=256)

LLAMA_3_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
SMOLLM2 = {
    **LLAMA_3_8B,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}
GEMMA = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "hidden_size": 640,
    "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "max_position_embeddings": 32768,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
}


QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16",
}


def kivi(**given: Any) -> KiviSettings:
    return KiviSettings.parse({"kvcompress": {"kivi": given}})


def planned(config: dict, dtype: str = "auto", engine: EngineOptions = CPU, **given: Any):
    skip = tuple(given.pop("skip_layers", ()))
    return plan(ModelLayers.parse(config), engine, CacheOptions(dtype, kivi(**given), skip))


def test_a_cache_of_16_bits_is_two_times_layers_heads_channels_and_bytes():
    found = planned(LLAMA_3_8B, engine=EngineOptions())
    assert found.token_bytes() == 2 * 32 * 8 * 128 * 2
    assert found.request_bytes(8192) == 8192 * 131072 == GIB
    assert found.request_bytes(1) == 16 * 131072  # a whole block


@pytest.mark.parametrize(
    ("given", "pages", "net"),
    [
        ({}, 530_176, 477_696),
        ({"group_size": 128}, 554_880, 499_968),
        ({"preset": "kivi"}, 497_024, 447_872),
        ({"preset": "kivi", "group_size": 64}, 596_480, 537_472),
    ],
    ids=["balanced", "balanced 128", "kivi 32", "kivi 64"],
)
def test_kivi_pages_hold_what_the_start_up_log_says(given, pages, net):
    found = planned(SMOLLM2, "kivi_2bit", **given)
    assert found.tokens(2 * GIB) == net
    assert replace(found, pool_block=0).tokens(2 * GIB) == pages
    assert found.pool_blocks(2 * GIB) == 72
    assert planned(SMOLLM2).tokens(2 * GIB) == 93_184


def test_the_pool_takes_no_more_than_its_share_and_no_more_than_is_wanted():
    found = planned(SMOLLM2, "kivi_2bit")
    assert found.pool_bytes(2 * GIB) <= 0.1 * 2 * GIB
    few = planned(SMOLLM2, "kivi_2bit", EngineOptions(device="cpu", max_num_seqs=2))
    assert few.pool_blocks(2 * GIB) == 4
    with pytest.raises(ValueError, match="pool_share"):
        found.tokens(1 << 20)


def test_a_profile_leaves_out_layers_and_gives_others_four_bits_as_the_engine_does(tmp_path):
    shape = {"layers": 30, "kv_heads": 3, "head_size": 64}
    told = {"four_bits": (0, 29), "kivi_skip_layers": (7,), "fp8_skip_layers": (3, 4)}
    profile = load_page_profile(write_profile(tmp_path / "own", **shape, **told))
    model = ModelLayers.parse(SMOLLM2)

    def block_bytes(dtype, **given):
        return plan(model, CPU, CacheOptions(dtype, **given)).block_bytes

    whole, two, four, fp8 = (block_bytes(d) for d in ("auto", "kivi_2bit", "kivi_4bit", "fp8"))
    assert 30 * block_bytes("kivi_2bit", profile=profile) == 27 * two + 2 * four + whole
    assert 30 * block_bytes("fp8", profile=profile) == 28 * fp8 + 2 * whole
    assert block_bytes("auto", profile=profile) == whole
    # What the user leaves out counts instead.
    named = block_bytes("kivi_2bit", skip_layers=("0",), profile=profile)
    assert 30 * named == 28 * two + four + whole
    other = load_page_profile(write_profile(tmp_path / "other", layers=28))
    with pytest.raises(ValueError, match="this model is another one"):
        block_bytes("kivi_2bit", profile=other)


def test_layers_left_out_keep_their_16_bits():
    whole, packed = planned(SMOLLM2), planned(SMOLLM2, "kivi_2bit")
    mixed = planned(SMOLLM2, "kivi_2bit", skip_layers=["0", "29"])
    expected = (28 * packed.block_bytes + 2 * whole.block_bytes) // 30
    assert mixed.block_bytes == expected
    fp8 = planned(SMOLLM2, "kivi_2bit", skip_layers=["0", "29"], skip_dtype="fp8")
    assert mixed.block_bytes - fp8.block_bytes == whole.block_bytes // 30


def test_ranks_share_the_heads_and_latents_are_on_every_rank():
    one, two = (EngineOptions(tensor_parallel_size=ranks) for ranks in (1, 2))
    halves = planned(LLAMA_3_8B, engine=two)
    assert 2 * halves.block_bytes == planned(LLAMA_3_8B, engine=one).block_bytes
    same = planned(DEEPSEEK_V3, engine=two)
    assert same.block_bytes == planned(DEEPSEEK_V3, engine=one).block_bytes
    sixteen = EngineOptions(tensor_parallel_size=16)
    assert planned(LLAMA_3_8B, engine=sixteen).block_bytes * 8 == (
        planned(LLAMA_3_8B, engine=one).block_bytes
    )
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 2.*3 KV heads"):
        planned(SMOLLM2, engine=two)


def test_a_latent_is_stored_once_and_an_indexer_beside_it():
    gpu = EngineOptions()
    assert planned(DEEPSEEK_V3).token_bytes() == 61 * 576 * 2
    assert planned(DEEPSEEK_V3, "fp8", gpu).token_bytes() == 61 * 576
    sparse = {**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_topk": 2048}
    sparse["index_head_dim"] = 128
    assert planned(sparse, "fp8_ds_mla", gpu).token_bytes() == 61 * (656 + 132)


def test_a_window_bounds_what_a_long_request_holds():
    found = planned(GEMMA)
    assert len(found.groups) == 6
    assert {len(group) for group in found.groups} == {3}
    long, longer = found.request_blocks(16384), found.request_blocks(32768)
    assert longer - long == 16384 // 128  # only the full layers, one group of six
    all_full = {**GEMMA, "layer_types": ["full_attention"] * 18}
    assert found.request_bytes(32768) < planned(all_full).request_bytes(32768) / 2


def test_states_of_a_hybrid_do_not_grow_and_blocks_cover_them():
    found = planned(QWEN3_NEXT, engine=EngineOptions())
    state = 2 * (8192 * 3 + 32 * 128 * 128)  # 8192 channels of a convolution, 32 heads
    assert {pages.block for group in found.groups for pages in group} == {544}
    assert state <= found.groups[0][0].page_bytes == 544 * 2048
    assert [len(group) for group in found.groups] == [12, 12, 12, 12]
    assert found.request_blocks(544 * 10) == 10 + 3 * 2
    assert found.token_bytes() == 12 * 2048
    ranks = EngineOptions(tensor_parallel_size=2)
    assert 2 * planned(QWEN3_NEXT, engine=ranks).block_bytes == found.block_bytes


def test_fp8_that_a_checkpoint_asks_for_is_what_auto_means():
    scheme = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
    asked = planned({**LLAMA_3_8B, **scheme})
    assert asked.block_bytes == planned(LLAMA_3_8B, "fp8").block_bytes
    modelopt = {"quantization_config": {"kv_cache_quant_algo": "FP8"}}
    assert planned({**LLAMA_3_8B, **modelopt}).block_bytes == asked.block_bytes


@pytest.mark.parametrize("key", ["text_config", "llm_config"])
def test_the_language_model_of_a_multimodal_one_is_counted(key):
    config = {"model_type": "llava", "torch_dtype": "bfloat16", key: LLAMA_3_8B}
    assert planned(config).block_bytes == planned(LLAMA_3_8B).block_bytes


@pytest.mark.parametrize(
    ("config", "windows", "heads"),
    [
        ({"model_type": "mistral", "sliding_window": None}, 0, 8),
        ({"model_type": "mistral", "sliding_window": 4096}, 32, 8),
        ({"model_type": "mistral"}, 32, 8),  # its class has a window
        ({"model_type": "qwen2", "sliding_window": 4096}, 0, 8),  # and its class no use of it
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, 0, 8),
        ({"model_type": "gpt_oss"}, 16, 8),
        ({"model_type": "falcon", "n_head_kv": 8, "new_decoder_architecture": True}, 0, 8),
        ({"model_type": "falcon", "multi_query": True}, 0, 1),
        ({"model_type": "dbrx", "attn_config": {"kv_n_heads": 4}}, 0, 4),
        ({"model_type": "minimax_m2", "attn_type_list": [1] * 32}, 0, 8),
    ],
)
def test_windows_and_heads_are_those_that_vllm_takes(config, windows, heads):
    found = ModelLayers.parse({**LLAMA_3_8B, **config})
    assert sum(1 for layer in found.layers if layer.window) == windows
    assert found.layers[0].kv_heads == heads


def test_a_model_of_an_unknown_type_is_counted_and_told(capsys):
    found = ModelLayers.parse({**LLAMA_3_8B, "model_type": "brand_new"})
    assert len(found.layers) == 32
    assert found.assumed == "brand_new: its layers are taken as alike"
    assert not ModelLayers.parse(LLAMA_3_8B).assumed


def test_what_a_config_leaves_out_comes_from_its_class():
    known = {"model_type": "gemma2", "num_hidden_layers": 4}
    found = ModelLayers.parse(known)
    assert [layer.window for layer in found.layers] == [4096, None, 4096, None]
    assert (found.layers[0].kv_heads, found.layers[0].key_size) == (4, 256)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": None}, "model_type is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"num_hidden_layers": 1 << 30}, "num_hidden_layers is"),
        ({"num_key_value_heads": -8}, "num_key_value_heads is -8"),
        ({"num_key_value_heads": [8] * 32}, "num_key_value_heads"),
        ({"hidden_size": 1}, "hidden_size is less"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"layer_types": ["full_attention"]}, "one entry for each of 32"),
        ({"layer_types": ["linear_attention"] * 32}, "'linear_attention', which is not counted"),
        ({"layers_block_type": ["mamba"]}, "are not counted"),
        ({"model_type": "mamba"}, "models of type mamba are not counted"),
        ({"is_encoder_decoder": True}, "are not counted"),
        ({"attn_type_list": [0, 1]}, "attn_type_list"),
        ({"v_head_dim": 64}, "K has 128 channels a head and V 64"),
        ({"sliding_window": "wide"}, "sliding_window is 'wide'"),
    ],
)
def test_a_config_that_cannot_be_counted_is_refused_by_the_name_of_the_field(change, expected):
    with pytest.raises(ValueError, match=expected):
        ModelLayers.parse({**LLAMA_3_8B, **change})


@pytest.mark.parametrize(
    ("config", "dtype", "given", "expected"),
    [
        (QWEN3_NEXT, "kivi_2bit", {}, "models with Mamba or other state layers"),
        (QWEN3_NEXT, "fp8", {"skip_layers": ["3"]}, "not counted for models with state layers"),
        (LLAMA_3_8B, "kivi_3bit", {}, "kivi_3bit.*choose from.*kivi_2bit"),
        (LLAMA_3_8B, "nvfp4", {}, "nvfp4: the CPU engine cannot do it.*choose from.*kivi_2bit"),
        (DEEPSEEK_V3, "fp8", {}, "fp8: the CPU engine cannot do it"),
        (LLAMA_3_8B, "kivi_2bit", {"skip_layers": ["32"]}, "no layer '32'; choose from 0 to 31"),
        (LLAMA_3_8B, "kivi_2bit", {"skip_layers": ["sliding_window"]}, "no layer of this model"),
        ({**GEMMA, "num_kv_shared_layers": 2}, "kivi_2bit", {}, "share the KV cache"),
        ({**LLAMA_3_8B, "head_dim": 48}, "kivi_2bit", {}, "head_size is 48"),
    ],
)
def test_a_cache_that_cannot_be_is_refused_by_the_name_of_the_setting(
    config, dtype, given, expected
):
    with pytest.raises(ValueError, match=expected):
        planned(config, dtype, **given)


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        (LLAMA_3_8B, "fp8_ds_mla", "for models with MLA only"),
        (DEEPSEEK_V3, "kivi_2bit", "kivi_2bit does not support multi-head latent"),
        (DEEPSEEK_V3, "nvfp4", "nvfp4 does not support models with MLA"),
    ],
)
def test_a_cache_that_no_gpu_has_is_refused(config, dtype, expected):
    with pytest.raises(ValueError, match=expected):
        planned(config, dtype, EngineOptions())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"device": "tpu"}, "device is 'tpu'; choose from cpu, cuda"),
        ({"block_size": 0}, "block_size is 0"),
        ({"tensor_parallel_size": -1}, "tensor_parallel_size is -1"),
    ],
)
def test_wrong_options_of_an_engine_are_refused(options, expected):
    with pytest.raises(ValueError, match=expected):
        EngineOptions(**options)


def test_a_block_that_no_kernel_takes_is_refused():
    with pytest.raises(ValueError, match="block_size is 40; expected a multiple of 32"):
        planned(LLAMA_3_8B, engine=EngineOptions(device="cpu", block_size=40))
    with pytest.raises(ValueError, match="block_size is 32; expected a multiple of 64"):
        planned(LLAMA_3_8B, "kivi_2bit", EngineOptions(block_size=32))


def test_a_model_is_found_by_folder_by_file_and_never_by_a_wrong_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    for name in (tmp_path, str(tmp_path), tmp_path / "config.json"):
        assert len(ModelLayers.read(name).layers) == 32
    with pytest.raises(ValueError, match="name a model's folder"):
        ModelLayers.read(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"hf download nobody/nothing config\.json"):
        ModelLayers.read("nobody/nothing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        ModelLayers.read(tmp_path)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 40), 1 << 40)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    base=st.sampled_from([LLAMA_3_8B, GEMMA, DEEPSEEK_V3, QWEN3_NEXT]),
    changes=st.dictionaries(
        st.sampled_from(
            [
                *(*LLAMA_3_8B, *GEMMA, *DEEPSEEK_V3, *QWEN3_NEXT, "num_kv_shared_layers"),
                *(
                    "text_config",
                    "quantization_config",
                    "index_topk",
                    "index_topk_pattern",
                    "index_head_dim",
                ),
            ]
        ).filter(lambda name: name != "model_type"),
        json_values,
        max_size=3,
    ),
    dtype=st.sampled_from(["auto", "fp8", "nvfp4", *KIVI_DTYPES]),
)
def test_any_config_is_counted_or_refused_in_words(base, changes, dtype):
    try:
        found = planned({**base, **changes}, dtype)
    except ValueError as error:
        assert str(error)
    else:
        assert found.block_bytes > 0
        assert found.request_blocks(1) >= 1


@pytest.mark.parametrize("config", [None, [], "model", 3])
def test_a_file_without_an_object_is_refused(config):
    with pytest.raises(ValueError, match="holds no object"):
        ModelLayers.parse(config)
