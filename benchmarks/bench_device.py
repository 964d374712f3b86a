"""The Triton kernels: speed on a GPU, and what they need compiled ahead of time.

python benchmarks/bench_device.py [--aot] [--json FILE] [--profile]

On a GPU: the bytes of every level against the reference, then GB/s of the tensor, encoded into host
memory and decoded from it: the kernels with their transfers, the whole codec, and codec ``raw``,
which copies. Without one it says so and prints registers, spills and shared memory only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from vllm_kvcompress.codecs import create_codec
from vllm_kvcompress.kernels.cachegen import format as fmt
from vllm_kvcompress.kernels.cachegen import triton_aot, triton_codec
from vllm_kvcompress.kernels.cachegen.rotary import estimate_turns
from vllm_kvcompress.kernels.dispatch import ENVIRONMENT


def synthetic(layers: int, tokens: int, heads: int, size: int) -> torch.Tensor:
    """bf16 KV whose channels differ in width and mean, and whose K turns with the position."""
    g = torch.Generator().manual_seed(0)
    spread = (0.8 * torch.randn(layers, 2, 1, heads, size, generator=g)).exp()
    mean = torch.randn(layers, 2, 1, heads, size, generator=g)
    turn = 10000.0 ** -(torch.arange(size // 2) * 2 / size)
    angle = torch.arange(tokens)[:, None, None] * turn
    cos, sin = angle.cos(), angle.sin()
    kv = torch.randn(layers, 2, tokens, heads, size, generator=g).mul_(spread).add_(2 * mean)
    a, b = kv[:, 0, ..., : size // 2].clone(), kv[:, 0, ..., size // 2 :].clone()
    kv[:, 0, ..., : size // 2] = a * cos - b * sin
    kv[:, 0, ..., size // 2 :] = a * sin + b * cos
    return kv.bfloat16()


def check(kv: torch.Tensor, level: str, truth: str) -> None:
    """Raise unless blobs and tensors equal those of the implementation *truth*, on the CPU."""
    codec = create_codec("cachegen", level=level)
    os.environ[ENVIRONMENT] = truth
    expected = codec.encode(kv)
    decoded = codec.decode(expected)
    del os.environ[ENVIRONMENT]
    if codec.encode(kv.cuda()) != expected:
        raise SystemExit(f"level {level}: the blob differs from that of {truth}")
    if not torch.equal(codec.decode(expected, device="cuda").cpu(), decoded):
        raise SystemExit(f"level {level}: the decoded tensor differs from that of {truth}")


def seconds(action: Callable[[], object], repeats: int) -> float:
    """The best of *repeats* calls, by the wall clock, device included."""
    best = float("inf")
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def measure(kv: torch.Tensor, name: str, level: str | None, repeats: int) -> dict[str, object]:
    codec = create_codec(name, **({"level": level} if level else {}))
    size, out = kv.numel() * kv.element_size(), torch.empty_like(kv)
    blob = codec.encode(kv)
    row: dict[str, object] = {
        "codec": name,
        "level": level or "",
        "bits_per_value": 8 * len(blob) / kv.numel(),
        "encode_gb_s": size / seconds(lambda: codec.encode(kv), repeats) / 1e9,
        "decode_gb_s": size / seconds(lambda: codec.decode(blob, out=out), repeats) / 1e9,
    }
    if level is None:
        return row
    layers, values, tokens, heads, head_size = kv.shape
    stripes = kv.view(layers * values, tokens, heads * head_size)
    target = out.view_as(stripes)
    plan = [fmt.quantiser(level, layers, n, v) for n in range(layers) for v in range(values)]
    turns = estimate_turns(kv[:, 0]) if any(q.rotary for q in plan) else None
    sections = triton_codec.encode(stripes, plan, turns)
    encode = seconds(lambda: triton_codec.encode(stripes, plan, turns), repeats)
    decode = seconds(lambda: triton_codec.decode(sections, target, turns), repeats)
    return row | {
        "kernels_encode_gb_s": size / encode / 1e9,
        "kernels_decode_gb_s": size / decode / 1e9,
    }


def profile(kv: torch.Tensor) -> str:
    """Device time of each kernel of one encode and decode at level high."""
    codec = create_codec("cachegen", level="high")
    codec.decode(codec.encode(kv), device=kv.device)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as record:
        codec.decode(codec.encode(kv), device=kv.device)
        torch.cuda.synchronize()
    return record.key_averages().table(sort_by="cuda_time_total", row_limit=30)


def show_resources(rows: list[triton_aot.Resources]) -> None:
    print(f"{'kernel':<32}{'target':<8}{'registers':>10}{'spills':>8}{'shared':>8}{'warps':>7}")
    for r in rows:
        numbers = f"{r.registers:>10}{r.spills:>8}{r.shared:>8}{r.warps:>7}"
        print(f"{r.kernel:<32}{r.target:<8}{numbers}")


def show_speeds(rows: list[dict[str, object]]) -> None:
    print(f"{'GB/s of the tensor':<20}{'bits':>7}{'encode':>9}{'decode':>9}  kernels{'':>10}")
    for r in rows:
        line = f"{r['codec']} {r['level']}"
        line = f"{line:<20}{r['bits_per_value']:7.2f}{r['encode_gb_s']:9.2f}{r['decode_gb_s']:9.2f}"
        if r["level"]:
            line += f"{r['kernels_encode_gb_s']:9.2f}{r['kernels_decode_gb_s']:9.2f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--aot", action="store_true", help="only compile ahead of time")
    parser.add_argument(
        "--targets", nargs="+", choices=triton_aot.TARGETS, default=["sm_90"],
        help="to compile for",
    )  # fmt: skip
    parser.add_argument(
        "--dtypes", nargs="+", choices=fmt.DTYPES, default=["bfloat16"], help="to compile for"
    )
    parser.add_argument(
        "--shape", nargs=4, type=int, default=[32, 256, 8, 128],
        metavar=("LAYERS", "TOKENS", "HEADS", "SIZE"), help="of the chunk on the GPU",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="also time every kernel")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()

    result: dict[str, object] = {}
    here = torch.cuda.is_available() and not arguments.aot
    if here:
        small, chunk = synthetic(2, 64, 2, 64), synthetic(*arguments.shape)
        for level in fmt.LEVELS:
            check(small, level, "reference")
            check(chunk, level, "cpu")
        kv = chunk.cuda()
        cases = [("raw", None), *(("cachegen", level) for level in fmt.LEVELS)]
        speeds = [measure(kv, name, level, arguments.repeats) for name, level in cases]
        result |= {"device": torch.cuda.get_device_name(), "shape": list(kv.shape)}
        result["speeds"] = speeds
    elif not arguments.aot:
        print("no GPU here: nothing is timed, the kernels are only compiled", file=sys.stderr)
    needs = [
        triton_aot.resources(variant, target)
        for target in arguments.targets
        for variant in triton_aot.variants(tuple(arguments.dtypes))
    ]
    result["resources"] = [asdict(r) for r in needs]
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2))
    if here:
        print(f"{result['device']}, {result['shape']} bf16, the same bytes as on the CPU")
        show_speeds(speeds)
    show_resources(needs)
    if here and arguments.profile:
        print(profile(kv))


if __name__ == "__main__":
    main()
