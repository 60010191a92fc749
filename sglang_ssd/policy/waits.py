"""What rounds of one batch size wait for their drafts, by K."""

from __future__ import annotations

from dataclasses import dataclass, field

_MOST = 6.0
"""Samples that count at most: the newest has at least a sixth of the weight."""
_FADES = 0.5 ** (1 / 128)
"""By which what is known of a K loses weight with every round in which it is not tried."""


@dataclass
class _Known:
    """The mean of ``weight`` samples; as of round ``at``."""

    seconds: float = 0.0
    weight: float = 0.0
    at: int = 0


@dataclass
class Waits:
    """A long tree is waited for when a short one is not, so each K has an estimate of its own.

    It counts beside one sample of what the next shorter K is waited for (nothing for K = 1), and fades toward that
    while the K is not tried: one bad moment, as when many requests begin at once, must not rule a K out for ever.
    """

    _by_steps: dict[int, _Known] = field(default_factory=dict)
    _rounds: int = 0

    def begin_round(self) -> None:
        """Time passes."""
        self._rounds += 1

    def observe(self, num_steps: int, seconds: float) -> None:
        """A round with this K has waited so long."""
        known = self._by_steps.setdefault(num_steps, _Known())
        known.weight, known.at = min(_MOST, self._weight(known) + 1), self._rounds
        known.seconds += (seconds - known.seconds) / known.weight

    def estimate(self, num_steps: int) -> float:
        """Seconds that a round with this K is going to wait."""
        estimate = 0.0
        for steps in range(1, num_steps + 1):
            known = self._by_steps.get(steps)
            if known is not None:
                weight = self._weight(known)
                estimate = (estimate + weight * known.seconds) / (1 + weight)
        return estimate

    def estimates(self) -> dict[int, float]:
        """Seconds for every K that was tried."""
        return {steps: self.estimate(steps) for steps in sorted(self._by_steps)}

    def _weight(self, known: _Known) -> float:
        fading: float = _FADES ** (self._rounds - known.at)
        return known.weight * fading
