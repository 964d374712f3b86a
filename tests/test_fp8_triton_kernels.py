"""The Triton kernels of FP8 pages against the reference.

On a GPU where there is one, else under Triton's interpreter, which has to be chosen before triton
is imported: ``test_fp8_triton.py`` runs this file in a process of its own.
"""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_fp8_triton.py", allow_module_level=True)

from vllm_kvcompress.kernels.attention import Attention
from vllm_kvcompress.kernels.fp8 import reference, triton_fp8
from vllm_kvcompress.kernels.fp8.format import PageFormat

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Of the norm. The interpreter multiplies in float32; tensor cores take operands of the dtype.
TOLERANCE = {BF16: 2e-2, FP16: 5e-3, FP32: 1e-4}
POISON = 0x7F  # NaN
SLOW = pytest.mark.slow


def stored(fmt, key, value, slots, k_scale, v_scale, blocks):
    """Caches after storing with Triton and with the reference, on the CPU."""
    shape = (blocks, key.shape[1] + 1, fmt.block_tokens, 2 * fmt.head_size)
    caches = []
    for kernels, device in ((triton_fp8, DEVICE), (reference, "cpu")):
        cache = torch.full(shape, POISON, dtype=torch.uint8, device=device)[:, :-1]
        arguments = (x.to(device) for x in (key, value))
        others = (x.to(device) for x in (slots, k_scale, v_scale))
        kernels.store(fmt, *arguments, cache, *others)
        caches.append(cache.cpu())
    return caches


@triton.jit
def encode_all(x_ptr, code_ptr, COUNT: tl.constexpr, CODE: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(code_ptr + i, triton_fp8.encoded(tl.load(x_ptr + i), CODE).to(tl.uint8))


@pytest.mark.parametrize("low", [0, 1, 0xFFFF], ids=["ties", "above", "below"])
@pytest.mark.parametrize("code", ["e4m3", "e5m2"])
def test_the_upper_half_of_every_float_is_encoded_as_torch_casts_it(code, low):
    x = ((torch.arange(1 << 16) << 16) | low).to(torch.int32).view(FP32)
    got = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    encode_all[(1,)](x.to(DEVICE), got, COUNT=len(x), CODE=code)
    expected = reference.quantise(x, torch.ones(1), code)
    same = got.cpu() == expected.view(torch.uint8)
    is_nan = got.cpu().view(expected.dtype).float().isnan() & expected.float().isnan()
    assert (same | is_nan).all()


@pytest.mark.parametrize("code", ["e4m3", "e5m2"])
def test_every_code_is_decoded_as_torch_reads_it(code):
    fmt = PageFormat(16, 256, code)
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(fmt.dtype).float()
    finite = values.isfinite()
    cache = torch.zeros(1, 1, 16, 512, dtype=torch.uint8)
    # One token whose V is every code: its weight is 1.
    cache.view(-1)[16 * 256 : 17 * 256] = torch.where(finite, codes, 0)
    one = torch.ones(1)
    out = torch.empty(1, 1, 256)
    arguments = [
        torch.zeros(1, 1, 256), cache, one, one, torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32), torch.ones(1, dtype=torch.int32),
    ]  # fmt: skip
    out = out.to(DEVICE)
    on_device = (x.to(DEVICE) for x in arguments)
    triton_fp8.attend(fmt, Attention(1.0), *on_device, out, 1, 1)
    assert torch.equal(out.cpu().flatten(), torch.where(finite, values, 0))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("size", [32, 80])
def test_tokens_go_to_their_slots_and_nothing_else_is_written(size, dtype):
    fmt = PageFormat(48, size)
    g = torch.Generator().manual_seed(size)
    key, value = torch.randn(20, 2, 2 * size, generator=g).to(dtype).split(size, 2)
    slots = torch.randperm(3 * 48, generator=g)[:18]
    slots[5] = -1
    scales = torch.tensor([0.1, 0.02]), torch.tensor([0.5])
    got, expected = stored(fmt, key, value, slots, *scales, 3)
    assert torch.equal(got, expected)


def compare(fmt, lengths, new, attention=None, heads=4, kv_heads=2, dtype=BF16, slack=0):
    g = torch.Generator().manual_seed(1)
    width = max(-(-length // fmt.block_tokens) for length in lengths) + 1
    blocks = len(lengths) * width + 1
    table = (torch.randperm(blocks - 1, generator=g) + 1).to(torch.int32)
    table = table.view(len(lengths), width)
    cache = torch.full((blocks, kv_heads, fmt.block_tokens, 2 * fmt.head_size), POISON)
    cache = cache.to(torch.uint8)
    k_scale, v_scale = torch.rand(2, kv_heads, generator=g) * 0.1 + 0.005
    for row, length in enumerate(lengths):
        kv = torch.randn(2, length, kv_heads, fmt.head_size, generator=g).to(dtype)
        token = torch.arange(length)
        slots = table[row].long()[token // fmt.block_tokens] * fmt.block_tokens
        reference.store(fmt, *kv, cache, slots + token % fmt.block_tokens, k_scale, v_scale)
    query = torch.randn(sum(new), heads, fmt.head_size, generator=g).to(dtype)
    starts = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
    inputs = (query, cache, k_scale, v_scale, table, starts,
              torch.tensor(lengths, dtype=torch.int32))  # fmt: skip
    attention = attention or Attention(fmt.head_size**-0.5)
    expected, got = torch.full((2, *query.shape), torch.nan, dtype=dtype)
    reference.attend(fmt, attention, *inputs, expected, max(new), max(lengths))
    on = {
        name: None if getattr(attention, name) is None else getattr(attention, name).to(DEVICE)
        for name in ("slopes", "sinks")
    }
    attention = Attention(attention.scale, attention.window, attention.soft_cap, **on)
    got = got.to(DEVICE)
    on_device = (x.to(DEVICE) for x in inputs)
    triton_fp8.attend(fmt, attention, *on_device, got, max(new) + slack, max(lengths) + slack)
    for row in range(len(new)):
        begin, end = starts[row : row + 2].tolist()
        want, have = expected[begin:end].float(), got.cpu()[begin:end].float()
        assert (have - want).norm() <= TOLERANCE[dtype] * want.norm(), f"sequence {row}"


@pytest.mark.parametrize(
    "code, dtype",
    [
        ("e4m3", BF16),
        pytest.param("e4m3", FP16, marks=SLOW),
        pytest.param("e4m3", FP32, marks=SLOW),
        ("e5m2", FP16),
        pytest.param("e5m2", BF16, marks=SLOW),
    ],
)
def test_decode_prefill_and_continued_prefill(code, dtype):
    compare(PageFormat(32, 32, code), [70, 32, 1, 40], [1, 32, 1, 5], dtype=dtype)


@pytest.mark.parametrize("block, size", [(48, 80), pytest.param(16, 64, marks=SLOW)])
def test_blocks_and_head_sizes_that_are_no_powers_of_two(block, size):
    compare(PageFormat(block, size), [2 * block + 3, block], [1, 7])


@pytest.mark.parametrize("heads, kv_heads", [(3, 3), (6, 2), (5, 1)], ids=["mha", "gqa", "mqa"])
def test_heads_that_share_a_kv_head(heads, kv_heads):
    compare(PageFormat(16, 32), [50, 40], [1, 20], heads=heads, kv_heads=kv_heads)


ATTENTIONS = {
    "window": Attention(0.2, window=37),
    "short-window": Attention(0.2, window=3),
    "soft-cap": Attention(0.5, soft_cap=4.0),
    "alibi": Attention(0.2, slopes=torch.tensor([0.25, 0.0625])),
    "sinks": Attention(0.2, sinks=torch.tensor([1.5, -0.5])),
    "all": Attention(0.3, 50, 6.0, torch.tensor([0.1, 0.02]), torch.tensor([0.5, 2.0])),
}


@pytest.mark.parametrize(
    "attention",
    [
        pytest.param(attention, id=name, marks=() if name in ("window", "all") else SLOW)
        for name, attention in ATTENTIONS.items()
    ],
)
def test_what_a_layer_does_beside_softmax(attention):
    compare(PageFormat(16, 32), [90, 70, 2], [1, 20, 1], attention, heads=2, kv_heads=1)


def test_bounds_may_be_too_high_and_sequences_without_new_tokens_are_left_alone():
    compare(PageFormat(16, 32), [40, 20, 9], [1, 2, 0], slack=20)


@SLOW
def test_wide_heads_and_long_tiles():
    compare(PageFormat(64, 256), [200, 130], [70, 1], heads=4, kv_heads=1)
