"""How the blocks of one cache group become a blob, and come back into vLLM's pool."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_kvcompress.codecs import Codec, container, pages
from vllm_kvcompress.codecs.container import BytesLike, Header
from vllm_kvcompress.codecs.pages import Pages
from vllm_kvcompress.layout import PageLayout

if TYPE_CHECKING:
    from vllm_kvcompress.attention.kivi import PooledGroup

_thread = threading.local()


def beside_the_model(device: torch.device) -> AbstractContextManager[object]:
    """Let the calling thread's work on a GPU run on a stream of its own."""
    if device.type != "cuda":
        return nullcontext()
    if not hasattr(_thread, "stream"):
        _thread.stream = torch.cuda.Stream(device)
    return torch.cuda.stream(_thread.stream)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """An event after all that the calling thread has given to a GPU so far."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


class ForeignBlob(Exception):
    """A blob is intact and holds something else than this group's blocks."""


class Content(ABC):
    """Some blocks of a chunk, outside of vLLM's pool."""

    blocks: int
    nbytes: int
    """Bytes of the blocks before a codec, or after it."""

    @abstractmethod
    def write(self, place: int, block: int, first: bool) -> Callable[[], None] | None:
        """Write the block at ``place`` into block ``block`` of the pool, on any thread.

        ``first`` says whether it is the first block of its sequence. What only the model's own
        thread may do is returned, for it to call before the block is used.
        """


class Snapshot(Content):
    """Blocks copied when a store was submitted; on a GPU there once ``ready`` has passed."""

    ready: torch.cuda.Event | None

    def wait(self, *tensors: torch.Tensor | None) -> None:
        """Let the calling thread's stream work with the snapshot's tensors."""
        if self.ready is not None:
            torch.cuda.current_stream().wait_event(self.ready)
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(torch.cuda.current_stream())


class CacheGroup(ABC):
    """One cache group on this worker."""

    group_id: int
    device: torch.device

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, in the form that takes most."""

    @property
    @abstractmethod
    def block_tokens(self) -> int: ...

    @abstractmethod
    def snapshot(self, block_ids: list[int]) -> Snapshot:
        """Copy whole blocks, in the order of the model's own work on the device."""

    @abstractmethod
    def encode(self, snapshot: Snapshot, codec: Codec, key: bytes) -> bytes:
        """A blob that names its key."""

    @abstractmethod
    def decode(self, blob: BytesLike, codec: Codec, key: bytes) -> Content:
        """What a blob holds. Raises BlobError for a damaged one, ForeignBlob for another's."""

    @abstractmethod
    def prepare_load(self, block_ids: list[int]) -> None:
        """The pages of these blocks are about to be written; on the model's own thread."""


# --- pages whose elements are known --------------------------------------------------------------


@dataclass
class PlainGroup(CacheGroup):
    """Pages of K and V that a codec codes as a tensor, in canonical order."""

    group_id: int
    layout: PageLayout
    pages: list[torch.Tensor]
    """Per layer ``[blocks, bytes]``, views of vLLM's own pool."""

    @property
    def device(self) -> torch.device:
        return self.pages[0].device

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes()

    @property
    def block_tokens(self) -> int:
        return self.layout.block_tokens

    def snapshot(self, block_ids: list[int]) -> PlainSnapshot:
        return PlainSnapshot(self, copy_pages(self.pages, block_ids), mark(self.device))

    def encode(self, snapshot: Snapshot, codec: Codec, key: bytes) -> bytes:
        assert isinstance(snapshot, PlainSnapshot)
        snapshot.wait(snapshot.copied)
        return codec.encode(self.layout.to_kv(snapshot.copied), fingerprint=key)

    def decode(self, blob: BytesLike, codec: Codec, key: bytes) -> PlainContent:
        if codec.inspect(blob)["fingerprint"] != key.hex():
            raise ForeignBlob("a blob belongs to another key")
        kv = codec.decode(blob, device=self.device)
        if not self.layout.fits(kv):
            raise ForeignBlob(f"a blob of another shape, {list(kv.shape)}")
        return PlainContent(self, kv)

    def prepare_load(self, block_ids: list[int]) -> None:
        pass


@dataclass
class PlainSnapshot(Snapshot):
    group: PlainGroup
    copied: torch.Tensor  # [layers, blocks, bytes]
    ready: torch.cuda.Event | None

    @property
    def nbytes(self) -> int:
        return self.copied.numel()

    @property
    def blocks(self) -> int:
        return self.copied.shape[1]

    def write(self, place: int, block: int, first: bool) -> None:
        self.wait(self.copied)
        for layer, pages_of_layer in enumerate(self.group.pages):
            pages_of_layer[block].copy_(self.copied[layer, place])


@dataclass
class PlainContent(Content):
    group: PlainGroup
    kv: torch.Tensor  # [layers, K and V, tokens, kv_heads, head_size]

    @property
    def blocks(self) -> int:
        return self.kv.shape[2] // self.group.layout.block_tokens

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes

    def write(self, place: int, block: int, first: bool) -> None:
        for layer, pages_of_layer in enumerate(self.group.pages):
            self.group.layout.from_kv(self.kv, place, layer, pages_of_layer[block])


def copy_pages(pages_of_layers: list[torch.Tensor], block_ids: list[int]) -> torch.Tensor:
    """The pages of some blocks, int8 ``[layers, blocks, bytes]``."""
    first = pages_of_layers[0]
    ids = torch.tensor(block_ids, dtype=torch.int64, device=first.device)
    out = torch.empty(
        (len(pages_of_layers), len(block_ids), first.shape[1]),
        dtype=first.dtype,
        device=first.device,
    )
    for layer, pages_of_layer in enumerate(pages_of_layers):
        torch.index_select(pages_of_layer, 0, ids, out=out[layer])
    return out


# --- pages that a backend has compressed ---------------------------------------------------------


@dataclass
class PackedGroup(CacheGroup):
    """KIVI pages, whose bytes are entropy-coded, and blocks that are still exact: without loss."""

    group_id: int
    pooled: PooledGroup
    pages: list[torch.Tensor]
    """Per layer ``[blocks, bytes]``, views of vLLM's own pool."""
    exact_codec: Codec
    """A codec that loses nothing."""

    @property
    def device(self) -> torch.device:
        return self.pages[0].device

    @property
    def block_bytes(self) -> int:
        impls = [layer.impl for layer in self.pooled.layers]
        return self.block_tokens * sum(impl.exact_token_bytes for impl in impls)

    @property
    def block_tokens(self) -> int:
        return self.pooled.block_tokens

    def snapshot(self, block_ids: list[int]) -> PackedSnapshot:
        exact = self.pooled.exact_blocks(block_ids)
        packed = [block for block, form in zip(block_ids, exact, strict=True) if not form]
        tokens = None
        if any(exact):
            blocks = [
                self.pooled.exact_tokens(block)
                for block, form in zip(block_ids, exact, strict=True)
                if form
            ]
            tokens = torch.stack(
                [
                    torch.stack([torch.cat(part) for part in zip(*layer, strict=True)])
                    for layer in zip(*blocks, strict=True)
                ]
            )  # [layers, 2, tokens, kv_heads, head_size]
        copied = copy_pages(self.pages, packed).view(torch.uint8)
        return PackedSnapshot(self, Pages(tuple(exact), copied, tokens), mark(self.device))

    def encode(self, snapshot: Snapshot, codec: Codec, key: bytes) -> bytes:
        assert isinstance(snapshot, PackedSnapshot)
        content = snapshot.content
        snapshot.wait(content.packed_pages, content.exact_tokens)
        cuts = self.pooled.layers[0].impl.fmt.cuts
        return pages.encode(content, cuts, self.exact_codec, key)

    def decode(self, blob: BytesLike, codec: Codec, key: bytes) -> PackedContent:
        fingerprint, content = pages.decode(blob, self.exact_codec, self.device)
        if fingerprint != key:
            raise ForeignBlob("a blob belongs to another key")
        layers, _, page_bytes = content.packed_pages.shape
        impl = self.pooled.layers[0].impl
        tokens = content.exact_tokens
        if (layers, page_bytes) != (len(self.pages), self.pages[0].shape[1]) or (
            tokens is not None
            and (tuple(tokens.shape[3:]), tokens.dtype, tokens.shape[2])
            != (
                (impl.num_kv_heads, impl.head_size),
                impl.model_dtype,
                sum(content.exact) * self.pooled.block_tokens,
            )
        ):
            raise ForeignBlob("a blob of other pages")
        return PackedContent(self, content)

    def prepare_load(self, block_ids: list[int]) -> None:
        self.pooled.drop(block_ids)


@dataclass
class PackedContent(Content):
    group: PackedGroup
    content: Pages

    @property
    def blocks(self) -> int:
        return len(self.content.exact)

    @property
    def nbytes(self) -> int:
        exact = self.content.exact_tokens
        return self.content.packed_pages.numel() + (0 if exact is None else exact.nbytes)

    def write(self, place: int, block: int, first: bool) -> Callable[[], None] | None:
        content, group = self.content, self.group
        index = pages.place_of(content.exact, place)
        if not content.exact[place]:
            for layer, pages_of_layer in enumerate(group.pages):
                page = pages_of_layer[block].view(torch.uint8)
                page.copy_(content.packed_pages[layer, index])
            return None
        size = group.pooled.block_tokens
        kv = content.exact_tokens[:, :, index * size : (index + 1) * size]
        return lambda: group.pooled.put_exact(block, first, kv)


class PackedSnapshot(PackedContent, Snapshot):
    def __init__(self, group: PackedGroup, content: Pages, ready: torch.cuda.Event | None) -> None:
        super().__init__(group, content)
        self.ready = ready


# --- layers of several shapes --------------------------------------------------------------------


@dataclass
class MixedGroup(CacheGroup):
    """A cache group whose layers have pages of several kinds, such as layers left out of packing.

    Its blob holds a blob of every part, in order.
    """

    parts: list[CacheGroup]

    @property
    def group_id(self) -> int:
        return self.parts[0].group_id

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def block_bytes(self) -> int:
        return sum(part.block_bytes for part in self.parts)

    @property
    def block_tokens(self) -> int:
        return self.parts[0].block_tokens

    def snapshot(self, block_ids: list[int]) -> MixedSnapshot:
        return MixedSnapshot([part.snapshot(block_ids) for part in self.parts])

    def encode(self, snapshot: Snapshot, codec: Codec, key: bytes) -> bytes:
        assert isinstance(snapshot, MixedSnapshot)
        blobs = [
            part.encode(content, codec, key)
            for part, content in zip(self.parts, snapshot.parts, strict=True)
        ]
        header = Header(
            codec="parts",
            level="",
            dtype=torch.uint8,
            shape=(1, 1, 1, 1, snapshot.nbytes),
            fingerprint=key,
            codec_version=1,
        )
        return container.pack(header, blobs)

    def decode(self, blob: BytesLike, codec: Codec, key: bytes) -> MixedContent:
        header, blobs = container.unpack(blob, codec="parts", codec_version=1)
        if header.fingerprint != key:
            raise ForeignBlob("a blob belongs to another key")
        if len(blobs) != len(self.parts):
            raise ForeignBlob(f"a blob of {len(blobs)} parts; this group has {len(self.parts)}")
        content = MixedContent(
            [part.decode(b, codec, key) for part, b in zip(self.parts, blobs, strict=True)]
        )
        if any(part.blocks != content.blocks for part in content.parts):
            raise ForeignBlob("a blob whose parts have different blocks")
        return content

    def prepare_load(self, block_ids: list[int]) -> None:
        for part in self.parts:
            part.prepare_load(block_ids)


@dataclass
class MixedContent(Content):
    parts: list[Content]

    @property
    def blocks(self) -> int:
        return self.parts[0].blocks

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def write(self, place: int, block: int, first: bool) -> Callable[[], None] | None:
        left = [part.write(place, block, first) for part in self.parts]
        for_the_model = [action for action in left if action is not None]
        if not for_the_model:
            return None

        def finish() -> None:
            for action in for_the_model:
                action()

        return finish


class MixedSnapshot(MixedContent, Snapshot):
    """Its parts wait for their own copies."""
