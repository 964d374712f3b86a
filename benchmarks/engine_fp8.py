"""FP8 pages in the real engine against its bf16 pages: nats a token on real text.

    python benchmarks/engine_fp8.py [--model DIR] [--tokens 1024] [--texts 3] [--samples 8]
        [--models checkpoint rescaled] [--json FILE]

Two models: the checkpoint, and the same one with K and V rescaled, differently by head, so that
they do not fit FP8 at scale 1.0, while queries and the output projection make good for it: it
computes the same. Each is served with bf16 pages, with FP8 pages at scale 1.0, and as calibrated
per tensor and per head on parts of the texts that are not measured (`make calibrate` makes the
environment for that). ``above`` is the mean over the tokens of each text, its first 128 left out,
of the negative log-likelihood less that with bf16 pages, and the standard error of that mean.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

MODEL = Path(__file__).resolve().parent.parent / ".cache" / "smollm2-135m"

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

IGNORED = 128
MODELS = ("checkpoint", "rescaled")
K_POWERS, V_POWERS = (-6, 1, 10), (-6, 1, 10)
SAMPLE_TOKENS = 512


def nats(checkpoint: Path, prompts: list[list[int]], cache_dtype: str) -> Any:
    """Negative log-likelihoods ``[texts, tokens]`` of prompts as an engine sees them."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        str(checkpoint),
        kv_cache_dtype=cache_dtype,
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=len(prompts[0]) + 16,
        max_num_batched_tokens=512,
        seed=0,
    )
    try:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False),
            use_tqdm=False,
        )
        return -torch.tensor(
            [
                [step[token].logprob for step, token in zip(
                    output.prompt_logprobs[1:], prompt[1:], strict=True
                )]
                for output, prompt in zip(outputs, prompts, strict=True)
            ],
            dtype=torch.float64,
        )[:, IGNORED:]  # fmt: skip
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def calibrated(model: Path, out: Path, strategy: str, text: Path, samples: int) -> Path:
    """The checkpoint that calibration makes of a model on a text."""
    from vllm_kvcompress.calibration import oneshot
    from vllm_kvcompress.cli.calibrate import python

    command = [python(), oneshot.__file__, str(model), str(out), "--data", str(text)]
    command += ["--strategy", strategy, "--samples", str(samples), "--tokens", str(SAMPLE_TOKENS)]
    command += ["--no-profile", "--windows", "0"]
    subprocess.run(command, check=True, capture_output=True)
    return out


def measure(
    model: Path, work: Path, texts: list[list[int]], calibration: Path, samples: int
) -> list[dict]:
    """A row for each way to serve a checkpoint."""
    made = {
        strategy: calibrated(model, work / strategy, strategy, calibration, samples)
        for strategy in ("tensor", "attn_head")
    }
    settings = {
        "bf16": (model, "auto"),
        "fp8, scale 1.0": (model, "fp8"),
        "fp8, per tensor": (made["tensor"], "auto"),
        "fp8, per head": (made["attn_head"], "auto"),
    }
    rows, base = [], None
    for name, (checkpoint, cache_dtype) in settings.items():
        found = nats(checkpoint, texts, cache_dtype)
        base = found if base is None else base
        above = (found - base).flatten()
        rows.append(
            {
                "setting": name,
                "nats": found.mean().item(),
                "above": above.mean().item(),
                "std_error": (above.std() / len(above) ** 0.5).item(),
                "tokens": len(above),
            }
        )
        print(
            f"{name:<20}{rows[-1]['nats']:>9.4f}{rows[-1]['above']:>+10.4f}"
            f"{rows[-1]['std_error']:>10.4f}",
            flush=True,
        )
    return rows


def main(argv: list[str] | None = None) -> None:
    from fp8_models import rescaled
    from texts import chosen_texts
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="checkpoint (%(default)s)")
    parser.add_argument("--tokens", type=int, default=1024, help="of each text (%(default)s)")
    parser.add_argument("--texts", type=int, default=3, help="that are measured (%(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="to calibrate on (%(default)s)")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args(argv)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    sources = [text for _, text in chosen_texts([])]
    ids = [tokenizer(text[: 16 * args.tokens]).input_ids[: args.tokens] for text in sources]
    results = {}
    with tempfile.TemporaryDirectory(dir=args.model.parent) as folder:
        work = Path(folder)
        rest = work / "rest.txt"
        rest.write_text("\n".join(text[16 * args.tokens :] for text in sources))
        models = {
            "checkpoint": args.model,
            "rescaled": rescaled(args.model, work / "rescaled", K_POWERS, V_POWERS),
        }
        print(f"{'':<20}{'nats':>9}{'above':>10}{'std error':>10}")
        for name in args.models:
            model = models[name]
            print(name, flush=True)
            made = work / f"{model.name}-calibrated"
            made.mkdir()
            results[name] = measure(model, made, ids[: args.texts], rest, args.samples)
    if args.json:
        setting = {"model": args.model.name, "tokens": args.tokens}
        args.json.write_text(json.dumps({**setting, "models": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
