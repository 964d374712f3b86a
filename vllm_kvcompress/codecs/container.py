"""The container: one self-describing blob that holds one encoded chunk.

All integers are little-endian and unsigned. A blob is a fixed header, a table of section
lengths, and the sections; it is read without pickle and every field is checked.

====== ===== ======================================================================
offset bytes field
====== ===== ======================================================================
0      8     magic, ``89 4B 56 43 0D 0A 1A 0A`` (``\\x89KVC\\r\\n\\x1a\\n``)
8      2     container version, 1
10     2     number of sections, at most 1024
12     4     checksum: CRC-32 of bytes 0 to 11 followed by bytes 16 to the end
16     8     length of the whole blob in bytes
24     16    codec name: printable ASCII, not empty, padded with zero bytes
40     16    level: printable ASCII, may be empty, padded with zero bytes
56     2     codec version
58     1     dtype code, see ``DTYPE_CODES``
59     1     length of the fingerprint in bytes, 0 to 32
60     4     layers
64     4     K and V: 2, or 1 where they share one latent
68     4     tokens
72     4     KV heads
76     4     head size
80     32    fingerprint, padded with zero bytes
112    16    profile digest, zeros where no profile was used
128    8 * n lengths of the n sections in bytes
...    ...   the sections, each at the next multiple of 16, the gaps filled with zeros
====== ===== ======================================================================

The blob ends with the last byte of the last section (or of the table, if that is later).
Sections are aligned so that decoders can view them as arrays of wider integers.

The checksum guards against accidental corruption: it finds every burst up to 32 bits and any
other damage but for one in 2^32. It is no protection against someone who forges blobs, so every
decoder must also stand any payload under a valid checksum.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

MAGIC = b"\x89KVC\r\n\x1a\n"
CONTAINER_VERSION = 1
CHECKSUM_OFFSET = 12
HEADER_BYTES = 128
SECTION_ALIGNMENT = 16
MAX_SECTIONS = 1024
FINGERPRINT_BYTES = 32
PROFILE_DIGEST_BYTES = 16
NO_PROFILE = bytes(PROFILE_DIGEST_BYTES)

DEFAULT_MAX_DECODED_BYTES = 2 << 30
"""What a blob may claim to decode to, unless the decoder sets its own limit. The chunk of 256
tokens of a model with 126 layers, 8 heads of 128 channels and bf16 takes 132 MB."""

DTYPE_CODES: dict[torch.dtype, int] = {
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float32: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
    torch.float8_e4m3fnuz: 6,
    torch.float8_e5m2fnuz: 7,
    torch.float8_e8m0fnu: 8,
    torch.float64: 9,
    torch.bool: 10,
    torch.uint8: 11,
    torch.uint16: 12,
    torch.uint32: 13,
    torch.uint64: 14,
    torch.int8: 15,
    torch.int16: 16,
    torch.int32: 17,
    torch.int64: 18,
}
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}

_PREFIX = struct.Struct("<8sHHIQ")
_FIELDS = struct.Struct("<16s16sHBB5I32s16s")
assert _PREFIX.size + _FIELDS.size == HEADER_BYTES

Shape = tuple[int, int, int, int, int]
BytesLike = bytes | bytearray | memoryview


class BlobError(ValueError):
    """The bytes are not a blob that this version can decode; the subclass says why."""


class NotABlob(BlobError):
    """The magic is missing: these bytes were never a blob."""


class UnsupportedVersion(BlobError):
    """The container's or the codec's version is not one that this version reads."""


class WrongLength(BlobError):
    """There are fewer or more bytes than the blob says that it has."""


class ChecksumMismatch(BlobError):
    """The bytes have changed since the blob was made."""


class MalformedBlob(BlobError):
    """The checksum is right, but a field or a section is out of bounds or inconsistent."""


class WrongCodec(BlobError):
    """The blob is intact and was made by another codec."""


class WrongProfile(BlobError):
    """The blob is intact and was coded with a calibrated profile that the decoder has not got."""


@dataclass(frozen=True)
class Header:
    """What a blob says about itself.

    ``shape`` is ``[layers, K and V, tokens, kv_heads, head_size]`` of the decoded tensor,
    ``fingerprint`` at most 32 bytes that the caller chose, ``profile_digest`` 16 bytes.
    """

    codec: str
    level: str
    dtype: torch.dtype
    shape: Shape
    fingerprint: bytes = b""
    profile_digest: bytes = NO_PROFILE
    codec_version: int = 1

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the decoded tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def pack(header: Header, sections: Sequence[Any]) -> bytes:
    """Put a header and its sections (objects with a contiguous buffer) into one blob.

    Raises ValueError when a field of the header does not fit.
    """
    views = [memoryview(section).cast("B") for section in sections]
    if len(views) > MAX_SECTIONS:
        raise ValueError(f"{len(views)} sections; a blob holds at most {MAX_SECTIONS}")
    fields = _pack_fields(header)
    table = struct.pack(f"<{len(views)}Q", *(len(view) for view in views))

    position = HEADER_BYTES + len(table)
    body: list[BytesLike] = [table]
    for view in views:
        gap = -position % SECTION_ALIGNMENT
        body += (bytes(gap), view)
        position += gap + len(view)

    prefix = _PREFIX.pack(MAGIC, CONTAINER_VERSION, len(views), 0, position)
    checksum = zlib.crc32(prefix[:CHECKSUM_OFFSET])
    for part in (prefix[CHECKSUM_OFFSET + 4 :], fields, *body):
        checksum = zlib.crc32(part, checksum)
    prefix = _PREFIX.pack(MAGIC, CONTAINER_VERSION, len(views), checksum, position)
    return b"".join((prefix, fields, *body))


def unpack(
    blob: BytesLike,
    *,
    codec: str | None = None,
    codec_version: int | None = None,
    max_decoded_bytes: int = DEFAULT_MAX_DECODED_BYTES,
) -> tuple[Header, list[memoryview]]:
    """Check a blob and take it apart; the sections are views into it, nothing is copied.

    ``codec`` and ``codec_version`` are those that the caller decodes (any if None);
    ``max_decoded_bytes`` bounds the tensor that the header may announce.
    Raises a subclass of BlobError: NotABlob, UnsupportedVersion, WrongLength, ChecksumMismatch,
    MalformedBlob or WrongCodec, tested in this order.
    """
    view = memoryview(blob).cast("B")
    start = bytes(view[: len(MAGIC)])
    if start != MAGIC:
        if MAGIC.startswith(start):
            raise WrongLength(f"the blob ends after {len(start)} bytes, inside its magic")
        raise NotABlob(f"not a blob: it starts with {start.hex(' ')}, not {MAGIC.hex(' ')}")
    if len(view) < HEADER_BYTES:
        raise WrongLength(f"the blob ends after {len(view)} bytes, inside its header")

    _, version, section_count, checksum, total_bytes = _PREFIX.unpack_from(view)
    if version != CONTAINER_VERSION:
        raise UnsupportedVersion(
            f"container version {version}; this version reads {CONTAINER_VERSION}"
        )
    if total_bytes != len(view):
        raise WrongLength(f"the blob should have {total_bytes} bytes and has {len(view)}")
    actual = zlib.crc32(view[CHECKSUM_OFFSET + 4 :], zlib.crc32(view[:CHECKSUM_OFFSET]))
    if actual != checksum:
        raise ChecksumMismatch(f"checksum {actual:08x}; the header says {checksum:08x}")

    header = _unpack_fields(view)
    sections = _unpack_sections(view, section_count)
    if header.decoded_bytes > max_decoded_bytes:
        raise MalformedBlob(
            f"shape {list(header.shape)} takes {header.decoded_bytes} bytes decoded; "
            f"the limit is {max_decoded_bytes}"
        )
    if codec is not None and header.codec != codec:
        raise WrongCodec(f"the blob was made by codec {header.codec!r}, not {codec!r}")
    if codec_version is not None and header.codec_version != codec_version:
        raise UnsupportedVersion(
            f"version {header.codec_version} of codec {header.codec!r}; "
            f"this version reads {codec_version}"
        )
    return header, sections


def describe(header: Header, sections: Sequence[BytesLike]) -> dict[str, Any]:
    """The header and the sizes of the sections as plain JSON-able values."""
    return {
        "codec": header.codec,
        "codec_version": header.codec_version,
        "container_version": CONTAINER_VERSION,
        "level": header.level,
        "dtype": str(header.dtype).removeprefix("torch."),
        "shape": list(header.shape),
        "fingerprint": header.fingerprint.hex(),
        "profile_digest": None
        if header.profile_digest == NO_PROFILE
        else header.profile_digest.hex(),
        "decoded_bytes": header.decoded_bytes,
        "section_bytes": [len(section) for section in sections],
    }


def _pack_fields(header: Header) -> bytes:
    if header.dtype not in DTYPE_CODES:
        raise ValueError(f"dtype {header.dtype} has no code in the container")
    if not _shape_is_valid(header.shape):
        raise ValueError(
            f"shape {list(header.shape)}: expected [layers, 1 or 2, tokens, kv_heads, head_size], "
            "each from 1 to 2^32 - 1"
        )
    if len(header.fingerprint) > FINGERPRINT_BYTES:
        raise ValueError(f"fingerprint of {len(header.fingerprint)} bytes; at most 32")
    if len(header.profile_digest) != PROFILE_DIGEST_BYTES:
        raise ValueError(f"profile_digest of {len(header.profile_digest)} bytes; expected 16")
    if not 0 <= header.codec_version < 1 << 16:
        raise ValueError(f"codec_version {header.codec_version}; expected 0 to 65535")
    return _FIELDS.pack(
        _pack_name("codec", header.codec),
        _pack_name("level", header.level),
        header.codec_version,
        DTYPE_CODES[header.dtype],
        len(header.fingerprint),
        *header.shape,
        header.fingerprint,
        header.profile_digest,
    )


def _pack_name(field: str, name: str) -> bytes:
    if not _name_is_valid(name) or len(name) > 16 or (field == "codec" and not name):
        raise ValueError(f"{field} {name!r}: expected up to 16 printable ASCII characters")
    return name.encode("ascii")


def _unpack_fields(view: memoryview) -> Header:
    (
        codec,
        level,
        codec_version,
        dtype_code,
        fingerprint_length,
        *shape,
        fingerprint,
        profile_digest,
    ) = _FIELDS.unpack_from(view, _PREFIX.size)
    if dtype_code not in _DTYPES:
        raise MalformedBlob(f"unknown dtype code {dtype_code}")
    if not _shape_is_valid(tuple(shape)):
        raise MalformedBlob(f"shape {shape} is out of bounds")
    if fingerprint_length > FINGERPRINT_BYTES or any(fingerprint[fingerprint_length:]):
        raise MalformedBlob("the fingerprint is longer than its field")
    codec_name = _unpack_name("codec", codec)
    if not codec_name:
        raise MalformedBlob("the codec name is empty")
    return Header(
        codec=codec_name,
        level=_unpack_name("level", level),
        dtype=_DTYPES[dtype_code],
        shape=tuple(shape),
        fingerprint=fingerprint[:fingerprint_length],
        profile_digest=profile_digest,
        codec_version=codec_version,
    )


def _unpack_name(field: str, padded: bytes) -> str:
    name = padded.rstrip(b"\0").decode("latin-1")
    if not _name_is_valid(name):
        raise MalformedBlob(f"the {field} name {name!r} is not printable ASCII")
    return name


def _unpack_sections(view: memoryview, count: int) -> list[memoryview]:
    position = HEADER_BYTES + 8 * count
    if count > MAX_SECTIONS or position > len(view):
        raise MalformedBlob(f"{count} sections do not fit into the blob")
    sections = []
    for length in struct.unpack_from(f"<{count}Q", view, HEADER_BYTES):
        start = position + -position % SECTION_ALIGNMENT
        if start + length > len(view):
            raise MalformedBlob(f"section {len(sections)} reaches past the end of the blob")
        if any(view[position:start]):
            raise MalformedBlob(f"the gap before section {len(sections)} is not zero")
        position = start + length
        sections.append(view[start:position])
    if position != len(view):
        raise MalformedBlob(f"{len(view) - position} bytes belong to no section")
    return sections


def _name_is_valid(name: str) -> bool:
    return name.isascii() and name.isprintable()


def _shape_is_valid(shape: tuple[int, ...]) -> bool:
    return len(shape) == 5 and shape[1] <= 2 and all(1 <= size < 1 << 32 for size in shape)
