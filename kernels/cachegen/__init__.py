"""Kernels of the cachegen codec and the one place that chooses among their implementations."""

from __future__ import annotations

from types import ModuleType

import torch

from .. import dispatch

_MODULES = {"reference": "reference", "cpu": "cpu", "triton": "triton_codec"}


def implementation(device: torch.device) -> tuple[str, ModuleType]:
    """Name and module of the implementation for tensors on this device.

    The environment variable VLLM_KVCOMPRESS_KERNELS forces one. The module's functions are
    ``encode(kv[stripes, tokens, channels], quantisers) -> sections`` and
    ``decode(sections, out[stripes, tokens, channels])``; ``reference`` and ``cpu`` take contiguous
    tensors on the CPU, ``triton`` contiguous ones on its device. Raises ValueError for an unknown
    name.
    """
    return dispatch.implementation(__name__, _MODULES, device)
