"""What is told of a calibrated checkpoint: all that is there, what is wrong, and where."""

from __future__ import annotations

import copy
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.page_profiles import section
from tests.test_profile import HEADS, LAYERS, SIZE, make_profile
from vllm_kvcompress import cli, page_profile
from vllm_kvcompress.cli import calibrated
from vllm_kvcompress.codecs import profile as files

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": SIZE,
    "hidden_size": HEADS * SIZE,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    },
}
MADE = {"tokens": 2048, "data": "text.txt", "samples": 1}


def scale_name(layer: int, kind: str) -> str:
    return f"model.layers.{layer}.self_attn.{kind}_scale"


def good_scales() -> dict[str, torch.Tensor]:
    return {
        scale_name(layer, kind): torch.tensor([0.01 * (layer + 1)])
        for layer in range(LAYERS)
        for kind in "kv"
    }


@pytest.fixture(scope="module")
def profile():
    return make_profile()


def write_checkpoint(folder: Path, profile: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(good_scales(), folder / "model.safetensors")
    save_file(files.arrays_of(profile.transform), folder / files.TENSORS_NAME)
    content = {
        "format": 1,
        "cachegen": files.describe(profile.transform, profile.levels),
        "pages": section(layers=LAYERS, kv_heads=HEADS, head_size=SIZE),
        "calibration": MADE,
    }
    (folder / files.JSON_NAME).write_text(json.dumps(content))
    return folder


@pytest.fixture
def folder(profile, tmp_path) -> Path:
    return write_checkpoint(tmp_path, profile)


def shown(folder: Path, capsys, status: int) -> str:
    """What is printed, and that the command ends with this status."""
    assert cli.main(["inspect", str(folder)]) == status
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(folder: Path, capsys) -> str:
    """The one line of what cannot be read at all."""
    assert cli.main(["inspect", str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def change_json(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_scales(folder: Path, changed: dict[str, torch.Tensor | None]) -> None:
    held = {**good_scales(), **changed}
    kept = {name: tensor for name, tensor in held.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")


def line_of(out: str, layer: int) -> list[str]:
    return next(line.split() for line in out.splitlines() if line.split()[:1] == [str(layer)])


def test_a_good_checkpoint_is_shown_whole(folder, capsys):
    out = shown(folder, capsys, 0)
    assert "FP8 scales of 4 layers, strategy tensor, from 2,048 tokens of text.txt" in out
    assert line_of(out, 3) == ["3", "0.04", "0.04", "0.125", "0.125"]
    for words in ("profile ", "kivi_2bit: 1 nats a token", "clipping least_squares"):
        assert words in out
    assert not {"wrong:", "warning:"} & set(out.split())


# --- scales --------------------------------------------------------------------------------------


def test_a_layer_without_scales_leaves_its_cells_blank(folder, capsys):
    change_scales(folder, {scale_name(2, kind): None for kind in "kv"})
    out = shown(folder, capsys, 1)
    assert "wrong: layers 2 have no scales" in out
    assert line_of(out, 2) == ["2", "0.25", "0.25"]
    assert line_of(out, 3) == ["3", "0.04", "0.04", "0.125", "0.125"]


def test_a_first_layer_without_scales_takes_none_from_the_others(folder, capsys):
    change_scales(folder, {scale_name(0, kind): None for kind in "kv"})
    out = shown(folder, capsys, 1)
    assert line_of(out, 0) == ["0", "1", "1"]
    assert line_of(out, 1)[1:3] == ["0.02", "0.02"]
    assert out.split().index("k_scale") < out.split().index("fp8")


def test_a_layer_with_one_of_its_scales_shows_which_is_missing(folder, capsys):
    change_scales(folder, {scale_name(1, "v"): None})
    out = shown(folder, capsys, 1)
    assert "wrong: layer 1 has no v_scale" in out
    assert line_of(out, 1)[1:3] == ["0.02", "missing"]


def test_scales_of_layers_beyond_the_model_are_wrong(folder, capsys):
    change_scales(folder, {scale_name(44, "k"): torch.tensor([0.5])})
    out = shown(folder, capsys, 1)
    assert "wrong: layers 44 have scales, and the model has 4 layers" in out
    assert line_of(out, 44) == ["44", "0.5", "missing"]
    change_scales(folder, {})
    change_json(folder / "config.json", lambda config: config.update(num_hidden_layers=3))
    assert "layers 3 have scales, and the model has 3 layers" in shown(folder, capsys, 1)


@pytest.mark.parametrize("layers", [[1], range(LAYERS)])
def test_scales_that_were_left_at_one_are_told(layers, folder, capsys):
    change_scales(folder, {scale_name(layer, "k"): torch.ones(1) for layer in layers})
    out = shown(folder, capsys, 1)
    told = " ".join(map(str, layers))
    assert f"warning: k_scale left at 1.0 in layers {told}:" in out
    assert "v_scale left" not in out


def test_small_scales_are_shown_with_their_digits(folder, capsys):
    change_scales(folder, {scale_name(1, "k"): torch.tensor([1.25e-8])})
    assert line_of(shown(folder, capsys, 0), 1)[1] == "1.25e-08"
    change_scales(folder, {scale_name(1, "k"): torch.zeros(1)})
    assert "k_scale of layer 1 is zero" in shown(folder, capsys, 1)


@pytest.mark.parametrize(
    ("scale", "cell"), [(torch.empty(0), "empty"), (torch.tensor([torch.nan]), "nan")]
)
def test_scales_that_are_no_numbers_are_shown_and_drawn(scale, cell, folder, capsys):
    change_scales(folder, {scale_name(1, "k"): scale})
    out = shown(folder, capsys, 1)
    assert "wrong: k_scale of layer 1" in out
    assert line_of(out, 1)[1] == cell
    assert cli.main(["inspect", str(folder), "--plot", str(folder / "plot.svg")]) == 1
    assert '="nan"' not in (folder / "plot.svg").read_text()


def test_the_picture_has_what_only_some_layers_have(folder):
    change_scales(folder, {scale_name(0, kind): None for kind in "kv"})
    cli.main(["inspect", str(folder), "--plot", str(folder / "plot.svg")])
    assert "k_scale (largest 0.04)" in (folder / "plot.svg").read_text()


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", files.TENSORS_NAME])
@pytest.mark.parametrize("size", [0, 5, 60, -1])
def test_tensors_that_are_cut_off_are_told_by_the_name_of_the_file(name, size, folder, capsys):
    os.truncate(folder / name, size if size >= 0 else (folder / name).stat().st_size + size)
    told = refused(folder, capsys)
    assert f"{folder / name} cannot be read" in told
    assert "calibrate" in told


def test_tensors_of_a_dtype_that_torch_does_not_convert_are_told(folder, capsys):
    entry = {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}
    header = json.dumps({scale_name(0, "k"): entry}).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    assert f"{path} cannot be read" in refused(folder, capsys)


def test_weights_that_are_not_there_are_told_by_the_name_of_the_file(folder, capsys):
    path = folder / "model.safetensors"
    path.unlink()
    path.symlink_to(folder / "nothing")
    assert f"{path} cannot be read" in refused(folder, capsys)


@pytest.mark.parametrize("name", ["config.json", files.JSON_NAME])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000])
def test_json_that_is_damaged_is_told_by_the_name_of_the_file(name, content, folder, capsys):
    (folder / name).write_bytes(content)
    told = refused(folder, capsys)
    assert str(folder / name) in told
    assert "again" in told


@pytest.mark.parametrize("value", [[], [1], "compressed-tensors", 3, {"kv_cache_scheme": [1]}])
def test_a_quantisation_that_is_no_object_is_wrong(value, folder, capsys):
    change_json(folder / "config.json", lambda config: config.update(quantization_config=value))
    out = shown(folder, capsys, 1)
    assert f"wrong: {folder / 'config.json'}: " in out
    assert "calibrate again" in out


@pytest.mark.parametrize("value", ["token", 3, ["tensor"], {}])
def test_a_strategy_that_there_is_not_is_wrong(value, folder, capsys):
    scheme = {"kv_cache_scheme": {"strategy": value}}
    change_json(folder / "config.json", lambda config: config.update(quantization_config=scheme))
    assert "not tensor or attn_head; calibrate again" in shown(folder, capsys, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("model_type", "unknown"), ("num_hidden_layers", 1 << 50), ("num_hidden_layers", "x")],
)
def test_a_configuration_that_is_of_no_model_is_wrong(name, value, folder, capsys):
    change_json(folder / "config.json", lambda config: config.update({name: value}))
    out = shown(folder, capsys, 1)
    assert f"wrong: {folder / 'config.json'} is of no model that is known here" in out
    assert line_of(out, 3)[1:3] == ["0.04", "0.04"]


@pytest.mark.parametrize(
    "made", ["x", [], 3, {}, {"tokens": 3}, {**MADE, "tokens": "3"}, {**MADE, "data": None}]
)
def test_a_summary_that_makes_no_sense_is_wrong(made, folder, capsys):
    change_json(folder / files.JSON_NAME, lambda content: content.update(calibration=made))
    out = shown(folder, capsys, 1)
    assert f"wrong: {folder / files.JSON_NAME}: calibration" in out
    assert "calibrate again" in out


@pytest.mark.parametrize("level", [None, {}, {"alpha": [1, 1]}])
def test_a_level_too_many_in_the_profile_is_wrong(level, folder, capsys):
    path = folder / files.JSON_NAME
    change_json(path, lambda content: content["cachegen"]["levels"].update(best=level))
    out = shown(folder, capsys, 1)
    assert f"wrong: {path}: cachegen: " in out
    assert "calibrate again" in out
    assert "kivi_2bit" in out


def test_a_profile_without_its_arrays_is_wrong(folder, capsys):
    (folder / files.TENSORS_NAME).unlink()
    assert "holds no profile" in shown(folder, capsys, 1)


@pytest.mark.parametrize("value", [None, "x", True, -0.5, float("nan"), float("inf")])
def test_a_loss_allowed_that_is_no_number_is_wrong(value, folder, capsys):
    def change(content: dict[str, Any]) -> None:
        content["pages"]["max_loss"] = value
        if value is None:
            del content["pages"]["max_loss"]
        content["pages"]["digest"] = page_profile.digest_of(content["pages"])

    change_json(folder / files.JSON_NAME, change)
    out = shown(folder, capsys, 1)
    assert f"wrong: {folder / files.JSON_NAME}: pages: " in out
    assert "max_loss" in out


# --- anything ------------------------------------------------------------------------------------


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The paths of everything in a JSON value, but for lists deep in lists."""
    if isinstance(value, dict):
        below = list(value.items())
    elif isinstance(value, list):
        below = list(enumerate(value))[:3]
    else:
        below = []
    return ([path] if path else []) + [p for name, v in below for p in places(v, (*path, name))]


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from([[], {}, [0], [0, 0, 0], ["x"], {"x": 1}, 1 << 70, 10**400, "kivi_4bit"]),
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_whatever_stands_in_the_profile_is_shown_or_told(data, folder, profile, capsys):
    path = write_checkpoint(folder, profile) / files.JSON_NAME
    content = json.loads(path.read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(st.sampled_from(places(content)))
        place = content
        for name in way:
            place = place[name]
        if data.draw(st.integers(0, 4)) or isinstance(place, list):
            place[last] = copy.deepcopy(data.draw(VALUES))
        else:
            del place[last]
        if not content:
            break
    if isinstance(pages := content.get("pages"), dict) and data.draw(st.booleans()):
        pages["digest"] = page_profile.digest_of(pages)
    path.write_text(json.dumps(content))
    files._load.cache_clear()
    page_profile._load.cache_clear()
    try:
        found = calibrated.inspect_calibrated(folder)
    except (ValueError, OSError) as error:
        assert str(path) in str(error)
        return
    calibrated.print_calibrated(found)
    calibrated.plot_calibrated(found, folder / "plot.svg")
    json.dumps(found)
    assert all("again" in line for line in found["faults"])
