"""The order of a page's elements is found, whatever a backend makes of it, or refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_kvcompress.compat import GroupSpec
from vllm_kvcompress.layout import find_layout

SHAPES = [
    # layers, tokens, heads, head size
    (1, 16, 1, 64),
    (3, 32, 2, 80),
    (2, 128, 3, 64),
    (2, 16, 5, 96),
]


class Backend:
    """An attention backend that keeps the elements of a page in a random order of its own."""

    def __init__(self, elements: int, damage=None, kv_cache_dtype: str = "auto"):
        self.order = torch.randperm(elements, generator=torch.Generator().manual_seed(elements))
        self.damage = damage
        self.kv_cache_dtype = kv_cache_dtype
        self._k_scale = self._v_scale = torch.tensor(1.0)
        self.impl = self

    def do_kv_cache_update(self, layer, key, value, cache, slots):
        assert slots.tolist() == list(range(len(key)))
        page = torch.empty(cache.numel(), dtype=cache.dtype)
        page[self.order] = torch.cat([key.flatten(), value.flatten()]).to(cache.dtype)
        if self.damage is not None:
            self.damage(page)
        cache.copy_(page.view(cache.shape))


def group_of(layers, tokens, heads, size, itemsize):
    return GroupSpec(
        group_id=0,
        layer_names=tuple(f"layer.{i}" for i in range(layers)),
        block_tokens=tokens,
        kv_heads=heads,
        head_size=size,
        page_bytes=2 * tokens * heads * size * itemsize,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_order_is_found_and_every_bit_comes_back(shape, dtype):
    layers, tokens, heads, size = shape
    backend = Backend(2 * tokens * heads * size)
    cache = torch.zeros(6, heads, tokens, 2 * size, dtype=dtype)
    group = group_of(*shape, dtype.itemsize)
    layout = find_layout(group, backend, cache, 6)

    key, value = torch.randn(2, 2, tokens, heads, size).to(dtype)
    pages = torch.empty(layers, 2, layout.page_bytes, dtype=torch.int8)
    for layer in range(layers):
        for block in range(2):
            page = torch.empty(1, heads, tokens, 2 * size, dtype=dtype)
            backend.do_kv_cache_update(
                backend, key[block] + layer, value[block] - layer, page, torch.arange(tokens)
            )
            pages[layer, block] = page.view(-1).view(torch.int8)
    kv = layout.to_kv(pages)
    assert layout.fits(kv)
    for layer in range(layers):
        assert torch.equal(kv[layer, 0], (key + layer).flatten(0, 1))
        assert torch.equal(kv[layer, 1], (value - layer).flatten(0, 1))
        for block in range(2):
            page = torch.empty(layout.page_bytes, dtype=torch.int8)
            layout.from_kv(kv, block, layer, page)
            assert torch.equal(page, pages[layer, block])


def test_a_block_of_several_kernel_blocks_is_one_page():
    backend = Backend(2 * 32 * 2 * 64)
    cache = torch.zeros(4 * 2, 2, 16, 128, dtype=torch.bfloat16)  # two kernel blocks a block
    layout = find_layout(group_of(1, 32, 2, 64, 2), backend, cache, 4)
    assert layout.block_tokens == 32


@pytest.mark.parametrize("scale", [1.0, 0.001, 300.0])
def test_bytes_of_an_fp8_cache_are_told_apart_whatever_the_scale(scale):
    tokens, heads, size = 16, 2, 64

    class Quantising(Backend):
        def do_kv_cache_update(self, layer, key, value, cache, slots):
            scaled = [(t.float() / scale).to(torch.float8_e4m3fn) for t in (key, value)]
            super().do_kv_cache_update(layer, *(t.view(torch.uint8) for t in scaled), cache, slots)

    backend = Quantising(2 * tokens * heads * size, kv_cache_dtype="fp8")
    backend._k_scale = backend._v_scale = torch.tensor(scale)
    cache = torch.zeros(3, heads, tokens, 2 * size, dtype=torch.uint8)
    layout = find_layout(group_of(1, tokens, heads, size, 1), backend, cache, 3)
    assert layout.dtype == torch.float8_e4m3fn
    assert torch.equal(layout.index.flatten(), backend.order.to(torch.int32))


def lose_an_element(page):
    page[7] = 0


def copy_an_element(page):
    page[7] = page[8]


def add_a_constant(page):
    page += 1


@pytest.mark.parametrize("damage", [lose_an_element, copy_an_element, add_a_constant])
def test_a_page_that_is_not_a_permutation_is_refused_by_the_layers_name(damage):
    cache = torch.zeros(2, 1, 16, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"layer\.0.*permutation"):
        find_layout(group_of(1, 16, 1, 64, 2), Backend(2 * 16 * 64, damage), cache, 2)


def test_a_cache_dtype_that_is_not_understood_is_refused_with_the_choices():
    cache = torch.zeros(2, 1, 16, 128, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"int8_per_token_head.*auto, fp8"):
        backend = Backend(2 * 16 * 64, kv_cache_dtype="int8_per_token_head")
        find_layout(group_of(1, 16, 1, 64, 1), backend, cache, 2)


def test_a_backend_without_a_write_of_its_own_is_refused():
    one = torch.tensor(1.0)
    layer = SimpleNamespace(impl=object(), kv_cache_dtype="auto", _k_scale=one, _v_scale=one)
    cache = torch.zeros(2, 1, 16, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="no separate cache write"):
        find_layout(group_of(1, 16, 1, 64, 2), layer, cache, 2)
