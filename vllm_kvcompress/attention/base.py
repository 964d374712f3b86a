"""What the attention backends for pages of our own have in common."""

from __future__ import annotations

from functools import cached_property

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_kvcompress import compat
from vllm_kvcompress.kernels.attention import Attention


class PageBackend(AttentionBackend):
    """Pages ``[blocks, heads, tokens, bytes]``, read with windows and sinks."""

    @staticmethod
    def get_name() -> str:
        return compat.CUSTOM_BACKEND

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True


class PageImpl(AttentionImpl):
    """The arguments that vLLM makes the attention of a layer from."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise ValueError(f"kv_cache_dtype {kv_cache_dtype}: no attention of type {attn_type}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.soft_cap = float(logits_soft_cap or 0.0)
        self.alibi_slopes = alibi_slopes
        self.sinks = sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    @cached_property
    def attention(self) -> Attention:
        """What the kernels ask of a layer, when its weights are loaded."""
        slopes, sinks = self.alibi_slopes, self.sinks
        device = sinks.device if sinks is not None else compat.device()
        return Attention(
            scale=self.scale,
            window=self.sliding_window or 0,
            soft_cap=self.soft_cap,
            slopes=None if slopes is None else torch.tensor(slopes, device=device).float(),
            sinks=None if sinks is None else sinks.detach().float(),
        )
