"""Generate offline with KIVI pages: the same prompts, in 16 bits and in about 3.

    python examples/offline.py [MODEL]

Without MODEL it takes the test model that `make setup` makes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB of KV cache on the CPU engine

from vllm import LLM, SamplingParams

MODEL = Path(__file__).resolve().parents[1] / ".cache" / "smollm2-135m"

PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "The first three prime numbers are",
]


def generate(model: str, kv_cache_dtype: str) -> tuple[int, list[str]]:
    """Tokens that the KV cache holds, and an answer to each prompt."""
    llm = LLM(
        model,
        kv_cache_dtype=kv_cache_dtype,
        # The settings of KIVI pages; README lists them. Other dtypes ignore them.
        additional_config={"kvcompress": {"kivi": {"group_size": 128}}},
        max_model_len=1024,
        enforce_eager=True,
    )
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16))
    held = llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
    llm.llm_engine.engine_core.shutdown()
    return held, [output.outputs[0].text for output in outputs]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(MODEL)
    for kv_cache_dtype in ("auto", "kivi_2bit"):
        held, answers = generate(model, kv_cache_dtype)
        print(f"\n{kv_cache_dtype}: the KV cache holds {held:,} tokens")
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            print(f"  {prompt!r} {answer!r}")


# The engine starts processes of its own, which read this file again.
if __name__ == "__main__":
    main()
