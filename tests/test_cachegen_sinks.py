"""Sinks: found where they are, kept exactly, refused where their section is damaged."""

import numpy as np
import pytest
import torch

from vllm_kvcompress.codecs import MalformedBlob, container, create_codec
from vllm_kvcompress.kernels.cachegen import format as fmt
from vllm_kvcompress.kernels.cachegen.sinks import cover, find_sinks

LOSSY = ("high", "medium", "low")


def chunk(sinks=(), factor=0.2, tokens=40, dtype=torch.bfloat16, values=2):
    generator = torch.Generator().manual_seed(5)
    kv = torch.randn(6, values, tokens, 2, 16, generator=generator)
    kv[:, :, list(sinks)] *= factor
    return kv.to(dtype)


@pytest.mark.parametrize("sinks", [[], [0], [0, 7, 39], [3, 4, 5]], ids=str)
@pytest.mark.parametrize("factor", [0.2, 0.0, 30.0])
@pytest.mark.parametrize("values", [1, 2])
def test_tokens_far_from_the_others_are_found(sinks, factor, values):
    assert find_sinks(chunk(sinks, factor, values=values)) == sinks


def test_a_token_is_a_sink_only_in_half_of_the_stripes():
    kv = chunk()
    kv[:2, :, 3] *= 0.1
    assert find_sinks(kv) == []
    kv[2, :, 3] *= 0.1
    assert find_sinks(kv) == [3]


def test_few_tokens_zeros_and_non_finite_values_have_no_sinks():
    assert find_sinks(chunk([0], tokens=7)) == []
    assert find_sinks(torch.zeros(2, 2, 16, 1, 8)) == []
    assert find_sinks(torch.full((2, 2, 16, 1, 8), torch.nan)) == []


def test_the_number_of_sinks_is_limited():
    assert find_sinks(chunk(range(12))) == list(range(fmt.MAX_SINKS))


def test_a_sink_is_covered_by_the_nearest_token_after_it():
    stripes = torch.arange(6).reshape(1, 6, 1)
    assert cover(stripes, [0, 1, 3, 5]).flatten().tolist() == [2, 2, 2, 4, 4, 4]


@pytest.mark.parametrize("level", LOSSY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sinks_come_back_exactly(level, dtype):
    kv = chunk([0, 11], dtype=dtype)
    kv[1, 0, 11, 0, 3] = torch.nan
    kv[2, 1, 0, 1, 5] = -0.0
    codec = create_codec("cachegen", level=level)
    blob = codec.encode(kv)
    back = codec.decode(blob)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[kv.element_size()]
    assert torch.equal(back[:, :, [0, 11]].view(width), kv[:, :, [0, 11]].view(width))
    assert not torch.equal(back[:, :, 1], kv[:, :, 1])
    assert torch.isfinite(back[:, :, 1]).all()
    strided = torch.empty(6, 2, 2, 40, 16, dtype=dtype).transpose(2, 3)
    assert torch.equal(codec.decode(blob, out=strided).view(width), back.view(width))


def test_the_input_is_not_changed():
    kv = chunk([0])
    before = kv.clone()
    create_codec("cachegen", level="medium").encode(kv)
    assert torch.equal(kv, before)


@pytest.mark.parametrize("level", ["lossless", "paper"])
def test_other_levels_keep_no_sinks(level):
    sections = container.unpack(create_codec("cachegen", level=level).encode(chunk([0])))[1]
    assert len(sections[1]) == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s[:-1],
        lambda s: s + b"\0",
        lambda s: s[:3],
        lambda s: b"\0\0\0\0",
        lambda s: b"\xff\xff\xff\xff" + s[4:],
        lambda s: s[:4] + np.array([11, 11], "<u4").tobytes() + s[12:],
        lambda s: s[:4] + np.array([0, 40], "<u4").tobytes() + s[12:],
    ],
)
def test_a_damaged_section_of_sinks_is_refused(damage):
    codec = create_codec("cachegen", level="medium")
    header, sections = container.unpack(codec.encode(chunk([0, 11])))
    sections = [bytes(s) for s in sections]
    sections[1] = damage(sections[1])
    with pytest.raises(MalformedBlob):
        codec.decode(container.pack(header, sections))
