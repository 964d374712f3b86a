"""Calibrated profiles of cachegen: fewer bits, the same bytes everywhere, refused where wrong."""

import json
import math
import random

import pytest
import torch
from safetensors.torch import save_file

from vllm_kvcompress.calibration.codec_profile import Statistics, error, fit_profile, group_layers
from vllm_kvcompress.codecs import BlobError, WrongProfile, container, create_codec
from vllm_kvcompress.codecs import profile as files
from vllm_kvcompress.kernels.dispatch import ENVIRONMENT

LAYERS, HEADS, SIZE, TOKENS = 4, 2, 16, 64
TURNS = (10000.0 ** (-torch.arange(0, SIZE, 2).double() / SIZE) / (2 * math.pi) * 2**32).long()


def turned(keys, start):
    """K ``[L, T, H, D]`` with its rotary embedding, in floating point."""
    positions = torch.arange(start, start + keys.shape[1])
    angle = (positions[:, None] * TURNS).double() * (2 * math.pi / 2**32)
    cos, sin = (x.float()[None, :, None] for x in (angle.cos(), angle.sin()))
    a, b = keys.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def model_kv(seed, start=0, tokens=TOKENS, dtype=torch.bfloat16):
    """K and V whose channels hang together within a layer and between layers."""
    fixed = torch.Generator().manual_seed(1)
    width = LAYERS * HEADS * SIZE
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for value in (0, 1):
        mix = torch.randn(width // 4, width, generator=fixed)
        mean = torch.randn(width, generator=fixed) * 4
        x = torch.randn(tokens, width // 4, generator=generator) @ mix
        x = x + 0.3 * torch.randn(tokens, width, generator=generator) + mean
        x = x.unflatten(1, (LAYERS, HEADS, SIZE)).transpose(0, 1)
        parts.append(x if value else turned(x, start))
    return torch.stack(parts, 1).to(dtype)


def make_profile(turns=TURNS, together=2):
    statistics = Statistics(turns.expand(LAYERS, -1), LAYERS, HEADS, SIZE, LAYERS // together)
    for seed in range(24):
        statistics.add(model_kv(seed, start=37 * seed), 37 * seed)
    kept = [model_kv(100, start=640), model_kv(101, start=5)]
    return fit_profile(statistics, 4096, kept)


@pytest.fixture(scope="module")
def profile():
    return make_profile()


@pytest.fixture
def folder(profile, tmp_path):
    save_file(files.arrays_of(profile.transform), tmp_path / files.TENSORS_NAME)
    described = files.describe(profile.transform, profile.levels)
    (tmp_path / files.JSON_NAME).write_text(json.dumps({"format": 1, "cachegen": described}))
    return tmp_path


@pytest.mark.parametrize("level", files.LEVELS)
def test_a_profile_takes_fewer_bits_at_about_the_same_error_on_unseen_values(level, profile):
    chunks = [model_kv(200 + n, start=64 * n + 3) for n in range(4)]
    bits, errors = [], []
    for given in (None, profile):
        codec = create_codec("cachegen", level=level, profile=given)
        blobs = [codec.encode(kv) for kv in chunks]
        bits.append(sum(map(len, blobs)))
        errors.append(error(chunks, [codec.decode(blob) for blob in blobs]))
    assert bits[1] < 0.85 * bits[0]
    for plain, calibrated in zip(*errors, strict=True):
        assert calibrated < 1.15 * plain


@pytest.mark.parametrize("start", [0, 1, 777, 4000])
def test_the_position_of_a_chunk_is_found(start, profile):
    assert profile.transform.find_start(model_kv(300, start)[:, 0]) == start


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_whole_rank_comes_back_but_for_rounding(dtype, profile):
    kv = model_kv(400, 11, dtype=dtype)
    ranks = tuple(basis.shape[1] for basis in profile.transform.basis)
    coefficients = profile.transform.forward(kv, 11, ranks)
    back = torch.empty_like(kv)
    profile.transform.inverse(coefficients, 11, back)
    assert max(error([kv], [back])) < 1e-4


def test_sums_do_not_depend_on_their_order(profile):
    kv = model_kv(500, 21)
    transform = profile.transform
    ranks = tuple(basis.shape[1] for basis in transform.basis)
    coefficients = transform.forward(kv, 21, ranks)
    # The same products with the tokens, and with them the blocks of the library, elsewhere.
    for tokens in (1, 7):
        parts = [
            transform.forward(part, 21 + tokens * n, ranks)
            for n, part in enumerate(kv.split(tokens, 2))
        ]
        for value in (0, 1):
            joined = torch.cat([part[value] for part in parts], 1)
            assert torch.equal(joined, coefficients[value])


@pytest.mark.parametrize("level", files.LEVELS)
def test_numba_and_the_reference_write_the_same_bytes(level, profile, monkeypatch):
    kv = model_kv(600, 99, tokens=40)
    codec = create_codec("cachegen", level=level, profile=profile)
    monkeypatch.setenv(ENVIRONMENT, "reference")
    blob = codec.encode(kv)
    back = codec.decode(blob)
    monkeypatch.setenv(ENVIRONMENT, "cpu")
    assert codec.encode(kv) == blob
    assert torch.equal(codec.decode(blob), back)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e4])
def test_values_beyond_the_profile_are_coded_without_it(value, profile):
    kv = model_kv(700)
    kv[1, 1, 30, 1, 4] = value
    codec = create_codec("cachegen", level="medium", profile=profile)
    blob = codec.encode(kv)
    assert blob == create_codec("cachegen", level="medium").encode(kv)
    back = codec.decode(blob)
    assert back.isfinite().sum() == kv.isfinite().sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("value", [0.0, 1e30, -1e38])
def test_chunks_of_one_value_come_back(value, dtype, profile):
    kv = torch.full((LAYERS, 2, 24, HEADS, SIZE), value, dtype=dtype)
    codec = create_codec("cachegen", level="medium", profile=profile)
    back = codec.decode(codec.encode(kv))
    assert back.isfinite().all()
    if value:
        assert torch.allclose(back, kv, rtol=0.01)
    else:
        # Unlike any values of the model: what is left is the means that the ranks cannot say.
        assert back.float().abs().max() < 3 * profile.transform.scale.max()


@pytest.mark.parametrize("level", ["lossless", "paper"])
def test_levels_without_steps_ignore_the_profile(level, profile):
    kv = model_kv(800)
    codec = create_codec("cachegen", level=level, profile=profile)
    assert codec.encode(kv) == create_codec("cachegen", level=level).encode(kv)


def test_sinks_come_back_exactly(profile):
    kv = model_kv(900)
    kv[:, :, 0] *= 0.1
    codec = create_codec("cachegen", level="medium", profile=profile)
    blob = codec.encode(kv)
    assert codec.inspect(blob)["profile_digest"] == profile.digest.hex()
    assert torch.equal(codec.decode(blob)[:, :, 0], kv[:, :, 0])


def test_a_profile_reads_back_from_its_files(folder, profile):
    loaded = files.load_profile(folder)
    assert loaded.digest == profile.digest
    assert loaded.levels == profile.levels
    kv = model_kv(1000)
    blobs = [create_codec("cachegen", profile=given).encode(kv) for given in (folder, profile)]
    assert blobs[0] == blobs[1]


def test_the_digest_is_in_the_key_and_in_the_header(profile):
    plain, calibrated = (create_codec("cachegen", profile=given) for given in (None, profile))
    other = create_codec("cachegen", profile=make_profile(together=4))
    assert len({codec.cache_key() for codec in (plain, calibrated, other)}) == 3
    header, _ = container.unpack(calibrated.encode(model_kv(1)))
    assert header.profile_digest == profile.digest


def test_a_blob_of_another_profile_is_refused(profile):
    blob = create_codec("cachegen", profile=profile).encode(model_kv(2))
    assert create_codec("cachegen").inspect(blob)["profile_digest"] == profile.digest.hex()
    with pytest.raises(WrongProfile, match=profile.digest.hex()):
        create_codec("cachegen").decode(blob)
    with pytest.raises(WrongProfile, match="this codec has"):
        create_codec("cachegen", profile=make_profile(together=1)).decode(blob)


@pytest.mark.parametrize(
    "shape", [(3, 2, 9, HEADS, SIZE), (LAYERS, 1, 9, HEADS, SIZE), (LAYERS, 2, 9, 1, SIZE)]
)
def test_a_chunk_of_another_model_is_refused(shape, profile):
    with pytest.raises(ValueError, match=r"4 layers of 2 KV heads of 16.*calibrate this model"):
        create_codec("cachegen", profile=profile).encode(torch.zeros(shape, dtype=torch.bfloat16))


def test_keys_without_rotary_embedding_are_taken_as_they_are():
    made = make_profile(turns=torch.zeros_like(TURNS))
    kv = model_kv(3)
    codec = create_codec("cachegen", level="high", profile=made)
    assert made.transform.find_start(kv[:, 0]) == 0
    assert max(error([kv], [codec.decode(codec.encode(kv))])) < 0.01


def test_layers_are_taken_together_as_the_width_and_the_text_allow():
    assert group_layers(30, 192, 10**6, 1024) == 5
    assert group_layers(32, 1024, 10**6, 1024) == 1
    assert group_layers(30, 192, 2000, 1024) == 1
    assert group_layers(61, 64, 10**6, 1024) == 1


def test_a_directory_without_profile_says_what_to_give(tmp_path, folder):
    (tmp_path / "file").touch()
    for given in (tmp_path / "nothing", tmp_path / "file", "\0"):
        with pytest.raises(ValueError, match=r"holds no profile.*vllm-kvcompress calibrate"):
            create_codec("cachegen", profile=str(given))
    (folder / files.TENSORS_NAME).unlink()
    (folder / files.TENSORS_NAME).mkdir()
    with pytest.raises(ValueError, match=r"damaged.*calibrate again"):
        create_codec("cachegen", profile=str(folder))


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b"[" * 100_000, b"\xff", b'{"format": 1}']
)
def test_what_is_no_profile_at_all_is_refused(content, folder):
    (folder / files.JSON_NAME).write_bytes(content)
    with pytest.raises(ValueError, match="calibrate again"):
        create_codec("cachegen", profile=str(folder))


@pytest.mark.parametrize(
    "change",
    [
        {"best": None},
        {"high": {"alpha": [1, 1, 1], "dead_zone": [0, 0], "rank": [1, 1]}},
        {"high": {"alpha": [1, 1], "dead_zone": [0, 0], "rank": [1, 1, 1]}},
    ],
)
def test_levels_that_nothing_would_read_are_refused(change, folder):
    content = json.loads((folder / files.JSON_NAME).read_text())
    content["cachegen"]["levels"].update(change)
    (folder / files.JSON_NAME).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"level.*calibrate again"):
        create_codec("cachegen", profile=str(folder))


def test_what_cannot_be_read_is_told_by_the_name_of_the_file(folder):
    (folder / files.TENSORS_NAME).write_bytes(b"")
    with pytest.raises(ValueError, match=f"{files.TENSORS_NAME} cannot be read.*calibrate again"):
        create_codec("cachegen", profile=str(folder))
    (folder / files.JSON_NAME).write_bytes(b"{")
    with pytest.raises(ValueError, match=f"{files.JSON_NAME} is not JSON.*calibrate again"):
        create_codec("cachegen", profile=str(folder))


@pytest.mark.parametrize("header", [b"", b"\0" * 8, b"\xff" * 8, (1 << 40).to_bytes(8, "little")])
def test_arrays_with_a_header_that_makes_no_sense_are_refused(header, folder):
    (folder / files.TENSORS_NAME).write_bytes(header + b"{}")
    with pytest.raises(ValueError, match="calibrate again"):
        create_codec("cachegen", profile=str(folder))


def damaged_settings(chance, text):
    """JSON with something wrong in it."""
    if chance.random() < 0.5:
        at = chance.randrange(len(text))
        return text[:at] + chance.choice(["", "9", "-", "null", "[", "1e400"]) + text[at + 1 :]
    content = json.loads(text)
    place = content["cachegen"]
    while isinstance(place, dict):
        name = chance.choice(sorted(place))
        if not isinstance(place[name], dict) or chance.random() < 0.2:
            break
        place = place[name]
    place[name] = chance.choice([None, -1, 0, 1 << 40, 1.5, "x", [], {}, [1, 2], True, [1e300, 0]])
    return json.dumps(content)


def test_damaged_files_are_refused_with_an_error_that_says_so(folder):
    chance = random.Random(0)
    text = (folder / files.JSON_NAME).read_text()
    arrays = (folder / files.TENSORS_NAME).read_bytes()
    whole = files.load_profile(folder).digest
    for number in range(400):
        if number % 2:
            (folder / files.JSON_NAME).write_text(damaged_settings(chance, text))
            (folder / files.TENSORS_NAME).write_bytes(arrays)
        else:
            (folder / files.JSON_NAME).write_text(text)
            broken = bytearray(arrays)
            broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
            if chance.random() < 0.3:
                broken = broken[: chance.randrange(len(broken))]
            (folder / files.TENSORS_NAME).write_bytes(broken)
        files._load.cache_clear()
        try:
            assert files.load_profile(folder).digest == whole
        except ValueError as error:
            assert "calibrate" in str(error)


def test_damaged_blobs_of_a_profile_are_refused_or_decode(profile):
    chance = random.Random(0)
    codec = create_codec("cachegen", level="medium", profile=profile)
    header, sections = container.unpack(codec.encode(model_kv(4, tokens=20)))
    for _ in range(400):
        broken = [bytearray(section) for section in sections]
        section = chance.choice([part for part in broken if part])
        for _ in range(chance.choice((1, 1, 4))):
            section[chance.randrange(len(section))] ^= 1 << chance.randrange(8)
        if chance.random() < 0.2:
            del section[chance.randrange(len(section)) :]
        try:
            back = codec.decode(container.pack(header, broken))
        except BlobError:
            continue
        assert back.shape == header.shape
        assert back.dtype == header.dtype
        assert back.isfinite().all()
