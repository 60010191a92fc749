"""What the scheduler's thread and the link's share: the answers that came, and those that are due."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sglang_ssd.scheduler.supports import Proposed


@dataclass(frozen=True)
class Ready:
    """An answer: what is proposed behind a request of ``length`` tokens, and what made it."""

    length: int
    proposed: Proposed
    source: str


@dataclass(frozen=True)
class AnswerTime:
    """Seconds from sending an outcome to its answer, whether somebody still expected that, and whether it had to be
    drafted first.
    """

    seconds: float
    expected: bool
    drafted: bool


class Mailbox:
    """Answers by session. Every method may be called from either thread; only :meth:`collect` waits.

    An answer is due from the moment that its outcome is posted until it comes, is given up or is no longer waited for.
    Nothing is due while nobody is there to answer.
    """

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._peer_is_there = False
        self._ready: dict[int, Ready] = {}
        self._expected: dict[int, int] = {}  # session -> round whose answer is due
        self._lost: set[int] = set()
        self._answer_times: list[AnswerTime] = []

    def peer_came(self) -> None:
        """From now on what is posted will be answered."""
        with self._news:
            self._peer_is_there = True
            self._expected.clear()
            self._news.notify_all()

    def peer_went(self) -> None:
        """Nobody waits any longer, and what came from it is not served."""
        with self._news:
            self._peer_is_there = False
            self._ready.clear()
            self._expected.clear()
            self._lost.clear()
            self._news.notify_all()

    def expect(self, sessions: Iterable[int], round_: int) -> None:
        """The outcomes of ``round_`` are on their way."""
        with self._news:
            if self._peer_is_there:
                self._expected.update((session, round_) for session in sessions)

    def file(self, answers: Iterable[tuple[int, Ready]], round_: int, sent_at: float | None, *, drafted: bool) -> None:
        """Answers to the outcomes of ``round_``, which were sent at ``sent_at`` (seconds, ``time.monotonic``)."""
        with self._news:
            expected = False
            for session, ready in answers:
                self._ready[session] = ready
                if self._expected.get(session) == round_:
                    del self._expected[session]
                    expected = True
            if sent_at is not None:
                self._answer_times.append(AnswerTime(time.monotonic() - sent_at, expected, drafted))
            self._news.notify_all()

    def give_up(self, sessions: Iterable[int], *, lost: bool = False) -> None:
        """No answer will come for ``sessions`` this round; ``lost`` ones need a new epoch."""
        with self._news:
            for session in sessions:
                self._expected.pop(session, None)
                if lost and self._peer_is_there:
                    self._lost.add(session)
            self._news.notify_all()

    def forget(self, sessions: Iterable[int]) -> None:
        """They have ended, or begin anew."""
        with self._news:
            for session in sessions:
                self._ready.pop(session, None)
                self._expected.pop(session, None)
                self._lost.discard(session)

    def collect(self, wanted: Mapping[int, int], allowance_s: float) -> tuple[dict[int, Ready], bool]:
        """The answers for ``wanted`` (session -> length), waiting up to ``allowance_s`` for those that are due.

        Returns them by session, and whether time ran out.
        """
        until = time.monotonic() + allowance_s
        with self._news:
            while self._due(wanted):
                left = until - time.monotonic()
                if left <= 0 or not self._news.wait(left):
                    timed_out = self._due(wanted)
                    for session in wanted:
                        self._expected.pop(session, None)
                    return self._belonging(wanted), timed_out
            return self._belonging(wanted), False

    def take_lost(self) -> set[int]:
        """Sessions that the draft server does not know (any more): each needs a new epoch."""
        with self._news:
            lost, self._lost = self._lost, set()
        return lost

    def take_answer_times(self) -> list[AnswerTime]:
        """How long answers took since the last call."""
        with self._news:
            times, self._answer_times = self._answer_times, []
        return times

    def _due(self, wanted: Mapping[int, int]) -> bool:
        return any(session in self._expected for session in wanted)

    def _belonging(self, wanted: Mapping[int, int]) -> dict[int, Ready]:
        """The answers that stand behind the present length."""
        found = ((session, self._ready.get(session), length) for session, length in wanted.items())
        return {session: ready for session, ready, length in found if ready is not None and ready.length == length}
