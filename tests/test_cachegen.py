"""The cachegen codec: round trips, byte identity of the implementations, bounds of its losses."""

from __future__ import annotations

import struct
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvcompress.codecs import MalformedBlob, container, create_codec
from vllm_kvcompress.kernels.cachegen import cpu, implementation, reference
from vllm_kvcompress.kernels.cachegen import format as fmt
from vllm_kvcompress.kernels.cachegen.rotary import estimate_turns

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
FLOATS = DTYPES[:3]
LOSSY = ["high", "medium", "low", "paper"]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(BITS[x.element_size()])


def assert_same_bits(name: str, expected: torch.Tensor, actual: torch.Tensor) -> None:
    assert expected.dtype == actual.dtype and expected.shape == actual.shape, name
    differing = (bits_of(expected) != bits_of(actual)).sum().item()
    assert differing == 0, f"{name}: {differing} of {expected.numel()} values differ"


def gaussian(
    layers=2, values=2, tokens=64, heads=2, size=32, dtype=torch.bfloat16, seed=0
) -> torch.Tensor:
    """Channels of different means and widths, K turning with the position as rotary K does."""
    g = torch.Generator().manual_seed(seed)
    shape = (layers, values, tokens, heads, size)
    width = torch.exp(torch.randn((layers, values, 1, heads, size), generator=g))
    mean = 3 * torch.randn((layers, values, 1, heads, size), generator=g)
    x = mean + width * torch.randn(shape, generator=g)
    if size % 2 == 0:
        angle = torch.arange(tokens)[:, None] * 100.0 ** -torch.linspace(0, 1, size // 2)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[:, 0, ..., : size // 2].clone(), x[:, 0, ..., size // 2 :].clone()
        x[:, 0, ..., : size // 2] = a * cos - b * sin
        x[:, 0, ..., size // 2 :] = a * sin + b * cos
    return x.to(dtype)


def special_values(dtype: torch.dtype) -> torch.Tensor:
    """Infinities, NaN with payloads, zeros of both signs, subnormals, extremes; as bits."""
    d = fmt.DTYPES[name_of(dtype)]
    sign = 1 << (d.exponent_bits + d.mantissa_bits)
    infinity = ((1 << d.exponent_bits) - 1) << d.mantissa_bits
    half = [0, 1, 2, (1 << d.mantissa_bits) - 1, 1 << d.mantissa_bits, infinity - 1, infinity,
            infinity + 1, sign - 1, infinity | 1 << (d.mantissa_bits - 1)]  # fmt: skip
    patterns = np.array(half + [p | sign for p in half], np.int64)
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[d.itemsize]
    return torch.from_numpy(patterns.astype(unsigned)).view(dtype)


def cases(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    base = gaussian(dtype=torch.float32, tokens=65)
    zero_channels = base.clone()
    zero_channels[..., ::3] = 0
    wide = base * torch.exp(
        12 * torch.randn(base.shape, generator=torch.Generator().manual_seed(3))
    )
    spiky = base.clone()
    spiky[..., 7] *= 1000
    spiky[:, :, 11, 1, 3] = 60000
    made = {
        "zeros": torch.zeros_like(base),
        "negative zeros": -torch.zeros_like(base),
        "constant": torch.full_like(base, 0.37),
        "zero channels": zero_channels,
        "wide range": wide.clamp(-6e4, 6e4),
        "outliers": spiky,
        "subnormal": base * 1e-41,
        "tiny": base * 1e-30,
        "channel constants": base[:, :, :1].expand_as(base).clone(),
    }
    made = {k: v.to(dtype) for k, v in made.items()}
    special = special_values(dtype)
    sprinkled = base.to(dtype)
    flat = bits_of(sprinkled).view(-1)
    at = torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(5))[:200]
    flat[at] = bits_of(special).repeat(10)
    made["special values"] = sprinkled
    made["only special values"] = special.repeat(base.numel() // len(special) + 1)[
        : base.numel()
    ].view(base.shape)
    channel = base.to(dtype)
    channel[:, :, :, 0, 5] = float("nan")
    channel[:, :, 4] = float("nan")
    made["nan channel and token"] = channel
    return made


def kernel_blob(module, kv: torch.Tensor, level: str) -> list[bytes]:
    layers, values, tokens, heads, size = kv.shape
    chosen = "lossless" if kv.element_size() == 1 else level
    quantisers = [
        fmt.quantiser(chosen, layers, layer, v) for layer in range(layers) for v in range(values)
    ]
    turns = estimate_turns(kv[:, 0]) if any(q.rotary for q in quantisers) else None
    x = kv.reshape(layers * values, tokens, heads * size).contiguous()
    return [fmt.pack_turns(turns), *map(bytes, module.encode(x, quantisers, turns))]


def kernel_decode(module, sections: list[bytes], like: torch.Tensor) -> torch.Tensor:
    layers, values, tokens, heads, size = like.shape
    out = torch.zeros_like(like).contiguous()
    turns = fmt.unpack_turns(sections[0], size)
    module.decode(sections[1:], out.view(layers * values, tokens, heads * size), turns)
    return out


def check_twins(name: str, kv: torch.Tensor, level: str) -> torch.Tensor:
    """Both implementations write the same bytes and read each other's; returns what they read."""
    expected = kernel_blob(reference, kv, level)
    actual = kernel_blob(cpu, kv, level)
    for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
        assert a == b, f"{name}: section {i} differs"
    from_reference = kernel_decode(reference, actual, kv)
    assert_same_bits(name, from_reference, kernel_decode(cpu, expected, kv))
    return from_reference


@pytest.mark.parametrize("level", fmt.LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_twins_agree_on_every_case(dtype, level):
    if dtype.itemsize == 1 and level != "high":
        pytest.skip("FP8 is coded alike at every level")
    for name, kv in cases(dtype).items():
        decoded = check_twins(name, kv, level)
        if level == "lossless" or dtype.itemsize == 1:
            assert_same_bits(name, kv, decoded)
            continue
        finite = torch.isfinite(kv)
        assert torch.isfinite(decoded[finite]).all(), f"{name}: a finite value became infinite"
        assert_same_bits(name, kv[~finite], decoded[~finite])


@pytest.mark.parametrize(
    "shape",
    [(1, 2, 1, 1, 64), (1, 2, 2, 3, 64), (2, 1, 17, 1, 80), (1, 2, 255, 2, 96), (1, 2, 256, 3, 64),
     (2, 2, 300, 1, 128), (1, 2, 33, 2, 256), (3, 1, 5, 1, 1), (1, 2, 40, 5, 7)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("level", fmt.LEVELS)
def test_twins_agree_on_every_shape(shape, level):
    kv = gaussian(*shape)
    decoded = check_twins(str(shape), kv, level)
    if level == "lossless":
        assert_same_bits(str(shape), kv, decoded)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize < 4], ids=name_of)
def test_lossless_is_exact_for_every_pattern(dtype):
    codec = create_codec("cachegen", level="lossless")
    count = 1 << (8 * dtype.itemsize)
    unsigned = {1: np.uint8, 2: np.uint16}[dtype.itemsize]
    patterns = np.arange(count).astype(unsigned)
    shuffled = np.random.default_rng(0).permutation(patterns)
    for name, bits in (("in order", patterns), ("shuffled", shuffled)):
        kv = torch.from_numpy(bits).view(dtype).view(1, 1, -1, 1, 64 if count > 256 else 4)
        assert_same_bits(name, kv, codec.decode(codec.encode(kv)))


def test_lossless_is_exact_for_random_float32_patterns():
    codec = create_codec("cachegen", level="lossless")
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2, 2, 100, 2, 64), generator=g, dtype=torch.int64)
    kv = bits.to(torch.int32).view(torch.float32)
    assert_same_bits("random", kv, codec.decode(codec.encode(kv)))


def test_lossless_leaves_out_empty_byte_planes():
    """float32 that was bfloat16 costs no more than bfloat16 does."""
    codec = create_codec("cachegen", level="lossless")
    kv = gaussian()
    narrow, wide = len(codec.encode(kv)), len(codec.encode(kv.float()))
    assert wide < 1.02 * narrow
    assert_same_bits("widened", kv.float(), codec.decode(codec.encode(kv.float())))


@pytest.mark.parametrize(("level", "key", "value"), [
    ("high", 0.0045, 0.0026), ("medium", 0.045, 0.026), ("low", 0.12, 0.08),
])  # fmt: skip
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_error_is_bounded(dtype, level, key, value):
    kv = gaussian(tokens=256, size=64, dtype=dtype)
    codec = create_codec("cachegen", level=level)
    x, y = kv.double(), codec.decode(codec.encode(kv)).double()
    error = (x - y).square().sum((2, 3, 4)) / x.square().sum((2, 3, 4))
    assert (error[:, 0] <= key).all() and (error[:, 1] <= value).all(), error


@pytest.mark.parametrize("layers", [4, 12])
def test_paper_level_is_its_quantiser(layers):
    """code = round(x C / M + C), value = (code - C) / C M with one maximum a token."""
    kv = gaussian(layers=layers, tokens=32)
    codec = create_codec("cachegen", level="paper")
    decoded = codec.decode(codec.encode(kv))
    for layer in range(layers):
        for v in (0, 1):
            bins = 32 if layers < 10 or layer < (10, 2)[v] else 16
            c = torch.tensor(bins // 2 - 1, dtype=torch.float32)
            x = kv[layer, v].float()
            largest = x.abs().amax((1, 2), keepdim=True)
            expected = torch.round(x * (c / largest)) / c * largest
            assert (expected.bfloat16() == decoded[layer, v]).all(), f"layer {layer}"


def test_non_finite_values_do_not_disturb_others():
    kv = gaussian(tokens=64)
    poisoned = kv.clone()
    poisoned[0, 0, 3, 1, 4] = float("inf")
    poisoned[0, 1, 5, 0, 2] = float("nan")
    keep = torch.isfinite(poisoned)
    for level in LOSSY:
        codec = create_codec("cachegen", level=level)
        plain, other = (codec.decode(codec.encode(x)).float() for x in (kv, poisoned))
        spread = (plain - other)[keep].abs().max()
        assert spread <= 0.05 * kv.float().abs().max(), level


@pytest.mark.parametrize("level", ["high", "medium", "low"])
def test_a_chunk_whose_tokens_all_differ_in_energy_is_coded(level):
    amplitudes = 4.6 ** torch.arange(-4.0, 4.0)
    kv = torch.ones(1, 2, 8, 1, 64) * amplitudes.view(1, 1, 8, 1, 1)
    kv[:, 1] = kv[:, 1].flip(1)
    codec = create_codec("cachegen", level=level)
    for tokens in (8, 9):
        x = torch.cat([kv, kv[:, :, :1]], 2)[:, :, :tokens].bfloat16()
        assert codec.decode(codec.encode(x)).isfinite().all()


def test_rotary_means_are_used_and_pay():
    kv = gaussian(layers=4, tokens=256, size=64)
    codec = create_codec("cachegen", level="medium")
    layers, values, tokens, heads, size = kv.shape
    x = kv.view(layers * values, tokens, heads * size)
    quantisers = [fmt.quantiser("medium", layers, i // 2, i % 2) for i in range(layers * values)]
    plain = sum(map(len, cpu.encode(x, quantisers, None)))
    sections = container.unpack(codec.encode(kv))[1]
    assert len(sections[0]) == 2 * size
    assert sum(map(len, sections)) < 0.95 * plain


def test_out_device_strides_and_header():
    kv = gaussian()
    codec = create_codec("cachegen", level="high")
    blob = codec.encode(kv, fingerprint=b"abc")
    plain = codec.decode(blob)
    strided = torch.empty(2, 64, 2, 2, 32, dtype=kv.dtype).transpose(1, 2)
    assert codec.decode(blob, out=strided) is strided
    assert_same_bits("strided out", plain, strided)
    assert codec.encode(kv.transpose(1, 2).contiguous().transpose(1, 2), b"abc") == blob
    described = codec.inspect(blob)
    assert described["level"] == "high" and described["shape"] == list(kv.shape)
    assert described["bits_per_value"] == pytest.approx(8 * len(blob) / kv.numel())
    with pytest.raises(ValueError, match="out is"):
        codec.decode(blob, out=torch.empty(1))


def test_unknown_settings_are_named():
    with pytest.raises(ValueError, match=r"'hihg'.*lossless, high, medium, low, paper"):
        create_codec("cachegen", level="hihg")
    with pytest.raises(ValueError, match="profile"):
        create_codec("cachegen", profile="x")
    with pytest.raises(ValueError, match=r"int32.*bfloat16"):
        create_codec("cachegen").encode(torch.zeros(1, 2, 4, 1, 8, dtype=torch.int32))


def test_implementation_can_be_forced(monkeypatch):
    kv = gaussian(tokens=9)
    blobs = []
    for name in ("reference", "cpu"):
        monkeypatch.setenv("VLLM_KVCOMPRESS_KERNELS", name)
        assert implementation(torch.device("cpu"))[0] == name
        blobs.append(create_codec("cachegen").encode(kv))
    assert blobs[0] == blobs[1]
    monkeypatch.setenv("VLLM_KVCOMPRESS_KERNELS", "gpu")
    with pytest.raises(ValueError, match=r"'gpu'.*reference, cpu, triton"):
        create_codec("cachegen").encode(kv)


def test_keys_differ_by_level():
    keys = {create_codec("cachegen", level=level).cache_key() for level in fmt.LEVELS}
    assert len(keys) == len(fmt.LEVELS)


def test_threads_share_an_instance():
    codec = create_codec("cachegen", level="high")
    inputs = [gaussian(tokens=32 + i, seed=i) for i in range(8)]
    expected = [codec.encode(x) for x in inputs]
    results: list = [None] * len(inputs)

    def work(i: int) -> None:
        for _ in range(5):
            results[i] = codec.encode(inputs[i])
            codec.decode(results[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == expected


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(*(st.integers(1, n) for n in (2, 2, 40, 3, 40))),
    level=st.sampled_from(fmt.LEVELS),
    dtype=st.sampled_from(DTYPES),
    exponent=st.integers(-45, 38),
    spread=st.floats(0, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_tensor_round_trips(shape, level, dtype, exponent, spread, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    kv = (x * torch.exp(spread * torch.randn(shape, generator=g)) * 10.0**exponent).to(dtype)
    codec = create_codec("cachegen", level=level)
    blob = codec.encode(kv)
    decoded = codec.decode(blob)
    raw = kv.numel() * kv.element_size()
    sections = shape[0] * shape[1] + 2
    rows = fmt.MAX_SINKS * (raw // shape[2] + 4) + 4
    assert len(blob) <= raw + 128 + 2 * shape[4] + rows + sections * (8 + 15 + fmt.HEADER_BYTES + 3)
    if level == "lossless" or dtype.itemsize == 1:
        assert_same_bits("lossless", kv, decoded)
    finite = torch.isfinite(kv.float())
    assert torch.isfinite(decoded.float()[finite]).all()
    assert_same_bits("not finite", kv[~finite], decoded[~finite])


def mutate(section: bytearray, rng: np.random.Generator) -> bytearray:
    """Change, cut or extend a section; often in its header, where the decisions are."""
    section = bytearray(section)
    for _ in range(rng.integers(1, 4)):
        if not section:
            break
        kind = rng.integers(8)
        near = min(len(section), (20, 80, len(section))[rng.integers(3)])
        at = int(rng.integers(near))
        if kind < 4:
            section[at] = rng.integers(256)
        elif kind == 4:
            section[at] ^= 1 << rng.integers(8)
        elif kind == 5 and len(section) >= 4:
            at = min(at // 4 * 4, len(section) - 4)
            extreme = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, len(section)][rng.integers(6)]
            section[at : at + 4] = struct.pack("<I", extreme)
        elif kind == 6:
            del section[at:]
        else:
            section += bytes(int(rng.integers(1, 64)))
    return section


def fuzz(count: int, seed: int) -> dict[str, int]:
    """Decode *count* mutated payloads under a valid checksum; each is refused or a tensor."""
    rng = np.random.default_rng(seed)
    sources = []
    for level in fmt.LEVELS:
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            kv = gaussian(layers=1, tokens=40, heads=1, size=34, dtype=dtype, seed=seed)
            if dtype == torch.bfloat16:
                kv[0, 0, 3, 0, 4] = float("inf")
                kv[0, 0, :, 0, 6] *= 1e4
            codec = create_codec("cachegen", level=level)
            header, sections = container.unpack(codec.encode(kv))
            sources.append((codec, header, [bytes(s) for s in sections]))
    outcome = {"refused": 0, "decoded": 0}
    for _ in range(count):
        codec, header, sections = sources[rng.integers(len(sources))]
        which = rng.integers(len(sections))
        changed = [*sections]
        changed[which] = mutate(bytearray(sections[which]), rng)
        blob = container.pack(header, changed)
        try:
            decoded = codec.decode(blob)
        except MalformedBlob:
            outcome["refused"] += 1
        else:
            assert decoded.shape == header.shape and decoded.dtype == header.dtype
            outcome["decoded"] += 1
    return outcome


def test_mutated_sections_are_refused_or_decoded():
    outcome = fuzz(10_000, seed=1)
    assert outcome["refused"] > outcome["decoded"], outcome


@pytest.mark.slow
def test_mutated_sections_are_refused_or_decoded_many():
    fuzz(100_000, seed=2)


def test_reference_refuses_what_cpu_refuses():
    rng = np.random.default_rng(4)
    for level in fmt.LEVELS:
        kv = gaussian(layers=1, values=1, tokens=9, heads=1, size=34)
        sections = kernel_blob(cpu, kv, level)
        for _ in range(150):
            changed = [sections[0], bytes(mutate(bytearray(sections[1]), rng))]
            outcome = []
            for module in (reference, cpu):
                try:
                    outcome.append(bits_of(kernel_decode(module, changed, kv)))
                except fmt.SectionError:
                    outcome.append(None)
            assert (outcome[0] is None) == (outcome[1] is None), level
