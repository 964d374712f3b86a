"""Scales per head around a backend that has one scale a layer: the same as scales per head."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl

from vllm_kvcompress.attention import folding, routing
from vllm_kvcompress.attention.folding import folded, path_of
from vllm_kvcompress.kernels.attention import Attention
from vllm_kvcompress.kernels.fp8 import reference
from vllm_kvcompress.kernels.fp8.format import PageFormat

FMT = PageFormat(16, 32)


class PlainImpl(AttentionImpl):
    """Attention over FP8 pages in plain torch, with one scale a layer, as most backends have it.

    It rounds towards zero when it writes, as one of vLLM's does.
    """

    def __init__(self, num_heads, head_size, scale, num_kv_heads, *rest, **options):
        self.scale, self.kv_cache_dtype = scale, "fp8"
        self.supports_quant_query_input = True

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        assert layer.name == "a layer"  # the rest of the layer is there
        scales = layer._k_scale.reshape(1), layer._v_scale.reshape(1)
        key, value = (
            self.truncated(x.float() / s) * s for x, s in zip((key, value), scales, strict=True)
        )
        reference.store(FMT, key, value, kv_cache, slot_mapping, *scales)

    def truncated(self, x):
        near = x.clamp(-448, 448).to(torch.float8_e4m3fn)
        too_large = near.float().abs() > x.abs()
        smaller = (near.view(torch.uint8) - 1).view(near.dtype).float()
        return torch.where(too_large, smaller, near.float())

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,
                output_block_scale=None):  # fmt: skip
        assert layer._k_scale_float == float(layer._k_scale)
        reference.attend(
            FMT, Attention(self.scale), query, kv_cache, layer._k_scale.reshape(1),
            layer._v_scale.reshape(1), *attn_metadata, output, 0, 0,
        )  # fmt: skip
        return output

    def fused_rope_kvcache_supported(self):
        return True

    def fused_output_quant_supported(self, quant_key):
        return True


class PlainBackend(AttentionBackend):
    @staticmethod
    def get_name():
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        return PlainImpl

    @staticmethod
    def get_builder_cls():
        raise NotImplementedError


def layer_with(k_scale, v_scale):
    return SimpleNamespace(
        name="a layer",
        _q_scale=torch.tensor(0.7),
        _k_scale=k_scale,
        _v_scale=v_scale,
        _q_scale_float=0.7,
        _k_scale_float=float(k_scale.max()),
        _v_scale_float=float(v_scale.max()),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("per_head", [True, False], ids=["per-head", "per-tensor"])
@pytest.mark.parametrize("halved", [False, True], ids=["", "FNUZ"])
def test_a_folded_backend_gives_what_scales_per_head_give(per_head, dtype, halved, monkeypatch):
    monkeypatch.setattr(folding.compat, "doubles_scales", lambda: halved)
    factor = 2 if halved and per_head else 1
    g = torch.Generator().manual_seed(3)
    heads, kv_heads, tokens = 6, 3, 40
    count = kv_heads if per_head else 1
    k_scale = torch.tensor([0.01, 3.0, 0.2])[:count]
    v_scale = torch.tensor([7.0, 0.004, 0.05])[:count]
    widths = 100 * torch.stack([k_scale, v_scale]).view(2, 1, count, 1)
    kv = (torch.randn(2, tokens, kv_heads, 32, generator=g) * widths).to(dtype)
    query = torch.randn(tokens, heads, 32, generator=g).to(dtype)
    slots = torch.arange(tokens) + 16
    where = (
        torch.tensor([[1, 2, 3]], dtype=torch.int32),
        torch.tensor([0, tokens], dtype=torch.int32),
        torch.tensor([tokens], dtype=torch.int32),
    )
    layer = layer_with(k_scale, v_scale)
    impl = folded(PlainBackend).get_impl_cls()(heads, 32, 32**-0.5, kv_heads)
    assert not impl.supports_quant_query_input

    cache, expected = torch.zeros(2, 5, kv_heads, 16, 64, dtype=torch.uint8)
    impl.do_kv_cache_update(layer, *kv, cache, slots)
    reference.store(FMT, *kv, expected, slots, factor * k_scale, factor * v_scale)
    if per_head:  # the parent's own rounding has nothing left to round
        assert torch.equal(cache, expected)
    out, want = torch.empty(2, *query.shape, dtype=dtype)
    impl.forward(layer, query, *kv, cache, where, out)
    reference.attend(
        FMT,
        Attention(32**-0.5),
        query,
        cache,
        factor * k_scale,
        factor * v_scale,
        *where,
        want,
        0,
        0,
    )
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert (out.float() - want.float()).norm() <= tolerance * want.float().norm()
    assert torch.equal(layer._k_scale, k_scale) and layer._q_scale_float == 0.7


def test_a_folded_backend_declines_what_would_pass_it_by():
    backend = folded(PlainBackend)
    assert backend.supports_per_head_quant_scales()
    assert not PlainBackend.supports_per_head_quant_scales()
    impl = backend.get_impl_cls()(6, 32, 1.0, 3)
    assert not impl.fused_rope_kvcache_supported()
    assert not impl.fused_output_quant_supported(None)


class Config(SimpleNamespace):
    def _replace(self, **changes):
        return Config(**{**vars(self), **changes})


def selector(**changes):
    nothing = dict.fromkeys(
        ("use_mla", "use_sparse", "use_mm_prefix", "use_non_causal", "use_rswa"), False
    )
    settings = {"kv_cache_dtype": "fp8", "use_per_head_quant_scales": True, "attn_type": "decoder"}
    return Config(**{**nothing, **settings, **changes})


PLAIN = f"{__name__}.PlainBackend"


@pytest.mark.parametrize("parent_can", [True, False])
def test_a_backend_with_scales_per_head_of_its_own_keeps_its_path(monkeypatch, parent_can):
    monkeypatch.setattr(routing.compat, "is_cpu", lambda: False)
    monkeypatch.setattr(routing.compat, "lacks_e4m3", lambda: False)

    def default(config):
        if config.use_per_head_quant_scales and not parent_can:
            raise ValueError("per-head quant scales not supported")
        return PLAIN

    chosen = routing.attention_backend(selector(), default)
    assert chosen == (PLAIN if parent_can else path_of(PLAIN))
    if not parent_can:
        from vllm.utils.import_utils import resolve_obj_by_qualname

        assert resolve_obj_by_qualname(chosen) is folded(resolve_obj_by_qualname(PLAIN))
    single = routing.attention_backend(selector(use_per_head_quant_scales=False), default)
    assert single == PLAIN


@pytest.mark.parametrize(
    "cpu, lacking, dtype, chosen",
    [
        (True, False, "fp8", routing.FP8_BACKEND),
        (True, False, "fp8_e5m2", routing.FP8_BACKEND),
        (False, True, "fp8_e4m3", routing.FP8_BACKEND),
        (False, True, "fp8_e5m2", PLAIN),
        (False, False, "fp8", PLAIN),
        (True, False, "auto", PLAIN),
        (True, False, "kivi_2bit", routing.KIVI_BACKEND),
    ],
)
def test_pages_of_our_own_are_for_the_cpu_engine_and_gpus_without_fp8(
    monkeypatch, cpu, lacking, dtype, chosen
):
    monkeypatch.setattr(routing.compat, "is_cpu", lambda: cpu)
    monkeypatch.setattr(routing.compat, "lacks_e4m3", lambda: lacking)
    assert routing.attention_backend(selector(kv_cache_dtype=dtype), lambda config: PLAIN) == chosen


def test_a_layer_that_pages_of_our_own_do_not_have_is_refused_by_what_it_asks():
    with pytest.raises(ValueError, match="fp8: bidirectional attention over images"):
        routing.attention_backend(selector(use_mm_prefix=True), lambda config: PLAIN)
