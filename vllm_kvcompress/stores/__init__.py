"""Stores by name, and stacks of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from vllm_kvcompress.stores.base import (
    Store,
    StoreConfigError,
    StoreError,
    StoreStats,
    parse_size,
)
from vllm_kvcompress.stores.stack import StoreStack

__all__ = [
    "Store",
    "StoreConfigError",
    "StoreError",
    "StoreStack",
    "StoreStats",
    "create_stack",
    "create_store",
    "parse_size",
    "register_store",
    "store_types",
]

# type -> "module:class", imported on first use.
_REGISTRY: dict[str, str] = {
    "memory": "vllm_kvcompress.stores.memory:MemoryStore",
    "disk": "vllm_kvcompress.stores.disk:DiskStore",
}


def store_types() -> list[str]:
    """The types that ``create_store`` knows."""
    return sorted(_REGISTRY)


def register_store(store_type: str, target: str) -> None:
    """Make ``target``, ``"module:class"`` of a Store, known as ``store_type``."""
    _REGISTRY[store_type] = target


def create_store(config: Mapping[str, Any]) -> Store:
    """Make a store: ``create_store({"type": "memory", "bytes": "8GiB"})``.

    Every entry but ``type`` is a setting of the store's class. Raises StoreConfigError, which
    names the setting and the choices, for an unknown type, a setting that is unknown or missing,
    or a value that does not do.
    """
    if not isinstance(config, Mapping):
        raise StoreConfigError(
            f"store {config!r}: give an object such as {{'type': 'memory', 'bytes': '8GiB'}}"
        )
    settings = dict(config)
    store_type = settings.pop("type", None)
    if not isinstance(store_type, str) or store_type not in _REGISTRY:
        raise StoreConfigError(
            f"type: store type {store_type!r} is unknown; choose from {', '.join(store_types())}"
        )
    module, _, attribute = _REGISTRY[store_type].partition(":")
    store_class = getattr(import_module(module), attribute)
    known = inspect.signature(store_class).parameters
    for setting in settings:
        if setting not in known:
            raise StoreConfigError(
                f"{setting}: store type {store_type!r} has no such setting; "
                f"its settings are {', '.join(known)}"
            )
    for setting, parameter in known.items():
        if parameter.default is parameter.empty and setting not in settings:
            raise StoreConfigError(f"{setting}: store type {store_type!r} needs this setting")
    return store_class(**settings)


def create_stack(configs: Sequence[Mapping[str, Any]], write_back: bool = False) -> StoreStack:
    """Make a stack from the settings of its stores, the top first.

    Raises StoreConfigError as ``create_store`` does, with the place of the store in the list.
    """
    if isinstance(configs, str | Mapping) or not isinstance(configs, Sequence):
        raise StoreConfigError(f"stores: {configs!r}; give a list of stores, the top first")
    stores: list[Store] = []
    try:
        for config in configs:
            stores.append(create_store(config))
        return StoreStack(stores, write_back=write_back)
    except StoreConfigError as error:
        for store in stores:
            store.close()
        place = f"stores[{len(stores)}]." if len(stores) < len(configs) else ""
        raise StoreConfigError(f"{place}{error}") from None
