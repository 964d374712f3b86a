"""FP8 scales per KV head for backends of vLLM that have one scale a layer.

Attention is separate per head. So K and V are brought to one scale before the backend writes them,
and the query and the output are multiplied by what their head's scale is more or less than that:
the same numbers as with scales per head, but for the rounding of the query. The one scale is a
power of two no less than any head's: multiplying by it rounds nothing, and a query that the backend
itself quantises is never larger than it was.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl

from vllm_kvcompress import compat
from vllm_kvcompress.config import FP8_DTYPES
from vllm_kvcompress.kernels.fp8.reference import quantise


class OneScale:
    """A layer as its backend is to see it: with one scale of K and one of V, otherwise itself.

    The layer's own scales are never changed: others read them at any time.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        # Where FP8's numbers are half as large, a scale for e4m3 has to be twice as large.
        self._fit = fit = 2.0 if compat.doubles_scales() else 1.0
        # The host's copy of a scale per head is the greatest.
        self._k_scale_float = _power_above(fit * layer._k_scale_float)
        self._v_scale_float = _power_above(fit * layer._v_scale_float)
        self._k_scale_cpu = torch.tensor(self._k_scale_float)
        self._v_scale_cpu = torch.tensor(self._v_scale_float)
        self._k_scale = self._k_scale_cpu.to(layer._k_scale.device)
        self._v_scale = self._v_scale_cpu.to(layer._v_scale.device)

    def heads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales per head of K and of V."""
        return self._layer._k_scale * self._fit, self._layer._v_scale * self._fit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _power_above(scale: float) -> float:
    return 2.0 ** math.ceil(math.log2(scale)) if 0 < scale < math.inf else 1.0


def _per_head(layer: Any) -> bool:
    return layer._k_scale.numel() > 1 or layer._v_scale.numel() > 1


def _times(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """``[tokens, heads, size]`` times the factor of each head's KV head, in the dtype of x."""
    grouped = x.view(len(x), factors.numel(), -1)
    return (grouped.float() * factors.view(-1, 1)).to(x.dtype).view(x.shape)


def _rounded(x: torch.Tensor, scale: torch.Tensor, one: float, kv_cache_dtype: str) -> torch.Tensor:
    """K or V rounded to FP8 at its heads' scales, as numbers of its own dtype at the one scale.

    What the backend makes of them then does not depend on how it rounds.
    """
    codes = quantise(x, scale.view(-1, 1), FP8_DTYPES[kv_cache_dtype])
    return (codes.float() * one).to(x.dtype)


class _FoldedImpl(AttentionImpl):
    """What is put before a backend's own implementation."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # The query would arrive quantised, without K's scale in it.
        self.supports_quant_query_input = False
        self._one_scale: OneScale | None = None

    def _seen(self, layer: Any) -> OneScale:
        if self._one_scale is None or self._one_scale._layer is not layer:
            self._one_scale = OneScale(layer)
        return self._one_scale

    def _brought(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen, dtype = self._seen(layer), self.kv_cache_dtype
        k_scale, v_scale = seen.heads()
        return (
            _rounded(key, k_scale, seen._k_scale_float, dtype),
            _rounded(value, v_scale, seen._v_scale_float, dtype),
        )

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
        key, value = self._brought(layer, key, value)
        return super().do_kv_cache_update(self._seen(layer), key, value, kv_cache, slot_mapping)

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
        seen = self._seen(layer)
        if key is not None:
            key, value = self._brought(layer, key, value)
        k_scale, v_scale = seen.heads()
        query = _times(query, k_scale / seen._k_scale_float)
        super().forward(seen, query, key, value, kv_cache, attn_metadata, output)
        return output.copy_(_times(output, v_scale / seen._v_scale_float))

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
