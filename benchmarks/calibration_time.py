"""Time and memory of a calibration against LLM Compressor's own script, on the same samples.

Its script is the one of its documentation: the model's name, a data set, a recipe, `oneshot`. Each
runs in a process of its own, in the environment of calibration (`make calibrate`); memory is the
peak of the process. Beside them stands what a process takes that loads the model as calibration
does and runs one sample through it, in the same libraries.

    .venv-calibrate/bin/python benchmarks/calibration_time.py --data FILE [--samples N]
        [--tokens N] [--only NAME ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

MODEL = Path(__file__).resolve().parent.parent / ".cache" / "smollm2-135m"
SCRIPT = Path(__file__).resolve().parent.parent / "calibration" / "oneshot.py"

SAMPLES = """
import sys
from transformers import AutoTokenizer
from vllm_kvcompress.calibration.samples import Source, load_samples

model, data, out, samples, tokens = sys.argv[1:]
ids = load_samples(Source(data), AutoTokenizer.from_pretrained(model), int(samples), int(tokens), 0)
"""

PLAIN = (
    SAMPLES
    + """
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier

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
)

ONE_BATCH = (
    SAMPLES
    + """
import llmcompressor, torch
from transformers import AutoModelForCausalLM
from vllm_kvcompress.calibration.oneshot import _is_fast

network = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
if not _is_fast("cpu"):
    network.float()
with torch.inference_mode():
    network(input_ids=ids[0][None])
"""
)

BASE = "the model and one batch"


def run(command: list[str]) -> tuple[float, int]:
    """Seconds of a command, and the most bytes that it held. Raises CalledProcessError if it
    fails."""
    started = time.monotonic()
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command[:3])
    return time.monotonic() - started, usage.ru_maxrss * 1024


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="checkpoint (%(default)s)")
    parser.add_argument("--data", help="text to calibrate on")
    parser.add_argument("--samples", default="8", help="(%(default)s)")
    parser.add_argument("--tokens", default="512", help="of a sample (%(default)s)")
    parser.add_argument("--only", nargs="+", help="of the processes, by their names")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args(argv)
    if args.data is None or find_spec("llmcompressor") is None:
        print("left out: needs --data and the environment of calibration")
        return

    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        size = ["--samples", args.samples, "--tokens", args.tokens]

        def ours(out: str, *more: str) -> list[str]:
            command = [sys.executable, str(SCRIPT), str(args.model), f"{folder}/{out}"]
            return [*command, "--data", args.data, *size, *more]

        def other(script: str, out: str) -> list[str]:
            given = [str(args.model), args.data, f"{folder}/{out}", args.samples, args.tokens]
            return [sys.executable, "-c", script, *given]

        commands = {
            BASE: other(ONE_BATCH, "a"),
            "LLM Compressor": other(PLAIN, "b"),
            "FP8 scales": ours("c", "--no-profile", "--windows", "0"),
            "and the codec's profile": ours("d", "--windows", "0"),
            "and the pages'": ours("e"),
        }
        unknown = sorted(set(args.only or ()) - set(commands))
        if unknown:
            parser.error(f"--only {unknown[0]!r}: choose from {', '.join(commands)}")
        print(f"{'':<26}{'seconds':>9}{'GB':>8}{'of one batch':>14}")
        for name in args.only or commands:
            seconds, peak = run(commands[name])
            rows[name] = {"seconds": seconds, "peak_bytes": peak}
            share = f"{peak / rows[BASE]['peak_bytes']:>13.2f}x" if BASE in rows else ""
            print(f"{name:<26}{seconds:>9.1f}{peak / 1e9:>8.2f}{share}", flush=True)
    if args.json:
        setting = {"model": args.model.name, "samples": args.samples, "tokens": args.tokens}
        args.json.write_text(json.dumps({**setting, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
