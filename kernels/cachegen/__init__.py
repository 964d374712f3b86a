"""Kernels of the cachegen codec and the one place that chooses among their implementations."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

import torch

ENVIRONMENT = "VLLM_KVCOMPRESS_KERNELS"
_MODULES = {"reference": "reference", "cpu": "cpu", "triton": "triton_codec"}


def implementation(device: torch.device) -> tuple[str, ModuleType]:
    """Name and module of the implementation for tensors on this device.

    The environment variable VLLM_KVCOMPRESS_KERNELS forces one. The module's functions are
    ``encode(kv[stripes, tokens, channels], quantisers) -> sections`` and
    ``decode(sections, out[stripes, tokens, channels])``; ``reference`` and ``cpu`` take contiguous
    tensors on the CPU, ``triton`` contiguous ones on its device. Raises ValueError for an unknown
    name.
    """
    name = os.environ.get(ENVIRONMENT) or ("cpu" if device.type == "cpu" else "triton")
    if name not in _MODULES:
        raise ValueError(f"{ENVIRONMENT}={name!r}: choose from {', '.join(_MODULES)}")
    return name, import_module(f".{_MODULES[name]}", __name__)
