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
    "SEAL_KEY",
    "Store",
    "StoreConfigError",
    "StoreError",
    "StoreStack",
    "StoreStats",
    "create_stack",
    "create_store",
    "parse_size",
    "register_store",
    "store_class",
    "store_types",
]

# type -> "module:class", imported on first use.
_REGISTRY: dict[str, str] = {
    "memory": "vllm_kvcompress.stores.memory:MemoryStore",
    "disk": "vllm_kvcompress.stores.disk:DiskStore",
    "valkey": "vllm_kvcompress.stores.valkey:ValkeyStore",
    "object": "vllm_kvcompress.stores.object:BucketStore",
}

SEAL_KEY = "seal_key"
"""The setting of every store that says where the key is that its blobs are sealed with."""


def store_types() -> list[str]:
    """The types that ``create_store`` knows."""
    return sorted(_REGISTRY)


def register_store(store_type: str, target: str) -> None:
    """Make ``target``, ``"module:class"`` of a Store, known as ``store_type``."""
    _REGISTRY[store_type] = target


def store_class(store_type: str) -> type[Store]:
    """The class of a store, whose constructor's parameters are its settings.

    Raises KeyError for a type that is not in ``store_types``.
    """
    module, _, attribute = _REGISTRY[store_type].partition(":")
    return getattr(import_module(module), attribute)


def create_store(config: Mapping[str, Any]) -> Store:
    """Make a store: ``create_store({"type": "memory", "bytes": "8GiB"})``.

    Every entry but ``type`` and ``seal_key`` is a setting of the store's class. With ``seal_key``,
    ``"file:PATH"`` or ``"env:NAME"``, the store's blobs are sealed. Raises StoreConfigError, which
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
    sealed = SEAL_KEY in settings
    seal_source = settings.pop(SEAL_KEY, None)
    known = inspect.signature(store_class(store_type)).parameters
    for setting in settings:
        if setting not in known:
            raise StoreConfigError(
                f"{setting}: store type {store_type!r} has no such setting; "
                f"its settings are {', '.join((*known, SEAL_KEY))}"
            )
    for setting, parameter in known.items():
        if parameter.default is parameter.empty and setting not in settings:
            raise StoreConfigError(f"{setting}: store type {store_type!r} needs this setting")
    if not sealed:
        return store_class(store_type)(**settings)
    from vllm_kvcompress.stores.sealed import SealedStore, read_seal_key

    seal_key = read_seal_key(seal_source)
    return SealedStore(store_class(store_type)(**settings), seal_key)


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
