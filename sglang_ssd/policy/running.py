"""Running estimates that forget."""

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


@dataclass
class RunningShare:
    """How often something happens, older trials fading. It begins as ``happened`` of ``tried``, soon outweighed."""

    happened: float
    tried: float

    @property
    def value(self) -> float:
        """Between 0 and 1."""
        return self.happened / self.tried

    def observe(self, happened: bool, memory: float) -> None:
        """Take one trial in; the earlier ones keep ``memory`` of their weight."""
        self.happened = self.happened * memory + happened
        self.tried = self.tried * memory + 1
