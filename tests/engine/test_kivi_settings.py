"""KIVI pages: every wrong setting is refused before a model is loaded, by a line that names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import running_engine
from vllm_kvcompress.config import KIVI_DTYPES, PRESETS, KiviSettings


def kivi(**settings: Any) -> dict[str, Any]:
    return {"kvcompress": {"kivi": settings}}


@pytest.mark.parametrize(
    ("additional_config", "expected"),
    [
        ({"kvcompress": 3}, ["kvcompress is 3"]),
        ({"kvcompress": []}, ["kvcompress is []"]),
        ({"kvcompress": {"kvi": {}}}, ["kvcompress", "'kvi'", "kivi"]),
        ({"kvcompress": {"kivi": "balanced"}}, ["kvcompress.kivi", "'balanced'"]),
        (kivi(group=32), ["kvcompress.kivi", "'group'", "group_size", "residual_length"]),
        (kivi(preset="paper"), ["preset", "'paper'", "kivi", "balanced"]),
        (kivi(preset=1), ["preset", "1"]),
        (kivi(group_size=16), ["group_size", "16", "32, 64 or 128"]),
        (kivi(group_size="64"), ["group_size", "'64'"]),
        (kivi(group_size=64.0), ["group_size", "64.0"]),
        (kivi(group_size=True), ["group_size", "True"]),
        (kivi(group_size=None), ["group_size", "None"]),
        (kivi(residual_length=0), ["residual_length", "0"]),
        (kivi(residual_length=-1), ["residual_length", "-1"]),
        (kivi(residual_length=1 << 30), ["residual_length"]),
        (kivi(residual_length="all"), ["residual_length", "'all'"]),
        (kivi(sink_tokens=-1), ["sink_tokens", "-1"]),
        (kivi(sink_tokens=33), ["sink_tokens", "33", "32"]),
        (kivi(sink_tokens=1.5), ["sink_tokens", "1.5"]),
        (kivi(sink_tokens=True), ["sink_tokens", "True"]),
        (kivi(boosted_channels=1.5), ["boosted_channels", "1.5"]),
        (kivi(boosted_channels=17), ["boosted_channels", "17", "16"]),
        (kivi(boosted_channels=-0.1), ["boosted_channels", "-0.1"]),
        (kivi(boosted_channels="most"), ["boosted_channels", "'most'"]),
        (kivi(boosted_channels=float("nan")), ["boosted_channels"]),
        (kivi(clipping="mse"), ["clipping", "'mse'", "none", "least_squares"]),
        (kivi(clipping=None), ["clipping", "None"]),
        (kivi(pool_share=0), ["pool_share", "0"]),
        (kivi(pool_share=1.0), ["pool_share", "1.0"]),
        (kivi(pool_share=float("nan")), ["pool_share"]),
        (kivi(pool_share="10%"), ["pool_share", "'10%'"]),
        (kivi(skip_dtype="kivi_2bit"), ["skip_dtype", "'kivi_2bit'", "auto", "fp8"]),
    ],
)
def test_a_wrong_setting_is_refused_by_name(additional_config, expected):
    with pytest.raises(ValueError) as error:
        KiviSettings.parse(additional_config)
    for word in expected:
        assert word in str(error.value)


@pytest.mark.parametrize("additional_config", [{}, None, {"kvcompress": {}}, kivi(), {"other": 1}])
def test_defaults_are_the_balanced_preset(additional_config):
    settings = KiviSettings.parse(additional_config)
    assert settings == KiviSettings()
    assert settings == KiviSettings(**PRESETS["balanced"])


def test_a_preset_gives_what_is_not_set():
    settings = KiviSettings.parse(kivi(preset="kivi", sink_tokens=4))
    assert settings == KiviSettings(**{**PRESETS["kivi"], "preset": "kivi", "sink_tokens": 4})


# --- an engine's configuration, nothing of which is loaded --------------------------------------


def configured(model: Path, kv_cache_dtype: str = "kivi_2bit", **settings: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model),
        kv_cache_dtype=kv_cache_dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        **{"max_model_len": 512, **settings},
    ).create_engine_config()


def transfer(**settings: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KVCompressConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }


@pytest.mark.parametrize("cache_dtype", KIVI_DTYPES)
def test_every_dtype_configures_an_engine(llama, cache_dtype):
    assert configured(llama, cache_dtype).cache_config.cache_dtype == cache_dtype


@pytest.mark.parametrize("cache_dtype", ["auto", "kivi_2bit"])
def test_in_place_equals_the_flag(llama, cache_dtype):
    config = configured(
        llama, cache_dtype, kv_transfer_config=transfer(in_place="kivi_2bit", codec="raw")
    )
    assert config.cache_config.cache_dtype == "kivi_2bit"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kv_cache_dtype": "kivi_3bit"}, ["kivi_3bit", "kivi_2bit"]),
        ({"additional_config": kivi(group_size=48)}, ["kvcompress.kivi", "group_size", "48"]),
        ({"additional_config": kivi(grup_size=32)}, ["kvcompress.kivi", "grup_size"]),
        ({"additional_config": {"kvcompress": {"kv": {}}}}, ["kvcompress", "'kv'"]),
        (
            {"block_size": 32, "additional_config": kivi(group_size=64)},
            ["group_size 64", "block of 32"],
        ),
        (
            {"block_size": 96, "additional_config": kivi(group_size=64)},
            ["group_size 64", "block of 96"],
        ),
        (
            {"additional_config": kivi(boosted_channels=48)},
            ["boosted", "48", "head size, 32"],
        ),
        ({"kv_transfer_config": transfer(in_place="kivi_4bit")}, ["in_place", "kivi_4bit"]),
        ({"kv_transfer_config": transfer(in_place="fp8")}, ["in_place", "'fp8'", "kivi_2bit"]),
        ({"kv_transfer_config": transfer(in_place=2)}, ["in_place", "2"]),
        ({"kv_transfer_config": transfer(in_place=["kivi_2bit"])}, ["in_place", "['kivi_2bit']"]),
        (
            {"kv_cache_dtype": "fp8", "kv_transfer_config": transfer(in_place="kivi_2bit")},
            ["in_place", "kivi_2bit", "--kv-cache-dtype", "fp8"],
        ),
        ({"kv_cache_dtype_skip_layers": ["2"]}, ["kv_cache_dtype_skip_layers", "'2'", "0 to 1"]),
        ({"kv_cache_dtype_skip_layers": ["01"]}, ["kv_cache_dtype_skip_layers", "'01'"]),
        ({"kv_cache_dtype_skip_layers": ["-1"]}, ["kv_cache_dtype_skip_layers", "'-1'"]),
        ({"kv_cache_dtype_skip_layers": ["first"]}, ["kv_cache_dtype_skip_layers", "'first'"]),
        (
            {"kv_cache_dtype_skip_layers": ["sliding_window"]},
            ["kv_cache_dtype_skip_layers", "sliding_window"],
        ),
        (
            {"kv_cache_dtype_skip_layers": ["1", "0"]},
            ["kv_cache_dtype_skip_layers", "leaves out every layer"],
        ),
        (
            {"additional_config": kivi(skip_dtype="fp8")},
            ["skip_dtype", "fp8"],
        ),
        ({"dtype": "float64"}, ["float64"]),
        (
            {
                "additional_config": kivi(residual_length=3),
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
            },
            ["3 speculative tokens", "residual_length 3"],
        ),
    ],
)
def test_an_engine_is_not_configured_with_a_wrong_setting(llama, settings, expected):
    with pytest.raises(ValueError) as error:
        configured(llama, **settings)
    for word in expected:
        assert word in str(error.value)


def test_skipped_layers_are_checked_under_every_dtype(llama):
    """vLLM itself ignores what it does not know."""
    with pytest.raises(ValueError, match="kv_cache_dtype_skip_layers"):
        configured(llama, "fp8", kv_cache_dtype_skip_layers=["7"])


def test_more_exact_tokens_than_speculative_ones_are_enough(llama):
    configured(
        llama,
        additional_config=kivi(residual_length=4),
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )


def test_sliding_window_names_layers_where_there_are_some(gemma3):
    config = configured(gemma3, kv_cache_dtype_skip_layers=["sliding_window", "0"])
    assert config.cache_config.kv_cache_dtype_skip_layers == ["sliding_window", "0"]


def test_without_a_block_size_one_is_found_that_the_group_divides(llama):
    config = configured(llama, additional_config=kivi(group_size=128))
    block = config.cache_config.block_size
    assert not config.cache_config.user_specified_block_size or block % 128 == 0


def test_windows_and_numbers_that_leave_out_every_layer_are_refused(gemma3):
    with pytest.raises(ValueError, match="leaves out every layer"):
        configured(gemma3, kv_cache_dtype_skip_layers=["sliding_window", "2", "6"])


def test_a_model_of_windows_only_cannot_leave_them_out(tmp_path):
    from tests.engine.models import tiny_llama

    model = tiny_llama(tmp_path)
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "sliding_window": 96}))
    with pytest.raises(ValueError, match="leaves out every layer"):
        configured(model, kv_cache_dtype_skip_layers=["sliding_window"])


def test_a_draft_with_a_cache_of_its_own_is_refused_by_name(llama):
    """A group's layers share the plan of a step, and the draft's steps are others."""
    with pytest.raises(ValueError, match=r"does not support draft models .* ngram"):
        configured(
            llama,
            speculative_config={
                "method": "draft_model",
                "model": str(llama),
                "num_speculative_tokens": 2,
            },
        )


def saved(config: Any, path: Path, architecture: str) -> Path:
    config.architectures = [architecture]
    config.save_pretrained(path)
    return path


def deepseek(path: Path) -> Path:
    from transformers import DeepseekV2Config

    return saved(
        DeepseekV2Config(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            moe_intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            kv_lora_rank=64,
            q_lora_rank=None,
            qk_rope_head_dim=32,
            qk_nope_head_dim=32,
            v_head_dim=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
        ),
        path,
        "DeepseekV2ForCausalLM",
    )


def falcon(path: Path) -> Path:
    from transformers import FalconH1Config

    return saved(
        FalconH1Config(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            mamba_n_heads=8,
            mamba_d_head=32,
            mamba_d_ssm=256,
            mamba_d_state=16,
        ),
        path,
        "FalconH1ForCausalLM",
    )


@pytest.mark.parametrize(
    ("make", "expected"), [(deepseek, "MLA"), (falcon, "Mamba")], ids=["mla", "mamba"]
)
def test_a_model_without_pages_of_k_and_v_is_refused_by_name(tmp_path, make, expected):
    with pytest.raises(ValueError, match=f"kv_cache_dtype kivi_2bit does not support .*{expected}"):
        configured(make(tmp_path))


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("decode_context_parallel_size", "decode context parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
    ],
)
def test_context_parallelism_is_refused_by_name(llama, field, expected):
    """On the CPU, vLLM itself refuses it first."""
    from vllm_kvcompress import checks

    config = configured(llama)
    setattr(config.parallel_config, field, 2)
    with pytest.raises(ValueError, match=expected):
        checks.check_config(config)


# --- an engine that starts ----------------------------------------------------------------------


def gemma3n(path: Path) -> Path:
    """The last two layers read the KV cache of earlier ones."""
    from transformers import Gemma3nTextConfig

    return saved(
        Gemma3nTextConfig(
            vocab_size=512,
            vocab_size_per_layer_input=512,
            hidden_size=128,
            hidden_size_per_layer_input=32,
            intermediate_size=[256] * 4,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=32,
            sliding_window=64,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_kv_shared_layers=2,
            laurel_rank=16,
            altup_num_inputs=2,
            activation_sparsity_pattern=[0.0] * 4,
        ),
        path,
        "Gemma3nForCausalLM",
    )


def test_a_model_whose_layers_share_a_cache_is_refused_by_name(tmp_path):
    with (
        pytest.raises(ValueError, match=r"shares the KV cache of .*layers\.[01]\."),
        running_engine(
            gemma3n(tmp_path),
            None,
            kv_cache_dtype="kivi_2bit",
            additional_config=kivi(group_size=32),
        ),
    ):
        pass


def test_a_kind_of_attention_that_attends_otherwise_is_refused_by_name(llama, monkeypatch):
    """It derives its backend from the selected one, whose builder then gets other sequences, or is
    to attend to later tokens."""
    from vllm.model_executor.layers.attention import prefill_prefix_lm_attention as prefix_lm
    from vllm.model_executor.models import llama as model

    monkeypatch.setattr(model, "Attention", prefix_lm.PrefillPrefixLMAttention)
    with (
        pytest.raises(ValueError, match=r"kivi_2bit: .*layers\.0\..* PrefillPrefixLMAttention"),
        running_engine(
            llama,
            None,
            kv_cache_dtype="kivi_2bit",
            additional_config=kivi(group_size=32),
        ),
    ):
        pass


def test_pages_that_are_padded_to_those_of_other_layers_are_told(gemma3, monkeypatch):
    from vllm_kvcompress.attention import kivi as backend

    said = []
    monkeypatch.setattr(
        backend.logger, "warning_once", lambda text, *values: said.append(text % values)
    )
    settings = {"kv_cache_dtype": "kivi_2bit", "additional_config": kivi(group_size=32)}
    with running_engine(gemma3, None, **settings):
        pass
    assert not said
    with running_engine(gemma3, None, kv_cache_dtype_skip_layers=["2"], **settings):
        pass
    assert said and all("kv_cache_dtype_skip_layers" in line for line in said)


def test_a_pool_that_holds_no_block_is_refused_by_name(llama):
    with (
        pytest.raises(ValueError, match=r"pool_share is 1e-06, less than one block of 32"),
        running_engine(
            llama,
            None,
            kv_cache_dtype="kivi_2bit",
            additional_config=kivi(group_size=32, pool_share=1e-6),
        ),
    ):
        pass


@pytest.mark.slow
def test_a_server_with_a_wrong_setting_ends_with_a_line_that_names_it(llama):
    run = subprocess.run(
        [
            str(Path(sys.executable).parent / "vllm"),
            *("serve", str(llama), "--kv-cache-dtype", "kivi_2bit", "--skip-tokenizer-init"),
            *("--additional-config", json.dumps(kivi(group_size=48))),
        ],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode
    assert "kvcompress.kivi: group_size is 48; expected 32, 64 or 128" in run.stdout + run.stderr
