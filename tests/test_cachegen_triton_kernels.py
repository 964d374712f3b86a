"""The Triton kernels against the reference: the same bytes, and each decodes the other's.

On a GPU where there is one, else under Triton's interpreter, which has to be chosen before triton
is imported: ``test_cachegen_triton.py`` runs this file in a process of its own.
"""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_cachegen_triton.py", allow_module_level=True)

from tests.test_profile import make_profile, model_kv
from vllm_kvcompress.codecs import container, create_codec
from vllm_kvcompress.codecs.container import MalformedBlob
from vllm_kvcompress.kernels.cachegen import format as fmt
from vllm_kvcompress.kernels.cachegen import reference, triton_codec
from vllm_kvcompress.kernels.dispatch import ENVIRONMENT

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
DTYPES = [getattr(torch, name) for name in fmt.DTYPES]


def cases(*axes, quick):
    """All combinations of the axes; slow but for those that *quick* takes."""
    return [
        pytest.param(*c, marks=() if quick(*c) else pytest.mark.slow, id="-".join(map(str, c)))
        for c in itertools.product(*axes)
    ]


def wide_and_level(dtypes=DTYPES[:3], levels=("lossless", "high", "paper")):
    def quick(dtype, level):
        return dtype == torch.bfloat16 or (dtype == torch.float16 and level == "high")

    return cases(dtypes, levels, quick=quick)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter's time goes by operations, not by elements."""
    if DEVICE == "cpu":
        blocks = triton_codec.Blocks(rows=16, columns=64, sums=64, tables=64, line=64, streams=2)
        monkeypatch.setattr(triton_codec, "BLOCKS", blocks)


def plain(stripes, tokens, channels, seed=0):
    """float32 values with a mean and a spread of their own in each channel."""
    g = torch.Generator().manual_seed(seed)
    spread = torch.randn(stripes, 1, channels, generator=g).exp()
    mean = 3 * torch.randn(stripes, 1, channels, generator=g)
    return mean + spread * torch.randn(stripes, tokens, channels, generator=g)


def rotated(layers, tokens, heads, size, seed=0):
    """float32 [layers, 2, tokens, heads, size]; K turns with the position."""
    g = torch.Generator().manual_seed(seed)
    kv = 0.3 * torch.randn(layers, 2, tokens, heads, size, generator=g)
    turn = 10000.0 ** -(torch.arange(size // 2) * 2 / size)
    angle = torch.arange(tokens)[:, None] * turn + 2 * torch.randn(size // 2, generator=g)
    kv[:, 0, :, :, : size // 2] += 3 * angle.cos()[:, None]
    kv[:, 0, :, :, size // 2 :] += 3 * angle.sin()[:, None]
    return kv


def bits_of(tensor):
    return tensor.cpu().contiguous().view(BITS[tensor.element_size()])


def check(x, quantisers, turns=None, may_be_raw=False):
    """Sections of x: equal from both, and decoded by the Triton kernels as by the reference."""
    expected = reference.encode(x, quantisers, turns)
    sections = [bytes(s) for s in triton_codec.encode(x.to(DEVICE), quantisers, turns)]
    assert [len(s) for s in sections] == [len(s) for s in expected]
    assert sections == expected
    assert may_be_raw or all(s[0] != fmt.RAW for s in sections)
    truth = torch.empty_like(x)
    reference.decode(expected, truth, turns)
    out = torch.full_like(x, 1, device=DEVICE)
    triton_codec.decode(expected, out, turns)
    assert torch.equal(bits_of(out), bits_of(truth))
    return sections


def quantisers_of(level, stripes):
    return [fmt.quantiser(level, stripes, 0, i % 2) for i in range(stripes)]


@pytest.mark.parametrize("dtype, level", wide_and_level(levels=fmt.LEVELS))
def test_codec(dtype, level, monkeypatch):
    compare_codecs(rotated(1, 20, 2, 16).to(dtype), level, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES[3:], ids=str)
def test_codec_keeps_fp8(dtype, monkeypatch):
    compare_codecs(rotated(1, 40, 2, 16).to(dtype), "medium", monkeypatch, truth="reference")


def test_codec_with_a_profile(monkeypatch):
    profile = make_profile()
    kv = model_kv(7, start=50, tokens=16).to(DEVICE)
    codec = create_codec("cachegen", level="medium", profile=profile)
    monkeypatch.setenv(ENVIRONMENT, "reference")
    blob = codec.encode(kv)
    assert codec.inspect(blob)["profile_digest"] == profile.digest.hex()
    back = codec.decode(blob)
    monkeypatch.setenv(ENVIRONMENT, "triton")
    assert codec.encode(kv) == blob
    assert torch.equal(codec.decode(blob, device=DEVICE).cpu(), back)


def test_codec_with_rotary_frequencies(monkeypatch):
    compare_codecs(rotated(1, 32, 2, 8).to(torch.bfloat16), "high", monkeypatch)


def compare_codecs(kv, level, monkeypatch, truth="cpu"):
    codec = create_codec("cachegen", level=level)
    monkeypatch.setenv(ENVIRONMENT, truth)
    expected = codec.encode(kv)
    decoded = codec.decode(expected)
    monkeypatch.setenv(ENVIRONMENT, "triton")
    blob = codec.encode(kv.to(DEVICE))
    assert blob == expected
    assert all(s[0] != fmt.RAW for s in container.unpack(blob)[1][-2:])
    out = codec.decode(expected, device=DEVICE)
    assert out.device.type == DEVICE
    assert torch.equal(bits_of(out), bits_of(decoded))
    if kv.element_size() == 1 or level == "lossless":
        assert torch.equal(bits_of(out), bits_of(kv))


@pytest.mark.parametrize("dtype", cases(DTYPES[:3], quick=lambda d: d == torch.float32))
def test_rotary_means(dtype):
    x = rotated(1, 18, 4, 8).reshape(2, 18, 32).to(dtype)
    turns = (10000.0 ** -(np.arange(4) / 4) / (2 * np.pi) * 2**32).astype(np.uint32)
    sections = check(x, quantisers_of("high", 2), turns)
    assert [s[0] for s in sections] == [fmt.UNIFORM] * 2
    assert [s[1] for s in sections] == [1, 0]


@pytest.mark.parametrize("level", fmt.LEVELS[:2])
@pytest.mark.parametrize("tokens, channels", [(1, 5), (2, 3)])
def test_few_values(tokens, channels, level):
    check(plain(2, tokens, channels).to(torch.bfloat16), quantisers_of(level, 2), may_be_raw=True)


def test_two_segments():
    check(plain(1, 9, 261).to(torch.bfloat16), quantisers_of("high", 1))


@pytest.mark.parametrize("dtype, level", wide_and_level())
def test_odd_values(dtype, level):
    x = plain(3, 18, 32).to(dtype)
    x[0, :, 3] = 0
    x[0, :, 4] = 1.5
    x[0, 2, 5:9] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    x[0, 7, :9] = torch.nan
    x[1] = 0
    x[2] = -2.25
    x[2, 4, 4] = torch.finfo(dtype).max / 2
    check(x, quantisers_of(level, 3), may_be_raw=level == "lossless")


@pytest.mark.parametrize(
    "dtype", cases(DTYPES, quick=lambda d: d in (torch.float32, torch.float8_e5m2))
)
def test_any_bits(dtype):
    """Random patterns: subnormals, NaN, channels kept as they are, whole stripes too."""
    g = torch.Generator().manual_seed(1)
    top = 8 * dtype.itemsize - 1
    bits = torch.randint(-(1 << top), 1 << top, (2, 40, 32), generator=g)
    x = bits.to(torch.int64).to({1: torch.int8, 2: torch.int16, 4: torch.int32}[dtype.itemsize])
    x = x.view(dtype)
    x[1, :, 4:] = plain(1, 40, 28)[0].to(dtype)
    sections = check(x, quantisers_of("lossless", 2), may_be_raw=True)
    assert sections[1][0] == fmt.LOSSLESS
    assert fmt.HEADER.unpack_from(sections[1])[6] > 0


def test_several_modes_at_once():
    """Stripes beyond UNIFORM's range fall back to LOSSLESS beside others that do not."""
    x = plain(4, 14, 32).to(torch.bfloat16)
    x[1] *= 2.0**110
    x[2] *= 2.0**-110
    quantisers = [fmt.quantiser(level, 4, 0, 0) for level in ("high", "low", "high", "paper")]
    sections = check(x, quantisers)
    assert [s[0] for s in sections] == [fmt.UNIFORM, fmt.LOSSLESS, fmt.LOSSLESS, fmt.TOKEN_MAX]


def test_low_byte_planes_left_out():
    x = plain(1, 16, 8).to(torch.bfloat16).float()
    sections = check(x, quantisers_of("lossless", 1))
    assert sections[0][:2] == bytes([fmt.LOSSLESS, 3])


@pytest.mark.parametrize("level", cases(("lossless", "high", "paper"), quick="high".__eq__))
def test_damaged_sections(level):
    """What the reference refuses is refused, and nothing else."""
    x = plain(1, 18, 64).to(torch.bfloat16)
    x[0, 1, 1] = torch.nan
    quantisers = quantisers_of(level, 1)
    section = reference.encode(x, quantisers)[0]
    assert section[0] != fmt.RAW
    rng = np.random.default_rng(2)
    damaged = [section[:-4], section + bytes(4), section[:10], b""]
    for at in [*range(13), *rng.integers(20, len(section), 6)]:
        mutant = bytearray(section)
        mutant[at] ^= 1 << rng.integers(8)
        damaged.append(bytes(mutant))

    def refused(decode, section):
        try:
            decode([section], torch.empty_like(x, device=DEVICE))
        except fmt.SectionError:
            return True
        return False

    for section in damaged:
        assert refused(triton_codec.decode, section) == refused(
            lambda s, out: reference.decode(s, out.cpu()), section
        )


def test_malformed_blob(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, "triton")
    kv = plain(2, 5, 8).to(torch.bfloat16).view(1, 2, 5, 1, 8)
    codec = create_codec("cachegen", level="high")
    header, sections = container.unpack(codec.encode(kv.to(DEVICE)))
    sections[-1] = bytes(sections[-1])[:-4]
    with pytest.raises(MalformedBlob):
        codec.decode(container.pack(header, sections), device=DEVICE)
