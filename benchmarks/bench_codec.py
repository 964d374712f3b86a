"""Speed of the whole codec on one core: GB/s of the tensor in and out at every level.

Also how speed grows with tokens, layers and threads. Takes KV dumped from a model
(``kv`` of shape [layers, 2, tokens, kv_heads, head_size] in a safetensors file), or makes some of
the same kind.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from timing import best_time

from vllm_kvcompress.codecs import create_codec
from vllm_kvcompress.kernels.cachegen import format as fmt


def synthetic(layers: int, tokens: int, heads: int, size: int) -> torch.Tensor:
    """KV whose channels differ in width and mean, and whose K turns with the position."""
    g = torch.Generator().manual_seed(0)
    width = torch.exp(0.7 * torch.randn((layers, 2, 1, heads, size), generator=g))
    mean = torch.randn((layers, 2, 1, heads, size), generator=g) * torch.tensor([3.0, 0.2]).view(
        1, 2, 1, 1, 1
    )
    x = mean + width * torch.randn((layers, 2, tokens, heads, size), generator=g)
    angle = torch.arange(tokens)[:, None] * 1e5 ** -torch.linspace(0, 1, size // 2)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[:, 0, ..., : size // 2].clone(), x[:, 0, ..., size // 2 :].clone()
    x[:, 0, ..., : size // 2], x[:, 0, ..., size // 2 :] = a * cos - b * sin, a * sin + b * cos
    return x.bfloat16()


def load(path: str | None, tokens: int) -> torch.Tensor:
    if path is None:
        return synthetic(30, tokens, 3, 64)
    from safetensors.torch import load_file

    return load_file(path)["kv"][:, :, :tokens].contiguous()


def measure(kv: torch.Tensor, level: str, repeats: int, **names) -> dict:
    codec = create_codec("cachegen", level=level)
    blob = codec.encode(kv)
    out = codec.decode(blob)
    size = kv.numel() * kv.element_size()
    return {
        "level": level, **names, "shape": list(kv.shape),
        "bits_per_value": 8 * len(blob) / kv.numel(),
        "encode_gb_s": size / best_time(lambda: codec.encode(kv), repeats) / 1e9,
        "decode_gb_s": size / best_time(lambda: codec.decode(blob, out=out), repeats) / 1e9,
    }  # fmt: skip


def threads(kv: torch.Tensor, level: str, count: int, calls: int) -> dict:
    """Calls from *count* threads at once, by the wall clock."""
    codec = create_codec("cachegen", level=level)
    blob = codec.encode(kv)
    size = calls * kv.numel() * kv.element_size()
    row = {"level": level, "threads": count}
    with ThreadPoolExecutor(count) as pool:
        for name, function, argument in (
            ("encode", codec.encode, kv),
            ("decode", codec.decode, blob),
        ):
            list(pool.map(function, [argument] * count))
            start = time.perf_counter()
            list(pool.map(function, [argument] * calls))
            row[f"{name}_gb_s"] = size / (time.perf_counter() - start) / 1e9
    return row


def show(title: str, rows: list[dict], key: str) -> None:
    print(title)
    for row in rows:
        bits = f"{row['bits_per_value']:6.3f} bits" if "bits_per_value" in row else ""
        print(
            f"  {row[key]!s:>9} {bits:11} encode {row['encode_gb_s']:.3f}"
            f"  decode {row['decode_gb_s']:.3f} GB/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv", help="safetensors file with dumped KV")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kv = load(arguments.kv, 2048)
    chunk = kv[:, :, 256:512].contiguous()
    repeats = arguments.repeats
    result = {
        "levels": [measure(chunk, level, repeats) for level in fmt.LEVELS],
        "tokens": [
            measure(kv[:, :, :n].contiguous(), "high", repeats, tokens=n)
            for n in (16, 64, 256, 1024, 2048)
            if n <= kv.shape[2]
        ],
        "layers": [
            measure(chunk[:n].contiguous(), "high", repeats, layers=n)
            for n in (1, 4, 16, 30)
            if n <= len(chunk)
        ],
        "threads": [threads(chunk, "high", n, 16) for n in (1, 2, 4)],
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    show("levels, chunk of 256 tokens, one core", result["levels"], "level")
    show("tokens, level high", result["tokens"], "tokens")
    show("layers, level high", result["layers"], "layers")
    show("threads, level high, wall clock", result["threads"], "threads")


if __name__ == "__main__":
    main()
