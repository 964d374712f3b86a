"""Which implementation of a family of kernels runs: by device, or as the environment says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ENVIRONMENT = "VLLM_KVCOMPRESS_KERNELS"


def implementation(
    package: str, modules: Mapping[str, str], device: torch.device
) -> tuple[str, ModuleType]:
    """Name and module, of those in ``package``, for tensors on ``device``.

    ``modules`` maps ``reference``, ``cpu`` and ``triton`` to the names of modules. The environment
    variable VLLM_KVCOMPRESS_KERNELS forces one. Raises ValueError for an unknown name.
    """
    name = os.environ.get(ENVIRONMENT) or ("cpu" if device.type == "cpu" else "triton")
    if name not in modules:
        raise ValueError(f"{ENVIRONMENT}={name!r}: choose from {', '.join(modules)}")
    return name, import_module(f".{modules[name]}", package)
