"""The target's side of the link in virtual time: which sessions there are, and what has been proposed for them.

It stands in for the scheduler's :class:`~sglang_ssd.scheduler.draft_client.DraftClient`, without threads and sockets:
the draft server works when the target waits for it or tells it something, up to that moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_ssd.bench.simulator.clock import VirtualClock
from sglang_ssd.bench.simulator.draft import BOOT, Answer, VirtualDraft
from sglang_ssd.protocol import Close, Outcome, Prefill, Sampling, Speculation, pack_tokens, unpack_tokens
from sglang_ssd.scheduler.committed import CommittedRow, RoundPlan
from sglang_ssd.scheduler.figures import RequestFigures
from sglang_ssd.scheduler.ledger import Ledger
from sglang_ssd.scheduler.mailbox import AnswerTime, Ready
from sglang_ssd.scheduler.supports import Proposed

_NO_LIMIT = 1 << 31


@dataclass(eq=False)
class Request:
    """One request: its prompt token, the position of the trace where its text begins, and how it stands."""

    session: int
    tokens: list[int]
    begin: int
    remaining: int
    epoch: int = 1
    figures: RequestFigures = field(default_factory=RequestFigures)

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.tokens)

    @property
    def position(self) -> int:
        """Of the trace: that of the token which comes next. The prompt is one token."""
        return self.begin + self.length - 1

    def commit(self, tokens: list[int]) -> None:
        """The target has decided."""
        self.tokens += tokens
        self.remaining -= len(tokens)


class Client:
    """Sends outcomes and files answers. ``clock`` is the target's."""

    state = "up"
    boot = BOOT

    def __init__(self, draft: VirtualDraft, clock: VirtualClock, num_steps: int, sampling: Sampling) -> None:
        self._draft, self._clock, self._num_steps, self._sampling = draft, clock, num_steps, sampling
        self._ledger = Ledger(num_steps)
        self._ready: dict[int, tuple[float, Ready]] = {}
        self._expected: dict[int, int] = {}
        self._sent_at: dict[int, float] = {}
        self._times: list[AnswerTime] = []
        self._rounds = 0
        self.draft_steps: tuple[tuple[int, int], ...] = ()
        """See DraftClient."""

    @property
    def draft_rows(self) -> int:
        """Of all the draft server's forwards so far."""
        return self._draft.rows

    def open(self, request: Request) -> None:
        """A new request, or an old one under a new epoch."""
        self._ledger.open(request.session, request.epoch, request.length)
        self._ledger.announce(request.session)
        block = pack_tokens(request.tokens)
        self._draft.post(Prefill(BOOT, request.session, request.epoch, block, self._sampling), self._clock.time)

    def close(self, request: Request) -> None:
        """The request has its last token."""
        self._ledger.close((request.session,))
        self._ready.pop(request.session, None)
        self._expected.pop(request.session, None)
        self._draft.post(Close(BOOT, (request.session,)), self._clock.time)

    def commit(self, verified: Mapping[Request, int], verify_us: int, plan: RoundPlan) -> None:
        """Tell what was committed: ``verified`` drafts of each request were looked at. And what is to come."""
        self._file(self._draft.run_until(self._clock.time, lambda _: False), self._clock.time)
        outcomes = [self._outcome(request, length) for request, length in verified.items()]
        rows = [outcome for outcome in outcomes if outcome is not None]
        self._rounds += 1
        self._sent_at = {
            self._rounds: self._clock.time,
            **{n: t for n, t in self._sent_at.items() if n > self._rounds - 64},
        }
        self._expected |= {row.session: self._rounds for row in rows}
        self._draft.post(plan.message(BOOT, self._rounds, verify_us, rows), self._clock.time)

    def collect(self, wanted: Mapping[int, int], allowance_s: float) -> tuple[dict[int, Ready], bool]:
        """See DraftClient."""
        until = self._clock.time + allowance_s
        self._file(self._draft.run_until(until, lambda answers: self._complete(wanted, answers)), until)
        due = [session for session in wanted if session in self._expected]
        for session in due:
            del self._expected[session]
        arrivals = [self._ready.get(session, (-math.inf, None))[0] for session in wanted]
        self._clock.wait_until(until if due else max(arrivals, default=-math.inf))
        return {
            session: ready for session, length in wanted.items() if (ready := self._proposed(session, length))
        }, bool(due)

    def take_answer_times(self) -> list[AnswerTime]:
        """See DraftClient."""
        times, self._times = self._times, []
        return times

    def _outcome(self, request: Request, verified: int) -> Outcome | None:
        """What to tell of the tokens that are new; None for a request that has to begin anew, and does."""
        tokens = request.tokens[self._ledger.length(request.session) :]
        before, remaining_before = request.length - len(tokens), request.remaining + len(tokens)
        row = CommittedRow(request.session, request.epoch, before, verified, remaining_before)
        outcome = self._ledger.outcome(row, tokens)
        if outcome is None:
            request.epoch += 1
            self.open(request)
        return outcome

    def _proposed(self, session: int, length: int) -> Ready | None:
        """What stands behind the request's present text, if it has come by now."""
        arrives_at, ready = self._ready.get(session, (math.inf, None))
        return ready if ready is not None and ready.length == length and arrives_at <= self._clock.time else None

    def _complete(self, wanted: Mapping[int, int], answers: list[Answer]) -> bool:
        answered = {row.session: answer.message.round for answer in answers for row in answer.message.rows}
        return all(answered.get(each) == self._expected[each] for each in wanted if each in self._expected)

    def _file(self, answers: list[Answer], until: float) -> None:
        """Take answers in; ``until`` is when the target stopped looking for them."""
        for answer in answers:
            message, expected = answer.message, False
            self.draft_steps = message.build.steps
            for row in message.rows:
                self._file_row(row, answer.arrives_at)
                if answer.arrives_at <= until and self._expected.get(row.session) == message.round:
                    del self._expected[row.session]
                    expected = True
            drafted = any(row.source in ("jit", "partial") for row in message.rows)
            self._times.append(AnswerTime(answer.arrives_at - self._sent_at[message.round], expected, drafted))

    def _file_row(self, row: Speculation, arrives_at: float) -> None:
        if not self._ledger.has(row.session, row.epoch):
            return
        if not self._ledger.reaches(row.session, row.base):
            raise AssertionError("the draft server has lost a session, and nothing here loses one: this is a bug")
        if self._ledger.confirm(row.session, row.base):
            tokens: list[int] = unpack_tokens(row.tokens, _NO_LIMIT).tolist()
            ready = Ready(row.base, Proposed(tokens[: self._num_steps]), row.source)
            self._ready[row.session] = arrives_at, ready
