"""Make a checkpoint with FP8 scales of the KV cache and a codec profile from your own text.

LLM Compressor needs another environment than vLLM, which `make calibrate` makes in
.venv-calibrate; KVCOMPRESS_CALIBRATE_PYTHON names another Python that has it.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from vllm_kvcompress.calibration import oneshot

ENVIRONMENT = "KVCOMPRESS_CALIBRATE_PYTHON"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the script ``calibration/oneshot.py``."""
    oneshot.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Become the script in its environment. Raises ValueError where there is none."""
    command = [python(), oneshot.__file__, *oneshot.to_argv(arguments)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def python() -> str:
    """The Python that has LLM Compressor."""
    given = os.environ.get(ENVIRONMENT)
    if given:
        return given
    if find_spec("llmcompressor"):
        return sys.executable
    made = Path(oneshot.__file__).resolve().parents[1] / ".venv-calibrate" / "bin" / "python"
    if made.is_file():
        return str(made)
    raise ValueError(
        "calibration needs LLM Compressor, which cannot share this environment with vLLM; "
        f"type `make calibrate` in the project's folder, or set {ENVIRONMENT} to a Python that "
        "has llmcompressor and this package"
    )
