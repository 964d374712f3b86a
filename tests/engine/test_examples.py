"""Every example runs as it is, and the dashboard shows what the server counts."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
DASHBOARD = json.loads((EXAMPLES / "grafana.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def run(name: str, model: Path) -> str:
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / name, model],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=900)
    finally:
        # Servers that it has started must not outlive it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, out[-2000:] + errors[-4000:]
    return out


@pytest.mark.slow
def test_offline_generation_answers_with_both_kinds_of_pages(smollm2):
    out = run("offline.py", smollm2)
    held = [int(n.replace(",", "")) for n in re.findall(r"holds ([\d,]+) tokens", out)]
    assert held[1] > 5 * held[0]
    assert out.count("Paris") == 2


@pytest.mark.slow
def test_serving_restores_what_it_stored_and_counts_it(smollm2):
    out = run("serving.py", smollm2)
    assert "first: " in out and "again: " in out
    found = re.search(r"vllm:kvcompress_stored_chunks_total\{.*\} ([\d.]+)", out)
    assert float(found[1]) > 0


@pytest.mark.slow
def test_what_one_server_has_computed_another_serves_from_the_store(smollm2):
    out = run("two_servers.py", smollm2)
    told = re.findall(r"(\d+) tokens from the store, first token after ([\d.]+) s, (.+)", out)
    (cold, _, answer), (loaded, _, again) = told
    assert int(cold) == 0 and int(loaded) >= 1024
    assert answer != "''" != again


@pytest.mark.slow
def test_calibration_makes_a_checkpoint_that_generates_in_fp8(smollm2):
    if not (ROOT / ".venv-calibrate" / "bin" / "python").is_file():
        pytest.skip("the environment of calibration is not there: run `make calibrate`")
    out = run("calibration.py", smollm2)
    assert "FP8 scales of 30 layers, strategy tensor" in out
    assert re.search(r"profile \w+: 30 layers of 3 KV heads of 64", out)
    # 1 GiB holds half of that in 16 bits.
    assert re.search(r"FP8 pages hold 93,\d+ tokens: '.+' '.+'", out)


@pytest.mark.slow
def test_the_codec_takes_real_kv_there_and_back(smollm2):
    out = run("codec.py", smollm2)
    rows = {line.split()[0]: line.split() for line in out.splitlines() if " s " in line}
    assert set(rows) == {"lossless", "high", "medium", "low", "paper"}
    assert float(rows["lossless"][3]) == 0
    assert float(rows["high"][1]) > 3


def test_every_example_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    names = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".json", ".md")]
    assert [name for name in names if f"`{name}`" not in readme] == []


def test_the_dashboard_shows_every_metric_and_no_other():
    from vllm.v1.metrics import loggers

    from vllm_kvcompress import audit_metrics
    from vllm_kvcompress.connector.metrics import COUNTERS, GAUGES, PREFIX

    ours = {f"{PREFIX}{name}_total" for name in COUNTERS} | {PREFIX + name for name in GAUGES}
    ours.add(audit_metrics.NAME)
    shown = {name for text in EXPRESSIONS for name in re.findall(r"vllm:\w+", text)}
    assert {name for name in shown if name.startswith(PREFIX)} == ours
    source = inspect.getsource(loggers)
    for name in shown - ours:
        assert f'"{name.removesuffix("_total").removesuffix("_bucket")}"' in source


def test_the_dashboard_groups_by_labels_that_metrics_have():
    from vllm_kvcompress.connector.metrics import COUNTERS, GAUGES, PREFIX

    for text in EXPRESSIONS:
        grouped = re.search(r"by \((\w+)\)", text)
        name = re.search(rf"{PREFIX}(\w+?)(?:_total)?\{{", text)
        if grouped and name and name[1] in {**COUNTERS, **GAUGES}:
            assert grouped[1] in {**COUNTERS, **GAUGES}[name[1]][1]


def test_panels_lie_side_by_side_and_ask_the_chosen_prometheus():
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & own
        assert max(x for x, _ in own) < 24
        cells |= own
        assert panel["title"] and panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert DASHBOARD["templating"]["list"][0]["type"] == "datasource"
