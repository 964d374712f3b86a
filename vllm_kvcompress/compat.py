"""Every closed or experimental seam of vLLM that the package depends on, a function each.

Written against vLLM 0.32.0. A new release is this module's work.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext

LOGGER_NAME = "vllm.kvcompress"
"""vLLM configures the logger ``vllm`` and what lies below it; others stay silent."""

CUSTOM_BACKEND = "CUSTOM"
"""The name in vLLM's list of attention backends that is free for others."""

_cpu_affinity: set[int] | None = None


def remember_cpu_affinity() -> None:
    """Note which cores the process may use, before vLLM's CPU worker pins threads to cores."""
    global _cpu_affinity
    if _cpu_affinity is None and hasattr(os, "sched_getaffinity"):
        _cpu_affinity = os.sched_getaffinity(0)


def release_cpu_affinity() -> None:
    """Let the calling thread use every core that the process started with.

    A thread inherits the affinity of its maker, which the CPU worker has pinned to one core: the
    codec would then run on the very core of the model's main thread.
    """
    if _cpu_affinity:
        os.sched_setaffinity(0, _cpu_affinity)


def shield_llvmlite() -> None:
    """Make llvmlite's library handle deny special attributes that it does not have.

    vLLM's CPU worker scans the namespaces of all modules and reads ``__dict__`` of whatever says
    that it has one. llvmlite's handle answers to every name with a function, which ends the scan,
    and the worker, with an error once numba has been imported.
    """
    from llvmlite.binding import ffi

    handle = type(ffi.lib)
    lookup = handle.__getattr__
    if getattr(lookup, "_shielded", False):
        return

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return lookup(self, name)

    __getattr__._shielded = True
    handle.__getattr__ = __getattr__


def register_connector(name: str, module_path: str) -> None:
    """``KVConnectorFactory.register_connector``, once per process.

    Raises RuntimeError if another package has taken the name.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module_path, name)
        return
    registered = KVConnectorFactory.get_connector_class_by_name(name)
    if registered.__module__ != module_path:
        raise RuntimeError(
            f"a KV connector named {name!r} is already registered by {registered.__module__}; "
            "uninstall one of the two packages"
        )


def with_offload_config(vllm_config: VllmConfig, extra_config: Mapping[str, Any]) -> VllmConfig:
    """A shallow copy of ``vllm_config`` with another ``kv_connector_extra_config``.

    vLLM's offloading classes read the spec and the chunk size from there, and the user's own
    dictionary must stay what the user wrote.
    """
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    changed.kv_transfer_config.kv_connector_extra_config = dict(extra_config)
    return changed


def inside_multi_connector() -> bool:
    """Whether a ``MultiConnector`` is constructing the caller.

    It keeps its own load failure policy and drops the handshakes of all but its first child.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), MultiConnector):
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True)
class GroupSpec:
    """Layers of one cache group whose pages have the same shape, as the offload sees them."""

    group_id: int
    layer_names: tuple[str, ...]
    block_tokens: int
    kv_heads: int
    head_size: int
    page_bytes: int
    packed: bool = False
    """Whether the pages are bytes that only the layers' backend understands."""
    values: int = 2
    """Two for K and V, one where they share a latent (MLA)."""
    places: tuple[int, ...] = ()
    """Where the layers stand among all of the cache group."""


def request_keys(req_context: ReqContext) -> list[OffloadKey]:
    """The offload keys of a request's chunks that its scheduler side knows of so far."""
    return list(req_context._offload_key_positions)


def offload_groups(kv_cache_config: KVCacheConfig) -> tuple[tuple[GroupSpec, ...], ...]:
    """The cache groups that vLLM offloads, in its order, each split by the shape of its layers.

    Raises ValueError for layers whose pages hold neither K and V nor a latent: states of Mamba
    layers, vLLM's own packed pages.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        get_offloading_group_ids,
    )
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    groups = []
    for group_id in get_offloading_group_ids(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[group_id]
        spec = group.kv_cache_spec
        alike: dict[tuple[Any, ...], list[int]] = {}
        specs = [
            spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            for name in group.layer_names
        ]
        for place, of_layer in enumerate(specs):
            alike.setdefault(_shape_of(of_layer), []).append(place)
        groups.append(
            tuple(
                _group_spec(
                    group_id,
                    tuple(places),
                    [group.layer_names[i] for i in places],
                    specs[places[0]],
                )
                for places in alike.values()
            )
        )
    return tuple(groups)


def _group_spec(
    group_id: int, places: tuple[int, ...], layer_names: list[str], spec: AttentionSpec
) -> GroupSpec:
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    where = f"cache group {group_id} (layer {layer_names[0]})"
    # Other subclasses keep other things in their pages: sinks, compressed states.
    if type(spec) not in (FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec):
        raise ValueError(
            "KVCompressConnector takes full and sliding-window attention and MLA; "
            f"{where} is {type(spec).__name__}"
        )
    packed = spec.state_content_bytes is not None
    if spec.tokens_per_state != 1 or (packed and not is_opaque_spec(spec)):
        raise ValueError(f"KVCompressConnector does not take the packed pages of {where}")
    latent = isinstance(spec, MLAAttentionSpec)
    if not latent and spec.head_size_v != spec.head_size:
        raise ValueError(
            f"KVCompressConnector needs K and V of one head size; {where} has "
            f"{spec.head_size} and {spec.head_size_v}"
        )
    return GroupSpec(
        group_id=group_id,
        layer_names=tuple(layer_names),
        block_tokens=spec.block_size,
        kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        page_bytes=spec.unpadded_page_size_bytes,
        packed=packed,
        values=1 if latent else 2,
        places=places,
    )


def _shape_of(spec: AttentionSpec) -> tuple[Any, ...]:
    return (
        type(spec),
        spec.block_size,
        spec.num_kv_heads,
        spec.head_size,
        spec.head_size_v,
        spec.dtype,
        spec.state_content_bytes,
    )


def attention_layer(vllm_config: VllmConfig, layer_name: str) -> Any:
    """The attention layer of this name, with its backend's ``impl`` and its scales."""
    return vllm_config.compilation_config.static_forward_context[layer_name]


def write_through_backend(
    layer: Any, kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Let the layer's backend write ``kv [values, tokens, heads, head_size]`` to ``slots``.

    Raises ValueError where the backend only writes as a part of its attention.
    """
    write = getattr(layer.impl, "do_kv_cache_update", None)
    if write is None:
        raise ValueError(
            f"attention backend {type(layer.impl).__name__} has no separate cache write"
        )
    if len(kv) == 2:
        write(layer, kv[0].contiguous(), kv[1].contiguous(), cache, slots)
        return
    rank = layer.kv_lora_rank
    latent, rotary = kv[0, :, 0, :rank].contiguous(), kv[0, :, :, rank:].contiguous()
    write(latent, rotary, cache, slots, layer.kv_cache_dtype, layer._k_scale)


def scales_of(layer: Any) -> tuple[list[float], list[float]]:
    """The K and the V scales that a layer's pages were written with, as lists of floats."""
    found = []
    for name in ("_k_scale", "_v_scale"):
        scale = getattr(layer, name, None)
        found.append([] if scale is None else scale.detach().float().cpu().reshape(-1).tolist())
    return found[0], found[1]


def add_cache_dtypes(names: Iterable[str]) -> None:
    """Let ``kv_cache_dtype`` be one of ``names``, whose pages are bytes to vLLM."""
    from typing import Literal, get_args

    import pydantic.dataclasses
    from vllm.config import cache as cache_module
    from vllm.utils import torch_utils

    known = get_args(cache_module.CacheDType)
    new = [name for name in names if name not in known]
    if not new:
        return
    longer = Literal[(*known, *new)]
    # These modules took the list by name when they were imported.
    for module in ("vllm.config.cache", "vllm.engine.arg_utils", "vllm.v1.attention.selector"):
        if module in sys.modules:
            sys.modules[module].CacheDType = longer
    torch_utils.STR_DTYPE_TO_TORCH_DTYPE.update(dict.fromkeys(new, torch.uint8))

    config = cache_module.CacheConfig
    config.__annotations__["cache_dtype"] = longer
    config.__dataclass_fields__["cache_dtype"].type = longer
    config.__pydantic_fields__["cache_dtype"].annotation = longer
    pydantic.dataclasses.rebuild_dataclass(config, force=True, _types_namespace=vars(cache_module))


def _wrapped(function: Callable[..., Any]) -> bool:
    """Whether this package has wrapped a function already."""
    return getattr(function, "_kvcompress", False)


def route_attention(
    choose: Callable[[Any, Callable[[Any], str]], str], custom_class_path: str
) -> None:
    """Let ``choose`` name the attention backend of each layer.

    It gets vLLM's ``AttentionSelectorConfig`` and vLLM's own choice, a function of such a
    configuration, which raises ValueError where there is none. Returned is the qualified name of a
    class. ``custom_class_path`` is what ``--attention-backend CUSTOM`` means.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    platform = type(current_platform)
    original = platform.get_attn_backend_cls.__func__
    if _wrapped(original):
        return

    @functools.wraps(original)
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, *args, **options):
        def default(config):
            return original(cls, selected_backend, config, *args, **options)

        return choose(attn_selector_config, default)

    get_attn_backend_cls._kvcompress = True
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    register_backend(AttentionBackendEnum[CUSTOM_BACKEND], custom_class_path)


def on_config(callback: Callable[[VllmConfig], None]) -> None:
    """Call ``callback`` with every new configuration of an engine, before anything is loaded."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.check_and_update_config.__func__
    if _wrapped(original):
        return

    @functools.wraps(original)
    def check_and_update_config(cls, vllm_config):
        original(cls, vllm_config)
        callback(vllm_config)

    check_and_update_config._kvcompress = True
    platform.check_and_update_config = classmethod(check_and_update_config)


def on_available_memory(callback: Callable[[VllmConfig, int], int]) -> None:
    """Let ``callback`` turn a worker's memory for the KV cache, in bytes, into what pages may take.

    To be called in the worker, when its module has been loaded.
    """

    def wrap(original):
        def determine_available_memory(self, *args, **options):
            return callback(self.vllm_config, original(self, *args, **options))

        return determine_available_memory

    _wrap_in_worker("determine_available_memory", wrap)


def after_loading(callback: Callable[[VllmConfig, int], None]) -> None:
    """Call ``callback`` with the configuration and its rank in each worker that has its model.

    To be called in the worker, when its module has been loaded.
    """

    def wrap(original):
        def get_kv_cache_spec(self, *args, **options):
            callback(self.vllm_config, self.rank)
            return original(self, *args, **options)

        return get_kv_cache_spec

    _wrap_in_worker("get_kv_cache_spec", wrap)


def _wrap_in_worker(name: str, wrap: Callable[[Any], Any]) -> None:
    """Wrap a method of the workers' classes, where they define it, once."""
    for module, class_name in (
        ("vllm.v1.worker.gpu_worker", "Worker"),
        ("vllm.v1.worker.cpu_worker", "CPUWorker"),
    ):
        worker = getattr(sys.modules.get(module), class_name, None)
        original = vars(worker).get(name) if worker else None
        if original is None or _wrapped(original):
            continue
        method = functools.wraps(original)(wrap(original))
        method._kvcompress = True
        setattr(worker, name, method)


def on_layer(
    dtype_of: Callable[[VllmConfig, str, int | None], str | None], built: Callable[[Any], None]
) -> None:
    """Let ``dtype_of`` choose the ``kv_cache_dtype`` of single attention layers.

    It gets the configuration, the layer's name and its sliding window, and returns a dtype, or None
    for what vLLM would do. ``built`` is called with each layer, in its worker.
    """
    from vllm.model_executor.layers.attention import Attention

    original = Attention.__init__
    if _wrapped(original):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self, *args, **options):
        bound = signature.bind(self, *args, **options)
        cache = bound.arguments.get("cache_config")
        vllm_config = current_vllm_config()
        if cache is not None and vllm_config is not None:
            window = bound.arguments.get("per_layer_sliding_window") or cache.sliding_window
            dtype = dtype_of(vllm_config, bound.arguments.get("prefix", ""), window)
            if dtype is not None:
                cache = copy.copy(cache)
                cache.cache_dtype = dtype
                cache.kv_cache_dtype_skip_layers = []
                bound.arguments["cache_config"] = cache
        original(*bound.args, **bound.kwargs)
        _give_cpu_builders_their_dtype()
        built(self)

    __init__._kvcompress = True
    Attention.__init__ = __init__


def _give_cpu_builders_their_dtype() -> None:
    """Let the CPU engine plan each group's attention for the dtype of the group's own layers.

    Its builder takes the engine's ``kv_cache_dtype`` for every group.
    """
    cpu_attn = sys.modules.get("vllm.v1.attention.backends.cpu_attn")
    if cpu_attn is None:
        return
    builder = cpu_attn.CPUAttentionMetadataBuilder
    original = builder.__init__
    if _wrapped(original):
        return

    @functools.wraps(original)
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        dtypes = {attention_layer(vllm_config, name).kv_cache_dtype for name in layer_names}
        if len(dtypes) == 1:
            vllm_config = copy.copy(vllm_config)
            vllm_config.cache_config = copy.copy(vllm_config.cache_config)
            vllm_config.cache_config.cache_dtype = dtypes.pop()
        original(self, kv_cache_spec, layer_names, vllm_config, device)

    __init__._kvcompress = True
    builder.__init__ = __init__


def on_cache_write(
    callback: Callable[[VllmConfig, torch.Tensor, int], None], except_for: type
) -> None:
    """Call ``callback`` with what a step writes through other builders than ``except_for``.

    It gets the configuration, a cache group's slot mapping and the tokens of the group's blocks,
    before anything of the step runs. To be called in the worker, when its module has been loaded.
    """
    from vllm.v1.worker.utils import AttentionGroup

    original = AttentionGroup.create_metadata_builders
    if _wrapped(original):
        return

    @functools.wraps(original)
    def create_metadata_builders(self, vllm_config, *args, **options):
        original(self, vllm_config, *args, **options)
        block_tokens = getattr(self.kv_cache_spec, "block_size", None)
        for builder in self.metadata_builders:
            if block_tokens and not isinstance(builder, except_for):
                _report_writes(builder, callback, vllm_config, block_tokens)

    create_metadata_builders._kvcompress = True
    AttentionGroup.create_metadata_builders = create_metadata_builders


def _report_writes(
    builder: Any,
    callback: Callable[[VllmConfig, torch.Tensor, int], None],
    vllm_config: VllmConfig,
    block_tokens: int,
) -> None:
    build, update = builder.build, builder.update_block_table

    @functools.wraps(build)
    def reporting_build(common_prefix_len, common_attn_metadata, *args, **options):
        callback(vllm_config, common_attn_metadata.slot_mapping, block_tokens)
        return build(common_prefix_len, common_attn_metadata, *args, **options)

    @functools.wraps(update)
    def reporting_update(metadata, blk_table, slot_mapping):
        callback(vllm_config, slot_mapping, block_tokens)
        return update(metadata, blk_table, slot_mapping)

    builder.build, builder.update_block_table = reporting_build, reporting_update


def is_cpu() -> bool:
    """Whether this is vLLM's CPU engine."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def lacks_e4m3() -> bool:
    """Whether this is a CUDA GPU without FP8 arithmetic, which came with compute capability 8.9."""
    from vllm.platforms import current_platform

    return current_platform.is_cuda() and not current_platform.has_device_capability(89)


def doubles_scales() -> bool:
    """Whether this GPU's FP8 is AMD's older one (FNUZ), whose numbers are half as large."""
    from vllm.platforms import current_platform

    return current_platform.is_fp8_fnuz()


def device() -> torch.device:
    """The device that layers compute on."""
    from vllm.platforms import current_platform

    return torch.device(current_platform.device_type)


def tensor_parallel_rank() -> tuple[int, int]:
    """This worker's rank among those that share a layer's heads, and their number."""
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


def checkpoint_folder(vllm_config: VllmConfig) -> Path | None:
    """The local folder that the model is loaded from, None where there is none."""
    model = vllm_config.model_config
    if vllm_config.load_config.load_format == "dummy":
        return None
    if Path(model.model).is_dir():
        return Path(model.model)
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    except ValueError:  # not the name of a repository
        return None
    return Path(config).parent if isinstance(config, str) else None


def kv_cache_scheme(vllm_config: VllmConfig) -> Mapping[str, Any] | None:
    """What a checkpoint of compressed-tensors declares of its KV cache, None if nothing."""
    config = getattr(vllm_config.model_config.hf_config, "quantization_config", None)
    if isinstance(config, Mapping):
        return config.get("kv_cache_scheme")
    return None


def layer_number(layer_name: str) -> int:
    """The index in its model of the layer with this name."""
    from vllm.model_executor.models.utils import extract_layer_index

    return extract_layer_index(layer_name)


def current_vllm_config() -> VllmConfig | None:
    """The configuration that vLLM has made current, or None outside of any."""
    from vllm.config.vllm import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()


def is_opaque_spec(spec: AttentionSpec) -> bool:
    """Whether a layer's pages are bytes whose meaning only its backend knows."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    return spec.dtype == torch.uint8 and spec.kv_quant_mode == KVQuantMode.NONE


def attention_layers(vllm_config: VllmConfig) -> dict[str, Any]:
    """The model's attention layers that keep a KV cache, by name."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    return {
        name: layer
        for name, layer in get_layers_from_vllm_config(vllm_config, Attention).items()
        if layer.attn_type == "decoder" and layer.kv_sharing_target_layer_name is None
    }


def finish_stores(llm: Any) -> None:
    """Step an engine of this process until every store that was submitted has been reported."""
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    while connector.has_pending_push_work():
        llm.llm_engine.step()
