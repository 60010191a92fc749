"""The scheduler's end of the link: a thread that owns the socket, and a mailbox of speculations.

The forward never touches the socket. It posts what happened (a session opened, a round committed) and later collects
what came back; the thread waits for the round's device copy, sends at once, and files answers by session and
length. Nothing that the peer does can raise into the scheduler: bad and stale frames are counted, a silent peer
is a state that the operator can read.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import recv_monitor_message

from sglang_ssd.policy.fallback import Fallback
from sglang_ssd.protocol import (
    MAX_FRAME_BYTES,
    BadFrame,
    Close,
    Hello,
    Legal,
    LegalRow,
    Outcome,
    Outcomes,
    Ping,
    Pong,
    Prefill,
    Refused,
    Reset,
    Sampling,
    Speculation,
    Speculations,
    ToDraft,
    Tokens,
    ToTarget,
    Welcome,
    decode_at_target,
    encode,
    pack_tokens,
    unpack_tokens,
)
from sglang_ssd.scheduler.supports import Proposed, read_q

logger = logging.getLogger(__name__)

_SEND_QUEUE = 64
_PING_EVERY_S = 0.5
_SILENCE_IS_DEATH_S = 5.0
_LOG_EVERY_S = 10.0


@dataclass(frozen=True)
class CommittedRow:
    """One request's part of a round, as the forward knows it before the outcome is on the host."""

    session: int
    epoch: int
    length_before: int
    verified_len: int
    remaining_before: int


@dataclass(frozen=True)
class RoundPlan:
    """What the next round is to be: K, and the answers for 1, 2, ... missed rows.

    Not ``wanted``: the draft server prepares for K as ever, but this time nobody asks for its drafts.
    """

    num_steps: int
    answers: tuple[Fallback, ...]
    wanted: bool = True


@dataclass(frozen=True)
class CommittedRound:
    """A round whose tokens may still be on their way from the device.

    ``tokens()`` blocks until they are on the host and returns, per row, what was committed. It is called from both
    threads and must give the same answer to each.
    """

    number: int
    rows: tuple[CommittedRow, ...]
    tokens: Callable[[], list[list[int]]]
    verify_us: int
    plan: RoundPlan


@dataclass(frozen=True)
class AnswerTime:
    """Seconds from sending an outcome to its answer, whether somebody still expected that, and whether it had to be
    drafted first.
    """

    seconds: float
    expected: bool
    drafted: bool


@dataclass
class Ready:
    """An answer in the mailbox: what is proposed behind a request of ``length`` tokens, and what made it."""

    length: int
    proposed: Proposed
    source: str


@dataclass
class _Link:
    """What the thread knows of one session: the length that the draft confirmed, and what was committed since."""

    epoch: int
    confirmed: int
    tail: list[int] = field(default_factory=list)
    announced: bool = True

    @property
    def length(self) -> int:
        return self.confirmed + len(self.tail)


class DraftClient:
    """The link to one draft server. Public methods are for the scheduler's thread and never block, but `collect`."""

    def __init__(self, endpoint: str, hello: Hello) -> None:
        self._endpoint = endpoint
        self._hello = hello
        self._context = zmq.Context()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._news = threading.Condition()
        self._ready: dict[int, Ready] = {}
        self._expected: dict[int, int] = {}  # session -> round whose answer is due
        self._lost: set[int] = set()
        self._links: dict[int, _Link] = {}
        self._sent_at: dict[int, float] = {}
        self._heard_at = 0.0
        self._pinged_at = 0.0
        self._hello_at = 0.0
        self._welcome: Welcome | None = None
        self._refusal = ""
        self._draft_figures: dict[str, int] = {}
        self._answer_times: list[AnswerTime] = []
        self._draft_steps: tuple[tuple[int, int], ...] = ()
        self._logged_at: dict[str, float] = {}
        self.counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="ssd-draft-client", daemon=True)
        self._thread.start()

    # ---- the scheduler's thread -------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """``starting``, ``up``, ``down`` or ``refused``."""
        if self._welcome is not None:
            return "up"
        if self._refusal:
            return "refused"
        return "down" if self.counts["welcomes"] else "starting"

    @property
    def welcome(self) -> Welcome | None:
        """What the draft server said of itself, while it is up."""
        return self._welcome

    @property
    def boot(self) -> int:
        """Which run of a draft server answers; 0 while none does."""
        return self._welcome.boot if self._welcome is not None else 0

    def describe(self) -> dict[str, object]:
        """The part of ``/ssd/status`` that belongs to the link."""
        return {
            "draft_state": self.state,
            "draft": self._welcome.draft if self._welcome else None,
            "refusal": self._refusal or None,
            "sessions": len(self._links),
            "stale_frames": self.counts["stale_frames"],
            "bad_frames": self.counts["bad_frames"],
            "reconnects": max(0, self.counts["welcomes"] - 1),
            "draft_behind": self.counts["draft_behind"],
            "draft_figures": dict(self._draft_figures),
        }

    def open(self, session: int, epoch: int, tokens: Tokens, sampling: Sampling, num_steps: int = 0) -> None:
        """Tell the draft server a session's authoritative tokens; a new epoch replaces the old one.

        ``num_steps`` is the request's own limit to K, 0 for none.
        """
        with self._news:
            self._ready.pop(session, None)
            self._expected.pop(session, None)
            self._lost.discard(session)
        self._post(lambda: self._open(session, epoch, tokens, sampling, num_steps))

    def commit(self, committed: CommittedRound) -> None:
        """A forward committed tokens; the thread sends them as soon as they are on the host."""
        with self._news:
            if self._welcome is not None:
                self._expected.update((row.session, committed.number) for row in committed.rows)
        self._post(lambda: self._commit(committed))

    def restrict(self, legal: Callable[[], tuple[LegalRow, ...]]) -> None:
        """A forward begins in which grammars forbid tokens; the thread asks ``legal`` and sends what it says."""
        if self._hello.mode == "ssd" and self._welcome is not None:
            self._post(lambda: self._restrict(legal()))

    def close(self, sessions: tuple[int, ...]) -> None:
        """These sessions have ended."""
        with self._news:
            for session in sessions:
                self._ready.pop(session, None)
                self._expected.pop(session, None)
                self._lost.discard(session)
        self._post(lambda: self._close(sessions))

    def reset(self) -> None:
        """Forget every session and every cached prefix, there and here."""
        self._post(self._reset)

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

    @property
    def draft_steps(self) -> tuple[tuple[int, int], ...]:
        """(rows, microseconds) of the draft server's steps, as its newest answer tells them."""
        return self._draft_steps

    def collect(self, wanted: Mapping[int, int], allowance_s: float) -> tuple[dict[int, Ready], bool]:
        """The answers for ``wanted`` (session -> length), waiting up to ``allowance_s`` for those that are due.

        Returns them by session, and whether time ran out. An answer is due from the moment that its outcome is posted
        until it comes or is given up; what is not due is not waited for.
        """
        until = time.monotonic() + allowance_s
        with self._news:
            while self._due(wanted):
                left = until - time.monotonic()
                if left <= 0 or not self._news.wait(left):
                    timed_out = self._due(wanted)
                    for session in wanted:
                        self._expected.pop(session, None)
                    return self._take(wanted), timed_out
            return self._take(wanted), False

    def stop(self) -> None:
        """End the thread and close the socket."""
        self._jobs.put(None)
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        os.close(self._wake_fd)

    def _due(self, wanted: Mapping[int, int]) -> bool:
        return any(session in self._expected for session in wanted)

    def _take(self, wanted: Mapping[int, int]) -> dict[int, Ready]:
        found = {}
        for session, length in wanted.items():
            ready = self._ready.get(session)
            if ready is not None and ready.length == length:
                found[session] = ready
        return found

    def _post(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        os.eventfd_write(self._wake_fd, 1)

    # ---- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._connect()
        while True:
            for source, _ in self._poller.poll(timeout=int(_PING_EVERY_S * 1e3)):
                if source is self._socket:
                    self._receive()
                elif source is self._monitor:
                    self._watch()
            if not self._do_jobs():
                self._disconnect()
                self._context.term()
                return
            self._keep_alive()

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # queue for a peer that is there, not for one that may come
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake_fd):
            self._poller.register(source, zmq.POLLIN)
        self._socket.connect(self._endpoint)

    def _disconnect(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    def _do_jobs(self) -> bool:
        """Do everything posted so far; False when asked to stop."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return True
            if job is None:
                return False
            job()

    def _say_hello(self) -> None:
        self._hello_at = time.monotonic()
        self._send(self._hello)

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if self._welcome is None:
            if now - self._hello_at > _PING_EVERY_S and not self._refusal:
                self._say_hello()
            return
        if now - self._pinged_at > _PING_EVERY_S:
            self._pinged_at = now
            self._send(Ping(nonce=self.counts["pings"]))
            self.counts["pings"] += 1
        if now - self._heard_at > _SILENCE_IS_DEATH_S:
            self._lose(f"the draft server has been silent for {_SILENCE_IS_DEATH_S:.0f} s")

    def _lose(self, why: str) -> None:
        """The peer is gone: stop waiting for it, drop what was queued for it, and try to reach it again."""
        if self._welcome is not None:
            logger.warning("SSD: %s; requests go on without drafts.", why)
        with self._news:
            self._welcome = None
            self._ready.clear()
            self._expected.clear()
            self._lost.clear()
            self._news.notify_all()
        for link in self._links.values():
            link.announced = False
        self._sent_at.clear()
        self._disconnect()
        self._connect()

    def _watch(self) -> None:
        if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._say_hello()
        elif self._welcome is not None:
            self._lose("the draft server has closed the connection")

    def _send(self, message: ToDraft) -> bool:
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self.counts["draft_behind"] += self._welcome is not None
            return False
        return True

    def _open(self, session: int, epoch: int, tokens: Tokens, sampling: Sampling, num_steps: int) -> None:
        link = self._links[session] = _Link(epoch=epoch, confirmed=len(tokens), announced=False)
        if self._welcome is not None:
            prefill = Prefill(self._welcome.boot, session, epoch, pack_tokens(tokens), sampling, num_steps)
            link.announced = self._send(prefill)

    def _commit(self, committed: CommittedRound) -> None:
        outcomes = []
        for row, tokens in zip(committed.rows, committed.tokens(), strict=True):
            outcome = self._outcome(row, tokens)
            if outcome is not None:
                outcomes.append(outcome)
        if self._welcome is None or not outcomes:
            self._give_up(tuple(row.session for row in committed.rows))
            return
        self._sent_at[committed.number] = time.monotonic()
        if not self._send(_outcomes(self._welcome.boot, committed, outcomes)):
            self._give_up(tuple(outcome.session for outcome in outcomes))

    def _restrict(self, rows: tuple[LegalRow, ...]) -> None:
        """Tell the draft server about the sessions that it knows."""
        known = tuple(row for row in rows if (link := self._links.get(row.session)) is not None and link.announced)
        if known and self._welcome is not None:
            self._send(Legal(self._welcome.boot, known))

    def _outcome(self, row: CommittedRow, tokens: list[int]) -> Outcome | None:
        link = self._links.get(row.session)
        if link is None or link.epoch != row.epoch:
            self._give_up((row.session,))
            return None
        if link.length != row.length_before:
            link.announced = False
        link.tail.extend(tokens)
        if not link.announced or len(link.tail) > 4 * (self._hello.num_steps + 1):
            self._give_up((row.session,), lost=True)
            return None
        return Outcome(
            session=row.session,
            epoch=row.epoch,
            base=link.confirmed,
            verified_len=row.verified_len,
            remaining=max(0, row.remaining_before - len(tokens)),
            tokens=pack_tokens(link.tail),
        )

    def _give_up(self, sessions: tuple[int, ...], *, lost: bool = False) -> None:
        """No answer will come for ``sessions`` this round; ``lost`` ones need a new epoch."""
        with self._news:
            for session in sessions:
                self._expected.pop(session, None)
                if lost and self._welcome is not None:
                    self._lost.add(session)
            self._news.notify_all()

    def _close(self, sessions: tuple[int, ...]) -> None:
        known = tuple(session for session in sessions if self._links.pop(session, None) is not None)
        if known and self._welcome is not None:
            self._send(Close(self._welcome.boot, known))

    def _reset(self) -> None:
        if self._welcome is not None:
            self._send(Reset(self._welcome.boot))
        for link in self._links.values():
            link.announced = False

    def _receive(self) -> None:
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard_at = time.monotonic()
            try:
                self._handle(decode_at_target(frame))
            except BadFrame as error:
                self.counts["bad_frames"] += 1
                self._log_seldom("bad", f"SSD: dropped a frame that is no message of ours ({error}).")

    def _handle(self, message: ToTarget) -> None:
        match message:
            case Speculations():
                self._file(message)
            case Pong():
                self._draft_figures = message.figures
            case Welcome():
                self._greet(message)
            case Refused(reason, hello_again):
                self._refused(reason, hello_again)

    def _greet(self, welcome: Welcome) -> None:
        self.counts["welcomes"] += 1
        logger.info("SSD: draft server is up: %s, %d KV tokens.", welcome.draft, welcome.capacity)
        for link in self._links.values():
            link.announced = False
        with self._news:
            self._welcome = welcome
            self._expected.clear()
            self._news.notify_all()

    def _refused(self, reason: str, hello_again: bool) -> None:
        if hello_again:
            self._lose(reason)
            return
        self._refusal = reason
        logger.error("SSD: the draft server refuses to draft for this target: %s", reason)

    def _file(self, message: Speculations) -> None:
        if self._welcome is None or message.boot != self._welcome.boot:
            self.counts["stale_frames"] += 1
            return
        self._draft_steps = message.build.steps
        filed = [self._check(row) for row in message.rows]
        sent_at = self._sent_at.get(message.round)
        with self._news:
            expected = False
            for session, ready in filter(None, filed):
                self._ready[session] = ready
                if self._expected.get(session) == message.round:
                    del self._expected[session]
                    expected = True
            if sent_at is not None:
                drafted = any(row.source in ("jit", "partial") for row in message.rows)
                self._answer_times.append(AnswerTime(time.monotonic() - sent_at, expected, drafted))
            self._news.notify_all()
        if len(self._sent_at) > _SEND_QUEUE:
            self._sent_at.pop(min(self._sent_at))

    def _check(self, row: Speculation) -> tuple[int, Ready] | None:
        """The row as an answer, or None (counted) when it is stale; an unknown session there is a lost one here."""
        link = self._links.get(row.session)
        if link is None or row.epoch != link.epoch:
            self.counts["stale_frames"] += 1
            return None
        if not link.confirmed <= row.base <= link.length:
            self.counts["stale_frames"] += row.base != 0
            link.announced = False
            self._give_up((row.session,), lost=True)
            return None
        try:
            tokens = unpack_tokens(row.tokens, self._hello.vocab_size)
        except BadFrame:
            self.counts["bad_frames"] += 1
            return None
        del link.tail[: row.base - link.confirmed]
        link.confirmed = row.base
        if link.tail:
            self.counts["superseded"] += 1
            return None
        q = read_q(row, tokens, self._hello.vocab_size) if self._hello.verify == "rejection" else None
        return row.session, Ready(row.base, Proposed(tokens.tolist()[: self._hello.num_steps], q), row.source)

    def _log_seldom(self, kind: str, sentence: str) -> None:
        now = time.monotonic()
        if now - self._logged_at.get(kind, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._logged_at[kind] = now
            logger.warning("%s", sentence)


def _outcomes(boot: int, committed: CommittedRound, rows: Sequence[Outcome]) -> Outcomes:
    return Outcomes(
        boot=boot,
        round=committed.number,
        verify_us=committed.verify_us,
        fallback=tuple(answer.kind for answer in committed.plan.answers),
        rows=tuple(rows),
        jit_steps=tuple(answer.steps for answer in committed.plan.answers),
        num_steps=committed.plan.num_steps,
    )
