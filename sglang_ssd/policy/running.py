"""A running mean that forgets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RunningMean:
    """Mean of what was observed, with weight ``gain`` for the newest; ``value`` is the start until then."""

    value: float
    gain: float
    observed: bool = False

    def observe(self, sample: float) -> None:
        """Take one sample in; the first replaces the start."""
        self.value = self.value + self.gain * (sample - self.value) if self.observed else sample
        self.observed = True
