"""A running estimate of how long a draft step of so many rows takes."""

from __future__ import annotations

_NEWEST = 0.2
"""Weight of the newest step in its estimate."""


class StepClock:
    """Microseconds of a step, by rows in powers of two."""

    def __init__(self) -> None:
        self._by_size: dict[int, float] = {}

    def observe(self, rows: int, micros: float) -> None:
        """Count one step. A size's first step stands alone, so a slow warm-up fades within a few steps."""
        size = rows.bit_length()
        before = self._by_size.get(size, micros)
        self._by_size[size] = before + (micros - before) * _NEWEST

    def estimate(self, rows: int) -> float:
        """Of the nearest size seen so far; 0.0 before the first step."""
        if not self._by_size:
            return 0.0
        wanted = rows.bit_length()
        return self._by_size[min(self._by_size, key=lambda size: (abs(size - wanted), size))]
