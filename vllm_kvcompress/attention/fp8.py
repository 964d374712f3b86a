"""vLLM's attention backend for FP8 pages of our own: the CPU engine's, and those of GPUs without
FP8 arithmetic.

The pages are as large as vLLM's, so that vLLM's own dtypes keep their names and their capacity.
Every token is read as it is stored, new ones too: an answer does not depend on how a prompt was cut
into chunks, nor on what the prefix cache held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_kvcompress import compat
from vllm_kvcompress.attention.base import PageBackend, PageImpl
from vllm_kvcompress.config import FP8_DTYPES
from vllm_kvcompress.kernels.fp8 import implementation
from vllm_kvcompress.kernels.fp8.format import BLOCK_MULTIPLE, DTYPES, HEAD_SIZES, PageFormat


class Fp8Backend(PageBackend):
    """Scales of one a layer or one a KV head, from the layer, as vLLM has loaded them."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(FP8_DTYPES)

    @staticmethod
    def get_impl_cls() -> type[Fp8Impl]:
        return Fp8Impl

    @staticmethod
    def get_builder_cls() -> type[Fp8MetadataBuilder]:
        return Fp8MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(BLOCK_MULTIPLE)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True


@dataclass
class Fp8Metadata:
    """One step as the layers of one group see it."""

    num_actual_tokens: int
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int


class Fp8MetadataBuilder(AttentionMetadataBuilder[Fp8Metadata]):
    """Hands a step's tensors on."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        implementation(device).warm_up()

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Fp8Metadata:
        common = common_attn_metadata
        count = common.num_reqs
        return Fp8Metadata(
            num_actual_tokens=common.num_actual_tokens,
            query_start=common.query_start_loc[: count + 1],
            seq_lens=common.seq_lens[:count],
            block_table=common.block_table_tensor[:count],
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
        )


class Fp8Impl(PageImpl):
    """Attention of one layer, and what it stores."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Pages that another layer writes hold numbers at that layer's scales.
        self._written_by = None
        target, vllm_config = self.kv_sharing_target_layer_name, compat.current_vllm_config()
        if target is not None and vllm_config is not None:
            self._written_by = compat.attention_layer(vllm_config, target)

    def page_format(self, kv_cache: torch.Tensor) -> PageFormat:
        """The format of this layer's pages, from its cache ``[blocks, heads, tokens, bytes]``."""
        return PageFormat(kv_cache.shape[2], self.head_size, FP8_DTYPES[self.kv_cache_dtype])

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write key and value ``[tokens, kv_heads, head_size]`` to the slots."""
        implementation(kv_cache.device).store(
            self.page_format(kv_cache), key, value, kv_cache, slot_mapping, *_scales(layer)
        )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Fp8Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query ``[tokens, heads, head_size]``; writes ``output [tokens, heads, head_size]``. Key
        and value are read from the pages."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("FP8 pages have no fused output quantization")
        if attn_metadata is None:  # profiling
            return output
        tokens = attn_metadata.num_actual_tokens
        implementation(kv_cache.device).attend(
            self.page_format(kv_cache),
            self.attention,
            query[:tokens],
            kv_cache,
            *_scales(self._written_by or layer),
            attn_metadata.block_table,
            attn_metadata.query_start,
            attn_metadata.seq_lens,
            output[:tokens],
            attn_metadata.max_query_len,
            attn_metadata.max_seq_len,
        )
        return output


def _scales(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's scales of K and of V, float32 ``[1]`` or ``[kv_heads]``."""
    return layer._k_scale.detach().reshape(-1), layer._v_scale.detach().reshape(-1)
