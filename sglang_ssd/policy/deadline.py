"""How long a round may wait for its speculations: long enough for a healthy draft server, short for a sick one.

The allowance follows the measured answer times as TCP's retransmission timer does (smoothed mean plus four
deviations). A round that waits in vain backs off: the next 1, 2, 4, ... rounds take what is there and wait for
nothing. And what is waited in vain is paid from a credit that the target's own work earns, so that a stalled or slow
draft costs at most half a second and then a twentieth of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_GAIN, _DEVIATION_GAIN, _DEVIATIONS = 1 / 8, 1 / 4, 4
_FIRST_ALLOWANCE_S = 1.0
_LEAST_ALLOWANCE_S = 0.005
_LONGEST_BACK_OFF = 256
_FIRST_CREDIT_S = _LARGEST_CREDIT_S = 0.5
_CREDIT_PER_SECOND = 1 / 20
_LOOK_EVERY = 16
"""One round in so many waits as long as the answers take, worth it or not: a draft that has become good is noticed."""


@dataclass
class Deadline:
    """Adaptive waiting. ``cap_s`` bounds every wait; ``None`` leaves it to the measurements."""

    cap_s: float | None = None
    patient: bool = False
    _mean_s: float | None = None
    _deviation_s: float = 0.0
    _back_off: int = 0
    _rounds_to_skip: int = 0
    _rounds: int = 0
    _credit_s: float = _FIRST_CREDIT_S

    def allowance_s(self, worth_s: float = math.inf) -> float:
        """Seconds that the coming round may wait, 0 while backing off. Call once per round.

        ``worth_s`` is what a speculation saves (accepted tokens times the time of a plain step): to wait
        longer loses even when the answer comes.
        """
        if self.patient:
            return 3600.0
        self._rounds += 1
        if self._rounds_to_skip > 0:
            self._rounds_to_skip -= 1
            return 0.0
        if self._rounds % _LOOK_EVERY == 0:
            worth_s = math.inf
        measured = _FIRST_ALLOWANCE_S
        if self._mean_s is not None:
            measured = self._mean_s + _DEVIATIONS * self._deviation_s
        allowed = min(max(_LEAST_ALLOWANCE_S, min(measured, worth_s)), self._credit_s)
        return allowed if self.cap_s is None else min(allowed, self.cap_s)

    def earned(self, seconds: float) -> None:
        """The target worked for ``seconds``."""
        self._credit_s = min(_LARGEST_CREDIT_S, self._credit_s + seconds * _CREDIT_PER_SECOND)

    def answered(self, seconds: float, *, in_time: bool) -> None:
        """An answer came ``seconds`` after its outcome was sent; late ones teach too, but do not end a back-off."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = seconds, seconds / 2
        else:
            self._deviation_s += _DEVIATION_GAIN * (abs(seconds - self._mean_s) - self._deviation_s)
            self._mean_s += _GAIN * (seconds - self._mean_s)
        if in_time:
            self._back_off = self._rounds_to_skip = 0

    def missed(self, seconds: float) -> None:
        """A round waited its whole allowance of ``seconds`` in vain."""
        self._credit_s = max(0.0, self._credit_s - seconds)
        self._back_off = min(_LONGEST_BACK_OFF, max(1, 2 * self._back_off))
        self._rounds_to_skip = self._back_off
