"""The scheduler's end of the link to a draft server.

The forward never touches the socket. It posts what happened (a session opened, a round committed) and later collects
what came back; the link's thread (:mod:`~sglang_ssd.scheduler.peer`) waits for the round's device copy, sends at once,
and files answers in the mailbox.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from sglang_ssd.protocol import Hello, LegalRow, Sampling, Tokens, Welcome
from sglang_ssd.scheduler.committed import CommittedRound
from sglang_ssd.scheduler.jobs import Jobs
from sglang_ssd.scheduler.mailbox import AnswerTime, Mailbox, Ready
from sglang_ssd.scheduler.peer import Peer


class DraftClient:
    """The link to one draft server, for the scheduler's thread; no method blocks but :meth:`collect`."""

    def __init__(self, endpoint: str, hello: Hello) -> None:
        self._hello = hello
        self._mailbox, self._jobs = Mailbox(), Jobs()
        self._peer = Peer(endpoint, hello, self._mailbox, self._jobs)
        self._thread = threading.Thread(target=self._peer.run, name="ssd-draft-client", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        """``starting``, ``up``, ``down`` or ``refused``."""
        if self._peer.welcome is not None:
            return "up"
        if self._peer.refusal:
            return "refused"
        return "down" if self._peer.counts["welcomes"] else "starting"

    @property
    def welcome(self) -> Welcome | None:
        """What the draft server said of itself, while it is up."""
        return self._peer.welcome

    @property
    def boot(self) -> int:
        """Which run of a draft server answers; 0 while none does."""
        welcome = self._peer.welcome
        return 0 if welcome is None else welcome.boot

    @property
    def draft_steps(self) -> tuple[tuple[int, int], ...]:
        """(rows, microseconds) of the draft server's steps, as its newest answer tells them."""
        return self._peer.steps

    def describe(self) -> dict[str, object]:
        """The part of ``/ssd/status`` that belongs to the link."""
        welcome, counts = self._peer.welcome, self._peer.counts
        return {
            "draft_state": self.state,
            "draft": None if welcome is None else welcome.draft,
            "refusal": self._peer.refusal or None,
            "sessions": self._peer.sessions,
            "stale_frames": counts["stale_frames"],
            "bad_frames": counts["bad_frames"],
            "reconnects": max(0, counts["welcomes"] - 1),
            "draft_behind": counts["draft_behind"],
            "draft_figures": dict(self._peer.figures),
        }

    def open(self, session: int, epoch: int, tokens: Tokens, sampling: Sampling, num_steps: int = 0) -> None:
        """Tell the draft server a session's authoritative tokens; a new epoch replaces the old one.

        ``num_steps`` is the request's own limit to K, 0 for none.
        """
        self._mailbox.forget((session,))
        self._jobs.post(lambda: self._peer.open(session, epoch, tokens, sampling, num_steps))

    def commit(self, committed: CommittedRound) -> None:
        """A forward committed tokens; the thread sends them as soon as they are on the host."""
        self._mailbox.expect((row.session for row in committed.rows), committed.number)
        self._jobs.post(lambda: self._peer.commit(committed))

    def restrict(self, legal: Callable[[], tuple[LegalRow, ...]]) -> None:
        """A forward begins in which grammars forbid tokens; the thread asks ``legal`` and sends what it says."""
        if self._hello.mode == "ssd" and self._peer.welcome is not None:
            self._jobs.post(lambda: self._peer.restrict(legal()))

    def close(self, sessions: tuple[int, ...]) -> None:
        """These sessions have ended."""
        self._mailbox.forget(sessions)
        self._jobs.post(lambda: self._peer.close(sessions))

    def reset(self) -> None:
        """Forget every session and every cached prefix, there and here."""
        self._jobs.post(self._peer.reset)

    def collect(self, wanted: Mapping[int, int], allowance_s: float) -> tuple[dict[int, Ready], bool]:
        """See :meth:`~sglang_ssd.scheduler.mailbox.Mailbox.collect`."""
        return self._mailbox.collect(wanted, allowance_s)

    def take_lost(self) -> set[int]:
        """Sessions that the draft server does not know (any more): each needs a new epoch."""
        return self._mailbox.take_lost()

    def take_answer_times(self) -> list[AnswerTime]:
        """How long answers took since the last call."""
        return self._mailbox.take_answer_times()

    def stop(self) -> None:
        """End the thread and close the socket."""
        self._jobs.end()
        self._thread.join()
        self._jobs.close()
