"""Damaged blobs, by the hundred thousand: an error that says so, and nothing else.

A mutant with the checksum left as it was must raise a BlobError. With the checksum made right
again, so that the parsers behind it are reached, it may also decode to a tensor of the shape and
dtype that its header announces. Any other exception, a crash, a hang, a read past the end of the
blob or an allocation beyond the header's claim is a failure.

The mutants are decoded in a child process with little address space to spare. Each lies directly
before a page that cannot be read. ``python test_container_fuzz.py CODEC FIRST COUNT`` decodes the
mutants with these numbers; a number always gives the same mutant.
"""

import ctypes
import dataclasses
import faulthandler
import json
import mmap
import os
import random
import resource
import struct
import subprocess
import sys
import zlib

import pytest
import torch

from vllm_kvcompress.codecs import BlobError, container, create_codec
from vllm_kvcompress.kernels.dispatch import ENVIRONMENT

PROT_NONE = 0
SECONDS_PER_MUTANT = 20
MAX_DECODED_BYTES = 4 << 20
SPARE_ADDRESS_SPACE = 256 << 20

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
CODECS = {
    "raw": [({}, dtype) for dtype in (*DTYPES, torch.uint8)],
    "int8": [({}, dtype) for dtype in DTYPES],
    "cachegen": [
        *(
            ({"level": level}, torch.bfloat16)
            for level in ("lossless", "high", "medium", "low", "paper")
        ),
        *(({"level": "lossless"}, dtype) for dtype in DTYPES[1:]),
        *(({"level": "high"}, dtype) for dtype in (torch.float16, torch.float32)),
    ],
    "fp8": [
        *(({"level": level}, torch.bfloat16) for level in ("tensor", "head", "token_head")),
        *(({}, dtype) for dtype in DTYPES[1:]),
    ],
    "kivi": [
        *(({"level": level}, torch.bfloat16) for level in ("4bit", "k4v2", "2bit")),
        *(({"level": "2bit"}, dtype) for dtype in DTYPES[1:]),
    ],
}
SHAPES = [(1, 2, 1, 1, 64), (2, 2, 37, 2, 16), (3, 1, 64, 1, 40), (2, 2, 64, 2, 64)]
INTERESTING = [0, 1, 2, 7, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 1024, 4095, 4096, 65535]
INTERESTING += [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
# Offset and width of every field of the header.
FIELDS = [(8, 2), (10, 2), (16, 8), (56, 2), (58, 1), (59, 1)]
FIELDS += [(60, 4), (64, 4), (68, 4), (72, 4), (76, 4), (24, 1), (40, 4), (80, 4), (112, 4)]


def sample_kv(shape, dtype, kind, seed):
    values = torch.Generator().manual_seed(seed)
    kv = torch.randn(shape, generator=values)
    if kind == "wide":
        kv *= torch.exp2(torch.randn(shape[-2:], generator=values) * 3)
    elif kind == "zeros":
        kv.zero_()
    elif kind == "non-finite":
        kv[torch.rand(shape, generator=values) < 0.02] = float("nan")
        kv[torch.rand(shape, generator=values) < 0.02] = float("inf")
    elif kind == "bits":
        return torch.randint(
            0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=values
        ).view(dtype)
    return kv.clamp(0, 255).to(dtype) if dtype is torch.uint8 else kv.to(dtype)


def make_pools(codec_name):
    """Per case of a codec, the codec and some of its blobs."""
    pools = []
    for settings, dtype in CODECS[codec_name]:
        codec = create_codec(codec_name, **settings)
        codec.max_decoded_bytes = MAX_DECODED_BYTES
        blobs = [
            codec.encode(sample_kv(shape, dtype, kind, seed), fingerprint=b"fingerprint")
            for seed, kind in enumerate(("normal", "wide", "zeros", "non-finite", "bits"))
            for shape in SHAPES
        ]
        pools.append((codec, blobs))
    return pools


def flip_bits(chance, blob, other):
    damaged = bytearray(blob)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    return damaged


def flip_header_bits(chance, blob, other):
    damaged = bytearray(blob)
    for _ in range(chance.choice((1, 1, 2))):
        damaged[chance.randrange(min(len(damaged), 512))] ^= 1 << chance.randrange(8)
    return damaged


def fill(chance, blob, other):
    start, length = chance.randrange(len(blob)), chance.choice((1, 2, 4, 16, 512, 4096))
    length = min(length, len(blob) - start)
    filler = chance.choice((bytes(length), b"\xff" * length, chance.randbytes(length)))
    return blob[:start] + filler + blob[start + length :]


def truncate(chance, blob, other):
    return blob[: chance.choice((chance.randrange(len(blob)), len(blob) - chance.randrange(1, 9)))]


def extend(chance, blob, other):
    length = chance.choice((1, 2, 8, 16, 1000))
    return blob + chance.choice((bytes(length), chance.randbytes(length), other))


def splice(chance, blob, other):
    cut = chance.randrange(len(blob))
    from_other = chance.choice((cut, chance.randrange(len(other))))
    return blob[:cut] + other[from_other:]


def graft(chance, blob, other):
    """A piece of another blob of the same length, at its place."""
    start = chance.randrange(len(blob))
    end = start + chance.randrange(1, 1024)
    return blob[:start] + other[start:end] + blob[start + len(other[start:end]) :]


def move(chance, blob, other):
    a, b, c = sorted(chance.randrange(len(blob) + 1) for _ in range(3))
    return blob[:a] + blob[b:c] + blob[a:b] + blob[c:]


def delete(chance, blob, other):
    start = chance.randrange(len(blob))
    return blob[:start] + blob[start + chance.choice((1, 2, 8, 16, 300)) :]


def insert(chance, blob, other):
    start = chance.randrange(len(blob))
    return blob[:start] + chance.randbytes(chance.choice((1, 2, 8, 16, 300))) + blob[start:]


def set_field(chance, blob, other):
    table = [
        (container.HEADER_BYTES + 8 * i, 8) for i in range(struct.unpack_from("<H", blob, 10)[0])
    ]
    offset, width = chance.choice(FIELDS + table)
    old = int.from_bytes(blob[offset : offset + width], "little")
    value = chance.choice((*INTERESTING, old - 1, old + 1, old * 2, chance.getrandbits(64)))
    return _set(blob, offset, width, value)


def set_number(chance, blob, other):
    """A number in a section, near its start more often than not."""
    start = container.HEADER_BYTES if blob.startswith(container.MAGIC) else 0
    reach = chance.choice((32, 256, len(blob)))
    width = chance.choice((1, 2, 4, 8))
    offset = max(0, min(start + chance.randrange(reach) // width * width, len(blob) - width))
    old = int.from_bytes(blob[offset : offset + width], "little")
    return _set(blob, offset, width, chance.choice((*INTERESTING, old - 1, old + 1)))


def change_sections(chance, blob, other):
    """A well-formed container whose sections are swapped, dropped, doubled, cut or borrowed."""
    header, sections = container.unpack(blob)
    sections = [bytes(section) for section in sections]
    other_header, borrowed = container.unpack(other)
    here = chance.randrange(len(sections))
    match chance.randrange(10):
        case 0:
            chance.shuffle(sections)
        case 1:
            del sections[here]
        case 2:
            sections.insert(chance.randrange(len(sections) + 1), sections[here])
        case 3:
            sections[here] = bytes(chance.choice(borrowed))
        case 4:
            sections[here] = sections[here][: chance.randrange(len(sections[here]) + 1)]
        case 5:
            sections[here] += chance.randbytes(chance.choice((1, 2, 4, 16, 1000)))
        case 6:
            header = other_header
        case 7:
            shape = list(header.shape)
            axis = chance.randrange(5)
            shape[axis] = max(1, chance.choice((shape[axis] - 1, shape[axis] + 1, shape[axis] * 2)))
            shape[1] = min(shape[1], 2)
            header = dataclasses.replace(header, shape=tuple(shape))
        case 8:
            header = dataclasses.replace(header, dtype=chance.choice(list(container.DTYPE_CODES)))
        case 9:
            first, second = chance.sample(range(5), 2)
            shape = list(header.shape)
            shape[first], shape[second] = shape[second], shape[first]
            shape[1] = min(shape[1], 2)
            header = dataclasses.replace(header, shape=tuple(shape))
    return container.pack(header, sections)


def damage_section(chance, blob, other):
    """A well-formed container, one section of which is damaged."""
    header, sections = container.unpack(blob)
    _, borrowed = container.unpack(other)
    here = chance.randrange(len(sections))
    section, stranger = bytes(sections[here]), bytes(borrowed[here % len(borrowed)])
    if section and stranger:
        apply = chance.choice(SECTION_MUTATIONS)
        sections[here] = bytes(apply(chance, section, stranger))
    return container.pack(header, sections)


SECTION_MUTATIONS = [flip_bits, flip_bits, fill, truncate, extend, splice, graft, move]
SECTION_MUTATIONS += [delete, insert, set_number, set_number]
ON_SOUND_BLOBS = [change_sections, damage_section]
MUTATIONS = [flip_bits, flip_bits, flip_header_bits, fill, truncate, extend, splice, graft, move]
MUTATIONS += [delete, insert, set_field, set_number, set_number, *ON_SOUND_BLOBS]
MUTATIONS += [damage_section] * 8


def _set(blob, offset, width, value):
    value &= (1 << 8 * width) - 1
    return blob[:offset] + value.to_bytes(width, "little") + blob[offset + width :]


def reseal(blob, fix_length):
    """The blob with the checksum, and perhaps the length, that its bytes should have."""
    if len(blob) < container.HEADER_BYTES:
        return blob
    if fix_length:
        blob = _set(blob, 16, 8, len(blob))
    checksum = zlib.crc32(blob[16:], zlib.crc32(blob[:12]))
    return _set(blob, container.CHECKSUM_OFFSET, 4, checksum)


def make_mutant(number, pools):
    """The mutant of a number: codec, bytes, and whether its checksum was made right again."""
    chance = random.Random(number)
    codec, blobs = pools[number % len(pools)]
    _, strangers = chance.choice(pools)
    while True:
        blob = mutant = chance.choice(blobs)
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            apply = chance.choice(MUTATIONS)
            if apply in ON_SOUND_BLOBS:
                mutant = blob
            if len(mutant) > container.HEADER_BYTES:
                other = chance.choice(chance.choice((blobs, strangers)))
                mutant = bytes(apply(chance, mutant, other))
        resealed = chance.random() < 0.7
        if resealed:
            mutant = reseal(mutant, fix_length=chance.random() < 0.9)
        elif len(mutant) >= 16:
            mutant = mutant[:12] + blob[12:16] + mutant[16:]
        if mutant not in blobs and mutant not in strangers:
            return codec, mutant, resealed


class GuardedBuffer:
    """Memory whose end is followed by a page that cannot be touched."""

    def __init__(self, size):
        self._size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self._size + mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        protected = ctypes.c_void_p(address + self._size), ctypes.c_size_t(mmap.PAGESIZE)
        assert ctypes.CDLL(None).mprotect(*protected, PROT_NONE) == 0

    def take(self, size, alignment):
        """The last ``size`` bytes, started where ``alignment`` allows."""
        start = (self._size - size) // alignment * alignment
        return memoryview(self._map)[start : start + size]

    def place(self, content, alignment):
        view = self.take(len(content), alignment)
        view[:] = content
        return view


class GuardedOutput:
    """Tensors to decode into that end before such a page and start after bytes that are checked."""

    MARGIN = b"\xa5" * 4096

    def __init__(self):
        self._buffer = GuardedBuffer(len(self.MARGIN) + MAX_DECODED_BYTES)

    def tensor(self, header):
        size = header.decoded_bytes
        # Aligned as tensors are: the margin takes up what that leaves after the end.
        self._view = self._buffer.take(len(self.MARGIN) + size, 64)
        self._view[: len(self.MARGIN)] = self.MARGIN
        return torch.frombuffer(self._view[len(self.MARGIN) :], dtype=header.dtype).view(
            header.shape
        )

    def check(self):
        assert self._view[: len(self.MARGIN)] == self.MARGIN, "written before the tensor"


def same_as_reference(codec, blob, result):
    """Whether the reference implementation decodes to the same bits, or the same error."""
    os.environ[ENVIRONMENT] = "reference"
    try:
        kv = codec.decode(blob)
    except BlobError as error:
        return type(error).__name__ == result
    finally:
        del os.environ[ENVIRONMENT]
    return isinstance(result, torch.Tensor) and torch.equal(
        kv.flatten().view(torch.uint8), result.flatten().view(torch.uint8)
    )


def decode_mutant(codec, blob, resealed, output=None, compare=False):
    """What became of a mutant; AssertionError if that must not be."""
    try:
        header, _ = container.unpack(blob, max_decoded_bytes=MAX_DECODED_BYTES)
    except BlobError:
        header = out = None
    else:
        out = output.tensor(header) if output else None
    try:
        kv = codec.decode(blob, out=out)
    except BlobError as error:
        result = outcome = type(error).__name__
    else:
        assert resealed, "damage was not detected"
        assert tuple(kv.shape) == header.shape and kv.dtype == header.dtype
        result, outcome = kv, "decoded"
    if out is not None:
        output.check()
    if compare:
        assert same_as_reference(codec, blob, result), "the reference implementation differs"
    try:
        json.dumps(codec.inspect(blob))
    except BlobError:
        assert outcome != "decoded", "inspect refuses what decode takes"
    return outcome


def main(codec_name, first, count):
    pools = make_pools(codec_name)
    buffer = GuardedBuffer(8 * max(len(blob) for _, blobs in pools for blob in blobs))
    output = GuardedOutput()
    for alignment, out in ((1, None), (container.SECTION_ALIGNMENT, output)):
        for codec, blobs in pools:
            for blob in blobs:
                placed = buffer.place(blob, alignment)
                assert decode_mutant(codec, placed, True, out) == "decoded"

    with open("/proc/self/statm") as file:
        in_use = int(file.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (in_use + SPARE_ADDRESS_SPACE,) * 2)

    outcomes = {}
    for number in range(first, first + count):
        os.pwrite(1, b"%-20d\n" % number, 0)
        faulthandler.dump_traceback_later(SECONDS_PER_MUTANT, exit=True)
        codec, blob, resealed = make_mutant(number, pools)
        alignment = 1 if number % 5 == 0 else container.SECTION_ALIGNMENT
        placed = buffer.place(blob, alignment)
        compare = number % 7 == 0 and codec.name == "cachegen"
        out = output if number % 3 else None
        outcome = decode_mutant(codec, placed, resealed, out, compare)
        key = f"{'resealed' if resealed else 'plain'} {outcome}"
        outcomes[key] = outcomes.get(key, 0) + 1
    faulthandler.cancel_dump_traceback_later()
    os.pwrite(1, b"%-20d\n" % -1, 0)
    print(json.dumps(outcomes), file=sys.stderr)


def run_fuzzer(codec_name, first, count, tmp_path):
    progress, report = tmp_path / "progress", tmp_path / "report"
    with open(progress, "wb") as out, open(report, "wb") as err:
        status = subprocess.run(
            [sys.executable, __file__, codec_name, str(first), str(count)],
            stdout=out,
            stderr=err,
            timeout=900 + count / 10,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ).returncode
    report = report.read_text()
    assert status == 0, f"mutant {progress.read_text().strip()}, exit status {status}\n{report}"
    return json.loads(report.splitlines()[-1])


def check_outcomes(outcomes, count):
    assert sum(outcomes.values()) == count
    assert outcomes["plain ChecksumMismatch"] > count / 20
    for kind in ("NotABlob", "UnsupportedVersion", "WrongLength", "MalformedBlob", "decoded"):
        assert outcomes[f"resealed {kind}"] > 0


@pytest.mark.parametrize("codec_name", CODECS)
def test_mutants(codec_name, tmp_path):
    check_outcomes(run_fuzzer(codec_name, 0, 10_000, tmp_path), 10_000)


@pytest.mark.slow
@pytest.mark.parametrize("codec_name", CODECS)
@pytest.mark.parametrize("part", range(5))
def test_many_mutants(codec_name, tmp_path, part):
    count = 25_000
    check_outcomes(run_fuzzer(codec_name, 10_000 + part * count, count, tmp_path), count)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
