"""The ``kivi`` codec: what comes back, what it costs, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vllm_kvcompress.codecs import MalformedBlob, container, create_codec
from vllm_kvcompress.codecs.kivi import LEVELS
from vllm_kvcompress.kernels.kivi import reference
from vllm_kvcompress.kernels.kivi.format import PageFormat

# Squared error of K and of V whose values, but for the mean of K's channels, have variance 1.
MOST_LOST = {"4bit": (0.02, 0.02), "k4v2": (0.02, 0.25), "2bit": (0.25, 0.25)}


def chunk(tokens=256, dtype=torch.bfloat16, layers=2, heads=2, size=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    kv = torch.randn(layers, 2, tokens, heads, size, generator=g)
    kv[:, 0] += 4 * torch.randn(layers, 1, heads, size, generator=g)  # K's channels have means
    return kv.to(dtype)


@pytest.mark.parametrize("tokens", [1, 37, 64, 200, 256])
@pytest.mark.parametrize("level", LEVELS)
def test_values_come_back_at_their_levels_loss_whatever_the_number_of_tokens(level, tokens):
    kv = chunk(tokens)
    codec = create_codec("kivi", level=level)
    back = codec.decode(codec.encode(kv))
    assert back.dtype == kv.dtype and back.shape == kv.shape
    noise = (back.float() - kv.float()).square().mean((0, 2, 3, 4))
    assert (noise <= torch.tensor(MOST_LOST[level])).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [32, 80, 128])
def test_dtypes_and_head_sizes(size, dtype):
    kv = chunk(100, dtype, size=size)
    codec = create_codec("kivi", level="4bit")
    back = codec.decode(codec.encode(kv))
    assert (back.float() - kv.float()).norm() < 0.1 * kv.float().norm()


def test_levels_cost_what_their_bits_say():
    kv = chunk()
    bits = {}
    for level in LEVELS:
        codec = create_codec("kivi", level=level)
        bits[level] = codec.inspect(codec.encode(kv))["bits_per_value"]
    assert bits["2bit"] < 2.95 < bits["k4v2"] < 3.6 < bits["4bit"] < 4.7


def test_a_blob_holds_the_pages_of_the_reference():
    kv = chunk(128, layers=1)
    codec = create_codec("kivi", level="4bit")
    _, sections = container.unpack(codec.encode(kv), codec="kivi", codec_version=1)
    fmt = PageFormat(
        128, 64, torch.bfloat16, group=64, key_bits=4, value_bits=4, fit="unbiased", rotated=True
    )
    cache = torch.zeros(1, 2, 128, fmt.token_bytes, dtype=torch.uint8)
    zero = torch.zeros(1, dtype=torch.int32)
    reference.pack(fmt, kv[0, :1], kv[0, 1:], zero, cache, zero, zero + 128, zero + 1)
    same = torch.frombuffer(bytearray(sections[1]), dtype=torch.uint8) == cache.flatten()
    assert same.float().mean() > 0.99  # sums in another order may move a code by one


def test_an_attention_sink_stays_exact():
    kv = chunk(128, layers=8)
    kv[:, :, 0] *= 0.05
    codec = create_codec("kivi", level="2bit")
    back = codec.decode(codec.encode(kv))
    assert torch.equal(back[:, :, 0], kv[:, :, 0])
    assert not torch.equal(back[:, :, 1], kv[:, :, 1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_chunk_with_values_that_are_not_finite_is_kept_as_it_is(value):
    kv = chunk(64)
    kv[0, 1, 3, 1, 5] = value
    codec = create_codec("kivi")
    back = codec.decode(codec.encode(kv))
    assert torch.equal(back.view(torch.int16), kv.view(torch.int16))


@pytest.mark.parametrize(
    "kv",
    [
        torch.randint(0, 256, (2, 2, 16, 2, 32), dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.randn(2, 1, 16, 1, 64).to(torch.bfloat16),
        torch.randn(2, 2, 16, 2, 72).to(torch.bfloat16),
    ],
    ids=["fp8", "latents", "head-size"],
)
def test_what_has_no_page_is_kept_as_it_is(kv):
    codec = create_codec("kivi")
    back = codec.decode(codec.encode(kv))
    assert torch.equal(back.view(torch.uint8), kv.view(torch.uint8))


def test_it_decodes_into_what_it_is_given():
    kv = chunk(70)
    codec = create_codec("kivi")
    blob = codec.encode(kv)
    out = torch.empty(2, 2, 70, 4, 64, dtype=torch.bfloat16)[:, :, :, ::2]
    assert codec.decode(blob, out=out) is out
    assert torch.equal(out, codec.decode(blob))


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="kivi takes bfloat16"):
        create_codec("kivi").encode(torch.zeros(1, 2, 8, 1, 64, dtype=torch.int32))


def test_an_unknown_level_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"no level '3bit'; choose from 4bit, k4v2, 2bit"):
        create_codec("kivi", level="3bit")


def test_a_page_that_names_a_channel_that_is_not_there_is_refused():
    codec = create_codec("kivi", level="2bit")
    header, sections = container.unpack(
        codec.encode(chunk(128, layers=1, heads=1)), codec="kivi", codec_version=1
    )
    fmt = PageFormat(
        128, 64, torch.bfloat16, group=64, boosted=16, sinks=sections[0][0], fit="unbiased",
        rotated=True,
    )  # fmt: skip
    page = bytearray(sections[1])
    page[fmt.sections["boosted"][0] + 3] = 64
    with pytest.raises(MalformedBlob, match="channel beyond its 64"):
        codec.decode(container.pack(header, [sections[0], page]))


def test_sections_of_another_size_are_refused():
    codec = create_codec("kivi")
    header, sections = container.unpack(codec.encode(chunk(64)), codec="kivi", codec_version=1)
    for damaged in (
        [b"\2", sections[1]],
        [b"\xff", sections[1]],
        [sections[0], bytes(sections[1])[:-1]],
        [b"", sections[1]],
        sections[:1],
    ):
        with pytest.raises(MalformedBlob):
            codec.decode(container.pack(header, damaged))
    other = dataclasses.replace(header, level="2bit")
    with pytest.raises(MalformedBlob):
        codec.decode(container.pack(other, sections))
