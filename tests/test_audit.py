"""The audit of FP8 scales: what it reads from a checkpoint, what it finds, and how it says so."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from vllm_kvcompress import audit, audit_metrics


class Vectors:
    """A backend that takes scales per head."""

    supports_per_head_quant_scales = staticmethod(lambda: True)


class Floats:
    """A backend that has one scale a layer."""

    supports_per_head_quant_scales = staticmethod(lambda: False)


def layer(k, v, dtype="fp8", backend=Vectors, heads=2):
    return SimpleNamespace(
        kv_cache_dtype=dtype,
        num_kv_heads=heads,
        attn_backend=backend,
        impl=object(),
        _k_scale=torch.tensor(k),
        _v_scale=torch.tensor(v),
        _k_scale_float=float(torch.tensor(k).max()),
        _v_scale_float=float(torch.tensor(v).max()),
    )


def name(number):
    return f"model.layers.{number}.self_attn.attn"


def audited(*layers, checkpoint=None, **ranks):
    """Rows of layers by number; the checkpoint's scales as ``{number: (k, v)}``."""
    stored = {
        f"model.layers.{number}.self_attn": {"k": tuple(k), "v": tuple(v)}
        for number, (k, v) in (checkpoint or {}).items()
    }
    return audit.audit_layers({name(i): x for i, x in enumerate(layers)}, stored, **ranks)


def test_scales_that_come_from_the_checkpoint_are_good_per_tensor_and_per_head():
    rows = audited(
        layer([0.5], [0.25]),
        layer([0.5, 0.1], [0.25, 0.2]),
        checkpoint={0: ([0.5], [0.25]), 1: ([0.5, 0.1], [0.25, 0.2])},
    )
    assert [row.state for row in rows] == ["ok", "ok"]
    assert [row.per_head for row in rows] == [False, True]
    assert not audit.complaints(rows)
    text = audit.summary(rows)
    assert "layers 0-1, scales mixed, 2 of 2 from the checkpoint" in text
    assert "K 0.1 to 0.5, V 0.2 to 0.25" in text


@pytest.mark.parametrize(
    "found, stored, problem",
    [
        (layer([1.0], [1.0]), None, "missing"),
        (layer([1.0], [1.0]), ([1.0], [1.0]), "one"),
        (layer([1.0], [0.5]), ([1.0], [0.5]), "one"),
        (layer([0.5, 0.1], [1.0, 1.0]), ([0.5, 0.1], [1.0, 1.0]), "one"),
        (layer([0.5, 0.1], [0.5, 0.1]), ([0.5, 0.1, 0.5, 0.1], [0.5, 0.1]), "heads"),
        (layer([0.0], [0.5]), ([0.0], [0.5]), "bad"),
        (layer([float("nan")], [0.5]), ([float("nan")], [0.5]), "bad"),
        (layer([0.5], [1e30]), ([0.5], [1e30]), "bad"),
        (layer([-0.5], [0.5]), ([-0.5], [0.5]), "bad"),
        (layer([0.5, 0.1], [0.5, 0.1], backend=Floats), ([0.5, 0.1], [0.5, 0.1]), "collapsed"),
        (layer([0.5], [0.5]), ([0.5, 0.1], [0.5, 0.1]), "collapsed"),
        (layer([1.0], [1.0]), ([0.5], [0.5]), "unused"),
        (layer([0.5, 0.1], [0.5, 0.1]), ([0.1, 0.5], [0.5, 0.1]), "unused"),
    ],
)
def test_every_problem_is_found_and_its_layer_is_named(found, stored, problem):
    good = layer([0.5], [0.5])
    rows = audited(good, good, found, checkpoint={0: ([0.5], [0.5]), 1: ([0.5], [0.5]), 2: stored}
                   if stored else {0: ([0.5], [0.5]), 1: ([0.5], [0.5])})  # fmt: skip
    assert [row.state for row in rows[:2]] == ["ok", "ok"]
    assert problem in rows[2].problems
    assert f"FP8 scales: layers 2 {audit.PROBLEMS[problem]}" in audit.complaints(rows)


def test_a_scale_that_is_not_a_number_is_bad_and_no_other_than_the_checkpoint_s():
    nan = float("nan")
    rows = audited(layer([nan], [0.5]), layer([0.5], [0.5]),
                   checkpoint={0: ([nan], [0.5]), 1: ([0.5], [0.5])})  # fmt: skip
    assert rows[0].problems == ("bad",)
    text = audit.summary(rows)
    assert "2 of 2 from the checkpoint; K 0.5, some not finite, V 0.5" in text


def test_skipped_layers_and_other_dtypes_are_told_and_not_complained_of():
    rows = audited(
        layer([1.0], [1.0], "auto"), layer([1.0], [1.0], "kivi_2bit"), layer([0.5], [0.5]),
        checkpoint={0: ([0.5], [0.5]), 2: ([0.5], [0.5])},
    )  # fmt: skip
    assert [row.state for row in rows] == ["skipped", "packed", "ok"]
    assert not audit.complaints(rows)
    text = audit.summary(rows)
    assert "the model's dtype: layers 0" in text and "kivi_2bit: layers 1" in text


def test_e5m2_needs_no_scales():
    assert audited(layer([1.0], [1.0], "fp8_e5m2"))[0].state == "ok"


@pytest.mark.parametrize(
    "heads, ranks, parts",
    [
        (2, 2, [(1.0, 2.0), (3.0, 4.0)]),
        (1, 8, [(1.0,), (1.0,), (2.0,), (2.0,), (3.0,), (3.0,), (4.0,), (4.0,)]),
    ],
)
def test_a_rank_is_held_to_the_scales_of_its_own_heads(heads, ranks, parts):
    whole = (1.0, 2.0, 3.0, 4.0)
    for rank, part in enumerate(parts):
        mine = layer(list(part), list(part), heads=heads)
        rows = audited(mine, checkpoint={0: (whole, whole)}, rank=rank, ranks=ranks)
        assert not {"unused", "collapsed"} & {*rows[0].problems}
        other = layer([9.0] * heads, [9.0] * heads, heads=heads)
        rows = audited(other, checkpoint={0: (whole, whole)}, rank=rank, ranks=ranks)
        assert rows[0].problems[0] == "unused"


def test_scales_are_read_under_every_name_that_checkpoints_use(tmp_path):
    names = (
        "0.self_attn.v_scale",
        "1.self_attn.attn.k_scale",
        "1.self_attn.attn.v_scale",
        "2.self_attn.k_proj.output_scale",
        "2.self_attn.v_proj.output_scale",
        "4.self_attn.k_proj.weight",
    )
    tensors = {f"model.layers.{name}": torch.tensor([0.5]) for name in names}
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([[[0.5]], [[0.25]]])
    save_file(tensors, tmp_path / "model.safetensors")
    both = {"model.layers.3.self_attn.kv_scale": torch.tensor([0.5])}
    save_file(both, tmp_path / "more.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 40)
    found = audit.checkpoint_scales(tmp_path)
    assert set(found) == {f"model.layers.{i}.self_attn" for i in range(4)}
    assert found["model.layers.0.self_attn"]["k"] == (0.5, 0.25)
    assert found["model.layers.3.self_attn"] == {"k": (0.5,), "v": (0.5,)}


def test_layers_are_matched_though_a_checkpoint_names_their_parents_otherwise():
    rows = audit.audit_layers(
        {"language_model.model.layers.5.self_attn.attn": layer([0.5], [0.5])},
        {"model.language_model.layers.5.self_attn": {"k": (0.5,), "v": (0.5,)}},
    )
    assert rows[0].state == "ok"


@given(st.binary(max_size=200))
def test_any_file_in_the_place_of_weights_is_read_or_passed_by(content):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.safetensors").write_bytes(content)
        assert isinstance(audit.checkpoint_scales(Path(folder)), dict)


def test_counts_of_every_worker_are_served_by_the_front_end(tmp_path, monkeypatch):
    monkeypatch.setattr(audit_metrics.tempfile, "gettempdir", lambda: str(tmp_path))
    audit_metrics.publish("one", 0, ["ok", "ok", "missing"])
    audit_metrics.publish("one", 1, ["ok"])
    audit_metrics.publish("another", 0, ["ok"])
    (audit_metrics._folder("one") / "2.json").write_text("{")
    collector = audit_metrics._Collector()
    collector.instance = "one"
    samples = [s for family in collector.collect() for s in family.samples]
    assert {(s.labels["rank"], s.labels["state"], s.value) for s in samples} == {
        ("0", "ok", 2), ("0", "missing", 1), ("1", "ok", 1),
    }  # fmt: skip
    assert json.loads((audit_metrics._folder("another") / "0.json").read_text()) == {"ok": 1}
