"""A machine whose speed changes: others use it too, or it grows hot. As seen on the machine of the demo's benchmark."""

from __future__ import annotations

import random
from bisect import bisect_right

_STRETCH_S = (10.0, 50.0)
_SLOWER = (1.0, 1.1, 1.3, 1.6, 2.0)
_NOISE, _LEAST_NOISE = 0.08, 0.8


class Weather:
    """How many times slower than usual: the same for all in stretches of seconds, and noise in every forward."""

    def __init__(self, seed: int) -> None:
        self._stretches, self._noise = random.Random(seed), random.Random(seed + 1)  # noqa: S311 - an experiment
        self._ends, self._factors = [0.0], [1.0]

    def at(self, time: float) -> float:
        """Of a forward that begins at ``time``, in seconds."""
        while self._ends[-1] <= time:
            self._ends.append(self._ends[-1] + self._stretches.uniform(*_STRETCH_S))
            self._factors.append(self._stretches.choice(_SLOWER))
        noise = max(_LEAST_NOISE, self._noise.gauss(1.0, _NOISE))
        return noise * self._factors[bisect_right(self._ends, time)]
