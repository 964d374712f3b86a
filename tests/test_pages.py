"""Blobs of packed pages beside exact tokens: whole again bit for bit, or an error that says so."""

import pytest
import torch

from tests.test_container_fuzz import make_mutant
from vllm_kvcompress.codecs import BlobError, container, create_codec, pages
from vllm_kvcompress.codecs.container import MalformedBlob
from vllm_kvcompress.codecs.pages import Pages
from vllm_kvcompress.kernels.kivi import reference
from vllm_kvcompress.kernels.kivi.format import PageFormat

CPU = torch.device("cpu")
EXACT = create_codec("cachegen", level="lossless")
CUTS = [(12, 1), (8, 2), (12, 4)]  # of pages of 96 bytes: three rows


def some_pages(exact, layers=2, page_bytes=96, tokens=16, dtype=torch.bfloat16):
    packed = len(exact) - sum(exact)
    kv = torch.randn(layers, 2, tokens * sum(exact), 2, 16).to(dtype) if any(exact) else None
    return Pages(
        exact=tuple(exact),
        packed_pages=torch.randint(0, 256, (layers, packed, page_bytes), dtype=torch.uint8),
        exact_tokens=kv,
    )


def assert_same(a, b):
    assert a.exact == b.exact
    assert torch.equal(a.packed_pages, b.packed_pages)
    assert (a.exact_tokens is None) == (b.exact_tokens is None)
    if a.exact_tokens is not None:
        assert a.exact_tokens.dtype == b.exact_tokens.dtype
        assert torch.equal(a.exact_tokens, b.exact_tokens)


FORMS = [[False], [True], [False, False], [True, False, True], [False, True]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("exact", FORMS, ids=str)
def test_pages_and_exact_tokens_come_back_bit_for_bit(exact, dtype):
    content = some_pages(exact, dtype=dtype)
    fingerprint, back = pages.decode(pages.encode(content, CUTS, EXACT, b"key"), EXACT, CPU)
    assert fingerprint == b"key"
    assert_same(content, back)


def test_pages_that_are_not_made_of_the_cuts_are_refused():
    for cuts in ([], [(36, 1)], [(30, 4), (2, 1)]):
        with pytest.raises(ValueError, match="cuts"):
            pages.encode(some_pages([False]), cuts, EXACT, b"key")


def test_real_pages_of_a_format_take_fewer_bytes_than_they_have():
    fmt = PageFormat(64, 64, torch.bfloat16, boosted=16, sinks=1, rotated=True)
    index = torch.arange(8, dtype=torch.int32)
    keys, values = torch.randn(2, 8, 64, 3, 64).to(torch.bfloat16)
    cache = torch.zeros(8, 3, 64, fmt.token_bytes, dtype=torch.uint8)
    reference.pack(fmt, keys, values, index, cache, index, torch.full_like(index, 64), index == 0)
    content = Pages((False,) * 8, cache.flatten(1)[None], None)
    blob = pages.encode(content, fmt.cuts, EXACT, b"key")
    assert len(blob) < 0.95 * cache.numel()
    assert_same(pages.decode(blob, EXACT, CPU)[1], content)


def test_a_frame_that_announces_another_size_is_refused_before_anything_is_allocated():
    import zstandard

    blob = pages.encode(some_pages([False]), [(96, 1)], EXACT, b"key")
    header, sections = container.unpack(blob, codec="pages", codec_version=pages.VERSION)
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    with pytest.raises(MalformedBlob, match="a frame of 268435456 bytes for 192"):
        pages.decode(container.pack(header, [*sections[:3], bomb]), EXACT, CPU)


def test_the_place_of_a_block_counts_blocks_of_its_form():
    exact = (True, False, False, True)
    assert [pages.place_of(exact, block) for block in range(4)] == [0, 0, 1, 1]


def test_damaged_blobs_are_an_error_or_pages_of_the_announced_shape():
    blobs = [
        pages.encode(some_pages(exact), CUTS, EXACT, b"key") for exact in FORMS for _ in range(3)
    ]
    decoded = 0
    for number in range(3000):
        _, mutant, resealed = make_mutant(number, [(None, blobs)])
        try:
            _, back = pages.decode(mutant, EXACT, CPU)
        except BlobError:
            continue
        assert resealed, "damage that no checksum found"
        decoded += 1
        layers, packed, _ = back.packed_pages.shape
        assert packed + sum(back.exact) == len(back.exact)
        assert back.exact_tokens is None or back.exact_tokens.shape[0] == layers
    assert decoded, "no mutant reached the parser behind the checksum"


def test_forms_that_contradict_the_sections_are_malformed():
    content = some_pages([True, False])
    lost = Pages(content.exact, content.packed_pages, None)
    with pytest.raises(MalformedBlob, match="do not agree"):
        pages.decode(pages.encode(lost, CUTS, EXACT, b""), EXACT, CPU)
    short = Pages(content.exact, content.packed_pages[:, :0], content.exact_tokens)
    with pytest.raises(MalformedBlob, match="do not agree"):
        pages.decode(pages.encode(short, CUTS, EXACT, b""), EXACT, CPU)
