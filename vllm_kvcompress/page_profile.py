"""Calibrated hints for the pages of the KV cache, read from a directory and checked.

They stand under ``pages`` in ``kvcompress.json``: the ``model`` that they are of; under ``fp8`` and
``kivi`` what the pages cost, in nats a token, ``layers`` by layer and ``all`` together, and
``skip_layers``, the fewest to leave out for at most ``max_loss``, with what is ``left`` then. For
KIVI pages also ``clipping``, how scales are found; ``with_4bit``, the same with four bits for some
``layers``, which takes less memory than leaving them out; and the ``boosted_channels`` of each
layer's KV heads, the widest of K, for information.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SECTION = "pages"
DIGEST_BYTES = 16
MAX_LAYERS = 4096


@dataclass(frozen=True)
class ModelShape:
    """What tells models apart, as far as their caches go."""

    model_type: str
    layers: int
    kv_heads: int
    head_size: int

    def __str__(self) -> str:
        return (
            f"{self.model_type}, {self.layers} layers of {self.kv_heads} KV heads of "
            f"{self.head_size}"
        )


@dataclass(frozen=True)
class KiviHints:
    """What calibration says about the KIVI pages of a model; nothing if it cannot have any."""

    clipping: str | None = None
    """How scales are found: a value of their setting of this name."""
    four_bits: frozenset[int] = frozenset()
    """Layers with four bits of K and of V."""
    skip_layers: tuple[int, ...] = ()
    """Layers to leave out beside those with four bits."""


@dataclass(frozen=True)
class PageProfile:
    """What calibration says about the pages of a model."""

    name: str
    """Of the model, as calibration was given it."""
    shape: ModelShape
    fp8_skip_layers: tuple[int, ...]
    """Layers to leave out of FP8 pages."""
    kivi: KiviHints
    digest: str
    """Hexadecimal; of everything in the section."""
    folder: str = ""
    """Where it was read from."""

    def check_model(self, shape: ModelShape) -> None:
        """Raise ValueError, which names both, unless this is the profile of such a model."""
        if shape != self.shape:
            raise ValueError(
                f"the profile in {self.folder} is of {self.name} ({self.shape}), and this model "
                f"is another one ({shape}); calibrate this model, or leave the profile out"
            )


def digest_of(section: Mapping[str, Any]) -> str:
    """A digest of all that stands in the section, but for the digest itself."""
    content = {name: value for name, value in section.items() if name != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()


def holds_page_profile(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory holds a profile of pages that can be read."""
    try:
        load_page_profile(directory)
    except ValueError:
        return False
    return True


def load_page_profile(directory: str | os.PathLike[str]) -> PageProfile:
    """The profile in a directory. Raises ValueError, which says what is wrong and what to do."""
    from vllm_kvcompress.codecs.profile import JSON_NAME  # imports torch

    try:
        stat = (Path(directory) / JSON_NAME).stat()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{directory} holds no profile ({getattr(error, 'strerror', None) or error}: "
            f"{JSON_NAME}); give the directory that `vllm-kvcompress calibrate` wrote"
        ) from error
    return _load(os.fspath(directory), (stat.st_mtime_ns, stat.st_size))


@functools.lru_cache(maxsize=4)
def _load(folder: str, stamp: tuple[int, int]) -> PageProfile:
    """Read once for all layers; *stamp* tells a file from a later one of its name."""
    from vllm_kvcompress.codecs.profile import read_json

    try:
        section = read_json(Path(folder)).get(SECTION)
    except (OSError, ValueError) as error:
        raise _damaged(folder, str(error)) from error
    if section is None:
        raise ValueError(
            f"the profile in {folder} says nothing of pages; calibrate again, with --windows above "
            "0, or leave the profile out"
        )
    try:
        return replace(parse(section), folder=folder)
    except (
        *(LookupError, TypeError, AttributeError, OverflowError, ValueError),
        RecursionError,
    ) as error:
        raise _damaged(folder, f"{type(error).__name__}: {error}") from error


def parse(section: Mapping[str, Any]) -> PageProfile:
    """The profile of what ``calibration.hints.measure_pages`` gives.

    Raises ValueError, LookupError, TypeError, AttributeError or OverflowError where it is no such
    thing.
    """
    if section["digest"] != digest_of(section):
        raise ValueError(f"its digest is {digest_of(section)}, and it names {section['digest']!r}")
    model = section["model"]
    if not isinstance(model["name"], str) or not isinstance(model["model_type"], str):
        raise ValueError("the model has no name")
    shape = ModelShape(
        model["model_type"],
        *(_whole(model[name], name) for name in ("layers", "kv_heads", "head_size")),
    )
    layers = shape.layers
    if not _finite(section["max_loss"]) or section["max_loss"] < 0:
        raise ValueError(f"max_loss is {section['max_loss']!r}, not a number from 0 on")
    for kind in (section["fp8"], *([section["kivi"]] if "kivi" in section else ())):
        for loss in (*kind["layers"], kind["all"], kind["left"]):
            if not _finite(loss):
                raise ValueError(f"a loss is {loss!r}")
        if len(kind["layers"]) != layers:
            raise ValueError(f"there are losses of {len(kind['layers'])} layers, not of {layers}")
        _layers(kind["skip_layers"], layers)
    return PageProfile(
        name=model["name"],
        shape=shape,
        fp8_skip_layers=_layers(section["fp8"]["skip_layers"], layers),
        kivi=_kivi(section["kivi"], layers) if "kivi" in section else KiviHints(),
        digest=section["digest"],
    )


def _kivi(section: Mapping[str, Any], layers: int) -> KiviHints:
    from vllm_kvcompress.config import CLIPPINGS, KIVI_DTYPES

    if section["dtype"] not in KIVI_DTYPES:
        raise ValueError(f"dtype is {section['dtype']!r}, not one of {', '.join(KIVI_DTYPES)}")
    if not _finite(section["with_4bit"]["left"]):
        raise ValueError(f"a loss is {section['with_4bit']['left']!r}")
    if section["clipping"] not in CLIPPINGS:
        raise ValueError(f"clipping is {section['clipping']!r}, not one of {', '.join(CLIPPINGS)}")
    return KiviHints(
        clipping=section["clipping"],
        four_bits=frozenset(_layers(section["with_4bit"]["layers"], layers)),
        skip_layers=_layers(section["with_4bit"]["skip_layers"], layers),
    )


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_LAYERS:
        raise ValueError(f"{name} is {value!r}, not a number from 1 to {MAX_LAYERS}")
    return value


def _layers(entries: Any, layers: int) -> tuple[int, ...]:
    if not isinstance(entries, list) or any(
        not isinstance(entry, int) or isinstance(entry, bool) or not 0 <= entry < layers
        for entry in entries
    ):
        raise ValueError(f"{entries!r} are not layers of 0 to {layers - 1}")
    return tuple(entries)


def _damaged(folder: str, detail: str) -> ValueError:
    return ValueError(
        f"the profile in {folder} is damaged or of another version ({detail:.200}); calibrate again"
    )
