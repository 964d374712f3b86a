"""Calibrated profiles of the cachegen codec: two files in a directory, read and checked.

``kvcompress.json`` holds, under ``cachegen``, the sizes of the model, the start of its digest and
per level and K and V the step (``alpha``, in units of the coefficients' root mean square), the dead
zone (in steps) and the rank; ``kvcompress.safetensors`` holds the arrays of the transform as
``cachegen.scale``, ``.turns``, ``.mean``, ``.basis.k`` and ``.basis.v``. What they mean stands in
``vllm_kvcompress.kernels.cachegen.transform``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from vllm_kvcompress.codecs.container import PROFILE_DIGEST_BYTES
from vllm_kvcompress.kernels.cachegen import format as fmt
from vllm_kvcompress.kernels.cachegen.transform import Transform

JSON_NAME = "kvcompress.json"
TENSORS_NAME = "kvcompress.safetensors"
FORMAT = 1
LEVELS = ("high", "medium", "low")
"""The levels that a profile changes."""

ARRAYS = ("scale", "turns", "mean", "basis.k", "basis.v")
MAX_JSON_BYTES = 16 << 20


@dataclass(frozen=True)
class Level:
    """How one level codes the coefficients of K and of V: a quantiser and a rank each."""

    quantisers: tuple[fmt.Quantiser, fmt.Quantiser]
    ranks: tuple[int, int]


@dataclass(frozen=True)
class Profile:
    """A transform and, for each of LEVELS, its quantisers and ranks."""

    transform: Transform
    levels: Mapping[str, Level]
    digest: bytes
    """16 bytes that depend on everything here."""

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless ``[L, 2, T, H, D]`` is a chunk of the model of this profile."""
        t = self.transform
        layers, values, _, heads, size = shape
        if (layers, values, heads, size) != (t.layers, 2, t.kv_heads, t.head_size):
            raise ValueError(
                f"the profile is of a model with {t.layers} layers of {t.kv_heads} KV heads of "
                f"{t.head_size}, and these K and V have {layers} layers of {heads} KV heads of "
                f"{size}; calibrate this model, or leave the profile out"
            )


def describe(transform: Transform, levels: Mapping[str, Level]) -> dict[str, Any]:
    """What stands under ``cachegen`` in ``kvcompress.json``."""
    return {
        "digest": digest_of(transform, levels).hex(),
        "layers": transform.layers,
        "kv_heads": transform.kv_heads,
        "head_size": transform.head_size,
        "group_layers": transform.group_layers,
        "max_positions": transform.max_positions,
        "levels": {
            name: {
                "alpha": [q.alpha for q in level.quantisers],
                "dead_zone": [q.dead_zone / (1 << fmt.CODE_BITS) for q in level.quantisers],
                "rank": list(level.ranks),
            }
            for name, level in levels.items()
        },
    }


def arrays_of(transform: Transform) -> dict[str, torch.Tensor]:
    """What stands in ``kvcompress.safetensors``."""
    basis_k, basis_v = transform.basis
    found = (transform.scale, transform.turns, transform.mean, basis_k, basis_v)
    return {f"cachegen.{name}": x.contiguous() for name, x in zip(ARRAYS, found, strict=True)}


def digest_of(transform: Transform, levels: Mapping[str, Level]) -> bytes:
    """A digest of all that changes the meaning of a blob's bytes."""
    state = hashlib.blake2b(digest_size=PROFILE_DIGEST_BYTES)
    sizes = (transform.layers, transform.kv_heads, transform.head_size, transform.group_layers)
    state.update(repr((FORMAT, fmt.CODEC_VERSION, sizes, transform.max_positions)).encode())
    state.update(repr([(name, levels[name]) for name in sorted(levels)]).encode())
    for name, array in sorted(arrays_of(transform).items()):
        state.update(f"{name} {array.dtype} {list(array.shape)}".encode())
        state.update(array.cpu().numpy().tobytes())
    return state.digest()


def load_profile(directory: str | os.PathLike[str]) -> Profile:
    """The profile in a directory. Raises ValueError, which says what is wrong and what to do."""
    folder = Path(directory)
    files = [folder / JSON_NAME, folder / TENSORS_NAME]
    try:
        stamps = tuple((file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        why = str(error)
        if isinstance(error, OSError):
            why = f"{error.strerror}: {Path(error.filename).name}"
        raise ValueError(
            f"{folder} holds no profile ({why}); give the directory that `vllm-kvcompress "
            "calibrate` wrote"
        ) from error
    return _load(str(folder), stamps)


@functools.lru_cache(maxsize=4)
def _load(folder: str, stamps: tuple[tuple[int, int], ...]) -> Profile:
    """Read once for all codecs; *stamps* tell a file from a later one of its name."""
    try:
        content = read_json(Path(folder))
        settings = content["cachegen"]
        profile = parse(settings, _arrays(Path(folder) / TENSORS_NAME))
    except (LookupError, TypeError, OverflowError, OSError) as error:
        raise _damaged(folder, f"{type(error).__name__}: {error}") from error
    except ValueError as error:
        raise _damaged(folder, str(error)) from error
    if profile.digest.hex() != settings.get("digest"):
        raise _damaged(folder, f"its digest is {profile.digest.hex()}")
    return profile


def _arrays(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def read_json(folder: Path) -> dict[str, Any]:
    """``kvcompress.json`` of a directory. Raises ValueError if it is not what it should be."""
    path = folder / JSON_NAME
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path} is too large")
    try:
        content = json.loads(path.read_bytes())
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}, which this version reads")
    return content


def parse(settings: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]) -> Profile:
    """The profile of what ``describe`` and ``arrays_of`` give.

    Raises ValueError, LookupError, TypeError or OverflowError where they do not fit each other.
    """
    sizes = [
        _whole(settings[name], name)
        for name in ("layers", "kv_heads", "head_size", "group_layers", "max_positions")
    ]
    scale, turns, mean, basis_k, basis_v = (arrays[f"cachegen.{name}"] for name in ARRAYS)
    transform = Transform(*sizes, scale, turns, mean, (basis_k, basis_v))
    levels = {}
    if set(settings["levels"]) != set(LEVELS):
        raise ValueError(f"its levels are not {', '.join(LEVELS)}")
    for name in LEVELS:
        given = settings["levels"][name]
        if any(len(given[key]) != 2 for key in ("alpha", "dead_zone", "rank")):
            raise ValueError(f"level {name} has not one value each for K and V")
        quantisers = []
        ranks = []
        for value, basis in enumerate(transform.basis):
            alpha, dead_zone = float(given["alpha"][value]), float(given["dead_zone"][value])
            rank = _whole(given["rank"][value], "rank")
            if not 1e-6 <= alpha <= 1e6 or not 0 <= dead_zone < 0.5:
                raise ValueError(f"a step or dead zone of level {name} is out of range")
            if not 1 <= rank <= basis.shape[1]:
                raise ValueError(f"rank {rank} of level {name} is not 1 to {basis.shape[1]}")
            units = round(dead_zone * (1 << fmt.CODE_BITS))
            quantisers.append(fmt.Quantiser(fmt.UNIFORM, alpha, units))
            ranks.append(rank)
        levels[name] = Level(tuple(quantisers), tuple(ranks))
    return Profile(transform, levels, digest_of(transform, levels))


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
        raise ValueError(f"{name} is {value!r}, not a number above 0")
    return value


def _damaged(folder: str, detail: str) -> ValueError:
    return ValueError(
        f"the profile in {folder} is damaged or of another version ({detail:.300}); calibrate again"
    )
