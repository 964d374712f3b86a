"""The Triton kernels of KIVI pages against the reference.

On a GPU where there is one, else under Triton's interpreter, which has to be chosen before triton
is imported: ``test_kivi_triton.py`` runs this file in a process of its own.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_kivi_triton.py", allow_module_level=True)

from vllm_kvcompress.kernels.attention import Attention
from vllm_kvcompress.kernels.kivi import reference, triton_kivi
from vllm_kvcompress.kernels.kivi.format import PageFormat

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
POISON = 0xA5
# Of the norm. The interpreter multiplies in float32; tensor cores take operands of the dtype.
TOLERANCE = {BF16: 2e-2, FP16: 5e-3, FP32: 1e-4}

FORMATS = {
    "plain": PageFormat(32, 32, BF16),
    "plain-d64": PageFormat(32, 64, BF16),
    "balanced": PageFormat(64, 64, BF16, group=64, boosted=16, sinks=1),
    "several-groups": PageFormat(96, 32, FP16, boosted=16, sinks=5),
    "size-no-power-of-two": PageFormat(32, 80, FP16, boosted=48, sinks=3, value_bits=4),
    "four-bits": PageFormat(64, 96, FP32, group=64, key_bits=4, value_bits=4, sinks=2),
    "short-last-group": PageFormat(64, 80, BF16, group=64),
    "rotated": PageFormat(32, 32, BF16, boosted=16, sinks=1, rotated=True),
    "rotated-d80-4-bits": PageFormat(64, 80, FP32, 64, value_bits=4, sinks=3, rotated=True),
    "group-wider-than-head": PageFormat(128, 64, FP32, group=128),
}
SLOW_FORMATS = {
    "d256": PageFormat(64, 256, BF16, boosted=32, sinks=32),
    "d128-all-boosted": PageFormat(64, 128, FP16, group=64, boosted=128),
    "d112-g128": PageFormat(256, 112, BF16, group=128, key_bits=4),
    "d224": PageFormat(64, 224, FP32, group=64, value_bits=4, sinks=7),
}


def formats(*names, slow=False):
    found = [pytest.param(FORMATS[name], id=name) for name in names or FORMATS]
    if slow:
        found += [
            pytest.param(fmt, id=name, marks=pytest.mark.slow) for name, fmt in SLOW_FORMATS.items()
        ]
    return found


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def tokens(fmt, slots, heads, seed=0):
    """Exact K and V; channels of K differ in width and mean."""
    g = generator(seed)
    shape = (slots, fmt.block_tokens, heads, fmt.head_size)
    width, mean = torch.rand(2, heads, fmt.head_size, generator=g)
    keys = torch.randn(shape, generator=g) * 3 * width + 4 * (mean - 0.5)
    return keys.to(fmt.dtype), torch.randn(shape, generator=g).to(fmt.dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def poisoned_cache(fmt, blocks, heads):
    """Pages with a gap after each block's, as where layers share a tensor."""
    size = (blocks, heads + 1, fmt.block_tokens, fmt.token_bytes)
    return torch.full(size, POISON, dtype=torch.uint8, device=DEVICE)[:, :heads]


def on_device(*arguments):
    return [a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in arguments]


def pack_both(fmt, keys, values, slots, blocks, fills, firsts, count):
    heads = keys.shape[2]
    expected = poisoned_cache(fmt, count, heads).cpu()
    cache = poisoned_cache(fmt, count, heads)
    reference.pack(fmt, keys, values, slots, expected, blocks, fills, firsts)
    k, v, s, b, f, first = on_device(keys, values, slots, blocks, fills, firsts)
    triton_kivi.pack(fmt, k, v, s, cache, b, f, first)
    return cache.cpu(), expected


def several_blocks(fmt):
    """(slots, blocks, fills, firsts): full, nearly full, one token, none."""
    full = fmt.block_tokens
    return ints(1, 3, 0, 2), ints(2, 0, 4, 1), ints(full, full - 3, 1, 0), ints(1, 0, 1, 0)


@pytest.mark.parametrize("fmt", formats(slow=True))
def test_minmax_pages_are_the_references_to_the_byte(fmt):
    cache, expected = pack_both(fmt, *tokens(fmt, 4, 2), *several_blocks(fmt), count=6)
    if fmt.rotated:
        for name in set(fmt.sections) - {"value_codes", "value_extra", "value_scale"}:
            pages = cache.flatten(2), expected.flatten(2)
            a, b = (fmt.section(p[several_blocks(fmt)[1].long()], name) for p in pages)
            assert torch.equal(a, b), name
    else:
        assert torch.equal(cache, expected)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_odd_values_are_packed_to_the_same_bytes(dtype):
    fmt = PageFormat(32, 32, dtype, boosted=16)
    keys, values = tokens(fmt, 1, 1)
    keys[0, :, 0, 1] = 0  # no scale
    keys[0, :, 0, 2] = -1.25
    keys[0, :, 0, 3:20] = 1.5 + torch.arange(32)[:, None] % 2  # equal ranges: ties of ranks
    keys[0, :, 0, 20] = (torch.arange(32) * 0.25).to(dtype)  # halves between codes
    keys[0, 3, 0, 21] = torch.finfo(dtype).max / 4
    values[0, 4] = 0
    values[0, 5] *= 1e-4
    cache, expected = pack_both(fmt, keys, values, ints(0), ints(0), ints(32), ints(0), count=1)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(
    "fmt",
    [
        pytest.param(PageFormat(64, 64, BF16, 64, boosted=16, sinks=1, fit="unbiased"), id="bf16"),
        pytest.param(PageFormat(32, 80, FP32, value_bits=4, fit="unbiased"), id="fp32-4bit-V"),
        pytest.param(PageFormat(32, 64, BF16, sinks=2, fit="unbiased", rotated=True), id="rotated"),
        pytest.param(
            PageFormat(32, 96, FP32, value_bits=4, fit="unbiased", rotated=True), id="rotated-4bit"
        ),
    ],
)
def test_fitted_pages_read_as_the_references(fmt):
    """Sums in another order may turn a code at a boundary: nearly all numbers agree."""
    blocks = several_blocks(fmt)
    cache, expected = pack_both(fmt, *tokens(fmt, 4, 2), *blocks, count=6)
    got = reference.dequantise(fmt, cache, blocks[1], blocks[3])
    want = reference.dequantise(fmt, expected, blocks[1], blocks[3])
    for a, b in zip(got, want, strict=True):
        assert torch.isclose(a, b, rtol=1e-2, atol=1e-3).float().mean() > 0.995


@pytest.mark.parametrize("fmt", formats(slow=True))
def test_unpacked_tokens_are_the_references_and_no_others_are_written(fmt):
    slots, blocks, fills, firsts = several_blocks(fmt)
    source = tokens(fmt, 4, 2)
    cache = poisoned_cache(fmt, 6, 2).cpu()
    reference.pack(fmt, *source, slots, cache, blocks, fills, firsts)
    expected = [torch.full_like(x, torch.nan) for x in source]
    got = [torch.full_like(x, torch.nan, device=DEVICE) for x in source]
    reference.unpack(fmt, cache, blocks, fills, firsts, *expected, slots)
    cache, b, f, first, s = on_device(cache, blocks, fills, firsts, slots)
    triton_kivi.unpack(fmt, cache, b, f, first, *got, s)
    for a, b in zip(got, expected, strict=True):
        assert b.isnan().any()
        if fmt.rotated:
            # The rotation's sums may have another order.
            torch.testing.assert_close(a.cpu(), b, rtol=1e-2, atol=1e-5, equal_nan=True)
        else:
            assert torch.equal(a.cpu().nan_to_num(7.0), b.nan_to_num(7.0))


class Sequences:
    """Sequences over pages and slots; lengths include the new tokens."""

    def __init__(self, fmt, lengths, new, heads=2, kv_heads=1, exact=0.4, seed=0):
        g = generator(seed)
        width = max(-(-length // fmt.block_tokens) for length in lengths) + 1
        blocks = len(lengths) * width + 1
        self.fmt, self.lengths, self.new = fmt, lengths, new
        self.table = (torch.randperm(blocks - 1, generator=g) + 1).to(torch.int32)
        self.table = self.table.view(len(lengths), width)
        self.keys, self.values = tokens(fmt, blocks, kv_heads, seed)
        firsts = torch.zeros(blocks, dtype=torch.int32)
        firsts[self.table[:, 0].long()] = 1
        every = torch.arange(blocks, dtype=torch.int32)
        self.cache = torch.zeros(
            blocks, kv_heads, fmt.block_tokens, fmt.token_bytes, dtype=torch.uint8
        )
        fills = torch.full_like(every, fmt.block_tokens)
        reference.pack(fmt, self.keys, self.values, every, self.cache, every, fills, firsts)
        self.slots = torch.where(torch.rand(blocks, generator=g) < exact, every, -1).to(torch.int32)
        # What is not where a block says it is must not be read.
        self.keys[self.slots < 0] = torch.nan
        self.values[self.slots < 0] = torch.nan
        count = sum(new)
        self.query = torch.randn(count, heads, fmt.head_size, generator=g).to(fmt.dtype)
        self.key, self.value = torch.randn(2, count, kv_heads, fmt.head_size, generator=g).to(
            fmt.dtype
        )
        self.starts = torch.tensor([0, *new]).cumsum(0).to(torch.int32)

    def attend(self, module, attention, device, slack=0):
        out = torch.full_like(self.query, torch.nan, device=device)
        cache = self.cache
        if module is triton_kivi:
            cache = torch.where((self.slots >= 0)[:, None, None, None], POISON, cache)
        inputs = [
            self.query, self.key, self.value, cache, self.keys, self.values, self.slots,
            self.table, self.starts, torch.tensor(self.lengths, dtype=torch.int32),
        ]  # fmt: skip
        longest = max(self.new) + slack, max(self.lengths) + 7 * slack
        module.attend(self.fmt, attention, *(x.to(device) for x in inputs), out, *longest)
        return out.cpu().float()


def compare(sequences, attention=None, slack=0):
    attention = attention or Attention(sequences.fmt.head_size**-0.5)
    expected = sequences.attend(reference, attention, "cpu")
    if DEVICE != "cpu":
        on = {
            name: None if getattr(attention, name) is None else getattr(attention, name).to(DEVICE)
            for name in ("slopes", "sinks")
        }
        attention = Attention(attention.scale, attention.window, attention.soft_cap, **on)
    out = sequences.attend(triton_kivi, attention, DEVICE, slack)
    tolerance = TOLERANCE[sequences.fmt.dtype]
    for row, new in enumerate(sequences.new):
        begin = int(sequences.starts[row])
        want, got = expected[begin : begin + new], out[begin : begin + new]
        assert (got - want).norm() <= tolerance * want.norm(), f"sequence {row}"


@pytest.mark.parametrize("fmt", formats(slow=True))
def test_decode_and_prefill_of_every_format(fmt):
    block = fmt.block_tokens
    compare(Sequences(fmt, [2 * block + 9, block, 1, block + 5], [1, 3, 1, 5]))


def test_the_engines_decode_step():
    compare(Sequences(FORMATS["plain-d64"], [70, 33, 2, 32], [1, 1, 1, 1], heads=4, kv_heads=2))


@pytest.mark.parametrize("heads, kv_heads", [(3, 3), (6, 2), (5, 1)], ids=["mha", "gqa", "mqa"])
def test_heads_that_share_a_kv_head(heads, kv_heads):
    compare(Sequences(FORMATS["plain"], [50, 40], [1, 20], heads, kv_heads))


def test_a_prompt_without_history():
    compare(Sequences(FORMATS["plain"], [40, 7], [40, 7]))


def test_a_long_chunk_after_a_history_in_several_tiles_of_queries(monkeypatch):
    monkeypatch.setattr(triton_kivi, "TILING", triton_kivi.Tiling(rows=16))
    compare(Sequences(FORMATS["balanced"], [100], [37], heads=2))


@pytest.mark.parametrize("programs", [8, 32])
def test_a_history_split_into_stretches(programs, monkeypatch):
    tiling = triton_kivi.Tiling(programs=programs, stretch=1)
    monkeypatch.setattr(triton_kivi, "TILING", tiling)
    monkeypatch.setattr(triton_kivi, "_multiprocessors", lambda device: 1)
    compare(Sequences(FORMATS["several-groups"], [200, 1, 33], [1, 1, 1]))


ATTENTIONS = {
    "window": Attention(0.2, window=37),
    "short-window": Attention(0.2, window=3),
    "soft-cap": Attention(0.5, soft_cap=4.0),
    "alibi": Attention(0.2, slopes=torch.tensor([0.25, 0.0625])),
    "sinks": Attention(0.2, sinks=torch.tensor([1.5, -0.5])),
    "all": Attention(0.3, 50, 6.0, torch.tensor([0.1, 0.02]), torch.tensor([0.5, 2.0])),
}


@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
def test_what_a_layer_does_beside_softmax(attention):
    fmt = FORMATS["several-groups"]
    compare(Sequences(fmt, [150, 120, 97, 2], [1, 4, 60, 1]), attention)


def test_blocks_out_of_the_window_are_not_looked_up():
    sequences = Sequences(FORMATS["plain"], [150, 130], [1, 3])
    attention = Attention(0.2, window=20)
    expected = sequences.attend(reference, attention, "cpu")
    # Where the table is stale: a block that belongs to nobody and holds no numbers.
    sequences.table[:, :3] = 0
    sequences.slots[0], sequences.keys[0], sequences.values[0] = 0, torch.nan, torch.nan
    out = sequences.attend(triton_kivi, attention, DEVICE)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_bounds_may_be_too_high_and_sequences_without_new_tokens_are_left_alone():
    compare(Sequences(FORMATS["plain"], [40, 20, 0, 0], [1, 2, 0, 0]), slack=20)


@pytest.mark.parametrize("exact", [0.0, 1.0], ids=["all-packed", "all-exact"])
def test_histories_of_one_kind(exact):
    compare(Sequences(FORMATS["balanced"], [129, 70], [1, 4], exact=exact))
