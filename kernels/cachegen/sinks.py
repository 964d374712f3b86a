"""Attention sinks of a chunk, and their rows beside the coded stripes.

A model's attention rests much of its weight on a few tokens, mostly the first, whose K and V are
several times smaller than the others'. One step for all tokens of a stripe would drown them, and
what is lost there costs the model more than all other errors together; so they are kept as they
are. Every device path uses this one function to find them: they decide the bytes of a blob.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit

from . import format as fmt

# More than may be kept exactly, so that an ordinary token is left to stand in for them.
_MIN_TOKENS = fmt.MAX_SINKS + 1
_MAX_LAYERS = 8
_MAX_HEADS = 2
# Energy against the stripe's median, four times less or sixteen times more, in half of the stripes.
_QUIET = 4
_LOUD = 16


def find_sinks(kv: torch.Tensor) -> list[int]:
    """Tokens of ``kv`` ``[layers, 1 or 2, T, heads, D]`` to keep exactly, at most MAX_SINKS.

    A few layers and heads are looked at. Integer arithmetic throughout.
    """
    layers, _, tokens, heads, size = kv.shape
    if tokens < _MIN_TOKENS:
        return []
    sample = kv[:: -(-layers // _MAX_LAYERS), :, :, : min(heads, _MAX_HEADS)]
    rows = sample.float().cpu().contiguous().numpy().reshape(-1, tokens, sample.shape[3] * size)
    votes = np.zeros(tokens, np.int64)
    _vote(rows, votes)
    return np.flatnonzero(2 * votes >= len(rows))[: fmt.MAX_SINKS].tolist()


def cover(stripes: torch.Tensor, sinks: list[int]) -> torch.Tensor:
    """A copy of ``[stripes, T, C]`` in which sinks repeat an ordinary token, to cost few bits."""
    tokens = stripes.shape[1]
    ordinary = [t for t in range(tokens) if t not in sinks]
    stand_in = [min(ordinary, key=lambda t, s=s: (t < s, abs(t - s))) for s in sinks]
    covered = stripes.clone()
    covered[:, sinks] = stripes[:, stand_in]
    return covered


@njit(nogil=True, cache=True)
def _vote(stripes, votes):
    """Count for each token the stripes ``[n, T, C]`` where its energy is far from the median."""
    count, tokens, channels = stripes.shape
    energy = np.empty(tokens, np.int64)
    for k in range(count):
        largest = np.float32(0)
        for x in stripes[k].flat:
            if np.isfinite(x):
                largest = max(largest, abs(x))
        if largest < fmt.SMALLEST_MAX or largest > 1 / fmt.SMALLEST_MAX:
            continue
        scale = np.float32(2.0 ** (11 - math.frexp(largest)[1]))
        for t in range(tokens):
            total = np.int64(0)
            for c in range(channels):
                x = stripes[k, t, c]
                if np.isfinite(x):
                    fixed = np.int64(np.rint(x * scale))
                    total += fixed * fixed
            energy[t] = total
        median = np.sort(energy)[tokens // 2]
        for t in range(tokens):
            if energy[t] * _QUIET < median or energy[t] > _LOUD * median:
                votes[t] += 1
