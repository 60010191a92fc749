"""Virtual time."""

from __future__ import annotations


class VirtualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        """What a server is given as its clock."""
        return self.time

    def advance(self, seconds: float) -> None:
        """Work of so many seconds is done."""
        self.time += seconds

    def wait_until(self, time: float) -> None:
        """Nothing happens before ``time``."""
        self.time = max(self.time, time)
