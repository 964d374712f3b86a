"""What a page holds: where each of its elements lies, found by writing through the backend.

Backends order the elements of a page as their kernels like it (the CPU engine keeps K
dimension-major, or K and V interleaved in pairs), so no order is assumed. Blobs always hold the
canonical order ``[layer, K and V, token, head, channel]``; where K and V share a latent (MLA),
there is one of them, with one head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_kvcompress import compat
from vllm_kvcompress.kernels.pages import gather_pages, scatter_page

PAGE_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Element types of caches that vLLM hands over as bytes, by ``kv_cache_dtype``."""


@dataclass(frozen=True)
class PageLayout:
    """The layout of the pages of one cache group on one worker."""

    layers: int
    block_tokens: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    index: torch.Tensor
    """int32 ``[K and V, tokens * heads * channels]``: each value's place in a page, in elements."""

    @property
    def values(self) -> int:
        """Two for K and V, one for a latent."""
        return self.index.shape[0]

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.index.numel() * self.dtype.itemsize

    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        return self.page_bytes * self.layers

    def fits(self, kv: torch.Tensor) -> bool:
        """Whether ``kv`` is whole blocks of this group: shape, dtype and token count."""
        layers, values, tokens, heads, size = kv.shape
        return (
            (layers, values, heads, size)
            == (self.layers, self.values, self.kv_heads, self.head_size)
            and kv.dtype == self.dtype
            and tokens % self.block_tokens == 0
        )

    def to_kv(self, pages: torch.Tensor) -> torch.Tensor:
        """``[layers, K and V, tokens, heads, channels]`` of pages ``[layers, blocks, bytes]``."""
        out = gather_pages(pages.view(self.dtype), self.index)
        return out.view(self.layers, self.values, -1, self.kv_heads, self.head_size)

    def from_kv(self, kv: torch.Tensor, block: int, layer: int, page: torch.Tensor) -> None:
        """Write block number ``block`` of a chunk's ``kv`` into ``page [bytes]`` of one layer."""
        tokens = slice(block * self.block_tokens, (block + 1) * self.block_tokens)
        values = kv[layer, :, tokens].reshape(self.values, -1)
        scatter_page(values, self.index, page.view(self.dtype))


def find_layout(
    group: compat.GroupSpec, layer: Any, cache: torch.Tensor, num_blocks: int
) -> PageLayout:
    """Find the element order of a group's pages by writing numbered values into a scratch page.

    ``layer`` is an attention layer of the group, ``cache`` its KV cache ``[blocks, ...]`` of
    ``num_blocks`` blocks (or a multiple: a block may be several kernel blocks). Raises ValueError,
    naming the layer, when a page is not a permutation of its K and V: then nothing can be offloaded
    safely.
    """
    where = f"layer {group.layer_names[0]}"
    dtype, cache_dtype = cache.dtype, layer.kv_cache_dtype
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        if cache_dtype not in PAGE_DTYPES:
            raise ValueError(
                f"{where}: kv_cache_dtype {cache_dtype!r} ({dtype}) cannot be offloaded; "
                f"choose from auto, {', '.join(PAGE_DTYPES)}"
            )
        dtype = PAGE_DTYPES[cache_dtype]
    kernel_blocks = cache.shape[0] // num_blocks
    page_elements = group.page_bytes // dtype.itemsize
    shape = (kernel_blocks, *cache.shape[1:])
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, cache.stride(), strict=True))
    if extent != page_elements or math.prod(shape) != page_elements:
        raise ValueError(f"{where}: the page of a block is not contiguous, so it is not offloaded")

    values = (group.values, group.block_tokens, group.kv_heads, group.head_size)
    if math.prod(values) != page_elements:
        raise ValueError(
            f"{where}: a page of {page_elements} elements is not K and V, or a latent, of "
            f"{list(values)} (K and V, tokens, heads, head size)"
        )
    numbers = torch.arange(page_elements, dtype=torch.int64)
    slots = torch.arange(group.block_tokens, dtype=torch.int64, device=cache.device)
    model_dtype = cache.dtype if dtype == cache.dtype else torch.bfloat16
    k_scale, v_scale = compat.scales_of(layer)
    units = torch.tensor([max(scale, default=1.0) or 1.0 for scale in (k_scale, v_scale)])

    def write(nonzero: torch.Tensor) -> np.ndarray:
        """Which elements of the page are nonzero after writing a unit where ``nonzero`` says."""
        kv = nonzero.view(values) * units[: group.values].view(-1, 1, 1, 1)
        flat = torch.zeros(page_elements, dtype=cache.dtype, device=cache.device)
        scratch = flat.as_strided(shape, cache.stride())
        compat.write_through_backend(layer, kv.to(cache.device, model_dtype), scratch, slots)
        return flat.view(torch.uint8).view(page_elements, -1).any(dim=1).cpu().numpy()

    # One bit of the numbers a pass: exact whatever the element type rounds to.
    owner = np.zeros(page_elements, dtype=np.int64)
    for bit in range(max(1, (page_elements - 1).bit_length())):
        owner |= write((numbers >> bit) & 1).astype(np.int64) << bit
    index = np.full(page_elements, -1, dtype=np.int32)
    index[np.minimum(owner, page_elements - 1)] = np.arange(page_elements, dtype=np.int32)
    if not write(torch.ones_like(numbers)).all() or (index < 0).any():
        raise ValueError(f"{where}: its backend's page is not a permutation of K and V")
    return PageLayout(
        layers=len(group.layer_names),
        block_tokens=group.block_tokens,
        kv_heads=group.kv_heads,
        head_size=group.head_size,
        dtype=dtype,
        index=torch.from_numpy(index).view(group.values, -1).to(cache.device),
    )
