"""What a calibrated profile saves: bits, error and loss of cachegen with it and without it.

The text must not be that of the calibration. Bits and error are those of rate_distortion.py, on
the same text; beside them the bits without a profile at the error with it, between the levels by
logarithm. With --windows the loss of the model too, as in quality.py.

    python benchmarks/profile_gain.py DIR [--tokens N] [--windows N] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from pathlib import Path

import torch
from quality import HISTORY, SCORED, codec_method, measure_window
from rate_distortion import MODEL, Error
from texts import chosen_texts

from vllm_kvcompress.calibration.dump import dump_kv, load_model, tokenize
from vllm_kvcompress.codecs import create_codec
from vllm_kvcompress.codecs.profile import LEVELS

KINDS = ("plain", "profile")
BASE = "raw"


def measure(codec, kv: torch.Tensor, chunk: int) -> dict[str, float]:
    """Bits a value, errors, and bytes of bf16 a second, on ``[L, 2, T, H, D]``."""
    error, stored, encoding, decoding = Error(), 0, 0.0, 0.0
    for part in kv.split(chunk, dim=2):
        started = time.perf_counter()
        blob = codec.encode(part)
        encoded = time.perf_counter()
        back = codec.decode(blob)
        decoding += time.perf_counter() - encoded
        encoding += encoded - started
        stored += len(blob)
        error.add(part, back)
    k, v = error.k_and_v()
    return {
        "bits": 8 * stored / kv.numel(),
        "nmse_k": k,
        "nmse_v": v,
        "encode": kv.nbytes / encoding,
        "decode": kv.nbytes / decoding,
    }


def bits_at(error: float, curve: list[tuple[float, float]]) -> float:
    """Bits of a curve of (error, bits), descending in bits, at an error, by its logarithm."""
    points = sorted(curve)
    pairs = list(itertools.pairwise(points))
    low, high = next((p for p in pairs if error <= p[1][0]), pairs[-1])
    share = math.log(error / low[0]) / math.log(high[0] / low[0])
    return low[1] + share * (high[1] - low[1])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("profile", type=Path, nargs="?", help="a calibrated directory")
    parser.add_argument("--model", type=Path, default=MODEL, help="checkpoint (%(default)s)")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="text files to use")
    parser.add_argument("--tokens", type=int, default=1024, help="of each text (%(default)s)")
    parser.add_argument("--chunk", type=int, default=256, help="tokens (%(default)s)")
    parser.add_argument("--windows", type=int, default=0, help="of each text, for the loss")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args(argv)
    if args.profile is None:
        print("left out: no calibrated directory was given")
        return

    codecs = {
        (kind, level): create_codec(
            "cachegen", level=level, profile=args.profile if kind == "profile" else None
        )
        for level in LEVELS
        for kind in KINDS
    }
    model, tokenizer = load_model(args.model)
    texts = chosen_texts(args.text)
    rows = []
    for name, text in texts:
        kv = dump_kv(model, tokenize(tokenizer, text, args.tokens))
        for (kind, level), codec in codecs.items():
            rows.append(
                {"text": name, "kind": kind, "level": level} | measure(codec, kv, args.chunk)
            )
    columns = ("bits", "nmse_k", "nmse_v", "encode", "decode")
    means = {
        key: {
            c: statistics.mean(r[c] for r in rows if (r["kind"], r["level"]) == key)
            for c in columns
        }
        for key in codecs
    }
    print(f"{'level':<8}{'':<9}{'bits':>7}{'NMSE K':>9}{'NMSE V':>9}{'MB/s in':>9}{'out':>7}")
    curve = [
        (math.sqrt(m["nmse_k"] * m["nmse_v"]), m["bits"])
        for (kind, _), m in means.items()
        if kind == "plain"
    ]
    gains = {}
    for (kind, level), m in means.items():
        print(
            f"{level:<8}{kind:<9}{m['bits']:>7.3f}{m['nmse_k']:>9.4f}{m['nmse_v']:>9.4f}"
            f"{m['encode'] / 1e6:>9.0f}{m['decode'] / 1e6:>7.0f}",
            flush=True,
        )
        if kind == "profile":
            equal = bits_at(math.sqrt(m["nmse_k"] * m["nmse_v"]), curve)
            gains[level] = 1 - m["bits"] / equal
            print(f"  at the same error {equal:.3f} bits without: {gains[level]:.1%} fewer")
    losses = {}
    if args.windows:
        methods = {BASE: codec_method(BASE, args.chunk)}
        for level in LEVELS:
            methods[f"{level} plain"] = codec_method("cachegen", args.chunk, level=level)
            methods[f"{level} profile"] = codec_method(
                "cachegen", args.chunk, level=level, profile=args.profile
            )
        windows = []
        for _, text in texts:
            ids = tokenize(tokenizer, text, args.windows * (HISTORY + SCORED))
            windows += [measure_window(model, w, methods) for w in ids.split(HISTORY + SCORED)]
        for label in methods:
            above = [w[label][0] - w[BASE][0] for w in windows]
            divergence = statistics.mean(w[label][1] for w in windows)
            losses[label] = {"above": statistics.mean(above), "divergence": divergence}
            print(f"{label:<18}{statistics.mean(above):>+9.4f} nats, divergence {divergence:.4f}")
    if args.json:
        setting = {"model": args.model.name, "tokens": args.tokens, "chunk": args.chunk}
        content = {**setting, "rows": rows, "fewer_bits": gains, "losses": losses}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
