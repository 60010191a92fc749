"""A running mean that forgets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RunningMean:
    """Mean of what was observed, with weight ``gain`` for the newest.

    ``value`` is the start; the first sample replaces it, unless ``observed`` says that it counts as a sample itself.
    """

    value: float
    gain: float
    observed: bool = False

    def observe(self, sample: float) -> None:
        """Take one sample in."""
        self.value = self.value + self.gain * (sample - self.value) if self.observed else sample
        self.observed = True
