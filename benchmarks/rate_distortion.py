"""Bits a value and error of every lossy codec and level on the KV of a real model on real text.

Bits a value: 8 x the length of all blobs, everything in them counted, over the number of values.
Error of K and of V: squared error over squared norm per layer, then the mean over the layers.
LMCache's CacheGen stands beside, from its own CPU kernels.

    python benchmarks/rate_distortion.py [--model DIR] [--text FILE ...] [--tokens N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import peer_lmcache
import torch
from texts import chosen_texts

from vllm_kvcompress.calibration.dump import dump_kv, load_model, tokenize
from vllm_kvcompress.codecs import create_codec, fp8, kivi

MODEL = Path(__file__).resolve().parent.parent / ".cache" / "smollm2-135m"
LEVELS = ("lossless", "high", "medium", "low", "paper")
OTHERS = {"fp8": tuple(fp8.LEVELS), "kivi": tuple(kivi.LEVELS)}

Method = Callable[[torch.Tensor], tuple[int, torch.Tensor]]
"""A chunk -> (stored bytes, the chunk as it comes back)."""


class Error:
    """Normalised squared error, gathered over chunks of the same layers."""

    def __init__(self) -> None:
        self.noise = torch.zeros((), dtype=torch.float64)
        self.norm = torch.zeros((), dtype=torch.float64)

    def add(self, exact: torch.Tensor, coded: torch.Tensor) -> None:
        """Both ``[layers, 2, tokens, kv_heads, head_size]``."""
        exact, coded = exact.double(), coded.double()
        self.noise = self.noise + (coded - exact).square().sum((2, 3, 4))
        self.norm = self.norm + exact.square().sum((2, 3, 4))

    def k_and_v(self) -> tuple[float, float]:
        """Mean over the layers, for K and for V."""
        k, v = (self.noise / self.norm).mean(0).tolist()
        return k, v


def codec_method(name: str, level: str) -> Method:
    codec = create_codec(name, level=level)

    def method(chunk: torch.Tensor) -> tuple[int, torch.Tensor]:
        blob = codec.encode(chunk)
        return len(blob), codec.decode(blob)

    return method


def lmcache_method(source: Path | None) -> Method:
    kernels = peer_lmcache.load_kernels(source)

    def method(chunk: torch.Tensor) -> tuple[int, torch.Tensor]:
        codes, values = peer_lmcache.quantise(chunk)
        return peer_lmcache.stored_bytes(kernels, codes).total, values

    return method


def measure(method: Method, kv: torch.Tensor, chunk: int) -> dict[str, float]:
    """Bits a value, ratio and errors on ``[layers, 2, tokens, kv_heads, head_size]``."""
    error, stored = Error(), 0
    for part in kv.split(chunk, dim=2):
        size, back = method(part)
        stored += size
        error.add(part, back)
    k, v = error.k_and_v()
    raw = kv.numel() * kv.element_size()
    return {"bits": 8 * stored / kv.numel(), "ratio": raw / stored, "nmse_k": k, "nmse_v": v}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="checkpoint (%(default)s)")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="text files to use")
    parser.add_argument("--tokens", type=int, default=2048, help="of each text (%(default)s)")
    parser.add_argument("--chunk", type=int, default=256, help="tokens (%(default)s)")
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=LEVELS)
    parser.add_argument("--codecs", nargs="*", default=list(OTHERS), choices=OTHERS)
    parser.add_argument("--lmcache", type=Path, help="lmcache wheel, or its kernels' file")
    parser.add_argument("--no-lmcache", action="store_true", help="leave the peer out")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args(argv)

    methods = {level: codec_method("cachegen", level) for level in args.levels}
    for name in args.codecs:
        methods |= {f"{name} {level}": codec_method(name, level) for level in OTHERS[name]}
    if not args.no_lmcache:
        try:
            methods["LMCache CacheGen"] = lmcache_method(args.lmcache)
        except peer_lmcache.PeerUnavailable as error:
            print(f"left out: {error}")

    texts = chosen_texts(args.text)
    model, tokenizer = load_model(args.model)
    rows = []
    print(f"{'text':<12}{'method':<20}{'bits':>8}{'ratio':>8}{'NMSE K':>10}{'NMSE V':>10}")
    for name, text in texts:
        kv = dump_kv(model, tokenize(tokenizer, text, args.tokens))
        for label, method in methods.items():
            row = {"text": name, "method": label, **measure(method, kv, args.chunk)}
            rows.append(row)
            _print(row)
    for label in methods:
        own = [r for r in rows if r["method"] == label]
        mean = {k: sum(r[k] for r in own) / len(own) for k in ("bits", "ratio", "nmse_k", "nmse_v")}
        row = {"text": "mean", "method": label, **mean}
        rows.append(row)
        _print(row)
    if args.json:
        setting = {"model": args.model.name, "tokens": args.tokens, "chunk": args.chunk}
        args.json.write_text(json.dumps({**setting, "rows": rows}, indent=1) + "\n")


def _print(row: dict) -> None:
    print(
        f"{row['text']:<12}{row['method']:<20}{row['bits']:>8.3f}{row['ratio']:>8.2f}"
        f"{row['nmse_k']:>10.5f}{row['nmse_v']:>10.5f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
