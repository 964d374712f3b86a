"""The ``fp8`` codec: what comes back, what it costs, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from vllm_kvcompress.codecs import MalformedBlob, container, create_codec
from vllm_kvcompress.codecs.fp8 import LEVELS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def chunk(dtype=torch.bfloat16, shape=(3, 2, 40, 2, 64), seed=0):
    """K and V whose layers, heads and tokens differ in range."""
    g = torch.Generator().manual_seed(seed)
    kv = torch.randn(shape, generator=g)
    for axis in (0, 2, 3):
        sizes = [1] * 5
        sizes[axis] = shape[axis]
        kv = kv * torch.exp2(3 * torch.randn(sizes, generator=g)).clamp(2.0**-6, 2.0**6)
    return kv.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_values_come_back_as_e4m3_at_their_scale(level, dtype):
    kv = chunk(dtype)
    codec = create_codec("fp8", level=level)
    back = codec.decode(codec.encode(kv))
    scale = kv.float().abs().amax(LEVELS[level], keepdim=True) / 448
    scale = scale.to(torch.bfloat16).float()
    codes = (kv.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(back, (codes.float() * scale).to(dtype))


def test_a_scale_for_fewer_values_loses_less():
    kv = chunk()
    errors = []
    for level in ("tensor", "head", "token_head"):
        codec = create_codec("fp8", level=level)
        back = codec.decode(codec.encode(kv)).float()
        errors.append(((back - kv.float()) ** 2 / (kv.float() ** 2 + 1e-9)).mean().item())
    assert errors[0] > errors[1] > errors[2]


def test_a_value_takes_a_byte_and_scales_next_to_nothing():
    kv = chunk(shape=(4, 2, 256, 2, 64))
    for level, most in (("tensor", 8.1), ("head", 8.1), ("token_head", 8.35)):
        codec = create_codec("fp8", level=level)
        assert 8 < codec.inspect(codec.encode(kv))["bits_per_value"] < most


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_chunk_with_values_that_are_not_finite_is_kept_as_it_is(value):
    kv = chunk()
    kv[1, 0, 3, 1, 5] = value
    codec = create_codec("fp8")
    back = codec.decode(codec.encode(kv))
    assert torch.equal(back.view(torch.int16), kv.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_pages_lose_nothing(dtype):
    kv = torch.randint(0, 256, (2, 2, 16, 2, 32), dtype=torch.uint8).view(dtype)
    codec = create_codec("fp8")
    back = codec.decode(codec.encode(kv))
    assert torch.equal(back.view(torch.uint8), kv.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_and_the_smallest_numbers_of_a_dtype_stay_finite(dtype):
    info = torch.finfo(dtype)
    kv = torch.tensor([0.0, info.max, info.min, info.tiny, -info.tiny, 1.0, -1.0, 0.0])
    kv = kv.to(dtype).view(1, 1, 1, 2, 4).expand(1, 1, 3, 2, 4)
    for level in LEVELS:
        codec = create_codec("fp8", level=level)
        back = codec.decode(codec.encode(kv))
        assert back.isfinite().all()
        codec.decode(codec.encode(torch.zeros_like(kv)))
        assert not codec.decode(codec.encode(torch.zeros_like(kv))).any()


def test_it_decodes_into_what_it_is_given():
    kv = chunk()
    codec = create_codec("fp8")
    blob = codec.encode(kv.transpose(2, 3).contiguous().transpose(2, 3), fingerprint=b"f")
    out = torch.empty(3, 2, 40, 4, 64, dtype=torch.bfloat16)[:, :, :, ::2]
    assert codec.decode(blob, out=out) is out
    assert torch.equal(out, codec.decode(blob))


def test_an_unknown_level_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"no level 'row'; choose from tensor, head, token_head"):
        create_codec("fp8", level="row")


def test_sections_of_another_size_are_refused():
    codec = create_codec("fp8")
    header, sections = container.unpack(codec.encode(chunk()), codec="fp8", codec_version=1)
    for damaged in (
        [b"\2", *sections[1:]],
        [b"\0", *sections[1:]],
        [sections[0], sections[1], bytes(sections[2])[:-1]],
        [sections[0], bytes(sections[1]) + b"\0\0", sections[2]],
        sections[:2],
    ):
        with pytest.raises(MalformedBlob):
            codec.decode(container.pack(header, damaged))
