"""The int8 codec: its arithmetic, what it keeps exactly, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_kvcompress.codecs import MalformedBlob, container, create_codec
from vllm_kvcompress.kernels import int8

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def sample(dtype=torch.bfloat16, shape=(3, 2, 17, 2, 24), seed=0):
    g = torch.Generator().manual_seed(seed)
    width = torch.exp(2 * torch.randn(shape[0], shape[1], 1, *shape[3:], generator=g))
    return (width * torch.randn(shape, generator=g)).to(dtype)


def all_patterns() -> torch.Tensor:
    """Every bf16 there is, in rows of 64 of like exponent and in rows of all kinds."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    mixed = bits[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(1))]
    return torch.cat([bits, mixed]).view(torch.bfloat16).view(2, 1, 1024, 1, 64)


@pytest.mark.parametrize("kv", [sample(), all_patterns()], ids=["sample", "all patterns"])
def test_the_compiled_kernels_agree_with_the_reference_bit_for_bit(kv):
    codes, scales, finite = int8.quantise(kv)
    expected = int8.quantise_reference(kv)
    assert torch.equal(codes, expected[0])
    assert torch.equal(scales, expected[1])
    assert finite == expected[2]
    made, truth = torch.empty_like(kv), torch.empty_like(kv)
    int8.restore(codes, scales, made)
    int8.restore_reference(codes, scales, truth)
    assert torch.equal(made.view(torch.int16), truth.view(torch.int16))


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_error_is_half_a_step_and_the_rounding_of_the_dtype(dtype):
    kv = sample(dtype)
    codec = create_codec("int8")
    restored = codec.decode(codec.encode(kv))
    assert restored.dtype == dtype
    largest = kv.float().abs().amax(-1, keepdim=True)
    # The scale is rounded to eight bits, and so is a value of bf16.
    assert ((restored.float() - kv.float()).abs() <= largest * (0.5 / 127 + 1 / 128)).all()
    nmse = (restored.float() - kv.float()).square().sum() / kv.float().square().sum()
    assert nmse < 2e-4


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_finite_comes_back_exactly_and_spoils_nothing(dtype):
    kv = sample(dtype)
    clean = kv.clone()
    clean[0, 0, 3, 1, 5] = clean[2, 1, 16, 1, 23] = clean[1, 0, 0, 0, 0] = 0
    kv[0, 0, 3, 1, 5], kv[2, 1, 16, 1, 23] = float("inf"), float("-inf")
    kv[1, 0, 0, 0, 0] = float("nan")
    codec = create_codec("int8")
    restored = codec.decode(codec.encode(kv))
    finite = kv.isfinite()
    assert torch.equal(restored[~finite], kv[~finite]) or restored[1, 0, 0, 0, 0].isnan()
    assert torch.equal(restored[finite], codec.decode(codec.encode(clean))[finite])


@pytest.mark.parametrize("dtype", FLOATS)
def test_finite_values_at_the_end_of_the_range_stay_finite(dtype):
    kv = torch.full((1, 2, 4, 1, 8), torch.finfo(dtype).max, dtype=dtype)
    kv[0, 0, 1] = -kv[0, 0, 1]
    kv[0, 1] = torch.finfo(dtype).smallest_normal
    codec = create_codec("int8")
    restored = codec.decode(codec.encode(kv))
    assert restored.isfinite().all()
    assert torch.allclose(restored.float(), kv.float(), rtol=1e-2)


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_is_stored_without_loss(dtype):
    kv = torch.arange(256, dtype=torch.uint8).view(1, 2, 8, 1, 16).view(dtype)
    codec = create_codec("int8")
    restored = codec.decode(codec.encode(kv))
    assert torch.equal(restored.view(torch.uint8), kv.view(torch.uint8))


def test_zeros_cost_nothing_but_their_bytes_and_a_strided_output_is_filled():
    kv = torch.zeros(2, 2, 5, 1, 16, dtype=torch.bfloat16)
    codec = create_codec("int8")
    out = torch.ones(2, 2, 5, 1, 32, dtype=torch.bfloat16)[..., ::2]
    assert codec.decode(codec.encode(kv), out=out) is out
    assert torch.equal(out, kv)


def test_it_takes_eight_bits_and_a_scale_for_each_head():
    kv = sample(shape=(4, 2, 256, 2, 64))
    blob = create_codec("int8").encode(kv)
    assert 8 * len(blob) / kv.numel() == pytest.approx(8.25, rel=0.001)


def forged(sections, dtype=torch.bfloat16, shape=(1, 2, 2, 1, 4)):
    header = container.Header(
        codec="int8", level="", dtype=dtype, shape=shape, fingerprint=b"", codec_version=1
    )
    return container.pack(header, sections)


def u32(*numbers):
    return np.array(numbers, "<u4").tobytes()


@pytest.mark.parametrize(
    "sections",
    [
        [],
        [bytes(8), bytes(16), b""],
        [bytes(6), bytes(16), b"", b""],
        [bytes(8), bytes(15), b"", b""],
        [bytes(8), bytes(16), u32(0), b""],
        [bytes(8), bytes(16), u32(0)[:3], b""],
        [bytes(8), bytes(16), u32(16), bytes(2)],
        [bytes(8), bytes(16), u32(3, 3), bytes(4)],
        [bytes(8), bytes(16), u32(5, 3), bytes(4)],
    ],
)
def test_sections_that_do_not_fit_the_tensor_are_refused(sections):
    with pytest.raises(MalformedBlob):
        create_codec("int8").decode(forged(sections))


def test_other_dtypes_are_refused_by_name():
    with pytest.raises(ValueError, match="float64"):
        create_codec("int8").encode(torch.zeros(1, 2, 2, 1, 4, dtype=torch.float64))
    with pytest.raises(MalformedBlob):
        create_codec("int8").decode(forged([bytes(8), bytes(16), b"", b""], torch.float64))
