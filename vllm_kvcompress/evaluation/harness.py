"""Tasks of EleutherAI's lm-evaluation-harness through a running server, where it is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_kvcompress.evaluation.server import NAME, Server

MISSING = "lm-eval is not installed here; pip install 'lm-eval[api]', and name --lm-eval again"


def is_installed() -> bool:
    return find_spec("lm_eval") is not None


def command(server: Server, model: str, tasks: Sequence[str], limit: int, out: Path) -> list[str]:
    """The line that runs ``tasks``, ``limit`` documents of each, against a server."""
    arguments = {
        "model": NAME,
        "base_url": server.url + "/v1/completions",
        "tokenizer": server.setting.model or model,
        "num_concurrent": 4,
        "tokenized_requests": False,
    }
    return [
        *(sys.executable, "-m", "lm_eval", "--model", "local-completions"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
        *("--tasks", ",".join(tasks), "--limit", str(limit), "--output_path", str(out)),
    ]


def run(server: Server, model: str, tasks: Sequence[str], limit: int, folder: Path) -> dict:
    """Per task its scores. Raises RuntimeError with the harness's last line if it fails."""
    done = subprocess.run(
        command(server, model, tasks, limit, folder), capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"lm-eval ended with status {done.returncode}: {lines[-1]}")
    found = sorted(folder.rglob("results*.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise RuntimeError(f"lm-eval wrote no results into {folder}")
    return parse(json.loads(found[-1].read_text()))


def parse(results: Any) -> dict[str, dict[str, float]]:
    """Scores by task and metric, standard errors as ``METRIC_stderr``.

    Raises ValueError for what is not a file of results.
    """
    if not isinstance(results, dict) or not isinstance(results.get("results"), dict):
        raise ValueError("the results of lm-eval hold no object of results")
    found: dict[str, dict[str, float]] = {}
    for task, scores in results["results"].items():
        if not isinstance(scores, dict):
            raise ValueError(f"the results of lm-eval for {task} are no object")
        found[task] = {
            # A metric is named with its filter, as in acc,none.
            name.partition(",")[0]: float(value)
            for name, value in scores.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and "," in name
        }
    return found
