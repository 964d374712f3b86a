"""KIVI pages: every implementation against the reference, and the reference against the paper."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import numpy as np
import pytest
import torch

from vllm_kvcompress.kernels.attention import Attention
from vllm_kvcompress.kernels.kivi import format as form
from vllm_kvcompress.kernels.kivi import reference
from vllm_kvcompress.kernels.kivi.format import PageFormat

IMPLEMENTATIONS = ["cpu"]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
POISON = 0xAB

FORMATS = {
    "published": PageFormat(32, 64, BF16),
    "published fp16, two groups": PageFormat(128, 64, FP16, 64),
    "published fp32": PageFormat(64, 64, FP32),
    "boosted, a sink": PageFormat(128, 64, BF16, 64, boosted=16, sinks=1),
    "short last group, 4 bits": PageFormat(64, 80, FP32, 32, 4, 4, sinks=4),
    "head 96, V of 4 bits": PageFormat(64, 96, FP16, 64, 2, 4, boosted=32),
    "head 256, one group of 128": PageFormat(128, 256, BF16, 128, sinks=2),
    "head 32": PageFormat(32, 32, FP16, 32, 4, 2),
    "unbiased, two groups": PageFormat(128, 64, BF16, 64, boosted=16, sinks=1, fit="unbiased"),
    "unbiased fp32": PageFormat(32, 112, FP32, 32, 2, 4, fit="unbiased"),
    "unbiased": PageFormat(64, 128, FP16, 64, boosted=16, sinks=4, fit="unbiased"),
    "rotated": PageFormat(128, 64, BF16, 64, boosted=16, sinks=4, fit="unbiased", rotated=True),
    "rotated, 4 bits, head 80": PageFormat(64, 80, FP32, 64, 4, 4, fit="unbiased", rotated=True),
    "rotated, published K": PageFormat(32, 96, FP16, 32, sinks=1, rotated=True),
}
EXACT_FIT = [n for n, f in FORMATS.items() if f.fit == "minmax" and not f.rotated]
FITTED = [n for n in FORMATS if n not in EXACT_FIT]


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=IMPLEMENTATIONS)
def kernels(request):
    return import_module(f"vllm_kvcompress.kernels.kivi.{request.param}")


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def poisoned(fmt: PageFormat, blocks: int, heads: int) -> torch.Tensor:
    """A cache in the middle of a bigger one: other layers' pages before and behind each block."""
    whole = torch.full(
        (blocks, 2, heads + 1, fmt.block_tokens, fmt.token_bytes), POISON, dtype=torch.uint8
    )
    return whole[:, 1, :heads]


def exact_tokens(fmt: PageFormat, slots: int, heads: int, seed: int) -> torch.Tensor:
    """K or V with an outlying channel, a constant one and one of few values, of odd strides."""
    torch.manual_seed(seed)
    x = torch.randn(slots, fmt.block_tokens, heads + 1, fmt.head_size)
    x[..., 3] = 4 * x[..., 3] + 6
    x[..., 5] = 0.75
    x[..., 7] = x[..., 7].round()
    return x.to(fmt.dtype)[:, :, :heads]


@dataclass
class Blocks:
    """Some blocks to pack: full, partly filled, of one token and of none, first ones and others."""

    fmt: PageFormat
    heads: int = 2

    def __post_init__(self) -> None:
        tokens = self.fmt.block_tokens
        self.fills = int32([tokens, tokens, tokens - 13, 1, 17, 0])
        self.firsts = int32([1, 0, 0, 1, 1, 0])
        self.slots = int32([4, 0, 6, 3, 1, 2])
        self.blocks = int32([2, 8, 0, 5, 7, 3])
        self.keys = exact_tokens(self.fmt, 7, self.heads, 1)
        self.values = exact_tokens(self.fmt, 7, self.heads, 2)

    def packed(self, module) -> torch.Tensor:
        cache = poisoned(self.fmt, 9, self.heads)
        module.pack(
            self.fmt, self.keys, self.values, self.slots, cache, self.blocks, self.fills,
            self.firsts,
        )  # fmt: skip
        return cache

    def unpacked(self, module, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = torch.full_like(self.keys, -3), torch.full_like(self.values, -3)
        module.unpack(
            self.fmt, cache, self.blocks, self.fills, self.firsts, keys, values, self.slots
        )
        return keys, values


@pytest.mark.parametrize("name", EXACT_FIT)
def test_pages_of_the_published_fit_are_the_references_byte_for_byte(kernels, name):
    blocks = Blocks(FORMATS[name])
    assert torch.equal(blocks.packed(kernels), blocks.packed(reference))


@pytest.mark.parametrize("name", FITTED)
def test_fitted_pages_differ_from_the_references_by_rounding_only(kernels, name):
    fmt = FORMATS[name]
    blocks = Blocks(fmt)
    ours, truth = blocks.packed(kernels), blocks.packed(reference)
    pages = [reference.pages_of(fmt, cache, blocks.blocks) for cache in (ours, truth)]
    for section in fmt.sections:
        mine, theirs = (fmt.section(p, section) for p in pages)
        if section.endswith(("codes", "extra")):
            if mine.numel():
                mine, theirs = reference._unplane(mine), reference._unplane(theirs)
                assert (mine != theirs).float().mean() < 0.005, section
        elif mine.numel():
            close = torch.isclose(mine.float(), theirs.float(), rtol=0.01, atol=1e-3)
            assert (~close).sum() <= 0.005 * mine.numel() + 1, section
    errors = []
    for cache in (ours, truth):
        k, v = reference.dequantise(fmt, cache, blocks.blocks, blocks.firsts)
        real = torch.arange(fmt.block_tokens) < blocks.fills[:, None]
        real = real[:, None, :, None]
        slots = blocks.slots.long()
        k = (k - blocks.keys[slots].transpose(1, 2).float()) * real
        v = (v - blocks.values[slots].transpose(1, 2).float()) * real
        errors.append((k.square().sum().item(), v.square().sum().item()))
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


@pytest.mark.parametrize("name", ["boosted, a sink", "rotated"])
def test_packing_leaves_neighbours_and_other_blocks_alone(kernels, name):
    fmt = FORMATS[name]
    cache = Blocks(fmt).packed(kernels)
    written = torch.zeros(cache._base.shape, dtype=torch.bool)
    written[Blocks(fmt).blocks.long(), 1, :2] = True
    assert (cache._base[~written] == POISON).all()


@pytest.mark.parametrize("name", FORMATS)
def test_unpacking_gives_the_references_values_and_no_token_beyond_the_fill(kernels, name):
    fmt = FORMATS[name]
    blocks = Blocks(fmt)
    cache = blocks.packed(reference)
    ours, truth = blocks.unpacked(kernels, cache), blocks.unpacked(reference, cache)
    assert torch.equal(ours[0], truth[0])
    if fmt.rotated:  # a sum of many terms
        assert torch.allclose(ours[1].float(), truth[1].float(), rtol=0.01, atol=1e-5)
        assert (ours[1] != truth[1]).float().mean() < 0.05 or fmt.dtype == FP32
    else:
        assert torch.equal(ours[1], truth[1])


@pytest.mark.parametrize("name", ["boosted, a sink", "short last group, 4 bits", "rotated"])
def test_sinks_come_back_exactly_from_the_first_block_alone(kernels, name):
    fmt = FORMATS[name]
    blocks = Blocks(fmt)
    keys, values = blocks.unpacked(kernels, blocks.packed(kernels))
    first, other = (int(blocks.slots[i]) for i in (0, 1))
    assert torch.equal(keys[first, : fmt.sinks], blocks.keys[first, : fmt.sinks])
    assert not torch.equal(keys[other, : fmt.sinks], blocks.keys[other, : fmt.sinks])
    if fmt.rotated:
        assert torch.equal(values[first, : fmt.sinks], blocks.values[first, : fmt.sinks])


def _published(values: np.ndarray, bits: int, kind) -> tuple[np.ndarray, np.generic, np.generic]:
    """Codes, scale and minimum of one group, a value at a time, in the model's dtype."""
    rounded = (lambda x: np.float32(x)) if kind == FP32 else np.float16
    if kind == BF16:
        rounded = _bfloat16
    top = rounded(2**bits - 1)
    low, high = min(values), max(values)
    scale = rounded(rounded(np.float32(high) - np.float32(low)) / np.float32(top))
    codes = []
    for x in values:
        if scale == 0:
            codes.append(0)
            continue
        ratio = rounded(np.float32(rounded(np.float32(x) - np.float32(low))) / np.float32(scale))
        codes.append(int(np.round(np.clip(np.float32(ratio), 0, np.float32(top)))))
    return np.array(codes), scale, low


def _bfloat16(x) -> np.float32:
    bits = int(np.float32(x).view(np.uint32))
    bits += 0x7FFF + (bits >> 16 & 1)
    return np.uint32(bits & 0xFFFF0000).view(np.float32)


def _code_of(page: np.ndarray, offset: int, columns: int, row: int, column: int) -> int:
    at = offset + 4 * ((row // 16) * columns + column)
    word = int.from_bytes(page[at : at + 4].tobytes(), "little")
    return word >> (2 * (row % 16)) & 3


@pytest.mark.parametrize("kind", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("which", ["reference", *IMPLEMENTATIONS])
def test_a_page_holds_what_the_paper_says(which, kind):
    module = import_module(f"vllm_kvcompress.kernels.kivi.{which}")
    fmt = PageFormat(32, 32, kind, 32, 2, 4)
    k, v = exact_tokens(fmt, 1, 1, 3), exact_tokens(fmt, 1, 1, 4)
    cache = poisoned(fmt, 1, 1)
    module.pack(fmt, k, v, int32([0]), cache, int32([0]), int32([32]), int32([0]))
    page = cache[0, 0].contiguous().view(-1).numpy()
    at = {name: offset for name, (offset, _) in fmt.sections.items()}

    def stored(name: str) -> np.ndarray:
        return fmt.section(torch.from_numpy(page.copy()), name).float().numpy()

    k, v = k[0, :, 0].float().numpy(), v[0, :, 0].float().numpy()
    for channel in range(32):
        codes, scale, low = _published(k[:, channel], 2, kind)
        found = [_code_of(page, at["key_codes"], 32, channel, t) for t in range(32)]
        assert found == codes.tolist()
        assert stored("key_scale")[0, channel] == np.float32(scale)
        assert stored("key_min")[0, channel] == np.float32(low)
    for token in range(32):
        codes, scale, low = _published(v[token], 4, kind)
        found = [
            4 * _code_of(page, at["value_codes"], 32, token, c)
            + _code_of(page, at["value_extra"], 32, token, c)
            for c in range(32)
        ]
        assert found == codes.tolist()
        assert stored("value_scale")[0, token] == np.float32(scale)
        assert stored("value_min")[0, token] == np.float32(low)


@dataclass
class Batch:
    """Sequences with some blocks packed and some exact, and new tokens for all of them."""

    fmt: PageFormat
    sequences: list[tuple[int, int]]
    """New tokens and length of each."""
    kv_heads: int
    queries: int
    exact: float = 0.3
    """The share of blocks that are exact; the last one of half the sequences is as well."""

    def __post_init__(self) -> None:
        fmt, tokens = self.fmt, self.fmt.block_tokens
        torch.manual_seed(5)
        counts = [-(-length // tokens) for _, length in self.sequences]
        total = sum(counts) + 3
        self.table = torch.randint(0, total, (len(counts), max(counts) + 2), dtype=torch.int32)
        free = torch.randperm(total).tolist()
        self.slot_of_block = torch.full((total,), -1, dtype=torch.int32)
        self.keys = exact_tokens(fmt, total, self.kv_heads, 6)
        self.values = exact_tokens(fmt, total, self.kv_heads, 7)
        slots = torch.randperm(total).tolist()
        blocks, fills, firsts = [], [], []
        for row, ((new, length), count) in enumerate(zip(self.sequences, counts, strict=True)):
            for i in range(count):
                block = free.pop()
                self.table[row, i] = block
                blocks.append(block)
                fills.append(max(0, min(tokens, length - new - i * tokens)))
                firsts.append(int(i == 0))
                if torch.rand(()) < self.exact or (i == count - 1 and row % 2):
                    self.slot_of_block[block] = slots[block]
        self.cache = poisoned(fmt, total, self.kv_heads)
        source = int32([slots[b] for b in blocks])
        reference.pack(
            fmt, self.keys, self.values, source, self.cache, int32(blocks), int32(fills),
            int32(firsts),
        )  # fmt: skip
        for block, fill in zip(blocks, fills, strict=True):
            # What an exact block has beyond its fill is never read, nor what a packed one's slot.
            self.keys[slots[block], fill:] = torch.nan
            self.values[slots[block], fill:] = torch.nan
        self.new = [new for new, _ in self.sequences]
        tokens = sum(self.new)
        # As views of one projection, the way models have them.
        heads = self.kv_heads * self.queries
        whole = torch.randn(tokens, heads + 2 * self.kv_heads, fmt.head_size).to(fmt.dtype)
        self.query, self.key, self.value = whole.split((heads, self.kv_heads, self.kv_heads), 1)

    def attended(self, module, attention: Attention) -> torch.Tensor:
        out = torch.full(self.query.shape, torch.nan, dtype=self.fmt.dtype)
        module.attend(
            self.fmt, attention, self.query, self.key, self.value, self.cache, self.keys,
            self.values, self.slot_of_block, self.table,
            int32([0, *np.cumsum(self.new).tolist()]), int32([n for _, n in self.sequences]), out,
            max(self.new), max(n for _, n in self.sequences),
        )  # fmt: skip
        return out.float()

    def check(self, module, attention: Attention) -> None:
        # The reference reads whole exact blocks; it needs numbers where nothing counts.
        ours = self.attended(module, attention)
        self.keys, self.values = (x.nan_to_num(0) for x in (self.keys, self.values))
        truth = self.attended(reference, attention)
        step = {FP32: 1e-5, FP16: 1e-3, BF16: 8e-3}[self.fmt.dtype]
        assert torch.allclose(ours, truth, rtol=step, atol=step)


# Decodes, first prefills, continued prefills and a few new tokens, in no order; history that ends
# in a block's middle, at its end, and that is empty; more than one span.
MIXED = [(1, 200), (40, 40), (1, 1), (70, 333), (3, 150), (1, 129), (1, 1300), (150, 280), (2, 2)]
SHORT = [(1, 70), (20, 97), (2, 40)]


@pytest.mark.parametrize("name", FORMATS)
def test_attention_over_packed_and_exact_blocks(kernels, name):
    fmt = FORMATS[name]
    Batch(fmt, SHORT, 2, 3).check(kernels, Attention(fmt.head_size**-0.5))


@pytest.mark.parametrize("name", ["published fp32", "rotated"])
@pytest.mark.parametrize(("kv_heads", "queries"), [(3, 3), (2, 1), (1, 5), (1, 22)])
def test_attention_of_mixed_batches_with_shared_and_own_heads(kernels, name, kv_heads, queries):
    fmt = FORMATS[name]
    Batch(fmt, MIXED, kv_heads, queries).check(kernels, Attention(0.2))


def test_attention_over_a_long_history_in_many_spans(kernels):
    fmt = FORMATS["rotated"]
    Batch(fmt, [(1, 8192), (5, 5000)], 1, 3, exact=0.05).check(kernels, Attention(0.125))


ATTENTIONS = {
    "window of one": Attention(0.125, window=1),
    "window within a block": Attention(0.125, window=50),
    "window of blocks": Attention(0.125, window=161),
    "soft cap": Attention(0.3, soft_cap=3.0),
    "slopes": Attention(0.125, slopes=torch.tensor([0.5, 0.25, 0.125, 0.06, 0.03, 0.015])),
    "sinks": Attention(0.125, sinks=torch.tensor([1.0, -2, 3, 0, 5, -9]).bfloat16()),
    "all": Attention(
        0.25, 77, 5.0, torch.tensor([0.5, 0.25, 0.125, 0.06, 0.03, 0.01]), torch.arange(6.0) - 2
    ),
}


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ["published fp32", "rotated, 4 bits, head 80"])
def test_attention_with_all_that_a_layer_may_add(kernels, name, attention):
    Batch(FORMATS[name], MIXED, 2, 3).check(kernels, ATTENTIONS[attention])


def test_blocks_wholly_outside_the_window_are_not_read(kernels):
    fmt, attention = FORMATS["published fp32"], Attention(0.125, window=70)
    batch = Batch(fmt, [(1, 1000), (30, 700), (2, 640)], 2, 3)
    before = batch.attended(kernels, attention)
    for row, (new, length) in enumerate(batch.sequences):
        gone = (length - new - 69) // fmt.block_tokens
        batch.table[row, :gone] = 0 if row else batch.table[row, gone + 1]
        batch.table[row, 1 : gone - 1] = 2**30
    assert torch.equal(batch.attended(kernels, attention), before)


@pytest.mark.parametrize("exact", [0.0, 1.0])
def test_attention_where_all_blocks_are_packed_or_all_exact(kernels, exact):
    batch = Batch(FORMATS["boosted, a sink"], MIXED, 1, 4, exact)
    if not exact:
        batch.slot_of_block[:] = -1
    batch.check(kernels, Attention(0.125))


def test_results_do_not_depend_on_the_number_of_threads(kernels):
    batch = Batch(FORMATS["rotated"], MIXED, 3, 3)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(batch.attended(kernels, Attention(0.125)))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("size", form.HEAD_SIZES)
def test_the_rotation_is_its_own_inverse(size):
    matrix = form.rotation(size)
    assert torch.equal(matrix, matrix.T)
    assert torch.allclose(matrix @ matrix, torch.eye(size), atol=1e-6)
