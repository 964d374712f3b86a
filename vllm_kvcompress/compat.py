"""Every closed or experimental seam of vLLM that the package depends on, a function each.

Written against vLLM 0.32.0. A new release is this module's work.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

LOGGER_NAME = "vllm.kvcompress"
"""vLLM configures the logger ``vllm`` and what lies below it; others stay silent."""

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
    """One cache group as the offload sees it; every layer in it has the same shape."""

    group_id: int
    layer_names: tuple[str, ...]
    block_tokens: int
    kv_heads: int
    head_size: int
    page_bytes: int


def offload_groups(kv_cache_config: KVCacheConfig) -> tuple[GroupSpec, ...]:
    """The cache groups that vLLM offloads, in its order.

    Raises ValueError for groups whose pages do not hold K and V of one shape: MLA latents, states
    of Mamba layers, packed pages, layers of different shapes in one group.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        get_offloading_group_ids,
    )
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

    groups = []
    for group_id in get_offloading_group_ids(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[group_id]
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            specs = [spec.kv_cache_specs[name] for name in group.layer_names]
        else:
            specs = [spec] * len(group.layer_names)
        first = specs[0]
        where = f"cache group {group_id} (layer {group.layer_names[0]})"
        # Subclasses keep other things in their pages: latents, sinks, compressed states.
        if type(first) not in (FullAttentionSpec, SlidingWindowSpec):
            raise ValueError(
                f"KVCompressConnector takes full and sliding-window attention; {where} is "
                f"{type(first).__name__}"
            )
        if first.state_content_bytes is not None or first.tokens_per_state != 1:
            raise ValueError(f"KVCompressConnector does not take the packed pages of {where}")
        if first.head_size_v != first.head_size:
            raise ValueError(
                f"KVCompressConnector needs K and V of one head size; {where} has "
                f"{first.head_size} and {first.head_size_v}"
            )
        if any(_shape_of(other) != _shape_of(first) for other in specs):
            raise ValueError(f"KVCompressConnector needs layers of one shape; {where} has several")
        groups.append(
            GroupSpec(
                group_id=group_id,
                layer_names=tuple(group.layer_names),
                block_tokens=first.block_size,
                kv_heads=first.num_kv_heads,
                head_size=first.head_size,
                page_bytes=first.unpadded_page_size_bytes,
            )
        )
    return tuple(groups)


def _shape_of(spec: AttentionSpec) -> tuple[Any, ...]:
    return (spec.block_size, spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.dtype)


def attention_layer(vllm_config: VllmConfig, layer_name: str) -> Any:
    """The attention layer of this name, with its backend's ``impl`` and its scales."""
    return vllm_config.compilation_config.static_forward_context[layer_name]


def write_through_backend(
    layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Let the layer's backend write K and V ``[tokens, heads, head_size]`` to ``slots``.

    Raises ValueError where the backend only writes as a part of its attention.
    """
    write = getattr(layer.impl, "do_kv_cache_update", None)
    if write is None:
        raise ValueError(
            f"attention backend {type(layer.impl).__name__} has no separate cache write"
        )
    write(layer, key, value, cache, slots)


def scales_of(layer: Any) -> tuple[list[float], list[float]]:
    """The K and the V scales that a layer's pages were written with, as lists of floats."""
    found = []
    for name in ("_k_scale", "_v_scale"):
        scale = getattr(layer, name, None)
        found.append([] if scale is None else scale.detach().float().cpu().reshape(-1).tolist())
    return found[0], found[1]
