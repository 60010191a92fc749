"""The engine thread: take in what came, answer, then one step of drafting, then one chunk of prefill, and again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from sglang_ssd.draft_server.cache import SpeculationCache
from sglang_ssd.draft_server.engine import DraftEngine
from sglang_ssd.draft_server.growth import Drafter
from sglang_ssd.draft_server.legal import read_legal
from sglang_ssd.draft_server.rounds import Round, Rounds
from sglang_ssd.draft_server.session import Session
from sglang_ssd.draft_server.sessions import Sessions
from sglang_ssd.draft_server.socket import Mail
from sglang_ssd.draft_server.suffixes import Past
from sglang_ssd.draft_server.target import Target, refusal
from sglang_ssd.policy.pace import Expected
from sglang_ssd.protocol import (
    BadFrame,
    Close,
    Hello,
    Legal,
    LegalRow,
    Outcomes,
    Ping,
    Prefill,
    Refused,
    Reset,
    Speculation,
    Speculations,
    ToDraft,
    ToTarget,
    Welcome,
)
from sglang_ssd.seldom import Seldom

logger = logging.getLogger(__name__)

IDLE_S = 1.0
"""Silence after which there is time to check that every slot has one owner."""


@dataclass(frozen=True)
class Offer:
    """What this draft server is, as its Welcome says."""

    boot: int
    draft: str
    fingerprint: str
    max_sessions: int
    prefill_chunk: int = 256


class Mailbox(Protocol):
    """The engine thread's side of :class:`~sglang_ssd.draft_server.socket.Door`."""

    figures: dict[str, int]
    busy_since: float | None
    heard: dict[bytes, float]

    def receive(self, timeout_s: float) -> tuple[list[Mail], bool]:
        """All mail, and whether to stop."""

    def send(self, identity: bytes, message: ToTarget) -> None:
        """To one target."""


class DraftServer:
    """One draft model for any number of targets. All methods run on one thread, which owns the engine."""

    def __init__(
        self,
        engine: DraftEngine,
        mailbox: Mailbox,
        offer: Offer,
        now: Callable[[], float] = time.monotonic,
        past: Past | None = None,
    ) -> None:
        self._engine, self._mailbox, self._offer, self._now = engine, mailbox, offer, now
        self.cache = SpeculationCache(engine, now)
        self.drafter = Drafter(self.cache, now)
        sessions = min(offer.max_sessions, max(1, engine.limits.rows // 2))
        self._branch_rows = engine.limits.rows - sessions
        self.sessions = Sessions(self.cache, sessions, past)
        self.rounds = Rounds(self.sessions, self.cache, self.drafter, self._reply, past)
        self._past = past
        self._turns = count(1)
        self._quiet = Seldom(logger, now)
        self._stale = self._bad_blocks = self._legal_rows = 0
        self._looked_after = now()
        self._hold_until: float | None = None

    def run(self, when_idle: Callable[[], object] = lambda: None) -> None:
        """Serve until the mail ends; ``when_idle`` is called once when a second has passed without work."""
        busy = rested = False
        while True:
            mail, over = self._mailbox.receive(0 if busy else self.patience())
            if over:
                return
            self._mailbox.busy_since = self._now()
            for identity, message in mail:
                self.handle(identity, message)
            busy = self.turn()
            rested = rested and not (busy or mail)
            if not (busy or mail or rested or self._hold_until):
                rested = True
                self.cache.check()
                when_idle()
            if self._now() - self._looked_after > 5 * IDLE_S:
                self.look_after()
            self._mailbox.figures = self.figures()
            self._mailbox.busy_since = None

    def turn(self) -> bool:
        """Answer what can be answered, then one unit of work; False when there was none."""
        self.rounds.answer()
        if self.rounds.drafting:
            self.rounds.draft()
            self._take_off_starved()
            return True
        self._hold_until = None
        growing = self.rounds.growing()
        grew = bool(growing) and self._grow(growing)
        self._take_off_starved()
        prefilled = self._prefill()
        return grew or prefilled or self._deepen(growing)

    def look_after(self) -> None:
        """Close what has been silent for too long."""
        self._looked_after = self._now()
        self.sessions.expire(self._looked_after, self._mailbox.heard)

    def handle(self, identity: bytes, message: ToDraft) -> None:
        """Take one message in; whatever is wrong with it is counted and ends here."""
        if isinstance(message, Hello):
            self._greet(identity, message)
            return
        target = self.sessions.targets.get(identity)
        if isinstance(message, Ping) or target is None or message.boot != self._offer.boot:
            self._stale += 1
            if self._quiet.allows(f"stale {identity.hex()}"):
                again = Refused("this draft server does not know you (any more); say Hello again", hello_again=True)
                self._mailbox.send(identity, again)
            return
        match message:
            case Prefill():
                self._open(target, message)
            case Legal():
                for row in message.rows:
                    self._restrict(target, row)
            case Outcomes():
                self.rounds.add(target, message, self._now())
            case Close(_, numbers):
                self.sessions.close(target, *numbers)
            case Reset():
                self.sessions.clear(target)
                self.cache.tree.forget()
                if self._past is not None:
                    self._past.forget()

    def figures(self) -> dict[str, int]:
        """What Pong reports, from the engine thread's side."""
        tree, totals = self.cache.tree, [target.totals for target in self.sessions.targets.values()]
        return {
            "targets": len(self.sessions.targets),
            "sessions": len(self.sessions),
            "sessions_with_row": len(self.cache.sessions),
            "slots": tree.capacity,
            "slots_free": tree.free,
            "slots_cached": tree.nodes,
            "evictions": tree.evictions,
            "branches_shed": self.drafter.shed,
            "branches_illegal": self.drafter.illegal,
            "legal_rows": self._legal_rows,
            "stale_frames": self._stale + self.rounds.stale,
            "bad_blocks": self._bad_blocks,
            "prefill_tokens": self.cache.extended,
            "forwards": sum(each.forwards for each in totals),
            "rows": sum(each.rows for each in totals),
            "path_rows": sum(each.path_rows for each in totals),
            "forward_us": sum(each.forward_us for each in totals),
        }

    def _greet(self, identity: bytes, hello: Hello) -> None:
        limits = self._engine.limits
        reason = refusal(hello, limits.vocab_size, self._offer.fingerprint)
        if reason:
            self._quiet.warn("refused", f"refused target {hello.target!r}: {reason}")
            self._mailbox.send(identity, Refused(reason))
            return
        self.sessions.welcome(Target.of(identity, hello, limits.vocab_size))
        logger.info("drafting for %s: K=%d, mode %s, wait %s", hello.target, hello.num_steps, hello.mode, hello.wait)
        offer = self._offer
        welcome = Welcome(offer.boot, offer.draft, limits.vocab_size, limits.context_length, limits.slots)
        self._mailbox.send(identity, welcome)

    def _open(self, target: Target, message: Prefill) -> None:
        try:
            session = self.sessions.open(target, message, self._now())
        except BadFrame as error:
            self._bad_blocks += 1
            self._quiet.warn("block", f"dropped a Prefill: {error}")
            return
        if session is None:
            self._stale += 1

    def _restrict(self, target: Target, row: LegalRow) -> None:
        """Guess nothing that the grammar forbids, if ``row`` is about the text and chain that are in flight now."""
        session = self.sessions.find(target, row.session)
        if session is None or (row.epoch, row.base) != (session.epoch, session.length):
            self._stale += 1
            return
        try:
            session.legal = read_legal(row, session)
        except BadFrame as error:
            self._bad_blocks += 1
            self._quiet.warn("legal", f"dropped what is legal: {error}")
            return
        self._legal_rows += 1
        self.drafter.restrict(session)

    def _reply(self, round_: Round, rows: list[Speculation]) -> None:
        target = round_.target
        answer = Speculations.of(
            self._offer.boot, round_.message.round, rows, target.totals.build(self.drafter.clock.points())
        )
        self._mailbox.send(target.identity, answer)
        if target.verify_us and not target.waits:
            verify_s = target.verify_us / 1e6
            target.expected = Expected(self._now() + verify_s, verify_s)

    def _prefill(self) -> bool:
        """One chunk for the next session in turn; False when no text is waiting."""
        waiting = [session for session in self.cache.sessions if session.prefilling]
        if not waiting:
            return False
        session = min(waiting, key=lambda one: one.chunk_turn)
        session.chunk_turn = next(self._turns)
        self.cache.descend(session)
        end = session.missing - min(session.missing - 1, self._offer.prefill_chunk)
        while (left := session.missing - end) > 0:
            if not self.cache.extend(session, left) and not self.drafter.shed_branch():
                self.cache.close(session)
                return True
        session.prefilling = session.missing > 1
        return True

    def _grow(self, growing: list[Session]) -> bool:
        """One depth of the trees whose target leaves time for it."""
        self.drafter.plan(growing, self._branch_rows // len(self.cache.sessions))
        unfinished = [session for session in growing if session.growth is not None and not session.growth.complete]
        return self.drafter.grow(self._in_time(unfinished, planned=True))

    def _deepen(self, growing: list[Session]) -> bool:
        """With time left, let finished trees grow on; not with wait=full, which must be repeatable."""
        finished = [session for session in growing if not session.target.waits]
        return self.drafter.deepen(self._in_time(finished, planned=False))

    def _in_time(self, sessions: list[Session], *, planned: bool) -> list[Session]:
        """Those whose outcome is not about to come; until it should be there, nothing is begun for the others."""
        now, step_s = self._now(), self.drafter.step_s(sessions)
        held = {
            session.target: expected
            for session in sessions
            if (expected := session.target.expected) is not None
            and not expected.leaves_time(now, step_s, planned=planned and not _deepened(session))
        }
        if held:
            self._hold_until = min(expected.given_up_s for expected in held.values())
        return [session for session in sessions if session.target not in held]

    def patience(self) -> float:
        """How long to wait for mail when there is nothing to do."""
        return IDLE_S if self._hold_until is None else max(0.0, min(IDLE_S, self._hold_until - self._now()))

    def _take_off_starved(self) -> None:
        """Sessions whose text found no slot keep no row until another session ends."""
        for session in self.drafter.starved:
            self.cache.close(session)
        self.drafter.starved.clear()


def _deepened(session: Session) -> bool:
    return session.growth is not None and session.growth.deepened
