"""May another draft step start, when an outcome is about to come that would have to wait for its end?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    """When a target's outcome should come, and how long its forwards take; seconds."""

    at_s: float
    verify_s: float

    @property
    def given_up_s(self) -> float:
        """From then on nobody knows when it will come: the target may be busy with a prefill."""
        return self.at_s + self.verify_s / 2

    def leaves_time(self, now_s: float, step_s: float, *, planned: bool) -> bool:
        """A ``planned`` step may end a little late, for it is worth it; what is only nice to have must be over."""
        latest = self.at_s if planned else self.at_s - step_s
        return now_s <= latest or now_s >= self.given_up_s
