"""KIVI pages on a GPU: speed of the Triton kernels, what they need, and what memory allows.

python benchmarks/bench_kivi_device.py [--roofline] [--aot] [--json FILE]

On a GPU: the kernels against the reference, then decode at several lengths and batches against
torch's attention over bf16 of the same shape, and GB/s of exact tokens packed and unpacked. Without
one it says so, and prints registers, spills and shared memory, and the roofline on paper.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from vllm_kvcompress.kernels.attention import Attention
from vllm_kvcompress.kernels.kivi import reference, triton_aot, triton_kivi
from vllm_kvcompress.kernels.kivi.format import PageFormat

LAYERS, HEADS, KV_HEADS, SIZE = 32, 32, 8, 128
"""A Llama 3 8B."""
WEIGHTS = 16e9
"""Bytes of its weights in bf16, read once a step."""
BANDWIDTH = 4.8e12
"""Bytes a second of an H200's memory."""
RESIDUAL = 128
"""Most recent tokens of a sequence, which stay exact."""


def formats() -> dict[str, PageFormat]:
    """The presets for this head size, by their names without it."""
    found = triton_aot.presets((SIZE,))
    return {name.removesuffix(f" {SIZE}"): fmt for name, fmt in found.items()}


def read_bytes(fmt: PageFormat | None, tokens: int) -> float:
    """Bytes of KV that a step reads, a sequence; of bf16 where there is no format."""
    exact = tokens if fmt is None else min(tokens, RESIDUAL)
    size = exact * 2 * SIZE * 2
    if fmt is not None:
        size += (tokens - exact) * fmt.token_bytes
    return size * LAYERS * KV_HEADS


def roofline(tokens: int, batches: list[int]) -> list[dict[str, object]]:
    """Tokens a second if nothing but memory took time: weights and KV, each read once a step."""
    rows = []
    for name, fmt in {"bf16": None, **formats()}.items():
        for batch in batches:
            kv = batch * read_bytes(fmt, tokens)
            attention = batch * read_bytes(None, tokens) / kv
            seconds = (WEIGHTS + kv) / BANDWIDTH
            exact = (WEIGHTS + batch * read_bytes(None, tokens)) / BANDWIDTH
            rows.append(
                {
                    "format": name,
                    "bits_per_value": 16.0 if fmt is None else fmt.bits_per_value,
                    "tokens": tokens,
                    "batch": batch,
                    "kv_mb_per_token": kv / batch / 1e6,
                    "tokens_per_second": batch / seconds,
                    "attention_ratio": attention,
                    "step_ratio": exact / seconds,
                }
            )
    return rows


@dataclass
class Batch:
    """Sequences of equal length with one new token each, on the GPU, over packed pages."""

    fmt: PageFormat
    sequences: int
    tokens: int
    heads: int = HEADS
    kv_heads: int = KV_HEADS

    def __post_init__(self) -> None:
        fmt, g = self.fmt, torch.Generator("cuda").manual_seed(0)
        width = -(-self.tokens // fmt.block_tokens)
        blocks = self.sequences * width
        shape = (fmt.block_tokens, self.kv_heads, fmt.head_size)
        exact_per_sequence = -(-RESIDUAL // fmt.block_tokens)

        def normal(*size):
            return torch.randn(*size, generator=g, device="cuda").to(fmt.dtype)

        def every(value, count=blocks):
            return torch.full((count,), value, dtype=torch.int32, device="cuda")

        order = torch.randperm(blocks, generator=g, device="cuda").to(torch.int32)
        self.table = order.view(self.sequences, width)
        size = (blocks, self.kv_heads, fmt.block_tokens, fmt.token_bytes)
        self.cache = torch.zeros(size, dtype=torch.uint8, device="cuda")
        pool = min(blocks, 64)
        self.keys, self.values = normal(pool, *shape), normal(pool, *shape)
        firsts = every(0)
        firsts[self.table[:, 0].long()] = 1
        for start in range(0, blocks, pool):
            ids = torch.arange(start, min(start + pool, blocks), dtype=torch.int32, device="cuda")
            triton_kivi.pack(
                fmt, self.keys, self.values, ids - start, self.cache, ids,
                every(fmt.block_tokens, len(ids)), firsts[ids.long()],
            )  # fmt: skip
        # The last blocks of each sequence are exact.
        recent = self.table[:, width - exact_per_sequence :].reshape(-1)
        self.exact = normal(len(recent), *shape), normal(len(recent), *shape)
        self.slots = every(-1)
        self.slots[recent.long()] = torch.arange(len(recent), dtype=torch.int32, device="cuda")
        self.query = normal(self.sequences, self.heads, fmt.head_size)
        self.new = normal(2, self.sequences, self.kv_heads, fmt.head_size)
        self.starts = torch.arange(self.sequences + 1, dtype=torch.int32, device="cuda")
        self.lengths = every(self.tokens, self.sequences)
        self.out = torch.full_like(self.query, torch.nan)

    def attend(self) -> torch.Tensor:
        triton_kivi.attend(
            self.fmt, Attention(self.fmt.head_size**-0.5), self.query, *self.new, self.cache,
            *self.exact, self.slots, self.table, self.starts, self.lengths, self.out, 1,
            self.tokens,
        )  # fmt: skip
        return self.out

    def expected(self) -> torch.Tensor:
        """The same from the reference, on the CPU."""
        out = torch.empty_like(self.query, device="cpu")
        tensors = [
            self.query, *self.new, self.cache, *self.exact, self.slots, self.table, self.starts,
            self.lengths,
        ]  # fmt: skip
        reference.attend(
            self.fmt, Attention(self.fmt.head_size**-0.5), *(x.cpu() for x in tensors), out, 1,
            self.tokens,
        )  # fmt: skip
        return out


def check(name: str, fmt: PageFormat) -> float:
    """The relative error of decode against the reference; raises if it is too great."""
    batch = Batch(fmt, 2, 5 * fmt.block_tokens - 3)
    expected = batch.expected().float()
    error = float((batch.attend().cpu().float() - expected).norm() / expected.norm())
    if not error < 2e-2:
        raise SystemExit(f"{name}: decode is off by {error:.2g}")
    if fmt.fit == "minmax" and not fmt.rotated:
        n = min(4, len(batch.keys))
        slots = torch.arange(n, dtype=torch.int32)
        full = torch.full((n,), fmt.block_tokens, dtype=torch.int32)
        pages = torch.zeros_like(batch.cache[:n], device="cpu")
        keys, values = batch.keys[:n], batch.values[:n]
        reference.pack(fmt, keys.cpu(), values.cpu(), slots, pages, slots, full, full * 0)
        got = torch.zeros_like(batch.cache[:n])
        on_gpu = slots.cuda(), full.cuda()
        triton_kivi.pack(fmt, keys, values, on_gpu[0], got, on_gpu[0], on_gpu[1], on_gpu[1] * 0)
        if not torch.equal(got.cpu(), pages):
            raise SystemExit(f"{name}: pages differ from the reference's")
    return error


def seconds(action: Callable[[], object], repeats: int) -> float:
    """The median of *repeats* calls by the device's clock, as captured in a graph."""
    for _ in range(3):
        action()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def exact_seconds(sequences: int, tokens: int, repeats: int) -> float:
    """torch's attention over contiguous bf16 of the same shape."""
    shape = (sequences, KV_HEADS, tokens, SIZE)
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    # All queries of a KV head as rows: what reads K and V once.
    q = torch.randn(
        sequences, KV_HEADS, HEADS // KV_HEADS, SIZE, dtype=torch.bfloat16, device="cuda"
    )
    return seconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v), repeats)


def measure(
    lengths: list[int], batches: list[int], repeats: int
) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """(decode, packing)."""
    decode, packing = [], []
    for tokens in lengths:
        for sequences in batches:
            exact = exact_seconds(sequences, tokens, repeats)
            for name, fmt in formats().items():
                batch = Batch(fmt, sequences, tokens)
                taken = seconds(batch.attend, repeats)
                read = sequences * read_bytes(fmt, tokens) / LAYERS
                decode.append(
                    {
                        "format": name, "tokens": tokens, "batch": sequences,
                        "microseconds": taken * 1e6, "bf16_microseconds": exact * 1e6,
                        "ratio": exact / taken, "gb_s": read / taken / 1e9,
                    }
                )  # fmt: skip
                del batch
    for name, fmt in formats().items():
        batch = Batch(fmt, 1, 64 * fmt.block_tokens)
        ids = torch.arange(64, dtype=torch.int32, device="cuda")
        full, firsts = torch.full_like(ids, fmt.block_tokens), torch.zeros_like(ids)
        exact = batch.keys, batch.values
        size = sum(x.numel() * x.element_size() for x in exact)
        pages = fmt, batch.cache, ids, full, firsts
        to = seconds(lambda e=exact, p=pages, i=ids: triton_kivi.pack(p[0], *e, i, *p[1:]), repeats)
        back = seconds(lambda e=exact, p=pages, i=ids: triton_kivi.unpack(*p, *e, i), repeats)
        row = {"format": name, "pack_gb_s": size / to / 1e9, "unpack_gb_s": size / back / 1e9}
        packing.append(row)
    return decode, packing


def show(title: str, rows: list[dict[str, object]]) -> None:
    print(title)
    if not rows:
        return
    cells = [list(rows[0])] + [
        [f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--roofline", action="store_true", help="only what memory allows, on paper")
    parser.add_argument("--aot", action="store_true", help="only compile ahead of time")
    parser.add_argument(
        "--targets", nargs="+", choices=triton_aot.TARGETS, default=["sm_90"],
        help="to compile for",
    )  # fmt: skip
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()

    result: dict[str, object] = {}
    here = torch.cuda.is_available() and not arguments.aot and not arguments.roofline
    if here:
        result["device"] = torch.cuda.get_device_name()
        result["errors"] = [
            {"format": name, "error": check(name, fmt)} for name, fmt in formats().items()
        ]
        show(f"{result['device']}: decode against the reference", result["errors"])
        decode, packing = measure(arguments.lengths, arguments.batches, arguments.repeats)
        result |= {"decode": decode, "packing": packing}
        show("decode of one layer against torch's attention in bf16", decode)
        show("packing, GB/s of exact tokens", packing)
    elif not arguments.aot and not arguments.roofline:
        print("no GPU here: nothing is timed", file=sys.stderr)
    if not arguments.aot:
        result["roofline"] = [
            row for tokens in arguments.lengths for row in roofline(tokens, arguments.batches)
        ]
        show(
            f"roofline: a step of {LAYERS} layers, {KV_HEADS} KV heads of {SIZE}, "
            f"{WEIGHTS / 1e9:g} GB of weights, {BANDWIDTH / 1e12:g} TB/s",
            result["roofline"],
        )
    if not arguments.roofline:
        result["resources"] = [
            asdict(triton_aot.resources(variant, target))
            for target in arguments.targets
            for variant in triton_aot.variants(triton_aot.presets(), target)
        ]
        show("kernels, compiled ahead of time", result["resources"])
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
