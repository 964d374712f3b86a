"""LMCache's CacheGen as a peer: its quantiser, and what it stores, through its own CPU kernels.

The kernels are one file of the ``lmcache`` wheel that needs only torch and numba; it is read from a
wheel, or from a copy that pip downloads once into a cache directory. Nothing else of the wheel is
installed or run.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

VERSION = "0.5.6"
KERNELS = "lmcache/v1/platform/torch_ops/cachegen_kernels.py"
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "peers"
CDF_BINS = 32


class PeerUnavailable(RuntimeError):
    """The peer's kernels could not be found or downloaded."""


def _download(cache: Path) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    pattern = f"lmcache-{VERSION}-*.whl"
    if not list(cache.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", str(cache), f"lmcache=={VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise PeerUnavailable(
                f"pip could not download lmcache {VERSION} ({last}); name a wheel with --lmcache"
            )
    return next(cache.glob(pattern))


def load_kernels(source: Path | None = None, cache: Path = CACHE) -> ModuleType:
    """LMCache's CPU kernels as a module.

    source: a wheel, or the kernels' own file; if None, the wheel in ``cache``, downloaded when it
    is not there. Raises PeerUnavailable.
    """
    source = source or _download(cache)
    if not source.is_file():
        raise PeerUnavailable(f"{source} is not a file; --lmcache takes a wheel or {KERNELS}")
    if source.suffix == ".whl":
        with zipfile.ZipFile(source) as wheel:
            source = Path(wheel.extract(KERNELS, cache / f"lmcache-{VERSION}"))
    spec = importlib.util.spec_from_file_location("lmcache_cachegen_kernels", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bins(layers: int, layer: int, value: int) -> int:
    """Bins of a layer; value: 0 K, 1 V."""
    if layers < 10:
        return 32
    return 32 if layer < (2 if value else 10) else 16


def quantise(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and values that LMCache's quantiser makes of ``[layers, 2, tokens, heads, size]``.

    Returns int8 codes of the same shape and float32 values.
    """
    layers = kv.shape[0]
    half = torch.tensor([[bins(layers, i, j) // 2 - 1 for j in (0, 1)] for i in range(layers)])
    half = half[:, :, None, None, None].float()
    x = kv.float()
    top = x.abs().amax((3, 4), keepdim=True)
    codes = torch.round(x * (half / top) + half)
    return codes.to(torch.int8), (codes - half) / half * top


@dataclass
class Stored:
    """Bytes of one chunk in LMCache's container, part by part."""

    payload: int
    tables: int
    lengths: int
    maxima: int

    @property
    def total(self) -> int:
        return self.payload + self.tables + self.lengths + self.maxima


def stored_bytes(kernels: ModuleType, codes: torch.Tensor) -> Stored:
    """What LMCache stores for the codes of one chunk, ``[layers, 2, tokens, heads, size]`` int8.

    Arithmetic-coded payload, an int16 table of 33 entries and an int32 length per (layer, K or V,
    channel), a 16-bit maximum per (layer, K or V, token). The container around them is not counted.
    """
    layers, _, tokens, heads, size = codes.shape
    payload = 0
    for value in (0, 1):
        q = codes[:, value].reshape(layers, tokens, heads * size).contiguous()
        cdf = kernels.calculate_cdf(q, CDF_BINS)
        room = torch.zeros(layers, heads * size, 2 * tokens, dtype=torch.uint8)
        lengths = torch.zeros(layers, heads * size, dtype=torch.int32)
        kernels.encode_fast_new(cdf, q, room, lengths)
        payload += int(lengths.sum())
    rows = layers * 2
    channels = rows * heads * size
    return Stored(payload, channels * (CDF_BINS + 1) * 2, channels * 4, rows * tokens * 2)
