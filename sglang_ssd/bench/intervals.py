"""Ratios of paired blocks with bootstrap intervals, percentiles, and the exponent of a power law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 4000
_SEED = 7
LEAST_BLOCKS = 3
"""With fewer, an interval says nothing."""


@dataclass(frozen=True)
class Ratio:
    """A geometric mean of ratios, with its 95 % interval; NaN ends when there are too few blocks for one."""

    mean: float
    low: float
    high: float
    blocks: int

    @property
    def has_interval(self) -> bool:
        """Whether there were enough blocks for one."""
        return self.blocks >= LEAST_BLOCKS

    def __str__(self) -> str:
        if not self.has_interval:
            return f"{self.mean:.2f} ({self.blocks} blocks)"
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def paired_ratio(ratios: Sequence[float]) -> Ratio | None:
    """Of positive ratios, one for each block: percentile bootstrap over blocks; None without any."""
    if not ratios:
        return None
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    mean = float(np.exp(logs.mean()))
    if len(logs) < LEAST_BLOCKS:
        return Ratio(mean, float("nan"), float("nan"), len(logs))
    picks = np.random.default_rng(_SEED).integers(0, len(logs), (_RESAMPLES, len(logs)))
    low, high = np.exp(np.percentile(logs[picks].mean(axis=1), [2.5, 97.5]))
    return Ratio(mean, float(low), float(high), len(logs))


def percentiles(values: Sequence[float]) -> tuple[float, float, float] | None:
    """p50, p95 and p99; None of nothing."""
    if not values:
        return None
    p50, p95, p99 = np.percentile(np.asarray(values, dtype=np.float64), [50, 95, 99])
    return float(p50), float(p95), float(p99)


def power_law(x: Sequence[float], y: Sequence[float]) -> tuple[float, float] | None:
    """(c, r) of y = c * x**-r by least squares on the logarithms; None with fewer than two positive points."""
    points = [(a, b) for a, b in zip(x, y, strict=True) if a > 0 and b > 0]
    if len({a for a, _ in points}) < 2:
        return None
    slope, offset = np.polyfit(np.log([a for a, _ in points]), np.log([b for _, b in points]), 1)
    return float(np.exp(offset)), float(-slope)
