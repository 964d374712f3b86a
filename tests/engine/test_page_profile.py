"""A profile of pages in the engine: what it gives, what the user says instead, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fp8_models import copy_checkpoint, declare_scheme
from tests.engine.conftest import CHUNK, prompt, running_engine
from tests.engine.models import tiny_llama
from tests.engine.test_kivi import served
from tests.engine.test_kivi_settings import configured
from tests.engine.test_page_kinds import LOSSLESS, restored_equals_local
from tests.page_profiles import section, write_profile
from vllm_kvcompress import checks, compat

LAYERS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama4"), num_hidden_layers=LAYERS)


@pytest.fixture
def told(monkeypatch):
    """What the checks of a configuration have told."""
    lines: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(checks.logger, level, lambda form, *of: lines.append(form % of))
    return lines


def profile(folder: Path, **of: Any) -> str:
    return str(write_profile(folder, layers=LAYERS, **of))


def settings(folder: str, **kivi: Any) -> dict[str, Any]:
    return {"kvcompress": {"profile": folder, "kivi": kivi}}


def skipped(config: Any) -> list[str]:
    return config.cache_config.kv_cache_dtype_skip_layers


@pytest.mark.parametrize(
    ("cache_dtype", "expected"), [("kivi_2bit", ["2"]), ("kivi_4bit", ["2"]), ("fp8", ["0", "3"])]
)
def test_the_layers_of_the_profile_are_left_out(model, tmp_path, told, cache_dtype, expected):
    folder = profile(tmp_path, four_bits=(1,), kivi_skip_layers=(2,), fp8_skip_layers=(0, 3))
    config = configured(model, cache_dtype, additional_config={"kvcompress": {"profile": folder}})
    assert skipped(config) == expected
    (line,) = told
    assert f"left out layers {', '.join(expected)}" in line
    assert ("four bits for layers 1" in line) == (cache_dtype != "fp8")


def test_layers_that_the_user_names_are_left_out_instead(model, tmp_path):
    folder = profile(tmp_path, kivi_skip_layers=(2,))
    config = configured(model, additional_config=settings(folder), kv_cache_dtype_skip_layers=["0"])
    assert skipped(config) == ["0"]


def test_a_dtype_without_compressed_pages_warns_that_the_profile_changes_nothing(
    model, tmp_path, told
):
    config = configured(model, "auto", additional_config=settings(profile(tmp_path)))
    assert skipped(config) == []
    assert "changes nothing, as kv_cache_dtype is auto" in told[0]


def test_auto_means_fp8_pages_for_a_calibrated_checkpoint_and_takes_their_profile(
    model, tmp_path, told
):
    checkpoint = copy_checkpoint(model, tmp_path / "calibrated")
    declare_scheme(checkpoint, "tensor")
    given = {"kvcompress": {"profile": profile(tmp_path / "profile", fp8_skip_layers=(0, 3))}}
    config = configured(checkpoint, "auto", additional_config=given)
    assert skipped(config) == ["0", "3"]
    assert "FP8 pages: profile" in told[0]
    assert configured(checkpoint, "bfloat16").cache_config.cache_dtype == "bfloat16"


def test_a_misspelt_name_of_the_settings_is_pointed_at(model, told):
    configured(model, "fp8", additional_config={"kvcompres": {"fp8": {}}, "other": 1})
    (line,) = told
    assert "'kvcompres' is nobody's; did you mean 'kvcompress'?" in line


@pytest.mark.parametrize(
    ("cache_dtype", "layers", "expected"),
    [
        ("auto", ["1"], "changes nothing, as kv_cache_dtype is auto"),
        ("fp8", ["0", "1", "2", "3"], "leaves out every layer"),
    ],
)
def test_layers_left_out_of_nothing_are_told(model, told, cache_dtype, layers, expected):
    configured(model, cache_dtype, kv_cache_dtype_skip_layers=layers)
    assert expected in told[0]


def test_a_model_that_holds_a_profile_names_the_setting(tmp_path, told):
    folder = tiny_llama(tmp_path / "model")
    write_profile(folder)
    config = configured(folder)
    assert skipped(config) == []
    (line,) = told
    assert json.dumps({"kvcompress": {"profile": str(folder)}}) in line
    told.clear()
    configured(folder, "auto")
    (folder / "kvcompress.json").write_text("{}")
    configured(folder)
    assert told == []


@pytest.mark.parametrize("cache_dtype", ["kivi_2bit", "fp8", "auto"])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (section(layers=3), r"of some/model \(llama, 3 layers of 2 KV heads of 32\).* 4 layers"),
        (section(layers=LAYERS, model_type="qwen3"), r"qwen3, 4 layers.*llama, 4 layers"),
        ({**section(layers=LAYERS), "windows": 7}, "is damaged or of another version"),
        (None, "holds no profile"),
    ],
    ids=["layers", "type", "damaged", "missing"],
)
def test_a_profile_that_is_not_of_this_model_is_refused_before_it_is_loaded(
    model, tmp_path, cache_dtype, content, expected
):
    if content is not None:
        write_profile(tmp_path, content)
    with pytest.raises(ValueError, match=f"(?s)kvcompress: profile: .*{expected}"):
        configured(model, cache_dtype, additional_config=settings(str(tmp_path)))


def test_layers_with_and_without_a_window_keep_the_same_bits(gemma3, tmp_path, told):
    of = {"layers": 7, "kv_heads": 1, "head_size": 64, "model_type": "gemma3_text"}
    write_profile(tmp_path, four_bits=(0, 1), kivi_skip_layers=(2,), fp8_skip_layers=(2,), **of)
    given = settings(str(tmp_path))
    config = configured(gemma3, additional_config=given)
    assert skipped(config) == []
    assert "the same bits for all layers" in told[0]
    assert checks.layer_dtype(config, "model.layers.0.self_attn.attn", None) is None
    assert skipped(configured(gemma3, "fp8", additional_config=given)) == ["2"]


def test_layers_of_different_bits_compute_what_the_truth_does(model, tmp_path):
    folder = profile(tmp_path, four_bits=(1, 3), kivi_skip_layers=(2,))
    fields = {"preset": "kivi", "group_size": 32, "residual_length": 48}
    impls = served(model, additional_config=settings(folder, **fields))
    assert [impl.kv_cache_dtype for impl in impls] == ["kivi_2bit", "kivi_4bit", "kivi_4bit"]
    assert [impl.fmt.key_bits for impl in impls] == [2, 4, 4]


def test_the_clipping_of_the_profile_is_used(model, tmp_path):
    folder = profile(tmp_path, clipping="none")
    impls = served(model, additional_config=settings(folder, group_size=32, residual_length=48))
    assert {impl.fmt.fit for impl in impls} == {"minmax"}


@pytest.mark.slow
def test_more_bits_for_some_layers_take_room_for_fewer_tokens(model, tmp_path):
    blocks = []
    for four in ((), (1,), (0, 1, 2, 3)):
        folder = profile(tmp_path / str(len(four)), four_bits=four)
        with running_engine(
            model, kv_cache_dtype="kivi_2bit", additional_config=settings(folder, group_size=32)
        ) as engine:
            blocks.append(engine.core.scheduler.kv_cache_config.num_blocks)
    assert blocks[0] > blocks[1] > blocks[2]


@pytest.mark.parametrize("residual", [8, 512], ids=["packed", "exact"])
def test_layers_of_different_bits_are_stored_and_restored(model, tmp_path, residual):
    folder = profile(tmp_path, four_bits=(1,), kivi_skip_layers=(2,))
    restored, local = restored_equals_local(
        model,
        LOSSLESS,
        kv_cache_dtype="kivi_2bit",
        additional_config=settings(folder, group_size=32, residual_length=residual),
    )
    assert (restored.tokens, restored.logprobs) == (local.tokens, local.logprobs)


def test_fp8_pages_leave_out_the_layers_of_the_profile(model, tmp_path):
    folder = profile(tmp_path, fp8_skip_layers=(1,))
    with running_engine(
        model, kv_cache_dtype="fp8", additional_config={"kvcompress": {"profile": folder}}
    ) as engine:
        layers = compat.attention_layers(engine.llm.llm_engine.vllm_config).values()
        assert [layer.kv_cache_dtype for layer in layers] == ["fp8", "auto", "fp8", "fp8"]
        assert engine.generate(prompt(100))[0].tokens


@pytest.mark.slow
def test_the_digest_and_not_the_place_of_a_profile_is_in_the_keys(model, tmp_path):
    stores = {"stores": [{"type": "disk", "path": str(tmp_path / "store"), "bytes": "1GiB"}]}
    text = prompt(4 * CHUNK + 10)
    cached = []
    for name, of in (("a", {}), ("b", {}), ("c", {"clipping": "none"}), ("d", {"four_bits": (0,)})):
        folder = profile(tmp_path / name, **of)
        with running_engine(
            model,
            stores,
            kv_cache_dtype="kivi_2bit",
            additional_config=settings(folder, group_size=32),
        ) as engine:
            cached.append(engine.generate(text, tokens=1)[0].cached)
            engine.settle()
    assert cached == [0, 4 * CHUNK, 0, 0]
