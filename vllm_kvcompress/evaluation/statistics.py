"""Intervals of confidence for means, for shares of answers, and for ratios of times."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

CONFIDENCE = 0.95
_RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A value with the bounds that hold it with CONFIDENCE; None where nothing bounds it."""

    value: float
    low: float | None
    high: float | None

    def to_json(self) -> dict[str, float | None]:
        return asdict(self)


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of independent values and Student's interval; unbounded for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, None, None)
    margin = student_quantile((1 + CONFIDENCE) / 2, len(values) - 1) * (
        statistics.stdev(values) / math.sqrt(len(values))
    )
    return Interval(mean, mean - margin, mean + margin)


def share_interval(successes: int, trials: int) -> Interval:
    """A share and Wilson's interval, which is right near 0 and 1 too."""
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share = successes / trials
    scale = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    margin = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return Interval(share, max(0.0, centre - margin), min(1.0, centre + margin))


def lost_share_interval(base: Sequence[bool], mine: Sequence[bool]) -> Interval:
    """Share of cases that ``base`` gets right and ``mine`` does not, less the reverse.

    The interval is that of Bonett and Price (2012), Wald's with one case added to either kind of
    disagreement: cases that all agree bound a difference only by their number.
    """
    pairs = list(zip(base, mine, strict=True))
    lost = sum(a and not b for a, b in pairs)
    won = sum(b and not a for a, b in pairs)
    n = len(pairs) + 2
    p, q = (lost + 1) / n, (won + 1) / n
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    margin = z * math.sqrt((p + q - (p - q) ** 2) / n)
    value = (lost - won) / len(pairs)
    return Interval(value, max(-1.0, p - q - margin), min(1.0, p - q + margin))


def ratio_interval(ratios: Sequence[float], seed: int = 0) -> Interval:
    """The median of ratios and the interval of its bootstrap; the extremes for fewer than six.

    Each ratio is of two measurements of the same round.
    """
    middle = statistics.median(ratios)
    if len(ratios) < 6:
        return Interval(middle, min(ratios), max(ratios))
    chance = random.Random(seed)
    medians = sorted(
        statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES)
    )
    cut = round((1 - CONFIDENCE) / 2 * _RESAMPLES)
    return Interval(middle, medians[cut], medians[-cut - 1])


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the values lies, interpolated between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def student_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's distribution, for a probability above one half.

    Found by bisection on the integral of the density over ``t = sqrt(freedom) tan(angle)``, where
    it is a power of a cosine.
    """
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)

    def below(angle: float, steps: int = 200) -> float:
        width = angle / steps
        weights = (1 if i in (0, steps) else 4 if i % 2 else 2 for i in range(steps + 1))
        total = sum(w * math.cos(i * width) ** (freedom - 1) for i, w in enumerate(weights))
        return 0.5 + scale * total * width / 3

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < probability else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
