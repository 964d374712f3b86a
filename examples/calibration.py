"""Calibrate a model on a text, look at what was found, and generate with it.

    make calibrate                                  # once: LLM Compressor's own environment
    python examples/calibration.py [MODEL] [TEXT]

Without MODEL it takes the test model that `make setup` makes, without TEXT the reference of this
Python. Few and short samples, so that it is quick; for use leave --samples and --tokens out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB of KV cache on the CPU engine
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, SamplingParams

MODEL = Path(__file__).resolve().parents[1] / ".cache" / "smollm2-135m"
PROMPT = "The with statement is used to wrap the execution of a block with"


def kvcompress(*arguments: object) -> None:
    """Run a command of this package, and show its line."""
    command = ["vllm-kvcompress", *map(str, arguments)]
    print("$ " + " ".join(command), flush=True)
    subprocess.run([str(Path(sys.executable).with_name(command[0])), *command[1:]], check=True)


def generate(made: Path) -> tuple[int, str]:
    """Tokens that the KV cache holds in FP8, with the scales that were found, and an answer."""
    llm = LLM(
        str(made),
        kv_cache_dtype="fp8",
        max_model_len=1024,
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "KVCompressConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"codec": "cachegen", "profile": str(made)},
        },
    )
    (output,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=16))
    held = llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
    llm.llm_engine.engine_core.shutdown()
    return held, output.outputs[0].text


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(MODEL)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(folder, "reference.txt")
        if len(sys.argv) <= 2:
            text.write_text("\n\n".join(topics.values()))
        made = Path(folder, "calibrated")
        few = ("--samples", 8, "--tokens", 512, "--windows", 1)
        kvcompress("calibrate", model, made, "--data", text, *few)
        kvcompress("inspect", made)
        held, answer = generate(made)
        print(f"\nFP8 pages hold {held:,} tokens: {PROMPT!r} {answer!r}")


# The engine starts processes of its own, which read this file again.
if __name__ == "__main__":
    main()
