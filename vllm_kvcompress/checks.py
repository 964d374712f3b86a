"""What is checked of an engine's configuration before a model is loaded."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_kvcompress import audit_metrics, compat
from vllm_kvcompress.config import (
    FOUR_BIT_DTYPE,
    FP8_DTYPES,
    IN_PLACE,
    KIVI_DTYPES,
    PROFILE,
    SLIDING_WINDOW,
    Fp8Settings,
    KiviSettings,
    profile_folder,
    profile_of,
)
from vllm_kvcompress.kernels.kivi.format import DTYPES
from vllm_kvcompress.page_profile import ModelShape, holds_page_profile

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(compat.LOGGER_NAME)


def check_config(vllm_config: VllmConfig) -> None:
    """Apply ``in_place``, then refuse what cannot work: a ValueError that names the setting."""
    if vllm_config.model_config is None:
        return
    _point_at_misspelt_settings(vllm_config)
    _apply_in_place(vllm_config)
    _resolve_auto(vllm_config)
    _apply_profile(vllm_config)
    _check_skip_layers(vllm_config)
    settings = KiviSettings.parse(vllm_config.additional_config)
    Fp8Settings.parse(vllm_config.additional_config)
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype in KIVI_DTYPES:
        _check_kivi(vllm_config, cache_dtype, settings)
    else:
        _check_dtype(vllm_config, cache_dtype)
        _check_that_skipping_matters(vllm_config, cache_dtype)
        if (vllm_config.additional_config or {}).get("kvcompress", {}).get("kivi"):
            logger.warning(
                "additional_config: kvcompress.kivi changes nothing, as kv_cache_dtype is %s; "
                "choose from %s",
                cache_dtype,
                ", ".join(KIVI_DTYPES),
            )
    audit_metrics.serve(vllm_config.instance_id)


def _point_at_misspelt_settings(vllm_config: VllmConfig) -> None:
    """Other keys of additional_config belong to others, and vLLM checks none."""
    given = vllm_config.additional_config
    for key in given if isinstance(given, dict) else ():
        if key != "kvcompress" and difflib.get_close_matches(str(key), ["kvcompress"], 1, 0.8):
            logger.warning("additional_config: %r is nobody's; did you mean 'kvcompress'?", key)


def _apply_in_place(vllm_config: VllmConfig) -> None:
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != "KVCompressConnector":
        return
    wanted = (transfer.kv_connector_extra_config or {}).get(IN_PLACE)
    if wanted is None:
        return
    if not isinstance(wanted, str) or wanted not in KIVI_DTYPES:
        raise ValueError(
            f"kv_connector_extra_config: {IN_PLACE} is {wanted!r}; "
            f"choose from {', '.join(KIVI_DTYPES)}"
        )
    cache = vllm_config.cache_config
    if cache.cache_dtype not in ("auto", wanted):
        raise ValueError(
            f"kv_connector_extra_config: {IN_PLACE} is {wanted}, and --kv-cache-dtype is "
            f"{cache.cache_dtype}; leave one of the two away"
        )
    cache.cache_dtype = wanted


def _resolve_auto(vllm_config: VllmConfig) -> None:
    """vLLM finds out that ``auto`` means FP8 for a calibrated checkpoint when it makes the layers;
    a profile, and what is refused, depend on it before."""
    cache = vllm_config.cache_config
    if cache.cache_dtype == "auto" and compat.kv_cache_scheme(vllm_config) is not None:
        cache.cache_dtype = "fp8"


def _apply_profile(vllm_config: VllmConfig) -> None:
    """Check the profile of the pages, and leave out the layers that it names unless the user names
    others."""
    cache, dtype = vllm_config.cache_config, vllm_config.cache_config.cache_dtype
    folder = profile_folder(vllm_config.additional_config)
    if folder is None:
        _name_profile_at_hand(vllm_config)
        return
    profile = profile_of(vllm_config.additional_config)
    try:
        profile.check_model(_shape_of(vllm_config))
    except ValueError as error:
        raise ValueError(f"additional_config: kvcompress: {PROFILE}: {error}") from error
    where = f"profile {folder} ({profile.digest[:8]})"
    if dtype in FP8_DTYPES:
        told, layers = "FP8 pages", profile.fp8_skip_layers
    elif dtype in KIVI_DTYPES:
        told, layers = "KIVI pages", profile.kivi.skip_layers
    else:
        logger.warning(
            "additional_config: kvcompress.%s changes nothing, as kv_cache_dtype is %s; choose "
            "from %s",
            PROFILE,
            dtype,
            ", ".join((*FP8_DTYPES, *KIVI_DTYPES)),
        )
        return
    if dtype in KIVI_DTYPES and _has_some_windows(vllm_config):
        logger.info(
            "%s: %s: the same bits for all layers, and none left out, as vLLM makes the blocks of "
            "layers with and without a window equally large",
            told,
            where,
        )
        return
    chosen = cache.kv_cache_dtype_skip_layers
    if not chosen:
        cache.kv_cache_dtype_skip_layers = [str(layer) for layer in layers]
    bits = ""
    if dtype in KIVI_DTYPES:
        clipping = KiviSettings.parse(vllm_config.additional_config).clipping
        bits = f", clipping {clipping}, four bits for layers {_listed(profile.kivi.four_bits)}"
    logger.info("%s: %s: left out layers %s%s", told, where, _listed(chosen or layers), bits)


def _listed(entries: Iterable[Any]) -> str:
    return ", ".join(map(str, sorted(entries))) or "none"


def _name_profile_at_hand(vllm_config: VllmConfig) -> None:
    model, dtype = vllm_config.model_config.model, vllm_config.cache_config.cache_dtype
    if dtype in (*FP8_DTYPES, *KIVI_DTYPES) and holds_page_profile(model):
        logger.info(
            "%s holds a calibrated profile of its pages; to use it: --additional-config '%s'",
            model,
            json.dumps({"kvcompress": {PROFILE: str(model)}}),
        )


def _shape_of(vllm_config: VllmConfig) -> ModelShape:
    model = vllm_config.model_config
    text_config = model.hf_text_config
    return ModelShape(
        str(text_config.model_type),
        text_config.num_hidden_layers,
        model.get_total_num_kv_heads(),
        model.get_head_size(),
    )


def _has_some_windows(vllm_config: VllmConfig) -> bool:
    """Whether some layers have a sliding window and others none."""
    kinds = getattr(vllm_config.model_config.hf_text_config, "layer_types", None) or ()
    return len({"sliding" in str(kind) for kind in kinds}) > 1


def _check_skip_layers(vllm_config: VllmConfig) -> None:
    """vLLM ignores entries that it does not know."""
    entries = vllm_config.cache_config.kv_cache_dtype_skip_layers or ()
    text_config = vllm_config.model_config.hf_text_config
    layers = getattr(text_config, "num_hidden_layers", None)
    for entry in entries:
        if entry == SLIDING_WINDOW:
            kinds = getattr(text_config, "layer_types", None) or ()
            window = getattr(text_config, "sliding_window", None)
            if window is None and not any("sliding" in str(kind) for kind in kinds):
                raise ValueError(
                    f"kv_cache_dtype_skip_layers: {entry!r}, and no layer of this model has one"
                )
        elif not str(entry).isdecimal():
            raise ValueError(
                f"kv_cache_dtype_skip_layers: unknown entry {entry!r}; choose a layer's number or "
                f"{SLIDING_WINDOW}"
            )
        elif str(int(entry)) != entry or (layers is not None and int(entry) >= layers):
            raise ValueError(
                f"kv_cache_dtype_skip_layers: there is no layer {entry!r}; this model has layers "
                f"0 to {(layers or 1) - 1}"
            )


def _check_that_skipping_matters(vllm_config: VllmConfig, cache_dtype: str) -> None:
    if not vllm_config.cache_config.kv_cache_dtype_skip_layers:
        return
    if cache_dtype in ("auto", "bfloat16", "float16"):
        logger.warning(
            "kv_cache_dtype_skip_layers changes nothing, as kv_cache_dtype is %s: no layer is "
            "compressed",
            cache_dtype,
        )
    elif _all_layers_skipped(vllm_config):
        logger.warning(
            "kv_cache_dtype_skip_layers leaves out every layer: nothing is compressed to %s",
            cache_dtype,
        )


def _all_layers_skipped(vllm_config: VllmConfig) -> bool:
    cache, text_config = vllm_config.cache_config, vllm_config.model_config.hf_text_config
    entries = cache.kv_cache_dtype_skip_layers or ()
    layers = getattr(text_config, "num_hidden_layers", None) or 0
    kinds = getattr(text_config, "layer_types", None) or ()
    left_out = {int(entry) for entry in entries if entry != SLIDING_WINDOW}
    if SLIDING_WINDOW in entries:
        # vLLM sets this where all layers have a window.
        everywhere = cache.sliding_window is not None
        left_out |= {
            i
            for i in range(layers)
            if everywhere or (i < len(kinds) and "sliding" in str(kinds[i]))
        }
    return layers > 0 and len(left_out) == layers


def _check_dtype(vllm_config: VllmConfig, cache_dtype: str) -> None:
    """vLLM's CPU engine starts with dtypes that it does not know, and produces nonsense; and it
    does not say why it cannot do e5m2 with calibrated scales."""
    if cache_dtype == "fp8_e5m2" and compat.kv_cache_scheme(vllm_config) is not None:
        raise ValueError(
            "kv_cache_dtype fp8_e5m2: this checkpoint has scales that were calibrated for "
            "fp8_e4m3, which is twice as precise; choose fp8_e4m3, or serve the model that was "
            "calibrated instead of what calibration wrote"
        )
    model = vllm_config.model_config
    own = str(model.dtype).removeprefix("torch.")
    # vLLM has no name for pages of float32.
    whole = ["auto", own] if own in ("bfloat16", "float16") else ["auto"]
    known = whole if model.use_mla else [*whole, *FP8_DTYPES, *KIVI_DTYPES]
    if compat.is_cpu() and cache_dtype not in known:
        raise ValueError(
            f"kv_cache_dtype {cache_dtype}: the CPU engine cannot do it with this model; choose "
            f"from {', '.join(known)}"
        )


def layer_dtype(vllm_config: VllmConfig, layer_name: str, window: int | None) -> str | None:
    """The ``kv_cache_dtype`` of a layer that has another than the engine's KIVI pages; None for
    vLLM's choice."""
    cache = vllm_config.cache_config
    entries = cache.kv_cache_dtype_skip_layers or ()
    if cache.cache_dtype not in KIVI_DTYPES:
        return None
    skipped = window is not None and SLIDING_WINDOW in entries
    if not skipped and entries:
        skipped = str(compat.layer_number(layer_name)) in entries
    if skipped:
        dtype = KiviSettings.parse(vllm_config.additional_config).skip_dtype
        return dtype if dtype != "auto" else None
    profile = profile_of(vllm_config.additional_config)
    if profile is None or not profile.kivi.four_bits or _has_some_windows(vllm_config):
        return None
    return FOUR_BIT_DTYPE if compat.layer_number(layer_name) in profile.kivi.four_bits else None


def _check_kivi(vllm_config: VllmConfig, cache_dtype: str, settings: KiviSettings) -> None:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    drafts = 0 if speculative is None else speculative.num_speculative_tokens or 0
    drafting = speculative is not None and speculative.uses_draft_kv_cache()
    for refused, what in (
        (model.use_mla, "multi-head latent attention (MLA)"),
        (model.is_hybrid, "models with Mamba or other state layers"),
        (model.is_attention_free, "models without attention"),
        (model.is_encoder_decoder, "encoder-decoder models"),
        (parallel.decode_context_parallel_size > 1, "decode context parallelism"),
        (parallel.prefill_context_parallel_size > 1, "prefill context parallelism"),
        (parallel.use_ubatching, "microbatches (dual batch overlap)"),
        (model.dtype not in DTYPES, f"models in {model.dtype}"),
        # Target and draft take their steps apart from each other, in one residual pool.
        (drafting, "draft models and draft layers; speculate with the method ngram or suffix"),
        (
            settings.residual_length < drafts + 1,
            f"{drafts} speculative tokens with kvcompress.kivi residual_length "
            f"{settings.residual_length}; it must be greater",
        ),
    ):
        if refused:
            raise ValueError(f"kv_cache_dtype {cache_dtype} does not support {what}")
    if _all_layers_skipped(vllm_config):
        raise ValueError(
            f"kv_cache_dtype {cache_dtype}: kv_cache_dtype_skip_layers leaves out every layer of "
            "this model; name fewer, or leave kv_cache_dtype away"
        )
    if settings.skip_dtype != "auto":
        config = vllm_config.additional_config
        where = f"additional_config: kvcompress.kivi: skip_dtype is {settings.skip_dtype}"
        if not cache.kv_cache_dtype_skip_layers and profile_of(config) is None:
            raise ValueError(f"{where}, and --kv-cache-dtype-skip-layers names no layer")
    block = cache.block_size
    if not cache.user_specified_block_size and block % settings.group_size:
        block = settings.group_size  # vLLM has yet to choose one that the backend takes
    try:
        settings.page_format(cache_dtype, block, model.get_head_size(), model.dtype)
    except ValueError as error:
        raise ValueError(
            f"kv_cache_dtype {cache_dtype}, with kvcompress.kivi group_size "
            f"{settings.group_size}: {error}"
        ) from error


def refused_layer(config: Any) -> str | None:
    """What a layer asks of its attention backend that pages of ours do not have, or None."""
    for refused, what in (
        (config.use_mla, "multi-head latent attention (MLA)"),
        (config.use_sparse, "sparse attention"),
        (config.use_mm_prefix, "bidirectional attention over images"),
        (config.use_non_causal, "non-causal attention"),
        (config.use_rswa, "reference sliding-window attention"),
        (config.attn_type != "decoder", f"attention of type {config.attn_type}"),
    ):
        if refused:
            return f"{what} is not supported; leave such layers out with kv_cache_dtype_skip_layers"
    return None
