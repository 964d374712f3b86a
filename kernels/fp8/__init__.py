"""Kernels of FP8 pages and the one place that chooses among their implementations.

An implementation is a module with ``store`` and ``attend``, as ``reference`` defines them, and
``warm_up``, which compiles what they need.
"""

from __future__ import annotations

from types import ModuleType

import torch

from .. import dispatch

_MODULES = {"reference": "reference", "cpu": "cpu", "triton": "triton_fp8"}


def implementation(device: torch.device) -> ModuleType:
    """The module for tensors on this device, or the one that VLLM_KVCOMPRESS_KERNELS forces."""
    return dispatch.implementation(__name__, _MODULES, device)[1]
