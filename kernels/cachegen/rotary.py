"""Rotary frequencies of K, measured on the K of a chunk itself.

K before its rotary embedding has a nearly constant mean, so after it each channel pair (i, i + D/2)
of a head turns about a circle by the same angle a token in every layer and head. The encoder needs
no model configuration for it, and keys without rotary embedding come out with frequency zero.
Every device path uses this one function: the frequencies decide the bytes of a blob.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit

from . import format as fmt

_MIN_TOKENS = 32
_MAX_LAYERS = 8
_MAX_HEADS = 2
_FLUSH_ROWS = 32


def estimate_turns(keys: torch.Tensor) -> np.ndarray | None:
    """Frequencies uint32 [D / 2] in 2^-32 turn a token, from K ``[layers, T, heads, D]``.

    None where there are too few tokens to tell or heads have no pairs. A few layers and heads are
    looked at.
    """
    layers, tokens, heads, size = keys.shape
    if tokens < _MIN_TOKENS or size % 2:
        return None
    sample = keys[:: -(-layers // _MAX_LAYERS), :, : min(heads, _MAX_HEADS)].transpose(1, 2)
    signals = sample.float().cpu().contiguous().numpy().reshape(-1, tokens, size)
    turns = np.empty(size // 2, np.uint32)
    _estimate(signals, turns)
    return turns


@njit(nogil=True, cache=True)
def _estimate(signals, turns):
    """Phase of each pair's autocorrelation at lags 1, 2, 4, …; each counts the next one's turns."""
    count, tokens, size = signals.shape
    half = size // 2
    fixed = np.zeros((tokens, size), np.int32)
    lags = 0
    while 2 << lags <= tokens:
        lags += 1
    real = np.zeros((lags, half), np.int64)
    imaginary = np.zeros((lags, half), np.int64)
    for k in range(count):
        largest = np.float32(0)
        for x in signals[k].flat:
            if np.isfinite(x):
                largest = max(largest, abs(x))
        if largest < fmt.SMALLEST_MAX or largest > 1 / fmt.SMALLEST_MAX:
            continue
        scale = np.float32(2.0 ** (11 - math.frexp(largest)[1]))
        for t in range(tokens):
            for c in range(size):
                x = signals[k, t, c]
                fixed[t, c] = np.int32(np.rint(x * scale)) if np.isfinite(x) else 0
        for j in range(lags):
            lag = 1 << j
            re = np.zeros(half, np.int32)
            im = np.zeros(half, np.int32)
            for t in range(tokens - lag):
                now, then = fixed[t], fixed[t + lag]
                for i in range(half):
                    re[i] += then[i] * now[i] + then[half + i] * now[half + i]
                    im[i] += then[half + i] * now[i] - then[i] * now[half + i]
                if t % _FLUSH_ROWS == _FLUSH_ROWS - 1 or t == tokens - lag - 1:
                    real[j] += re
                    imaginary[j] += im
                    re[:] = 0
                    im[:] = 0
    for i in range(half):
        turn = 0.0
        for j in range(lags):
            lag = 1 << j
            phase = math.atan2(np.float64(imaginary[j, i]), np.float64(real[j, i])) / (2 * math.pi)
            turn = (phase + np.rint(turn * lag - phase)) / lag
        turns[i] = np.int64(np.rint(turn * 2.0**32)) & 0xFFFFFFFF
