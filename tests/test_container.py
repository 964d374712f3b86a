"""The container's bytes: what goes in comes out, and every kind of damage has its own error."""

import json
import struct
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvcompress.codecs import (
    BlobError,
    ChecksumMismatch,
    MalformedBlob,
    NotABlob,
    UnsupportedVersion,
    WrongCodec,
    WrongLength,
    container,
)
from vllm_kvcompress.codecs.container import DTYPE_CODES, Header, describe, pack, unpack

HEADER = Header(
    codec="cachegen",
    level="high",
    dtype=torch.bfloat16,
    shape=(3, 2, 256, 4, 64),
    fingerprint=b"fingerprint",
    profile_digest=bytes(range(16)),
    codec_version=7,
)
SECTIONS = [b"first", b"", b"third section, of more than sixteen bytes.", b"x" * 16]

names = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=16)
headers = st.builds(
    Header,
    codec=names.filter(bool),
    level=names,
    dtype=st.sampled_from(list(DTYPE_CODES)),
    shape=st.tuples(
        st.integers(1, 1 << 10),
        st.integers(1, 2),
        st.integers(1, 1 << 10),
        st.integers(1, 1 << 3),
        st.integers(1, 1 << 4),
    ),
    fingerprint=st.binary(max_size=32),
    profile_digest=st.binary(min_size=16, max_size=16),
    codec_version=st.integers(0, 0xFFFF),
)


def reseal(blob: bytes) -> bytes:
    """The blob with the checksum that its bytes should have."""
    checksum = zlib.crc32(blob[16:], zlib.crc32(blob[:12]))
    return blob[:12] + struct.pack("<I", checksum) + blob[16:]


def patch(blob: bytes, offset: int, value: bytes) -> bytes:
    return reseal(blob[:offset] + value + blob[offset + len(value) :])


@given(headers, st.lists(st.binary(max_size=100), max_size=8))
def test_round_trip(header, sections):
    blob = pack(header, sections)
    found, views = unpack(blob)
    assert found == header
    assert [bytes(view) for view in views] == sections
    json.dumps(describe(found, views))


@given(st.binary(max_size=300))
def test_foreign_bytes_are_no_blob(content):
    with pytest.raises((NotABlob, WrongLength)):
        unpack(content)
    with pytest.raises(BlobError):
        unpack(container.MAGIC + content)


def test_bytes_are_as_documented():
    blob = pack(HEADER, SECTIONS)
    assert blob[0:8] == b"\x89KVC\r\n\x1a\n"
    assert struct.unpack_from("<HH", blob, 8) == (1, 4)
    assert struct.unpack_from("<I", blob, 12)[0] == zlib.crc32(blob[:12] + blob[16:])
    assert struct.unpack_from("<Q", blob, 16)[0] == len(blob)
    assert blob[24:40] == b"cachegen".ljust(16, b"\0")
    assert blob[40:56] == b"high".ljust(16, b"\0")
    assert struct.unpack_from("<HBB", blob, 56) == (7, 1, 11)
    assert struct.unpack_from("<5I", blob, 60) == (3, 2, 256, 4, 64)
    assert blob[80:112] == b"fingerprint".ljust(32, b"\0")
    assert blob[112:128] == bytes(range(16))
    assert struct.unpack_from("<4Q", blob, 128) == (5, 0, 42, 16)
    assert blob[160:165] == b"first"
    assert blob[165:176] == bytes(11)
    assert blob[176:218] == SECTIONS[2]
    assert blob[224:] == b"x" * 16
    assert zlib.crc32(blob) == 0xA1D95A51, "the bytes of version 1 never change"


def test_sections_are_aligned_views():
    blob = pack(HEADER, SECTIONS)
    _, views = unpack(blob)
    assert all(view.obj is blob for view in views)
    base = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    assert len(base) == len(blob)
    for view, section in zip(views, SECTIONS, strict=True):
        assert not section or blob.find(section) % container.SECTION_ALIGNMENT == 0
        assert bytes(view) == section


def test_any_contiguous_buffer_is_a_section():
    numbers = torch.arange(6, dtype=torch.int32).reshape(2, 3).numpy()
    for section in (numbers, bytearray(numbers.tobytes()), memoryview(numbers.tobytes())):
        assert bytes(unpack(pack(HEADER, [section]))[1][0]) == numbers.tobytes()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_a_blob(kind):
    assert unpack(kind(pack(HEADER, SECTIONS)))[0] == HEADER


def test_every_bit_counts():
    blob = pack(HEADER, SECTIONS)
    for position in range(8 * len(blob)):
        damaged = bytearray(blob)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(BlobError):
            unpack(damaged)


def test_every_length_counts():
    blob = pack(HEADER, SECTIONS)
    for length in range(len(blob)):
        with pytest.raises(WrongLength):
            unpack(blob[:length])
    for extra in (b"\0", b"x" * 100, blob):
        with pytest.raises(WrongLength):
            unpack(blob + extra)


def test_each_kind_of_damage_has_its_own_error():
    blob = pack(HEADER, SECTIONS)
    with pytest.raises(NotABlob, match="not a blob: it starts with 80 04"):
        unpack(b"\x80\x04" + blob)
    with pytest.raises(UnsupportedVersion, match="container version 2; this version reads 1"):
        unpack(patch(blob, 8, b"\2"))
    with pytest.raises(WrongLength, match=f"should have {len(blob)} bytes and has 200"):
        unpack(blob[:200])
    with pytest.raises(ChecksumMismatch, match="the header says"):
        unpack(blob[:-1] + b"y")
    with pytest.raises(WrongCodec, match="made by codec 'cachegen', not 'raw'"):
        unpack(blob, codec="raw")
    with pytest.raises(UnsupportedVersion, match=r"version 7 of codec 'cachegen'; .* reads 8"):
        unpack(blob, codec="cachegen", codec_version=8)
    assert unpack(blob, codec="cachegen", codec_version=7)[0] == HEADER


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (10, struct.pack("<H", 3), "gap|no section"),
        (10, struct.pack("<H", 0), "bytes belong to no section"),
        (10, struct.pack("<H", 5), "past the end|gap"),
        (10, struct.pack("<H", 1025), "do not fit"),
        (10, struct.pack("<H", 0xFFFF), "do not fit"),
        (24, bytes(16), "codec name is empty"),
        (24, b"\xff", "not printable ASCII"),
        (24, b"a\0b", "not printable ASCII"),
        (40, b"\n", "not printable ASCII"),
        (58, b"\0", "unknown dtype code 0"),
        (58, b"\xff", "unknown dtype code 255"),
        (59, b"\x21", "fingerprint"),
        (59, b"\5", "fingerprint"),
        (60, bytes(4), "shape"),
        (64, b"\3", "shape"),
        (64, b"\0", "shape"),
        (68, bytes(4), "shape"),
        (68, b"\xff\xff\xff\xff", "the limit is"),
        (60, b"\xff" * 4 + b"\2\0\0\0" + b"\xff" * 12, "the limit is"),
        (128, struct.pack("<Q", 1 << 10), "section 0 reaches past the end"),
        (128, struct.pack("<Q", 1 << 63), "past the end"),
        (128, struct.pack("<Q", (1 << 64) - 1), "past the end"),
        (152, struct.pack("<Q", 15), "1 bytes belong to no section"),
        (152, struct.pack("<Q", 17), "section 3 reaches past the end"),
        (170, b"\1", "gap before section 1 is not zero"),
    ],
)
def test_fields_are_bounded_under_a_right_checksum(offset, value, message):
    with pytest.raises(MalformedBlob, match=message):
        unpack(patch(pack(HEADER, SECTIONS), offset, value))


def test_limit_on_the_decoded_size():
    blob = pack(HEADER, SECTIONS)
    assert HEADER.decoded_bytes == 3 * 2 * 256 * 4 * 64 * 2
    assert unpack(blob, max_decoded_bytes=HEADER.decoded_bytes)
    with pytest.raises(MalformedBlob, match=r"takes 786432 bytes decoded; the limit is 786431"):
        unpack(blob, max_decoded_bytes=HEADER.decoded_bytes - 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codec": ""}, "codec ''"),
        ({"codec": "x" * 17}, "codec 'x"),
        ({"level": "é"}, "level 'é'"),
        ({"dtype": torch.complex64}, "complex64 has no code"),
        ({"shape": (1, 3, 1, 1, 1)}, "shape"),
        ({"shape": (1, 2, 0, 1, 1)}, "shape"),
        ({"shape": (1, 2, 1, 1)}, "shape"),
        ({"shape": (1, 2, 1 << 32, 1, 1)}, "shape"),
        ({"fingerprint": bytes(33)}, "fingerprint of 33 bytes; at most 32"),
        ({"profile_digest": b""}, "profile_digest of 0 bytes; expected 16"),
        ({"codec_version": 1 << 16}, "codec_version 65536"),
    ],
)
def test_bad_headers_are_not_packed(changes, message):
    with pytest.raises(ValueError, match=message):
        pack(Header(**{**HEADER.__dict__, **changes}), [])


def test_too_many_sections_are_not_packed():
    assert len(unpack(pack(HEADER, [b"x"] * 1024))[1]) == 1024
    with pytest.raises(ValueError, match="at most 1024"):
        pack(HEADER, [b"x"] * 1025)
