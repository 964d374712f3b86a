"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""Which of the processes that share the machine this one is."""

if "PYTEST_XDIST_WORKER" in os.environ:
    # Threads that spin while they wait would take the other processes' cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The checkpoint of SmolLM2-135M-Instruct that `make setup` makes."""
    path = ROOT / ".cache" / "smollm2-135m"
    if not (path / "model.safetensors").is_file():
        message = "the test model is not there: run `make setup`"
        # Where tests gate a change, a test that cannot run must not look like one that passed.
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return path
