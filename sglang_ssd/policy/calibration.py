"""From what the draft's scores say to what really happens: one monotone curve for each range of temperatures."""

from __future__ import annotations

import numpy as np

from sglang_ssd.policy.planner import Floats, Ints

KNOTS = np.array([0.0, 0.01, 0.02, 0.04, 0.07, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98, 1.0])
"""Where a curve may bend."""
HOTTEST = np.array([0.0, 0.4, 0.85, 1.15])
"""The upper ends of the ranges; the last range is open."""
_TRUST = 12.0
"""Trials at a knot that weigh as much as the raw value."""
_HALF_LIFE = 4000.0
"""Trials after which an old one counts half."""


def temperature_range(temperatures: Floats) -> Ints:
    """Which curve belongs to each of ``temperatures`` [n]; 0 is greedy."""
    return np.searchsorted(HOTTEST, temperatures, side="left").astype(np.int64)


class Calibration:
    """Counts how often events of a predicted chance happen. Until something is known, it is raised to ``exponent``."""

    def __init__(self, exponent: float = 1.0) -> None:
        shape = (len(HOTTEST) + 1, len(KNOTS))
        self._start = KNOTS**exponent
        self._tried, self._happened = np.zeros(shape), np.zeros(shape)
        self._curves = np.tile(self._start, (shape[0], 1))

    def __call__(self, predicted: Floats, ranges: Ints) -> Floats:
        """The calibrated chances of ``predicted`` [S, ...], by the ``ranges`` [S] of the sessions."""
        present = np.flatnonzero(np.bincount(ranges))
        if len(present) == 1:
            alike: Floats = np.interp(predicted, KNOTS, self._curves[present[0]])
            return alike
        calibrated = np.empty_like(predicted)
        for each in present:
            mine = ranges == each
            calibrated[mine] = np.interp(predicted[mine], KNOTS, self._curves[each])
        return calibrated

    def observe(self, predicted: Floats, happened: Floats, ranges: Ints) -> None:
        """N trials: their raw chances, 1.0 where the event happened, and their ranges, all [n].

        Each trial is shared by the two knots around it.
        """
        above = np.clip(np.searchsorted(KNOTS, predicted, side="left"), 1, len(KNOTS) - 1)
        share = (predicted - KNOTS[above - 1]) / (KNOTS[above] - KNOTS[above - 1])
        trials = np.bincount(ranges, minlength=len(self._curves))
        fading = 0.5 ** (trials / _HALF_LIFE)
        self._tried *= fading[:, None]
        self._happened *= fading[:, None]
        for knot, weight in ((above - 1, 1 - share), (above, share)):
            np.add.at(self._tried, (ranges, knot), weight)
            np.add.at(self._happened, (ranges, knot), weight * happened)
        for each in np.flatnonzero(trials):
            weights = self._tried[each] + _TRUST
            self._curves[each] = rising((self._happened[each] + _TRUST * self._start) / weights, weights)


def rising(values: Floats, weights: Floats) -> Floats:
    """The nearest curve to ``values`` [n], by weighted squares, that never falls: neighbours that do are pooled."""
    if not np.count_nonzero(values[1:] < values[:-1]):
        return values
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            right, left = pools.pop(), pools.pop()
            total = left[1] + right[1]
            pools.append(((left[0] * left[1] + right[0] * right[1]) / total, total, left[2] + right[2]))
    return np.repeat([value for value, _, _ in pools], [count for _, _, count in pools])
