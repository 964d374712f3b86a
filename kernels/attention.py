"""What a layer's attention does beside softmax(q k) v, for every implementation."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Attention:
    """What a layer's attention does beside softmax(q k)."""

    scale: float
    window: int = 0
    """Tokens that a token sees, itself included; 0 for all."""
    soft_cap: float = 0.0
    """Logits become ``soft_cap * tanh(logits / soft_cap)``; 0 for none."""
    slopes: torch.Tensor | None = None
    """ALiBi's slopes, float32 ``[heads]``: added times the distance, which is negative."""
    sinks: torch.Tensor | None = None
    """Logits ``[heads]`` that count in the denominator only."""
