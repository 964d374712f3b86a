"""Two workers: a chunk is there only when each rank's part is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "tensor_parallel_script.py"


def test_two_ranks_store_restore_and_recompute_when_one_part_is_gone(llama, tmp_path):
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
    assert result["blobs"] == 8  # four chunks, two ranks
    assert result["restored"]["cached"] == 256
    assert result["restored"]["tokens"] == result["local"]["tokens"]
    # One rank's part of one chunk was damaged: both ranks recompute from there.
    assert result["damaged"]["cached"] in (0, 64, 128, 192)
    assert result["damaged"]["tokens"] == result["cold"]["tokens"]
    assert result["failures"] > 0
    assert result["healed"]["cached"] == 256
