"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
