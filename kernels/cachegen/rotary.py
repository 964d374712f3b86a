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
_MAX_LAYERS = 6
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
    sample = keys[:: -(-layers // _MAX_LAYERS), :, : min(heads, _MAX_HEADS)].cpu()
    # In small pieces, which torch does not spread over threads.
    rows = [head.float().numpy() for layer in sample for head in layer.unbind(1)]
    signals = np.stack(rows)
    turns = np.empty(size // 2, np.uint32)
    _estimate(signals, turns)
    return turns


@njit(nogil=True, cache=True)
def _estimate(signals, turns):
    """Phase of each pair's autocorrelation at lags 1, 2, 4, …; each counts the next one's turns."""
    count, tokens, size = signals.shape
    half = size // 2
    first = np.zeros((tokens, half), np.int32)
    second = np.zeros((tokens, half), np.int32)
    lags = 0
    while 2 << lags <= tokens:
        lags += 1
    real = np.zeros((lags, half), np.int64)
    imaginary = np.zeros((lags, half), np.int64)
    re = np.zeros(half, np.int32)
    im = np.zeros(half, np.int32)
    infinity = np.float32(np.inf)
    for k in range(count):
        highest = np.zeros(size, np.float32)
        for t in range(tokens):
            row = signals[k, t]
            for c in range(size):
                x = abs(row[c])
                highest[c] = x if x > highest[c] and x < infinity else highest[c]
        largest = highest.max()
        if largest < fmt.SMALLEST_MAX or largest > 1 / fmt.SMALLEST_MAX:
            continue
        scale = np.float32(2.0 ** (11 - math.frexp(largest)[1]))
        for t in range(tokens):
            for side, target in ((0, first[t]), (half, second[t])):
                row = signals[k, t, side : side + half]
                for i in range(half):
                    x = row[i] if abs(row[i]) < infinity else np.float32(0)
                    target[i] = np.int32(np.rint(x * scale))
        for j in range(lags):
            lag = 1 << j
            for t in range(tokens - lag):
                a, b, later_a, later_b = first[t], second[t], first[t + lag], second[t + lag]
                for i in range(half):
                    re[i] += later_a[i] * a[i] + later_b[i] * b[i]
                    im[i] += later_b[i] * a[i] - later_a[i] * b[i]
                if t % _FLUSH_ROWS == _FLUSH_ROWS - 1 or t == tokens - lag - 1:
                    for i in range(half):
                        real[j, i] += re[i]
                        imaginary[j, i] += im[i]
                        re[i] = 0
                        im[i] = 0
    for i in range(half):
        turn = 0.0
        for j in range(lags):
            lag = 1 << j
            phase = math.atan2(np.float64(imaginary[j, i]), np.float64(real[j, i])) / (2 * math.pi)
            turn = (phase + np.rint(turn * lag - phase)) / lag
        turns[i] = np.int64(np.rint(turn * 2.0**32)) & 0xFFFFFFFF
