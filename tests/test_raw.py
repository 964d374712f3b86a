"""The raw codec, and what every codec shares with it."""

import threading

import pytest
import torch

from vllm_kvcompress.codecs import (
    MalformedBlob,
    UnsupportedVersion,
    WrongCodec,
    codec_names,
    container,
    create_codec,
)
from vllm_kvcompress.codecs.container import DTYPE_CODES, Header

SHAPES = [(1, 1, 1, 1, 1), (3, 2, 17, 2, 64), (2, 1, 5, 1, 576), (5, 2, 256, 3, 80)]


def random_kv(shape, dtype):
    """Random bits: NaN, infinities and every other pattern are among them."""
    values = torch.Generator().manual_seed(0)
    last = (*shape[:-1], shape[-1] * dtype.itemsize)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=values).bool()
    return torch.randint(0, 256, last, dtype=torch.uint8, generator=values).view(dtype)


def bits(kv):
    return kv.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_bit_of_every_dtype_comes_back(shape, dtype):
    codec, kv = create_codec("raw"), random_kv(shape, dtype)
    blob = codec.encode(kv, fingerprint=b"fp")
    decoded = codec.decode(blob)
    assert type(blob) is bytes
    assert decoded.shape == kv.shape and decoded.dtype == dtype and decoded.is_contiguous()
    assert torch.equal(bits(decoded), bits(kv))
    assert len(blob) == 144 + kv.numel() * kv.element_size()


def test_strided_input_and_output():
    codec = create_codec("raw")
    kv = random_kv((3, 2, 16, 2, 64), torch.bfloat16).transpose(2, 3)
    blob = codec.encode(kv)
    out = torch.empty(3, 2, 16, 2, 128, dtype=torch.bfloat16).transpose(2, 3)[..., ::2]
    assert codec.decode(blob, out=out) is out
    assert torch.equal(bits(out), bits(kv))
    contiguous = torch.empty(kv.shape, dtype=kv.dtype)
    assert codec.decode(blob, out=contiguous) is contiguous
    assert torch.equal(bits(contiguous), bits(kv))


def test_the_decoded_tensor_is_writable_and_its_own():
    codec = create_codec("raw")
    blob = codec.encode(torch.zeros(1, 2, 3, 1, 4))
    codec.decode(blob).fill_(1)
    assert not codec.decode(blob, device="cpu").any()


def test_input_that_requires_grad():
    kv = torch.ones(1, 2, 3, 1, 4, requires_grad=True)
    decoded = create_codec("raw").decode(create_codec("raw").encode(kv))
    assert torch.equal(decoded, kv) and not decoded.requires_grad


def test_out_must_fit():
    codec = create_codec("raw")
    blob = codec.encode(torch.zeros(1, 2, 3, 1, 4))
    for out in (torch.zeros(1, 2, 4, 1, 4), torch.zeros(1, 2, 3, 1, 4, dtype=torch.float16)):
        with pytest.raises(ValueError, match=r"the blob holds torch\.float32"):
            codec.decode(blob, out=out)
    with pytest.raises(ValueError, match="out is on cpu; device is meta"):
        codec.decode(blob, device="meta", out=torch.zeros(1, 2, 3, 1, 4))


@pytest.mark.parametrize("shape", [(2, 3, 1, 4), (1, 3, 2, 1, 4), (1, 2, 0, 1, 4), ()], ids=str)
def test_bad_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"kv has shape .*expected \[layers"):
        create_codec("raw").encode(torch.zeros(shape))


def test_bad_dtypes_and_sizes_are_refused():
    codec = create_codec("raw")
    with pytest.raises(ValueError, match="complex64"):
        codec.encode(torch.zeros(1, 2, 3, 1, 4, dtype=torch.complex64))
    codec.max_decoded_bytes = 95
    with pytest.raises(ValueError, match="96 bytes; the limit is 95"):
        codec.encode(torch.zeros(1, 2, 3, 1, 4))
    with pytest.raises(MalformedBlob, match="the limit is 95"):
        codec.decode(create_codec("raw").encode(torch.zeros(1, 2, 3, 1, 4)))


def test_inspect():
    kv = torch.zeros(3, 2, 16, 2, 64, dtype=torch.bfloat16)
    assert create_codec("raw").inspect(create_codec("raw").encode(kv, b"\1\2")) == {
        "codec": "raw",
        "codec_version": 1,
        "container_version": 1,
        "level": "",
        "dtype": "bfloat16",
        "shape": [3, 2, 16, 2, 64],
        "fingerprint": "0102",
        "profile_digest": None,
        "decoded_bytes": 24576,
        "section_bytes": [24576],
    }


def test_inconsistent_sections_are_refused():
    codec = create_codec("raw")
    header = Header("raw", "", torch.float32, (1, 2, 3, 1, 4))
    for sections in ([], [bytes(95)], [bytes(97)], [bytes(48), bytes(48)]):
        with pytest.raises(MalformedBlob):
            codec.decode(container.pack(header, sections))
    with pytest.raises(WrongCodec):
        codec.decode(container.pack(Header("x", "", torch.float32, (1, 2, 3, 1, 4)), [bytes(96)]))
    other = Header("raw", "", torch.float32, (1, 2, 3, 1, 4), codec_version=2)
    with pytest.raises(UnsupportedVersion):
        codec.decode(container.pack(other, [bytes(96)]))


def test_threads_share_an_instance():
    codec = create_codec("raw")
    failures = []

    def work(number):
        kv = torch.full((2, 2, 64, 2, 64), number)
        for _ in range(50):
            if not torch.equal(codec.decode(codec.encode(kv)), kv):
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_unknown_codecs_and_settings_are_named():
    assert "raw" in codec_names()
    with pytest.raises(ValueError, match=r"codec 'zip' is unknown; choose from cachegen, .*raw"):
        create_codec("zip")
    with pytest.raises(ValueError, match="codec 'raw' has no setting 'level'; it has no settings"):
        create_codec("raw", level="high")


def test_cache_key_names_codec_and_version():
    assert create_codec("raw").cache_key() == b"raw/1"
