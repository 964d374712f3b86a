"""Kernels of KIVI pages and the one place that chooses among their implementations.

An implementation is a module with ``pack``, ``unpack`` and ``attend``, as ``reference`` defines
them, and ``warm_up``, which compiles what they need.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from .. import dispatch

if TYPE_CHECKING:
    import torch

_MODULES = {"reference": "reference", "cpu": "cpu", "triton": "triton_kivi"}


def implementation(device: torch.device) -> ModuleType:
    """The module for tensors on this device, or the one that VLLM_KVCOMPRESS_KERNELS forces."""
    return dispatch.implementation(__name__, _MODULES, device)[1]
