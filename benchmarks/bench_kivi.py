"""KIVI and FP8 pages on the CPU against vLLM's own attention over exact bf16, in one process.

Shapes are SmolLM2-135M's: 9 heads, 3 KV heads, head size 64. Decode: one new token a sequence, over
a context that is packed but for its last two blocks.
Prefill: a prompt in one chunk, and its last chunk over a packed history. Pack: exact tokens in.
Rates are per thread, times the process's own, of all threads together, and each the best of some.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from timing import best_time
from vllm import _custom_ops as ops

from vllm_kvcompress.attention.residual import ResidualPool, StepInput, new_lives
from vllm_kvcompress.kernels import fp8
from vllm_kvcompress.kernels.attention import Attention
from vllm_kvcompress.kernels.fp8.format import PageFormat as Fp8Format
from vllm_kvcompress.kernels.kivi import cpu
from vllm_kvcompress.kernels.kivi.format import PageFormat

HEADS, KV_HEADS, SIZE, BLOCK = 9, 3, 64, 128
BF16 = torch.bfloat16
SCALE = SIZE**-0.5
PRESETS = {
    "kivi, G 32": PageFormat(BLOCK, SIZE, BF16),
    "balanced": PageFormat(
        BLOCK, SIZE, BF16, 64, boosted=16, sinks=1, fit="unbiased", rotated=True
    ),
}


def counts(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def vllm_call(batch: int, new: int, length: int) -> Callable[[], None]:
    """vLLM's attention of ``new`` tokens of each sequence."""
    blocks = -(-length // BLOCK)
    cache = torch.randn(batch * blocks + 1, KV_HEADS, 2 * BLOCK, SIZE).to(BF16)
    keys, values = cache.chunk(2, dim=2)
    table = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
    query = torch.randn(batch * new, HEADS, SIZE).to(BF16)
    out = torch.empty_like(query)
    starts = torch.arange(batch + 1, dtype=torch.int32) * new
    lengths = counts(*[length] * batch)
    plan = ops.cpu_attn_get_scheduler_metadata(
        batch, HEADS, KV_HEADS, SIZE, lengths, BF16, starts, True, -1, "vec", True
    )
    return lambda: ops.cpu_attention_with_kv_cache(
        query, keys, values, out, starts, lengths, SCALE, True, None, -1, table, 0.0, plan, None
    )


def our_call(fmt: PageFormat, batch: int, new: int, length: int) -> Callable[[], None]:
    blocks = -(-length // BLOCK)
    total = batch * blocks
    cache = torch.zeros(total + 1, KV_HEADS, BLOCK, fmt.token_bytes, dtype=torch.uint8)
    keys = torch.randn(2 * batch, BLOCK, KV_HEADS, SIZE).to(BF16)
    values = torch.randn_like(keys)
    every = torch.arange(total, dtype=torch.int32)
    table = every.view(batch, blocks)
    firsts = (every % blocks == 0).to(torch.int32)
    fills = torch.full_like(every, BLOCK)
    cpu.pack(fmt, keys, values, every % len(keys), cache, every, fills, firsts)
    slot_of_block = torch.full((total + 1,), -1, dtype=torch.int32)
    if new < length:
        slot_of_block[table[:, -2:].reshape(-1).long()] = torch.arange(2 * batch, dtype=torch.int32)
    query = torch.randn(batch * new, HEADS, SIZE).to(BF16)
    key, value = (torch.randn(batch * new, KV_HEADS, SIZE).to(BF16) for _ in range(2))
    out = torch.empty_like(query)
    starts = torch.arange(batch + 1, dtype=torch.int32) * new
    lengths, attention = counts(*[length] * batch), Attention(SCALE)
    return lambda: cpu.attend(
        fmt, attention, query, key, value, cache, keys, values, slot_of_block, table, starts,
        lengths, out, new, length,
    )  # fmt: skip


def fp8_call(batch: int, new: int, length: int) -> Callable[[], None]:
    fmt, kernels = Fp8Format(BLOCK, SIZE), fp8.implementation(torch.device("cpu"))
    blocks = -(-length // BLOCK)
    cache = torch.zeros(batch * blocks + 1, KV_HEADS, BLOCK, 2 * SIZE, dtype=torch.uint8)
    scales = torch.full((2, KV_HEADS), 0.01)
    kv = torch.randn(2, batch * blocks * BLOCK, KV_HEADS, SIZE).to(BF16)
    kernels.store(fmt, *kv, cache, torch.arange(kv.shape[1]), *scales)
    table = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
    query = torch.randn(batch * new, HEADS, SIZE).to(BF16)
    out = torch.empty_like(query)
    starts = torch.arange(batch + 1, dtype=torch.int32) * new
    lengths, attention = counts(*[length] * batch), Attention(SCALE)
    return lambda: kernels.attend(
        fmt, attention, query, cache, *scales, table, starts, lengths, out, new, length
    )


def attention(context: int, prompt: int, chunk: int, repeats: int) -> list[dict]:
    shapes = [("decode", batch, 1, context) for batch in (1, 4, 8)]
    shapes += [("prefill", 1, prompt, prompt), ("last chunk", 1, chunk, prompt)]
    rows = []
    for what, batch, new, length in shapes:
        times = repeats if new == 1 else max(2, repeats // 8)
        # Alternately, so that both meet the machine in the same state.
        calls = {"vllm bf16": vllm_call(batch, new, length)}
        calls |= {name: our_call(fmt, batch, new, length) for name, fmt in PRESETS.items()}
        calls["fp8"] = fp8_call(batch, new, length)
        best = dict.fromkeys(calls, float("inf"))
        for call in calls.values():
            call()
        for _ in range(times):
            for name, call in calls.items():
                best[name] = min(best[name], best_time(call, 1))
        pairs = new * (length - (new - 1) / 2)
        for name, seconds in best.items():
            rows.append({
                "what": what, "batch": batch, "new": new, "length": length, "name": name,
                "ms": seconds * 1e3, "ratio": best["vllm bf16"] / seconds,
                "gvalues_s": batch * pairs * KV_HEADS * 2 * SIZE / seconds / 1e9,
            })  # fmt: skip
    return rows


def coding(repeats: int) -> list[dict]:
    rows = []
    keys = torch.randn(64, BLOCK, KV_HEADS, SIZE).to(BF16)
    values = torch.randn_like(keys)
    every = torch.arange(len(keys), dtype=torch.int32)
    fills, firsts = torch.full_like(every, BLOCK), torch.zeros_like(every)
    size = 2 * keys.nbytes
    for name, fmt in PRESETS.items():
        cache = torch.zeros(len(keys), KV_HEADS, BLOCK, fmt.token_bytes, dtype=torch.uint8)
        back = torch.empty_like(keys), torch.empty_like(values)

        def pack(fmt=fmt, cache=cache):
            cpu.pack(fmt, keys, values, every, cache, every, fills, firsts)

        def unpack(fmt=fmt, cache=cache, back=back):
            cpu.unpack(fmt, cache, every, fills, firsts, *back, every)

        rows.append({
            "what": "code", "name": name, "bits": fmt.bits_per_value,
            "pack_gb_s": size / best_time(pack, repeats) / 1e9,
            "unpack_gb_s": size / best_time(unpack, repeats) / 1e9,
        })  # fmt: skip
    return rows


def planning(context: int, repeats: int) -> list[dict]:
    """What a step of eight decodes costs beside its kernels, once a step for all layers."""
    rows = []
    batch, blocks = 8, -(-context // BLOCK)
    for cached in (1_000, 100_000):
        pool = ResidualPool(2048, batch * blocks + cached, BLOCK, 128)
        for block in range(batch * blocks, batch * blocks + cached):
            pool.adopt(block, False)  # of requests that have ended
        table = np.arange(batch * blocks, dtype=np.int32).reshape(batch, blocks)
        starts = np.arange(batch + 1, dtype=np.int32)
        lengths = np.full(batch, context - BLOCK, np.int32)

        def step(pool=pool, table=table, starts=starts, lengths=lengths):
            lengths += 1
            slots = table[np.arange(batch), (lengths - 1) // BLOCK].astype(np.int64) * BLOCK
            slots += (lengths - 1) % BLOCK
            pool.finish_step()
            for block in new_lives(slots, BLOCK):
                pool.drop(block)
            pool.plan(StepInput(table, starts, lengths, slots))

        best = best_time(step, min(repeats, BLOCK - 1))
        rows.append({"what": "plan", "cached_blocks": cached, "microseconds": best * 1e6})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    plans = planning(arguments.context, 4 * arguments.repeats)
    codes = coding(arguments.repeats)
    rows = attention(arguments.context, arguments.prompt, arguments.chunk, arguments.repeats)
    if arguments.json:
        arguments.json.write_text(json.dumps(plans + codes + rows, indent=1))
    for row in plans:
        print(
            f"plan of a step, {row['cached_blocks']:>7} blocks cached: {row['microseconds']:.0f} us"
            f"  {plans[0]['microseconds'] / row['microseconds']:.2f}x"
        )
    for row in codes:
        print(
            f"{row['name']:26} {row['bits']:.2f} bits a value"
            f"  pack {row['pack_gb_s']:.2f} GB/s  unpack {row['unpack_gb_s']:.2f} GB/s"
        )
    for row in rows:
        print(
            f"{row['what']:10} batch {row['batch']} {row['new']:>4} of {row['length']}"
            f"  {row['name']:26} {row['ms']:8.2f} ms  {row['gvalues_s']:7.2f} Gvalues/s"
            f"  x{row['ratio']:.2f}"
        )


if __name__ == "__main__":
    main()
