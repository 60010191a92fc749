"""Running estimates of how long things take: a draft step by its rows, a verify by batch and width.

A decision asks for the same few estimates many times, so each is worked out once between two samples.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_NEWEST = 0.2
"""Weight of the newest sample in its estimate."""
_PACE_NEWEST = 0.3
"""Quick, for what it takes for a change of pace goes into one size only, and its noise is in all alike."""
_SLOWLY = 1 / 64
"""The least weight of a sample in what a size of forward takes: the pace follows the machine, this need not."""
_NEAR = 8


class StepClock:
    """Microseconds of a draft step, by rows in powers of two."""

    def __init__(self) -> None:
        self._by_size: dict[int, tuple[float, float]] = {}
        self._estimates: dict[int, float] = {}

    def observe(self, rows: int, micros: float) -> None:
        """Count one step. A size's first step stands alone, so a slow warm-up fades within a few steps."""
        mean_rows, mean = self._by_size.get(rows.bit_length(), (rows, micros))
        newest = mean_rows + (rows - mean_rows) * _NEWEST, mean + (micros - mean) * _NEWEST
        self._by_size[rows.bit_length()] = newest
        self._estimates.clear()

    def estimate(self, rows: int) -> float:
        """Along a line through the sizes seen so far, which goes on above the largest; 0.0 before the first step."""
        if rows not in self._estimates:
            points = _plausible(sorted(self._by_size.values()))
            beyond = len(points) > 1 and rows > points[-1][0]
            self._estimates[rows] = _above(points, rows) if beyond else _between(points, rows)
        return self._estimates[rows]

    @property
    def most_rows(self) -> int:
        """Of the largest size seen so far."""
        return round(max((rows for rows, _ in self._by_size.values()), default=0))

    def points(self) -> tuple[tuple[int, int], ...]:
        """(rows, microseconds) of every size seen so far, for the wire."""
        return tuple((round(rows), round(micros)) for rows, micros in sorted(self._by_size.values()))

    def replace(self, points: tuple[tuple[int, int], ...]) -> None:
        """Know what another clock's :meth:`points` say."""
        if points != self.points():
            self._by_size = {rows.bit_length(): (float(rows), float(micros)) for rows, micros in points if rows > 0}
            self._estimates.clear()


@dataclass
class _Forward:
    """What a forward takes at the usual pace, from so many samples."""

    seconds: float
    samples: int = 1


class VerifyClock:
    """Seconds of the target's forward, by batch size and width (draft positions + 1).

    A machine is slower for a while and faster again, and every forward tells it, whatever its size. So the *pace* is
    kept apart from what each size takes: sizes that were measured at different times still compare.
    """

    def __init__(self) -> None:
        self._by_batch: dict[int, dict[int, _Forward]] = {}
        self._estimates: dict[tuple[int, int], float] = {}
        self._pace = 1.0

    def observe(self, batch: int, width: int, seconds: float) -> None:
        """Count one forward."""
        by_width = self._by_batch.setdefault(batch, {})
        self._estimates.clear()
        known = by_width.get(width)
        if known is None:
            by_width[width] = _Forward(seconds / self._pace)
            return
        # A stall of the machine says little about the next forward.
        sample = min(seconds, 2 * known.seconds * self._pace)
        self._pace += _PACE_NEWEST * (sample / known.seconds - self._pace)
        known.samples += 1
        known.seconds += max(1 / known.samples, _SLOWLY) * (sample / self._pace - known.seconds)

    def samples_near(self, batch: int, width: int) -> int:
        """How often it was seen with this batch size or one that differs by an eighth at most."""
        near = (self._by_batch[size] for size in self._by_batch if abs(size - batch) * _NEAR <= batch)
        return sum(by_width[width].samples for by_width in near if width in by_width)

    def points(self) -> dict[int, dict[int, float]]:
        """Seconds of every batch size and width seen so far, at the present pace."""
        return {batch: self._seconds(batch) for batch in sorted(self._by_batch)}

    def estimate(self, batch: int, width: int) -> float:
        """Of the nearest batch size seen so far, along a line through its widths: at the width at which it has as many
        positions; 0.0 before the first forward.
        """
        if not self._by_batch:
            return 0.0
        if (batch, width) not in self._estimates:
            nearest = min(self._by_batch, key=lambda size: (abs(size - batch), size))
            self._estimates[batch, width] = _along(self._seconds(nearest), batch * width / nearest)
        return self._estimates[batch, width]

    def _seconds(self, batch: int) -> dict[int, float]:
        return {width: self._pace * known.seconds for width, known in sorted(self._by_batch[batch].items())}


def _along(by_width: Mapping[int, float], width: float) -> float:
    """Two widths give a line that also holds beyond them; wider is never faster."""
    points = _plausible(sorted(by_width.items()))
    if len(points) < 2 or points[0][0] <= width <= points[-1][0]:
        return _between(points, width)
    if width > points[-1][0]:
        return _above(points, width)
    (left, low), (right, high) = points[:2]
    return max(low / 4, low - max(0.0, (high - low) / (right - left)) * (left - width))


def _above(points: Sequence[tuple[float, float]], at: float) -> float:
    """Beyond the last of ``points``, on the line through it and the one before."""
    (left, low), (right, high) = points[-2:]
    return high + max(0.0, (high - low) / (right - left)) * (at - right)


def _plausible(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """More work never takes less time, nor more than in proportion: one slow start must not scare for ever."""
    capped: list[tuple[float, float]] = []
    for x, y in points:
        capped.append((x, min(y, capped[-1][1] * x / capped[-1][0]) if capped else y))
    for i in range(len(capped) - 1, 0, -1):
        capped[i - 1] = capped[i - 1][0], min(capped[i - 1][1], capped[i][1])
    return capped


def _between(points: list[tuple[float, float]], at: float) -> float:
    """On the line between the two ``points`` around ``at``, at its ends outside of them; 0.0 without any."""
    if not points:
        return 0.0
    above = bisect_left([x for x, _ in points], at)
    if above == 0:
        return points[0][1]
    if above == len(points):
        return points[-1][1]
    (left, low), (right, high) = points[above - 1], points[above]
    return low + (high - low) * (at - left) / (right - left)
