"""The real draft server on a virtual timeline: it takes mail in between forwards, as its own loop does."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from sglang_ssd.bench.simulator.clock import VirtualClock
from sglang_ssd.bench.simulator.engine import Language, VirtualEngine
from sglang_ssd.bench.simulator.profile import Times
from sglang_ssd.draft_server.engine import EngineLimits
from sglang_ssd.draft_server.server import DraftServer, Offer
from sglang_ssd.draft_server.socket import Mail
from sglang_ssd.protocol import Hello, Speculations, ToDraft, ToTarget

BOOT, ME = 1, b"simulator"
_LEAST_WAIT_S = 1e-6


class Answer(NamedTuple):
    """What the target gets, and when."""

    arrives_at: float
    message: Speculations


class VirtualDraft:
    """A draft server whose messages take half of ``round_trip_s`` either way."""

    def __init__(self, language: Language, times: Times, hello: Hello, limits: EngineLimits, sessions: int) -> None:
        self.clock = VirtualClock()
        self._engine = VirtualEngine(language, times, self.clock, limits)
        self._times, self._half_trip_s = times, times.profile.round_trip_ms / 2e3
        self._mailbox = _Mailbox(self.clock, self._half_trip_s)
        self.server = DraftServer(self._engine, self._mailbox, Offer(BOOT, "virtual", "", sessions), now=self.clock.now)
        self._inbox: deque[tuple[float, ToDraft]] = deque()
        self.server.handle(ME, hello)

    @property
    def rows(self) -> int:
        """Of all forwards so far."""
        return self._engine.rows

    def post(self, message: ToDraft, at: float) -> None:
        """The target sends ``message`` at that time, not before earlier ones."""
        self._inbox.append((at + self._half_trip_s, message))

    def run_until(self, time: float, done: Callable[[list[Answer]], bool]) -> list[Answer]:
        """Work up to ``time``, or until ``done`` with the answers so far; all of them, which are given only once."""
        while self.clock.time < time and not done(self._mailbox.answers):
            self._take_mail()
            if not self._turn() and not done(self._mailbox.answers):
                self._wait(time)
        answers, self._mailbox.answers = self._mailbox.answers, []
        return answers

    def _wait(self, time: float) -> None:
        """For mail, as long as the server would, but not beyond ``time``."""
        mail_at = self._inbox[0][0] if self._inbox else math.inf
        patience_s = max(_LEAST_WAIT_S, self.server.patience())
        self.clock.wait_until(min(time, mail_at, self.clock.time + patience_s))

    def _take_mail(self) -> None:
        came = False
        while self._inbox and self._inbox[0][0] <= self.clock.time:
            self.server.handle(ME, self._inbox.popleft()[1])
            came = True
        if came:
            self.clock.advance(self._times.draft_host(0))

    def _turn(self) -> bool:
        rows = self._engine.rows
        busy = self.server.turn()
        rows = self._engine.rows - rows
        if rows:
            self.clock.advance(self._times.draft_host(rows))
        return busy


class _Mailbox:
    """Keeps the answers, with the time at which they arrive."""

    def __init__(self, clock: VirtualClock, half_trip_s: float) -> None:
        self.figures: dict[str, int] = {}
        self.busy_since: float | None = None
        self.heard: dict[bytes, float] = {}
        self.answers: list[Answer] = []
        self._clock, self._half_trip_s = clock, half_trip_s

    def receive(self, timeout_s: float) -> tuple[list[Mail], bool]:  # noqa: ARG002
        """Mail is handed in by calls."""
        return [], True

    def send(self, identity: bytes, message: ToTarget) -> None:  # noqa: ARG002
        """Speculations only; the greeting is of no interest."""
        if isinstance(message, Speculations):
            self.answers.append(Answer(self._clock.time + self._half_trip_s, message))
