"""The profile of the cachegen codec, from the K and V of a model on calibration text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from vllm_kvcompress.codecs import create_codec
from vllm_kvcompress.codecs.profile import LEVELS, Level, Profile, digest_of
from vllm_kvcompress.kernels.cachegen import format as fmt
from vllm_kvcompress.kernels.cachegen import implementation
from vllm_kvcompress.kernels.cachegen.sinks import cover, find_sinks
from vllm_kvcompress.kernels.cachegen.transform import (
    BASIS_BITS,
    MAX_MEAN,
    SAMPLE_BITS,
    Transform,
)

CHUNK_TOKENS = 256
MAX_WIDTH = 1024
TOKENS_PER_CHANNEL = 8
"""Fewer tokens than so many times the channels that are decorrelated would fit noise."""

_SMALLEST_DEVIATION = 0.12
"""In steps: components below it are always coded as zero, and left out."""
_FITS = 3


class Statistics:
    """Sums over chunks, from which the transform follows. L layers, C channels a layer.

    turns: int64 [L, D / 2], rotary frequencies of each layer in 2^-32 turn a token.
    groups: of layers that are decorrelated together, equally large.
    """

    def __init__(self, turns: torch.Tensor, layers: int, heads: int, head_size: int, groups: int):
        self.turns, self.layers, self.heads, self.head_size = turns, layers, heads, head_size
        self.groups = groups
        channels = heads * head_size
        width = layers // groups * channels
        self.tokens = 0
        self.square = torch.zeros(layers, 2, dtype=torch.float64)
        self.total = torch.zeros(2, layers, channels, dtype=torch.float64)
        self.covariance = torch.zeros(2, groups, width, width)

    def add(self, kv: torch.Tensor, start: int) -> None:
        """A chunk ``[L, 2, T, H, D]``, on any device, whose first token has this position."""
        tokens = kv.shape[2]
        stripes = kv.flatten(0, 1).flatten(2)
        sinks = find_sinks(kv)
        if sinks:
            stripes = cover(stripes, sinks)
        x = stripes.float().unflatten(0, (self.layers, 2)).transpose(0, 1).contiguous()
        self.square += x.double().square().sum((2, 3)).T.cpu()
        x[0] = _turned_back(x[0], self.turns, start, self.heads)
        self.tokens += tokens
        self.total += x.double().sum(2).cpu()
        # What is left when a chunk's own means are taken out is what will be coded.
        x -= x.mean(2, keepdim=True)
        grouped = x.unflatten(1, (self.groups, -1)).transpose(2, 3).flatten(3)
        self.covariance = self.covariance.to(x.device)
        self.covariance += grouped.transpose(2, 3) @ grouped

    def transform(self, max_positions: int) -> tuple[Transform, torch.Tensor]:
        """The transform at full rank, and the variances ``[2, groups, width]`` of its components.

        Variances are in units of the layers' mean squares, in descending order.
        """
        channels = self.heads * self.head_size
        scale = (self.square / (self.tokens * channels)).sqrt().clamp_min(1e-20).float()
        weights = (1 / scale.double()).T.repeat_interleave(channels, 1)
        by_group = weights.view(2, self.groups, -1)
        covariance = self.covariance.double().cpu() * by_group[..., None] * by_group[:, :, None]
        variances, vectors = torch.linalg.eigh(covariance / self.tokens)
        basis = (vectors.transpose(2, 3).flip(2) * (1 << BASIS_BITS)).round().to(torch.int16)
        mean = self.total / self.tokens * weights.view(2, self.layers, channels)
        mean = (mean * (1 << (SAMPLE_BITS + fmt.TURN_BITS))).round().clamp(-MAX_MEAN, MAX_MEAN)
        transform = Transform(
            self.layers, self.heads, self.head_size, self.layers // self.groups, max_positions,
            scale, self.turns, mean.flatten(1).to(torch.int32), (basis[0], basis[1]),
        )  # fmt: skip
        return transform, variances.flip(2).clamp_min(0)


def _turned_back(keys: torch.Tensor, turns: torch.Tensor, start: int, heads: int) -> torch.Tensor:
    """K ``[L, T, C]`` before its rotary embedding."""
    if not turns.any():
        return keys
    turns = turns.to(keys.device)
    positions = torch.arange(start, start + keys.shape[1], device=keys.device)
    angle = (positions[:, None] * turns[:, None] & 0xFFFFFFFF).double() * (2 * math.pi / 2**32)
    cos, sin = angle.cos().float()[:, :, None], angle.sin().float()[:, :, None]
    a, b = keys.unflatten(2, (heads, 2, -1)).unbind(3)
    return torch.stack([a * cos + b * sin, b * cos - a * sin], 3).flatten(2)


def group_layers(layers: int, channels: int, tokens: int, width: int) -> int:
    """Layers to decorrelate together: a divisor of *layers* that keeps within *width* channels.

    tokens: of the calibration; too few of them narrow it further.
    """
    room = min(width, tokens // TOKENS_PER_CHANNEL)
    fitting = [n for n in range(1, layers + 1) if layers % n == 0 and n * channels <= room]
    return max(fitting, default=1)


def error(kv: Sequence[torch.Tensor], back: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Squared error over squared norm, mean over the layers, of K and of V of some chunks."""
    noise = sum(
        (b.double() - a.double()).square().sum((2, 3, 4)) for a, b in zip(kv, back, strict=True)
    )
    norm = sum(a.double().square().sum((2, 3, 4)) for a in kv)
    k, v = (noise / norm.clamp_min(1e-30)).mean(0).tolist()
    return k, v


def fit_profile(
    statistics: Statistics, max_positions: int, chunks: Sequence[torch.Tensor]
) -> Profile:
    """The profile whose levels have, on these chunks, the error of the levels without a profile.

    chunks: ``[L, 2, T, H, D]`` each, best not among those of the statistics.
    """
    transform, variances = statistics.transform(max_positions)
    coefficients = [_coefficients(transform, kv) for kv in chunks]
    largest = [1, 1]
    levels: dict[str, Level] = {}
    for name in LEVELS:
        plain = [fmt.quantiser(name, statistics.layers, 0, value) for value in (0, 1)]
        wanted = _codec_error(chunks, name, None)
        quantisers, ranks = [], []
        for value, quantiser in enumerate(plain):
            # The mean square of a value is one in the units of the variances: alpha is the step.
            kept = variances[value] > (_SMALLEST_DEVIATION * quantiser.alpha) ** 2
            rank = max(1, int(kept.sum(1).max()))
            coded = variances[value][:, :rank].mean().item()
            fitted = replace(
                quantiser, alpha=quantiser.alpha / math.sqrt(max(coded, 1e-12)), rotary=False
            )
            exact = [pair[value] for pair in coefficients]
            for _ in range(_FITS):
                found = _coefficient_error(exact, rank, fitted)
                fitted = _closer(fitted, wanted[value], found)
            quantisers.append(fitted)
            ranks.append(rank)
            largest[value] = max(largest[value], rank)
        # Once more on the values themselves, layer by layer, as the levels are measured.
        trial = {name: Level((quantisers[0], quantisers[1]), (ranks[0], ranks[1]))}
        trial_profile = Profile(transform, trial, digest_of(transform, trial))
        found = _codec_error(chunks, name, trial_profile)
        k, v = (_closer(*x) for x in zip(quantisers, wanted, found, strict=True))
        levels[name] = Level((k, v), (ranks[0], ranks[1]))
    basis_k, basis_v = (b[:, :rank] for b, rank in zip(transform.basis, largest, strict=True))
    cut = replace(transform, basis=(basis_k.contiguous(), basis_v.contiguous()))
    return Profile(cut, levels, digest_of(cut, levels))


def _coefficients(transform: Transform, kv: torch.Tensor) -> list[torch.Tensor]:
    """All coefficients of a chunk without its sinks, for K and for V ``[groups, T, width]``."""
    sinks = find_sinks(kv)
    if sinks:
        kv = cover(kv.flatten(0, 1).flatten(2), sinks).view(kv.shape)
    rank = transform.basis[0].shape[1]
    return transform.forward(kv, transform.find_start(kv[:, 0]), (rank, rank))


def _coefficient_error(exact: Sequence[torch.Tensor], rank: int, quantiser: fmt.Quantiser) -> float:
    """Squared error over squared norm, as far as coefficients tell, where each value's is one."""
    _, kernels = implementation(exact[0].device)
    noise = count = 0.0
    for full in exact:
        coded = full[:, :, :rank].contiguous()
        back = torch.empty_like(coded)
        kernels.decode(kernels.encode(coded, [quantiser] * len(coded)), back)
        noise += (back - coded).double().square().sum().item()
        noise += full[:, :, rank:].double().square().sum().item()
        count += full.numel()
    return noise / count


def _codec_error(
    chunks: Sequence[torch.Tensor], level: str, profile: Profile | None
) -> tuple[float, float]:
    codec = create_codec("cachegen", level=level, profile=profile)
    return error(chunks, [codec.decode(codec.encode(kv)) for kv in chunks])


def _closer(quantiser: fmt.Quantiser, wanted: float, found: float) -> fmt.Quantiser:
    """With the step that gives the wanted error, which grows with its square."""
    if not found > 0:
        return quantiser
    return replace(quantiser, alpha=quantiser.alpha * math.sqrt(wanted / found))
