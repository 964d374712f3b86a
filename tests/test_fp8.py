"""FP8 pages: the reference against torch's own casts, and the CPU kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvcompress.kernels.attention import Attention
from vllm_kvcompress.kernels.fp8 import cpu, reference
from vllm_kvcompress.kernels.fp8.format import HEAD_SIZES, PageFormat

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 1e-2, FP16: 2e-3, FP32: 1e-5}
POISON = 0x7F  # NaN: what is not stored must not be read
CODES = ("e4m3", "e5m2")


def scales(*values):
    return torch.tensor(values, dtype=FP32)


def store_both(fmt, key, value, slots, k_scale, v_scale, blocks):
    """Caches after storing with the CPU kernels and with the reference."""
    shape = (blocks, key.shape[1] + 1, fmt.block_tokens, 2 * fmt.head_size)
    caches = []
    for kernels in (cpu, reference):
        cache = torch.full(shape, POISON, dtype=torch.uint8)[:, :-1]
        kernels.store(fmt, key, value, cache, slots, k_scale, v_scale)
        caches.append(cache)
    return caches


@pytest.mark.parametrize("code", CODES)
def test_every_number_of_16_bits_is_rounded_to_nearest_even_and_saturates(code):
    fmt = PageFormat(16, 32, code)
    for dtype in (BF16, FP16):
        every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
        key = every.view(-1, 2, 32)
        slots = torch.arange(len(key))
        for scale in (scales(1.0), scales(0.37, 12.5)):
            got, expected = store_both(fmt, key, key, slots, scale, scale, len(key) // 16)
            same = got == expected
            # torch keeps the sign and the payload of a NaN; one NaN is as good as another.
            is_nan = [(x & 0x7F) > (0x7E if code == "e4m3" else 0x7C) for x in (got, expected)]
            assert (same | (is_nan[0] & is_nan[1])).all()
            k, _ = reference.read(fmt, got, torch.arange(len(key) // 16), scale, scale)
            x = key.float() / scale.view(-1, 1)
            near = x.clamp(-fmt.largest, fmt.largest).to(fmt.dtype).float() * scale.view(-1, 1)
            stored = k.transpose(1, 2).flatten(0, 1)
            assert torch.equal(stored.isnan(), near.isnan())
            assert torch.equal(stored.nan_to_num(7), near.nan_to_num(7))


@given(
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=32),
    st.floats(1e-6, 1e6),
    st.sampled_from(CODES),
)
@settings(max_examples=200, deadline=None)
def test_any_float_at_any_scale_is_stored_as_torch_casts_it(numbers, scale, code):
    fmt = PageFormat(16, 32, code)
    key = torch.zeros(1, 1, 32)
    key[0, 0, : len(numbers)] = torch.tensor(numbers, dtype=torch.int32).view(FP32).nan_to_num(1)
    got, expected = store_both(fmt, key, -key, torch.tensor([3]), scales(scale), scales(scale), 1)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("size", HEAD_SIZES)
def test_tokens_go_to_their_slots_and_nothing_else_is_written(size):
    fmt = PageFormat(48, size)
    g = torch.Generator().manual_seed(size)
    both = torch.randn(70, 3, 2 * size, generator=g).to(BF16)
    key, value = both.split(size, 2)  # strided, as where K and V come from one projection
    slots = torch.randperm(4 * 48, generator=g)[:60]
    slots[[5, 40]] = -1
    got, expected = store_both(fmt, key, value, slots, scales(0.1, 0.02, 1), scales(0.5), 4)
    assert torch.equal(got, expected)
    assert (got == POISON).any()


class Sequences:
    """Sequences over pages that hold nothing but their tokens; lengths include the new ones."""

    def __init__(self, fmt, lengths, new, heads=6, kv_heads=2, dtype=BF16, seed=0, per_head=True):
        g = torch.Generator().manual_seed(seed)
        self.fmt, self.new = fmt, new
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        width = max(-(-length // fmt.block_tokens) for length in lengths) + 1
        blocks = len(lengths) * width + 1
        self.table = (torch.randperm(blocks - 1, generator=g) + 1).to(torch.int32)
        self.table = self.table.view(len(lengths), width)
        shape = (blocks, kv_heads, fmt.block_tokens, 2 * fmt.head_size)
        self.cache = torch.full(shape, POISON, dtype=torch.uint8)
        count = kv_heads if per_head else 1
        self.k_scale, self.v_scale = torch.rand(2, count, generator=g) * 0.1 + 0.005
        for row, length in enumerate(lengths):
            kv = torch.randn(2, length, kv_heads, fmt.head_size, generator=g).to(dtype)
            token = torch.arange(length)
            slots = self.table[row].long()[token // fmt.block_tokens] * fmt.block_tokens
            slots += token % fmt.block_tokens
            cpu.store(fmt, *kv, self.cache, slots, self.k_scale, self.v_scale)
        self.query = torch.randn(sum(new), heads, fmt.head_size, generator=g).to(dtype)
        self.starts = torch.tensor([0, *new]).cumsum(0).to(torch.int32)

    def attend(self, kernels, attention):
        out = torch.full_like(self.query, torch.nan)
        kernels.attend(
            self.fmt, attention, self.query, self.cache, self.k_scale, self.v_scale, self.table,
            self.starts, self.lengths, out, max(self.new), int(self.lengths.max()),
        )  # fmt: skip
        return out.float()


def compare(sequences, attention=None):
    attention = attention or Attention(sequences.fmt.head_size**-0.5)
    expected = sequences.attend(reference, attention)
    got = sequences.attend(cpu, attention)
    tolerance = TOLERANCE[sequences.query.dtype]
    assert not expected.isnan().any()
    for row in range(len(sequences.new)):
        begin, end = sequences.starts[row : row + 2].tolist()
        want, have = expected[begin:end], got[begin:end]
        assert (have - want).norm() <= tolerance * want.norm(), f"sequence {row}"


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_decode_prefill_and_continued_prefill_of_every_head_size(size, code, dtype):
    fmt = PageFormat(48, size, code)
    compare(Sequences(fmt, [130, 48, 1, 70, 200], [1, 48, 1, 33, 3], dtype=dtype))


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (3, 3), (9, 3), (8, 2), (10, 2), (7, 1)])
def test_heads_that_share_a_kv_head(heads, kv_heads):
    compare(Sequences(PageFormat(32, 64), [90, 40, 50], [1, 1, 20], heads, kv_heads))


def test_one_scale_for_all_heads():
    compare(Sequences(PageFormat(32, 64), [90, 40], [1, 20], per_head=False))


def test_a_long_history_in_several_spans_and_a_long_prompt_in_several_tiles():
    compare(Sequences(PageFormat(128, 64), [2100, 1500, 700], [1, 4, 300], 9, 3))


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
    compare(Sequences(PageFormat(16, 32), [150, 120, 97, 2], [1, 4, 60, 1], 2, 1), attention)


def test_sequences_without_new_tokens_are_left_alone():
    compare(Sequences(PageFormat(16, 32), [40, 20, 30], [1, 0, 2]))


def test_results_do_not_depend_on_the_number_of_threads():
    sequences = Sequences(PageFormat(32, 64), [1300, 600, 90], [1, 90, 3], 9, 3)
    attention = Attention(0.125)
    before = torch.get_num_threads()
    try:
        outs = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outs.append(sequences.attend(cpu, attention))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((32, 72), r"head size 72; FP8 pages take 32, 64"),
        ((24, 64), r"blocks of 24 tokens.*multiples of 16"),
        ((32, 64, "e3m4"), r"'e3m4'; choose from e4m3, e5m2"),
    ],
)
def test_what_has_no_page_is_refused_with_the_choices(arguments, message):
    with pytest.raises(ValueError, match=message):
        PageFormat(*arguments)
