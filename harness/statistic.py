"""Ratios with intervals: geometric means over cases, bootstrapped over cases and, within each, over windows."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """A geometric mean and its 95 % interval; `n` cases went into it."""

    value: float
    low: float
    high: float
    n: int

    @property
    def tie(self) -> bool:
        """Whether the interval contains 1."""
        return self.low <= 1 <= self.high


def geometric_mean(values: Sequence[float]) -> float:
    """exp(mean(log)); ValueError where there is no value or one that is not positive."""
    if not values or min(values) <= 0:
        raise ValueError(f"geometric mean of {list(values)}: wanted positive values")
    return math.exp(fmean(math.log(value) for value in values))


def mean_ratio(pairs: Sequence[tuple[Sequence[float], Sequence[float]]], *, seed: int = 0) -> Ratio | None:
    """Geometric mean over cases of (best baseline sample / best sample of ours); above 1, ours is better.

    pairs: one (baseline's samples, our samples) a case. The interval draws cases with replacement, and for each one
    sample of either side. None without a case.
    """
    if not pairs:
        return None
    logs = [[math.log(base / ours) for base in baseline for ours in mine] for baseline, mine in pairs]
    draw = random.Random(seed)
    means = sorted(fmean(draw.choice(case) for case in draw.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    tail = round((1 - CONFIDENCE) / 2 * RESAMPLES)
    value = geometric_mean([min(baseline) / min(mine) for baseline, mine in pairs])
    return Ratio(value, math.exp(means[tail]), math.exp(means[-tail - 1]), len(pairs))
