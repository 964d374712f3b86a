"""Move elements between a backend's page order and canonical order, on any device.

A page is one block of one layer, as the attention backend keeps it. ``index[k, j]`` is the offset
in the page, in elements, of element ``j`` (token, head, channel, flattened) of K (``k = 0``) or V
(``k = 1``). Values are moved as bit patterns and never converted.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@numba.njit(nogil=True, cache=True)
def _gather(pages, index, out):  # pages [L, n, P], index [K, m], out [L, K, n, m]
    for layer in range(pages.shape[0]):
        for k in range(index.shape[0]):
            for block in range(pages.shape[1]):
                for j in range(index.shape[1]):
                    out[layer, k, block, j] = pages[layer, block, index[k, j]]


@numba.njit(nogil=True, cache=True)
def _scatter(kv, index, page):  # kv [K, m], index [K, m], page [P]
    for k in range(index.shape[0]):
        for j in range(index.shape[1]):
            page[index[k, j]] = kv[k, j]


def gather_pages(pages: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Pages ``[layers, blocks, elements]`` to ``[layers, K and V, blocks, tokens*heads*channels]``.

    ``index`` is int32 ``[K and V, tokens*heads*channels]`` on the device of ``pages``.
    """
    bits = pages.view(_INT_OF_SIZE[pages.element_size()])
    layers, blocks, _ = bits.shape
    out = torch.empty(
        (layers, index.shape[0], blocks, index.shape[1]), dtype=bits.dtype, device=bits.device
    )
    if bits.device.type == "cpu":
        _gather(bits.numpy(), index.numpy(), out.numpy())
    else:
        picked = bits.index_select(2, index.reshape(-1))  # [L, n, K * m]
        out.copy_(picked.view(layers, blocks, *index.shape).transpose(1, 2))
    return out.view(pages.dtype)


def scatter_page(kv: torch.Tensor, index: torch.Tensor, page: torch.Tensor) -> None:
    """Write one block of one layer, ``kv [K and V, tokens*heads*channels]``, into ``page``."""
    bits = _INT_OF_SIZE[page.element_size()]
    if page.device.type == "cpu":
        _scatter(kv.view(bits).numpy(), index.numpy(), page.view(bits).numpy())
    else:
        page.view(bits)[index.reshape(-1).long()] = kv.view(bits).reshape(-1)


def warm_up(element_size: int) -> None:
    """Compile the CPU kernels for elements of this size, so that no request waits for it."""
    page = np.zeros((1, 1, 2), dtype=f"i{element_size}" if element_size > 1 else np.uint8)
    index = np.arange(2, dtype=np.int32).reshape(2, 1)
    _gather(page, index, np.zeros((1, 2, 1, 1), page.dtype))
    _scatter(np.zeros((2, 1), page.dtype), index, page[0, 0])
