"""KIVI pages in the real engine against its own bf16 pages: speed, log-probabilities, retrieval.

    python benchmarks/engine_kivi.py speed [--context 7936] [--batch 1 4 8] [--prefill 4096]
    python benchmarks/engine_kivi.py logprobs [--windows 2] [--dtype ...]
    python benchmarks/engine_kivi.py passkey [--lengths 2048 4096 8192] [--trials 2] [--dtype ...]

Each starts an engine a setting, one after another in this process, and prints ratios or
differences. ``speed``: the sequences of a batch share a prefix of ``context`` tokens that is
computed once, and decode side by side. ``logprobs``: the last 256 of 1,792 tokens, prefilled in
chunks of 64 so that history is read as stored; nats a token above bf16. ``passkey``: a number
hidden in text, at depths spread evenly, asked for at the end. ``--dtype float32`` where a CPU
computes bf16 slowly.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MODEL = Path(__file__).resolve().parent.parent / ".cache" / "smollm2-135m"

ANSWER = 8
"""Tokens of an answer about a pass key."""

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("auto", {}),  # or what --dtype says
    "balanced": ("kivi_2bit", {}),
    "balanced G128": ("kivi_2bit", {"group_size": 128}),
    "balanced K4V2": ("kivi_k4v2", {}),
    "kivi G32": ("kivi_2bit", {"preset": "kivi"}),
    "kivi 4-bit": ("kivi_4bit", {"preset": "kivi"}),
}


@contextmanager
def engine(args: argparse.Namespace, name: str, **options: Any) -> Iterator[Any]:
    """An engine with one of SETTINGS in this process."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    cache_dtype, kivi = SETTINGS[name]
    llm = LLM(
        str(args.model),
        dtype=args.dtype,
        kv_cache_dtype=cache_dtype,
        additional_config={"kvcompress": {"kivi": kivi}} if kivi else {},
        enforce_eager=True,
        seed=0,
        **options,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def text_ids(model: Path, tokens: int, skip: int = 0) -> list[list[int]]:
    """The first ``tokens`` tokens of each kind of text, behind ``skip``."""
    from texts import chosen_texts
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        tokenizer(text[: 8 * (tokens + skip)]).input_ids[skip : skip + tokens]
        for _, text in chosen_texts([])
    ]


def timed(llm: Any, prompts: list[list[int]], tokens: int) -> float:
    from vllm import SamplingParams

    started = time.perf_counter()
    llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
        use_tqdm=False,
    )
    return time.perf_counter() - started


def speed(args: argparse.Namespace) -> dict[str, Any]:
    length = max(args.context, args.prefill)
    repeats = -(-length // 2048)
    text = (text_ids(args.model, 2048)[0] * repeats)[:length]
    found: dict[str, dict[str, float]] = {}
    for name in args.settings:
        own = found[name] = {}
        with engine(
            args,
            name,
            max_model_len=length + 256,
            max_num_seqs=max(args.batch),
            max_num_batched_tokens=2048,
        ) as llm:
            timed(llm, [text[:300]], 4)  # compile kernels
            other = [(token + 7) % 40000 + 100 for token in text[: args.prefill]]
            own[f"prefill {args.prefill}"] = args.prefill / timed(llm, [other], 1)
            timed(llm, [text[: args.context]], 1)
            for batch in args.batch:
                prompts = [text[: args.context] + [1000 + i] * 8 for i in range(batch)]
                timed(llm, prompts, 1)
                rates = []
                for _ in range(args.repeat):
                    short, long = timed(llm, prompts, 1), timed(llm, prompts, 1 + args.tokens)
                    rates.append(batch * args.tokens / (long - short))
                own[f"decode batch {batch}"] = statistics.median(rates)
        for key, rate in own.items():
            base = found[args.settings[0]][key]
            print(f"{name:<16}{key:<18}{rate:>9.1f} tokens/s{rate / base:>8.2f}x", flush=True)
    return found


def logprobs(args: argparse.Namespace) -> dict[str, Any]:
    from vllm import SamplingParams

    length, scored = 1792, 256
    windows = [
        ids[start : start + length]
        for ids in text_ids(args.model, length * args.windows)
        for start in range(0, length * args.windows, length)
    ]
    windows = [window for window in windows if len(window) == length]
    nats: dict[str, list[float]] = {}
    for name in args.settings:
        with engine(
            args,
            name,
            max_model_len=2048,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            enable_prefix_caching=False,
        ) as llm:
            outputs = llm.generate(
                [{"prompt_token_ids": window} for window in windows],
                SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
                use_tqdm=False,
            )
        nats[name] = [
            -statistics.mean(
                step[token].logprob
                for token, step in zip(
                    window[-scored:], output.prompt_logprobs[-scored:], strict=True
                )
            )
            for window, output in zip(windows, outputs, strict=True)
        ]
        above = [mine - base for mine, base in zip(nats[name], nats[args.settings[0]], strict=True)]
        error = statistics.stdev(above) / len(above) ** 0.5
        print(f"{name:<16}{statistics.mean(above):+.4f} ± {error:.4f} nats a token", flush=True)
    return nats


def passkey(args: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    filler = text_ids(args.model, max(args.lengths))[0]
    filler = filler * (-(-max(args.lengths) // len(filler)))
    cases = []
    for length in args.lengths:
        for trial in range(args.trials):
            key = str(10000 + 7919 * (trial + 3 * length) % 90000)
            needle = tokenizer(
                f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
            )
            question = tokenizer("\n\nWhat is the pass key? The pass key is")
            room = length - len(needle.input_ids) - len(question.input_ids) - ANSWER
            depth = round(room * (trial + 0.5) / args.trials)
            ids = filler[:depth] + needle.input_ids + filler[depth:room] + question.input_ids
            cases.append((length, depth / room, key, ids))
    found: dict[str, Any] = {}
    for name in args.settings:
        with engine(
            args,
            name,
            max_model_len=max(args.lengths),
            max_num_seqs=4,
            max_num_batched_tokens=1024,
        ) as llm:
            outputs = llm.generate(
                [{"prompt_token_ids": ids} for *_, ids in cases],
                SamplingParams(temperature=0, max_tokens=ANSWER),
                use_tqdm=False,
            )
        own = found[name] = [
            {
                "length": length,
                "depth": depth,
                "key": key,
                "answer": output.outputs[0].text,
                "found": key in output.outputs[0].text,
            }
            for (length, depth, key, _), output in zip(cases, outputs, strict=True)
        ]
        for length in args.lengths:
            hits = [case["found"] for case in own if case["length"] == length]
            print(f"{name:<16}{length:>6} tokens: {sum(hits)} of {len(hits)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = ["speed", "logprobs", "passkey"]
    parser.add_argument("what", nargs="?", choices=kinds, default="speed")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", default="bfloat16", help="of the model (%(default)s)")
    parser.add_argument(
        "--settings", nargs="+", choices=SETTINGS, default=["bf16", "balanced", "kivi G32"]
    )
    parser.add_argument("--context", type=int, default=7936)
    parser.add_argument("--prefill", type=int, default=4096)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    found = {"speed": speed, "logprobs": logprobs, "passkey": passkey}[args.what](args)
    if args.json:
        args.json.write_text(json.dumps({"model": args.model.name, args.what: found}, indent=1))


if __name__ == "__main__":
    main()
