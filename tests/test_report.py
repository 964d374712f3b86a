"""The page: from files that the other commands write, complete, alone, and refused if they lie."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import resvg_py
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.test_capacity import SMOLLM2
from vllm_kvcompress import cli
from vllm_kvcompress.cli.bench import print_bench
from vllm_kvcompress.cli.eval import print_eval
from vllm_kvcompress.evaluation import charts, pictures, report, speed
from vllm_kvcompress.evaluation.quality import Inputs, Measured, summary
from vllm_kvcompress.evaluation.tasks import Question
from vllm_kvcompress.evaluation.verdict import Tolerance, judge

INK = {"ink": "#000", "soft": "#666", "card": "#fff"}


def chart(text: str) -> str:
    return charts._svg(100, 40, "t", [charts._text(4, 20, text)])


def evaluation() -> dict:
    asked = [Question(task, 512, 0.5, [], "1") for task in ("passkey", "passages") for _ in "12"]
    inputs = Inputs(windows=[[]] * 3, questions=asked, prompts=[[]])
    base = Measured([2.0, 2.5, 3.0], [True] * 4, [[1, 2]], [1.0])
    rows = []
    for name, bits, loss in (("auto", 16.0, 0.0), ("kivi_2bit", 2.8, 0.01), ("a<b>&", 2.0, 0.5)):
        mine = Measured([n + loss for n in base.nats], [True] * 4, [[1, 2]], [1.0])
        row = {"name": name, "bits_per_value": bits, **summary(inputs, mine, base)}
        rows.append(row | (judge(row, Tolerance(0.05, 1.0)) if name != "auto" else {}))
    rows.append({"name": "nvfp4", "bits_per_value": 4.5, "refused": "for GPUs <only>"})
    plan = {"history": 1024}
    return {"kind": "eval", "model": "m", "plan": plan, "confidence": 0.95, "settings": rows}


def timings() -> dict:
    runs = []
    for round_ in range(3):
        for setting, factor in (("auto", 1.0), ("offload:raw", 1.1)):
            one = {name: factor * (10 + round_) for name in speed.FIGURES}
            phases = {"cold": one, "warm": one}
            if setting != "auto":
                phases["restored"] = {**one, "restored_share": 0.5}
            place = {"round": round_, "setting": setting, "context": 64, "concurrency": 2}
            runs.append({**place, "phases": phases})
    return {
        "kind": "bench",
        "model": "m",
        "load": {"rounds": 3, "requests": 1, "output_tokens": 8},
        "settings": ["auto", "offload:raw"],
        "rows": speed.rows(runs, "auto"),
    }


@pytest.fixture
def files(tmp_path: Path, capsys: pytest.CaptureFixture) -> list[Path]:
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SMOLLM2))
    assert cli.main(["estimate", str(model), "--kv-memory", "2GiB", "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)
    paths = []
    for name, found in (("e", estimate), ("q", evaluation()), ("b", timings())):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(found))
    return paths


def run(*arguments: object) -> int:
    return cli.main(["report", *map(str, arguments)])


def test_the_page_has_every_section_and_needs_no_network(files, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert run(*files, "--out", out) == 0
    assert capsys.readouterr().out.strip() == str(out)
    html = out.read_text()
    names = re.findall(r'<section id="(\w+)"', html)
    assert names == ["capacity", "levels", "quality", "retrieval", "rate_distortion", "latency"]
    addresses = set(re.findall(r'https?://[^"\s]+', html))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\(", html)
    assert "prefers-color-scheme:dark" in html and "width=device-width" in html
    assert "{" not in re.sub(r"<style>.*?</style>", "", html, flags=re.S)


def test_names_in_the_files_are_text_in_the_page(files, tmp_path):
    out = tmp_path / "page.html"
    run(*files, "--out", out)
    html = out.read_text()
    assert "a<b>" not in html and "a&lt;b&gt;&amp;" in html
    assert "for GPUs &lt;only&gt;" in html


def test_eval_and_bench_print_tables_that_a_person_can_read(capsys):
    print_eval(evaluation())
    print_bench(timings())
    out = capsys.readouterr().out
    assert re.search(r"kivi_2bit +2\.80 +\+0\.010 ± 0\.000 +2/2 +2/2 +100% +passed", out)
    assert re.search(r"nvfp4 +for GPUs", out)
    assert re.search(r"offload:raw +restored +12 ms +1\.10 \[1\.10, 1\.10\]", out)
    assert max(map(len, out.splitlines())) <= 110


def test_the_findings_stand_at_the_top(files, tmp_path):
    out = tmp_path / "page.html"
    run(*files, "--out", out)
    top = out.read_text().partition("<section")[0]
    assert "<b>kivi_2bit</b> (2.8 bits instead of 16) is the smallest that passed" in top
    assert "the tokens in the same memory" in top
    assert "<b>1.10\N{MULTIPLICATION SIGN}</b> the time" in top


def test_every_chart_is_well_formed_in_both_widths_and_inside_its_width(files):
    for path in files:
        for section in report.sections(*report.read_input(path)):
            for _, draw in section.charts:
                for width in (charts.NARROW, charts.WIDE):
                    root = ElementTree.fromstring(draw(width))
                    height = float(root.get("height"))
                    assert float(root.get("width")) == width
                    for element in root.iter():
                        for name in ("x", "x1", "x2", "cx"):
                            assert -1 <= float(element.get(name, 0)) <= width + 1
                        for name in ("y", "y1", "y2", "cy"):
                            assert -1 <= float(element.get(name, 0)) <= height + 1


def test_images_and_data_are_those_of_the_page(files, tmp_path, capsys):
    folder = tmp_path / "charts"
    assert run(*files, "--out", tmp_path / "p.html", "--images", folder, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["quality"] == json.loads(files[1].read_text())["settings"]
    assert data["latency"] == json.loads(files[2].read_text())["rows"]
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("capacity.png", "levels.png", "quality.png", "retrieval.png", "rate-distortion.png"),
        *("latency-1.png", "latency-2.png"),
    }
    for path in folder.iterdir():
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            assert picture.width == pictures.ZOOM * (charts.WIDE + 48)
            assert len(picture.convert("RGB").getcolors(1 << 20)) > 50


def test_pictures_have_text_without_a_font_on_the_machine(monkeypatch):
    drawn = []
    render = resvg_py.svg_to_bytes
    for options in ({}, {"skip_system_fonts": True}):
        monkeypatch.setattr(
            resvg_py, "svg_to_bytes", lambda options=options, **given: render(**given, **options)
        )
        drawn.append(pictures.png("Tokens", "model", chart("5.1\N{MULTIPLICATION SIGN} ±"), INK))
    assert drawn[0] == drawn[1]
    for text in ("", "5.1\N{MULTIPLICATION SIGN}"):
        assert pictures.png("Tokens", "model", chart(text), INK) != drawn[1]


def test_any_text_and_colour_in_a_chart_makes_a_picture():
    for text in ("var(--ink)", "var(--other)", "<&>", "\N{SNOWMAN}", "Modèle 模型"):
        assert pictures.png(text, text, chart(text), INK).startswith(b"\x89PNG")


def test_pictures_say_what_to_install_before_anything_is_written(
    files, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    out, folder = tmp_path / "p.html", tmp_path / "charts"
    assert run(*files, "--out", out, "--images", folder) == 2
    assert "pip install resvg-py pillow" in capsys.readouterr().err
    assert not out.exists() and not folder.exists()
    assert run(*files, "--out", out) == 0


def test_one_file_is_enough(files, tmp_path):
    for path in files:
        assert run(path, "--out", tmp_path / "p.html") == 0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "is no JSON"),
        ("[]", "is none of what"),
        ('{"kind": "poem"}', "is none of what"),
        ('{"kind": "eval", "model": "m"}', "not what `vllm-kvcompress eval --json` writes"),
        ('{"kind": "bench", "model": "m", "rows": 1}', "bench --json` writes"),
    ],
)
def test_a_file_that_no_command_wrote_is_refused(tmp_path, capsys, content, expected):
    path = tmp_path / "x.json"
    path.write_text(content)
    assert run(path, "--out", tmp_path / "p.html") == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "p.html").exists()


def test_files_of_different_models_or_of_one_kind_are_refused(files, tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**evaluation(), "model": "n"}))
    assert run(files[2], other, "--out", tmp_path / "p.html") == 2
    assert "different models: m, n" in capsys.readouterr().err
    assert run(files[1], files[1], "--out", tmp_path / "p.html") == 2
    assert "is a second file of eval" in capsys.readouterr().err


leaves = st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.just([]) | st.just({})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_file_with_any_field_replaced_gives_a_page_or_a_value_error(data):
    """As of a file that another version wrote, or that somebody has edited."""
    found = copy.deepcopy(data.draw(st.sampled_from([evaluation(), timings()])))
    kind = found["kind"]
    here = found
    while True:
        key = data.draw(st.sampled_from(list(here if isinstance(here, dict) else range(len(here)))))
        deeper = here[key]
        if not isinstance(deeper, dict | list) or not deeper or data.draw(st.integers(0, 3)) == 0:
            break
        here = deeper
    here[key] = data.draw(leaves)
    try:
        made = report.sections(kind, found)
        html = report.page("m", made)
    except ValueError:
        return
    for svg in re.findall(r"<svg.*?</svg>", html, flags=re.S):
        ElementTree.fromstring(svg)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-0.3, 0.02), (5, 5), (0, 1e-12), (12, 3000)])
def test_ticks_are_few_round_and_between(low, high):
    found = charts.ticks(low, high)
    assert len(found) <= 12
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)
