"""Two workers: a chunk is there only when each rank's part is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.fp8_models import with_scales

SCRIPT = Path(__file__).parent / "tensor_parallel_script.py"


@pytest.mark.parametrize("pages", ["bf16", pytest.param("fp8", marks=pytest.mark.slow)])
def test_two_ranks_store_restore_and_recompute_when_one_part_is_gone(llama, tmp_path, pages):
    if pages == "fp8":  # a scale per head: each rank has its own head's
        widths = torch.tensor([1.0, 8.0]).view(2, 1)
        kv = 40 * torch.rand(2, 2, 8, 2, 32) * widths
        llama = with_scales(llama, tmp_path / "checkpoint", kv, per_head=True)
    environment = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PYTHONPATH": str(SCRIPT.parents[2]),
    }
    run = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            str(llama),
            str(tmp_path / "store"),
            str(tmp_path / "result"),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads((tmp_path / "result").read_text())
    assert ("2 of 2 from the checkpoint" in run.stdout + run.stderr) == (pages == "fp8")
    assert "FP8 scales:" not in run.stdout + run.stderr
    assert result["blobs"] == 8  # four chunks, two ranks
    assert result["restored"]["cached"] == 256
    assert result["restored"]["tokens"] == result["local"]["tokens"]
    # One rank's part of one chunk was damaged: both ranks recompute from there.
    assert result["damaged"]["cached"] in (0, 64, 128, 192)
    assert result["damaged"]["tokens"] == result["cold"]["tokens"]
    assert result["failures"] > 0
    assert result["healed"]["cached"] == 256
