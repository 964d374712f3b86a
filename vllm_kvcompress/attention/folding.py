"""FP8 scales per KV head for backends of vLLM that have one scale a layer.

Attention is separate per head. So K and V are divided by their head's scale before the backend
writes them, the query is multiplied by K's and the output by V's, and the backend works at scale 1:
the same numbers as with scales per head, but for the rounding of the query.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl

from vllm_kvcompress.config import FP8_DTYPES
from vllm_kvcompress.kernels.fp8.reference import quantise


class UnitScales:
    """A layer as its backend is to see it: with every scale 1, and otherwise itself.

    The layer's own scales are never changed: others read them at any time.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        one = torch.ones((), dtype=torch.float32, device=layer._k_scale.device)
        self._q_scale = self._k_scale = self._v_scale = self._prob_scale = one
        self._q_scale_float = self._k_scale_float = self._v_scale_float = 1.0
        self._k_scale_cpu = self._v_scale_cpu = torch.ones((), dtype=torch.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _per_head(layer: Any) -> bool:
    return layer._k_scale.numel() > 1 or layer._v_scale.numel() > 1


def _times(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``[tokens, heads, size]`` times the scale of each head's KV head, in the dtype of x."""
    grouped = x.view(len(x), scale.numel(), -1)
    return (grouped.float() * scale.view(-1, 1)).to(x.dtype).view(x.shape)


def _codes(x: torch.Tensor, scale: torch.Tensor, kv_cache_dtype: str) -> torch.Tensor:
    """K or V divided by its heads' scales and rounded to FP8, as numbers of its own dtype.

    What the backend makes of them at scale 1 then does not depend on how it rounds.
    """
    return quantise(x, scale.view(-1, 1), FP8_DTYPES[kv_cache_dtype]).to(x.dtype)


class _FoldedImpl(AttentionImpl):
    """What is put before a backend's own implementation."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # The query would arrive quantised, without K's scale in it.
        self.supports_quant_query_input = False
        self._unit_scales: UnitScales | None = None

    def _unscaled(self, layer: Any) -> UnitScales:
        if self._unit_scales is None or self._unit_scales._layer is not layer:
            self._unit_scales = UnitScales(layer)
        return self._unit_scales

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if not _per_head(layer):
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        key = _codes(key, layer._k_scale, self.kv_cache_dtype)
        value = _codes(value, layer._v_scale, self.kv_cache_dtype)
        unscaled = self._unscaled(layer)
        return super().do_kv_cache_update(unscaled, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not _per_head(layer) or attn_metadata is None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale,
                output_block_scale,
            )  # fmt: skip
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("scales per head have no fused output quantization")
        if key is not None:
            key = _codes(key, layer._k_scale, self.kv_cache_dtype)
            value = _codes(value, layer._v_scale, self.kv_cache_dtype)
        query = _times(query, layer._k_scale)
        super().forward(self._unscaled(layer), query, key, value, kv_cache, attn_metadata, output)
        return output.copy_(_times(output, layer._v_scale))

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def fused_rope_kvcache_supported(self) -> bool:
        return False

    def fused_qk_norm_rope_kvcache_supported(self) -> bool:
        return False

    def fused_qk_norm_mrope_kvcache_supported(self) -> bool:
        return False


@functools.cache
def folded(parent: type[AttentionBackend]) -> type[AttentionBackend]:
    """A backend that does what ``parent`` does, and takes scales per head."""
    impl = type(f"Folded{parent.get_impl_cls().__name__}", (_FoldedImpl, parent.get_impl_cls()), {})
    return type(
        f"Folded{parent.__name__}",
        (parent,),
        {
            "get_impl_cls": staticmethod(lambda: impl),
            "supports_per_head_quant_scales": classmethod(lambda cls: True),
        },
    )


def path_of(parent: str) -> str:
    """The qualified name, which vLLM imports, of the folded backend of one by its own name."""
    return f"{__name__}.{parent.replace('.', '__')}"


def __getattr__(name: str) -> type[AttentionBackend]:
    if "__" not in name or name.startswith("__"):
        raise AttributeError(name)
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return folded(resolve_obj_by_qualname(name.replace("__", ".")))
