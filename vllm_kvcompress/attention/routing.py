"""Which attention backend a layer gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_kvcompress import checks, compat
from vllm_kvcompress.attention import folding
from vllm_kvcompress.config import FOUR_BIT_DTYPE, FP8_DTYPES, KIVI_DTYPES

KIVI_BACKEND = "vllm_kvcompress.attention.kivi.KiviBackend"
FOUR_BIT_BACKEND = "vllm_kvcompress.attention.kivi.FourBitBackend"
FP8_BACKEND = "vllm_kvcompress.attention.fp8.Fp8Backend"


def attention_backend(config: Any, default: Callable[[Any], str]) -> str:
    """The qualified name of the backend for a layer that vLLM's ``AttentionSelectorConfig``
    describes; ``default`` is vLLM's own choice, which may raise ValueError.

    Raises ValueError, naming the dtype, for a layer whose pages would have to be ours and cannot.
    """
    dtype = config.kv_cache_dtype
    if dtype in KIVI_DTYPES:
        _refuse(config, checks.refused_layer(config))
        return FOUR_BIT_BACKEND if dtype == FOUR_BIT_DTYPE else KIVI_BACKEND
    if dtype not in FP8_DTYPES or config.use_mla or config.attn_type != "decoder":
        return default(config)
    if compat.is_cpu() or (FP8_DTYPES[dtype] == "e4m3" and compat.lacks_e4m3()):
        _refuse(config, checks.refused_layer(config))
        return FP8_BACKEND
    if not config.use_per_head_quant_scales:
        return default(config)
    try:
        return default(config)
    except ValueError:
        parent = default(config._replace(use_per_head_quant_scales=False))
        return folding.path_of(parent)


def check_layer(layer: Any) -> None:
    """Refuse KIVI pages for a layer whose model does not leave the backend to vLLM's selector.

    Some kinds of attention derive a backend from the selected one that attends to other sequences,
    or to later tokens, and some models bring one that would take our bytes for values. Raises
    ValueError.
    """
    dtype, backend = layer.kv_cache_dtype, layer.attn_backend
    names = [f"{base.__module__}.{base.__qualname__}" for base in backend.__mro__]
    ours = names[0] in (KIVI_BACKEND, FOUR_BIT_BACKEND)
    if not ours and (KIVI_BACKEND in names or dtype in KIVI_DTYPES):
        raise ValueError(
            f"kv_cache_dtype {dtype}: {layer.layer_name} is a {type(layer).__name__} on "
            f"{backend.__name__}, which KIVI pages do not support; choose another kv_cache_dtype"
        )


def _refuse(config: Any, reason: str | None) -> None:
    if reason:
        raise ValueError(f"kv_cache_dtype {config.kv_cache_dtype}: {reason}")
