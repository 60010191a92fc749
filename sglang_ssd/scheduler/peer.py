"""The draft server as this process knows it, on the link's own thread.

Nothing that it does can raise into the scheduler: bad and stale frames are counted, a silent peer is a state that the
operator can read.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

from sglang_ssd.protocol import (
    SOURCES,
    BadFrame,
    Close,
    Hello,
    Legal,
    LegalRow,
    Ping,
    Pong,
    Prefill,
    Refused,
    Reset,
    Sampling,
    SpeculationColumns,
    Speculations,
    ToDraft,
    Tokens,
    ToTarget,
    Welcome,
    decode_at_target,
    encode,
    pack_tokens,
)
from sglang_ssd.scheduler.committed import CommittedRound
from sglang_ssd.scheduler.connection import Connection
from sglang_ssd.scheduler.jobs import Jobs
from sglang_ssd.scheduler.ledger import Ledger
from sglang_ssd.scheduler.mailbox import Mailbox, Ready
from sglang_ssd.scheduler.supports import Proposed, read_q
from sglang_ssd.seldom import Seldom

logger = logging.getLogger(__name__)

_PING_EVERY_S = 0.5
_SILENCE_IS_DEATH_S = 5.0
_ROUNDS_REMEMBERED = 64


class Peer:
    """``run`` is the thread; the other methods are jobs on it. Attributes may be read from anywhere."""

    def __init__(self, endpoint: str, hello: Hello, mailbox: Mailbox, jobs: Jobs) -> None:
        self._hello, self._mailbox, self._jobs = hello, mailbox, jobs
        self._connection = Connection(endpoint, jobs.wake_fd)
        self._ledger = Ledger(hello.num_steps)
        self._sent_at: dict[int, float] = {}
        self._heard_at = self._pinged_at = self._hello_at = 0.0
        self._quiet = Seldom(logger)
        self.welcome: Welcome | None = None
        """What it said of itself, while it is up."""
        self.refusal = ""
        self.figures: dict[str, int] = {}
        self.steps: tuple[tuple[int, int], ...] = ()
        """(rows, microseconds) of its steps, as its newest answer tells them."""
        self.counts: Counter[str] = Counter()

    @property
    def sessions(self) -> int:
        """How many are open."""
        return len(self._ledger)

    def run(self) -> None:
        """Until the jobs end."""
        try:
            while True:
                news = self._connection.wait(_PING_EVERY_S)
                if news.frames:
                    self._receive()
                if news.connected:
                    self._say_hello()
                elif news.disconnected and self.welcome is not None:
                    self._lose("the draft server has closed the connection")
                if not self._jobs.do():
                    return
                self._keep_alive()
        finally:
            self._connection.close()

    # ---- to the draft server ----------------------------------------------------------------------------------

    def open(self, session: int, epoch: int, tokens: Tokens, sampling: Sampling, num_steps: int) -> None:
        """See DraftClient."""
        self._ledger.open(session, epoch, len(tokens))
        if self.welcome is not None:
            prefill = Prefill(self.welcome.boot, session, epoch, pack_tokens(tokens), sampling, num_steps)
            if self._send(prefill):
                self._ledger.announce(session)

    def commit(self, committed: CommittedRound) -> None:
        """Wait for the round's tokens and send them."""
        outcomes = []
        for row, tokens in zip(committed.rows, committed.tokens(), strict=True):
            outcome = self._ledger.outcome(row, tokens)
            if outcome is not None:
                outcomes.append(outcome)
            else:
                self._mailbox.give_up((row.session,), lost=self._ledger.has(row.session, row.epoch))
        if self.welcome is None or not outcomes:
            self._mailbox.give_up(row.session for row in committed.rows)
            return
        self._remember(committed.number)
        message = committed.plan.message(self.welcome.boot, committed.number, committed.verify_us, outcomes)
        if not self._send(message):
            self._mailbox.give_up(outcome.session for outcome in outcomes)

    def restrict(self, rows: tuple[LegalRow, ...]) -> None:
        """Say what grammars allow in the sessions that the draft server knows."""
        known = tuple(row for row in rows if self._ledger.is_announced(row.session))
        if known and self.welcome is not None:
            self._send(Legal(self.welcome.boot, known))

    def close(self, sessions: tuple[int, ...]) -> None:
        """See DraftClient."""
        known = self._ledger.close(sessions)
        if known and self.welcome is not None:
            self._send(Close(self.welcome.boot, known))

    def reset(self) -> None:
        """See DraftClient."""
        if self.welcome is not None:
            self._send(Reset(self.welcome.boot))
        self._ledger.disown_all()

    def _send(self, message: ToDraft) -> bool:
        sent = self._connection.send(encode(message))
        self.counts["draft_behind"] += not sent and self.welcome is not None
        return sent

    def _remember(self, number: int) -> None:
        """When a round was sent."""
        self._sent_at[number] = time.monotonic()
        if len(self._sent_at) > _ROUNDS_REMEMBERED:
            self._sent_at.pop(min(self._sent_at))

    # ---- is it there? -----------------------------------------------------------------------------------------

    def _say_hello(self) -> None:
        self._hello_at = time.monotonic()
        self._send(self._hello)

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if self.welcome is None:
            if now - self._hello_at > _PING_EVERY_S and not self.refusal:
                self._say_hello()
            return
        if now - self._pinged_at > _PING_EVERY_S:
            self._pinged_at = now
            self._send(Ping(nonce=self.counts["pings"]))
            self.counts["pings"] += 1
        if now - self._heard_at > _SILENCE_IS_DEATH_S:
            self._lose(f"the draft server has been silent for {_SILENCE_IS_DEATH_S:.0f} s")

    def _lose(self, why: str) -> None:
        """It is gone: stop waiting for it, drop what was queued for it, and try to reach it again."""
        if self.welcome is not None:
            logger.warning("SSD: %s; requests go on without drafts.", why)
        self.welcome = None
        self._mailbox.peer_went()
        self._ledger.disown_all()
        self._sent_at.clear()
        self._connection.renew()

    # ---- from the draft server --------------------------------------------------------------------------------

    def _receive(self) -> None:
        for frame in self._connection.frames():
            self._heard_at = time.monotonic()
            try:
                self._handle(decode_at_target(frame))
            except BadFrame as error:
                self.counts["bad_frames"] += 1
                self._quiet.warn("bad", f"SSD: dropped a frame that is no message of ours ({error}).")

    def _handle(self, message: ToTarget) -> None:
        match message:
            case Speculations():
                self._file(message)
            case Pong():
                self.figures = message.figures
            case Welcome():
                self._greet(message)
            case Refused(reason, hello_again):
                self._refused(reason, hello_again)

    def _greet(self, welcome: Welcome) -> None:
        self.counts["welcomes"] += 1
        logger.info("SSD: draft server is up: %s, %d KV tokens.", welcome.draft, welcome.capacity)
        self._ledger.disown_all()
        self.welcome = welcome
        self._mailbox.peer_came()

    def _refused(self, reason: str, hello_again: bool) -> None:
        if hello_again:
            self._lose(reason)
            return
        self.refusal = reason
        logger.error("SSD: the draft server refuses to draft for this target: %s", reason)

    def _file(self, message: Speculations) -> None:
        if self.welcome is None or message.boot != self.welcome.boot:
            self.counts["stale_frames"] += 1
            return
        self.steps = message.build.steps
        rows = message.columns()
        sources = [SOURCES[source] for source in rows.source.tolist()]
        at = zip(rows.session.tolist(), rows.epoch.tolist(), rows.base.tolist(), strict=True)
        answers = [(row[0], ready) for i, row in enumerate(at) if (ready := self._ready(row, rows, i)) is not None]
        drafted = "jit" in sources or "partial" in sources
        self._mailbox.file(answers, message.round, self._sent_at.get(message.round), drafted=drafted)

    def _ready(self, row: tuple[int, int, int], rows: SpeculationColumns, i: int) -> Ready | None:
        """Answer ``i`` (session, epoch, base), or None (counted) when it is stale; an unknown session there is a lost
        one here.
        """
        session, epoch, base = row
        if not self._ledger.has(session, epoch):
            self.counts["stale_frames"] += 1
            return None
        if not self._ledger.reaches(session, base):
            self.counts["stale_frames"] += base != 0
            self._ledger.disown(session)
            self._mailbox.give_up((session,), lost=True)
            return None
        count = int(rows.counts[i])
        tokens, vocab_size = rows.tokens[rows.ends[i] - count : rows.ends[i]], self._hello.vocab_size
        drafts: list[int] = tokens.tolist()
        if drafts and not 0 <= min(drafts) <= max(drafts) < vocab_size:
            self.counts["bad_frames"] += 1
            return None
        if not self._ledger.confirm(session, base):
            self.counts["superseded"] += 1
            return None
        q = None
        if self._hello.verify == "rejection":
            its = slice(int(rows.q_ends[i]) - count * int(rows.q_width[i]), int(rows.q_ends[i]))
            q = read_q(rows.q_ids[its], rows.q[its], tokens, vocab_size)
        return Ready(base, Proposed(drafts[: self._hello.num_steps], q), SOURCES[rows.source[i]])
