"""Run a file of tests of Triton kernels in a process of its own, interpreted where no GPU is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch


def run_kernels(file: Path, marker: str) -> None:
    """The tests of ``file`` that ``marker`` selects must pass. Triton asks for its interpreter when
    it is imported, so this process cannot run them."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker]
    run = subprocess.run(
        [*command, str(file)], env=environment, capture_output=True, text=True, timeout=1800
    )
    assert run.returncode == 0, run.stdout + run.stderr
