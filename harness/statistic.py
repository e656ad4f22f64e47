"""Ratios of times with intervals: one row's, bootstrapped over its windows, and geometric means over cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

RESAMPLES = 1000
CONFIDENCE = 0.95
# A best time is one that comes again: the spread of the best few samples is its noise.
AGREEING = 3
Samples = Sequence[float]


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


def noise(samples: Samples) -> float:
    """By how much the three best samples differ, relative to the best; samples that are added can only lower it."""
    best = sorted(samples)[:AGREEING]
    return best[-1] / best[0] - 1 if best else 0.0


def row_ratio(baseline: Samples, mine: Samples, *, seed: int = 0) -> Ratio:
    """Best baseline sample / best of ours, one row; the interval resamples the windows of both."""
    found = mean_ratio([(baseline, mine)], seed=seed)
    assert found is not None
    return found


def mean_ratio(pairs: Sequence[tuple[Samples, Samples]], *, seed: int = 0) -> Ratio | None:
    """Geometric mean over cases of (best baseline sample / best sample of ours); above 1, ours is better.

    pairs: one (baseline's samples, our samples) a case. The interval draws cases with replacement, and each one's
    samples on both sides with replacement, of which the best counts as it does in the value. None without a case.
    """
    if not pairs:
        return None
    value = geometric_mean([min(baseline) / min(mine) for baseline, mine in pairs])
    draw = np.random.default_rng(seed)
    logs = np.stack([np.log(_bests(baseline, draw) / _bests(mine, draw)) for baseline, mine in pairs])
    cases = draw.integers(len(pairs), size=(RESAMPLES, len(pairs)))
    means = np.sort(logs[cases, np.arange(RESAMPLES)[:, None]].mean(axis=1))
    tail = round((1 - CONFIDENCE) / 2 * RESAMPLES)
    low, high = (math.exp(means[at]) for at in (tail, -tail - 1))
    # A resample's best is never better than the best: where one side is the noisier, its bound can miss the value.
    return Ratio(value, min(low, value), max(high, value), len(pairs))


def _bests(samples: Samples, draw: Any) -> Any:
    """The best of each resample."""
    values = np.asarray(samples, dtype=float)
    return values[draw.integers(len(values), size=(RESAMPLES, len(values)))].min(axis=1)
