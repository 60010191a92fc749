"""How long a round may wait for its speculations: long enough for a healthy draft server, short for a sick one.

The allowance follows the measured answer times as TCP's retransmission timer does (smoothed mean plus four
deviations), apart for answers that were ready and for those that were drafted first: both come from one draft
server, and the ready ones must not make it seem that drafting is late. A round that waits in vain backs off: the next
1, 2, 4, ... rounds wait only as long as a ready answer takes, and when that too is in vain, not at all. And what is
waited in vain is paid from a credit that the target's own work and accepted drafts earn, so that a stalled draft costs
at most half a second and then a hundredth of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_GAIN, _DEVIATION_GAIN, _DEVIATIONS = 1 / 8, 1 / 4, 4
_FIRST_ALLOWANCE_S = 1.0
_LEAST_ALLOWANCE_S = 0.005
_LONGEST_BACK_OFF = 256
_FIRST_CREDIT_S = _LARGEST_CREDIT_S = 0.5
_CREDIT_PER_SECOND, _CREDIT_OF_GAINS = 1 / 100, 1 / 4
_LOOK_EVERY = 16
"""One round in so many waits as long as the answers take, worth it or not: a draft that has become good is noticed."""


@dataclass
class AnswerTimes:
    """Smoothed mean and deviation of one kind of answer, in seconds."""

    _mean_s: float | None = None
    _deviation_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """One answer."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = seconds, seconds / 2
            return
        self._deviation_s += _DEVIATION_GAIN * (abs(seconds - self._mean_s) - self._deviation_s)
        self._mean_s += _GAIN * (seconds - self._mean_s)

    @property
    def mean_s(self) -> float | None:
        """None before the first."""
        return self._mean_s

    @property
    def allowance_s(self) -> float | None:
        """What nearly all of them stay below; None before the first."""
        return None if self._mean_s is None else self._mean_s + _DEVIATIONS * self._deviation_s


@dataclass
class BackOff:
    """Pauses of 1, 2, 4, ... rounds, each after a wait in vain."""

    _length: int = 0
    _left: int = 0

    def pauses(self) -> bool:
        """Whether this round is part of a pause. Call once per round that asks."""
        paused = self._left > 0
        self._left -= paused
        return paused

    def missed(self) -> None:
        """The next pause is twice as long."""
        self._length = self._left = min(_LONGEST_BACK_OFF, max(1, 2 * self._length))

    def reset(self) -> None:
        """All is well."""
        self._length = self._left = 0


@dataclass
class Deadline:
    """Adaptive waiting. ``cap_s`` bounds every wait; ``None`` leaves it to the measurements."""

    cap_s: float | None = None
    patient: bool = False
    _ready: AnswerTimes = field(default_factory=AnswerTimes)
    _drafted: AnswerTimes = field(default_factory=AnswerTimes)
    _long_waits: BackOff = field(default_factory=BackOff)
    _short_waits: BackOff = field(default_factory=BackOff)
    _short: bool = False
    _rounds: int = 0
    _credit_s: float = _FIRST_CREDIT_S

    def allowance_s(self, worth_s: float = math.inf) -> float:
        """Seconds that the coming round may wait. Call once per round.

        ``worth_s`` is what a speculation saves (accepted tokens times the time of a plain step): to wait
        longer loses even when the answer comes.
        """
        if self.patient:
            return 3600.0
        self._rounds += 1
        measured = self._measured_s()
        if self._rounds % _LOOK_EVERY == 0:
            worth_s = math.inf
        allowed = min(max(_LEAST_ALLOWANCE_S, min(measured, worth_s)) if measured else 0.0, self._credit_s)
        return allowed if self.cap_s is None else min(allowed, self.cap_s)

    def _measured_s(self) -> float:
        """By how long answers take; 0 in a pause, and when there is no credit for as long as they usually take.

        To wait for less would be in vain, and leave no credit for ever.
        """
        ready = self._ready.allowance_s if self._can_afford(self._ready) else 0.0
        self._short = self._long_waits.pauses()
        if self._short:
            return 0.0 if not ready or self._short_waits.pauses() else ready
        drafted = self._drafted.allowance_s
        if drafted is None:
            return max(ready or 0.0, _FIRST_ALLOWANCE_S)  # it may take longer than what was seen
        return max(ready or 0.0, drafted if self._can_afford(self._drafted) else 0.0)

    def _can_afford(self, kind: AnswerTimes) -> bool:
        return kind.mean_s is not None and kind.mean_s <= self._credit_s

    def gained(self, seconds: float) -> None:
        """Drafts saved the target ``seconds``: a draft server that is worth its waits may be late now and then."""
        self._credit_s = min(_LARGEST_CREDIT_S, self._credit_s + seconds * _CREDIT_OF_GAINS)

    def earned(self, seconds: float) -> None:
        """The target worked for ``seconds``."""
        self._credit_s = min(_LARGEST_CREDIT_S, self._credit_s + seconds * _CREDIT_PER_SECOND)

    def answered(self, seconds: float, *, in_time: bool, drafted: bool) -> None:
        """An answer came ``seconds`` after its outcome was sent, and was ``drafted`` first or ready.

        Late ones teach too, but do not end a back-off.
        """
        (self._drafted if drafted else self._ready).observe(seconds)
        if in_time:
            self._long_waits.reset()
            self._short_waits.reset()

    def forget(self) -> None:
        """Another draft server answers now. What was spent stays spent."""
        self._ready, self._drafted = AnswerTimes(), AnswerTimes()
        self._long_waits.reset()
        self._short_waits.reset()

    def missed(self, seconds: float) -> None:
        """A round waited its whole allowance of ``seconds`` in vain."""
        self._credit_s = max(0.0, self._credit_s - seconds)
        (self._short_waits if self._short else self._long_waits).missed()
