"""What a codec costs a model: nats a token above exact history, on real text.

A window is 1,536 tokens of history and the 256 that follow. The KV of the history, but for its last
128 tokens, goes through the codec in chunks of 256; the loss is the mean negative log likelihood of
the 256 tokens minus that of the same tokens with bfloat16 history. The model computes in float32.

    python benchmarks/quality.py [--model DIR] [--text FILE ...] [--windows N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import peer_lmcache
import torch
from texts import chosen_texts
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel
from vllm_kvcompress.calibration.dump import cache_to_kv, load_model, prefill, tokenize

from vllm_kvcompress.codecs import create_codec

MODEL = Path(__file__).resolve().parent.parent / ".cache" / "smollm2-135m"
HISTORY, RECENT, SCORED = 1536, 128, 256
BASE = "raw"
LEVELS = ("lossless", "high", "medium", "low", "paper")

Method = Callable[[torch.Tensor], torch.Tensor]
"""KV ``[layers, 2, tokens, kv_heads, head_size]`` in bfloat16 -> as it comes back."""


def codec_method(name: str, chunk: int, **settings) -> Method:
    codec = create_codec(name, **settings)

    def method(kv: torch.Tensor) -> torch.Tensor:
        parts = [codec.decode(codec.encode(part)) for part in kv.split(chunk, dim=2)]
        return torch.cat(parts, dim=2)

    return method


def all_methods(levels: list[str], chunk: int) -> dict[str, Method]:
    methods = {BASE: codec_method("raw", chunk)}
    methods |= {level: codec_method("cachegen", chunk, level=level) for level in levels}
    methods["LMCache CacheGen"] = lambda kv: peer_lmcache.quantise(kv)[1].to(kv.dtype)
    return methods


@torch.inference_mode()
def score(model: PreTrainedModel, kv: torch.Tensor, ids: torch.Tensor) -> float:
    """Mean nats a token of ``ids``, int64 ``[scored]``, after the history ``kv``.

    The first of them is only read: what it follows lies in the history.
    """
    cache = DynamicCache()
    for layer, pair in enumerate(kv.float().transpose(2, 3)):
        cache.update(pair[0][None], pair[1][None], layer)
    logits = model(ids[None], past_key_values=cache, use_cache=True).logits[0]
    return functional.cross_entropy(logits[:-1].float(), ids[1:]).item()


def measure_window(
    model: PreTrainedModel, ids: torch.Tensor, methods: dict[str, Method]
) -> dict[str, float]:
    """Nats a token by method, and ``exact`` for history in float32; ids: one window's."""
    exact = cache_to_kv(prefill(model, ids[:HISTORY]))
    old, recent = exact.split([HISTORY - RECENT, RECENT], dim=2)
    nats = {"exact": score(model, exact, ids[HISTORY:])}
    for label, method in methods.items():
        back = method(old.to(torch.bfloat16)).float()
        nats[label] = score(model, torch.cat([back, recent], dim=2), ids[HISTORY:])
    return nats


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="checkpoint (%(default)s)")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="text files to use")
    parser.add_argument("--windows", type=int, default=3, help="of each text (%(default)s)")
    parser.add_argument("--chunk", type=int, default=256, help="tokens (%(default)s)")
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=LEVELS)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args(argv)

    methods = all_methods(args.levels, args.chunk)
    length = HISTORY + SCORED
    texts = chosen_texts(args.text)
    model, tokenizer = load_model(args.model)
    windows = []
    for name, text in texts:
        ids = tokenize(tokenizer, text, args.windows * length)
        for number, window in enumerate(ids.split(length)):
            nats = measure_window(model, window, methods)
            windows.append({"text": name, "window": number, "nats": nats})
            losses = "  ".join(f"{m} {nats[m] - nats[BASE]:+.4f}" for m in nats if m != BASE)
            print(f"{name} {number}: {BASE} {nats[BASE]:.4f}  {losses}", flush=True)

    print(f"{'method':<20}{'nats/token':>12}{'above ' + BASE:>12}{'std error':>12}")
    rows = []
    for label in windows[0]["nats"]:
        above = [w["nats"][label] - w["nats"][BASE] for w in windows]
        error = statistics.stdev(above) / len(above) ** 0.5 if len(above) > 1 else float("nan")
        row = {
            "method": label,
            "nats": statistics.mean(w["nats"][label] for w in windows),
            "above": statistics.mean(above),
            "std_error": error,
        }
        rows.append(row)
        print(f"{label:<20}{row['nats']:>12.4f}{row['above']:>12.4f}{error:>12.4f}", flush=True)
    if args.json:
        result = {"model": args.model.name, "chunk": args.chunk, "rows": rows, "windows": windows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
