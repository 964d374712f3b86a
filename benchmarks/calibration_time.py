"""Time of a calibration against LLM Compressor's own script, on the same samples.

Its script is the one of its documentation: the model's name, a data set, a recipe, `oneshot`. Runs
in the environment of calibration (`make calibrate`).

    .venv-calibrate/bin/python benchmarks/calibration_time.py --data FILE [--samples N]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

MODEL = Path(__file__).resolve().parent.parent / ".cache" / "smollm2-135m"
SCRIPT = Path(__file__).resolve().parent.parent / "calibration" / "oneshot.py"

PLAIN = """
import json, sys, time
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoTokenizer
from vllm_kvcompress.calibration.samples import Source, load_samples

model, data, out, samples, tokens = sys.argv[1:]
ids = load_samples(Source(data), AutoTokenizer.from_pretrained(model), int(samples), int(tokens), 0)
scheme = dict(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)
oneshot(
    model=model,
    dataset=Dataset.from_dict({"input_ids": [list(map(int, x)) for x in ids]}),
    recipe=QuantizationModifier(kv_cache_scheme=scheme),
    num_calibration_samples=len(ids),
    max_seq_length=int(tokens),
    output_dir=out,
)
"""


def run(command: list[str]) -> float:
    """Seconds of a command. Raises CalledProcessError if it fails."""
    started = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="checkpoint (%(default)s)")
    parser.add_argument("--data", help="text to calibrate on")
    parser.add_argument("--samples", default="8", help="(%(default)s)")
    parser.add_argument("--tokens", default="512", help="of a sample (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args(argv)
    if args.data is None or find_spec("llmcompressor") is None:
        print("left out: needs --data and the environment of calibration")
        return

    size = ["--samples", args.samples, "--tokens", args.tokens]
    ours = [sys.executable, str(SCRIPT), str(args.model)]
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "FP8 scales": [
                *ours, f"{folder}/a", "--data", args.data, *size, "--no-profile", "--windows", "0",
            ],
            "and profile": [*ours, f"{folder}/b", "--data", args.data, *size, "--windows", "0"],
            "LLM Compressor": [
                *(sys.executable, "-c", PLAIN, str(args.model), args.data, f"{folder}/c"),
                *(args.samples, args.tokens),
            ],
        }  # fmt: skip
        for name, command in commands.items():
            seconds[name] = run(command)
            print(f"{name:<16}{seconds[name]:>8.1f} s", flush=True)
    if args.json:
        args.json.write_text(json.dumps(seconds, indent=1) + "\n")


if __name__ == "__main__":
    main()
