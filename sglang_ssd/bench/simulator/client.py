"""The target's side of the link in virtual time: which sessions there are, and what has been proposed for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sglang_ssd.bench.simulator.draft import BOOT, Answer, VirtualDraft
from sglang_ssd.protocol import Close, Outcome, Outcomes, Prefill, Sampling, Speculation, pack_tokens, unpack_tokens
from sglang_ssd.scheduler.draft_client import AnswerTime

_NO_LIMIT = 1 << 31


@dataclass(eq=False)
class Request:
    """One request: its prompt token, the position of the trace where its text begins, and how it stands.

    ``confirmed`` is the length that the draft server has confirmed, ``tail`` what was committed since.
    """

    session: int
    tokens: list[int]
    begin: int
    remaining: int
    epoch: int = 1
    confirmed: int = 1
    tail: list[int] = field(default_factory=list)

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
        self.tail += tokens
        self.remaining -= len(tokens)


@dataclass(frozen=True)
class Proposal:
    """Draft tokens for a session, and where they come from."""

    tokens: list[int]
    source: str


class Client:
    """Sends outcomes and files answers, as the scheduler's draft client does, without threads."""

    def __init__(self, draft: VirtualDraft, num_steps: int, sampling: Sampling) -> None:
        self._draft, self._num_steps, self._sampling = draft, num_steps, sampling
        self._requests: dict[int, Request] = {}
        self._ready: dict[int, tuple[float, int, Proposal]] = {}
        self._expected: set[int] = set()
        self._sent_at: dict[int, float] = {}
        self._rounds = 0
        self.late: list[AnswerTime] = []
        """Answer times not yet taken: seconds, and whether somebody still waited."""

    def open(self, request: Request, at: float) -> None:
        """A new request, or an old one under a new epoch."""
        self._requests[request.session] = request
        request.confirmed, request.tail = request.length, []
        block = pack_tokens(request.tokens)
        self._draft.post(Prefill(BOOT, request.session, request.epoch, block, self._sampling), at)

    def close(self, request: Request, at: float) -> None:
        """The request has its last token."""
        del self._requests[request.session]
        self._ready.pop(request.session, None)
        self._expected.discard(request.session)
        self._draft.post(Close(BOOT, (request.session,)), at)

    def commit(self, verified: Mapping[Request, int], at: float, verify_us: int, fallback: tuple[str, ...]) -> None:
        """Tell what was committed, and how the round is to be answered."""
        rows = tuple(
            Outcome(one.session, one.epoch, one.confirmed, length, one.remaining, pack_tokens(one.tail))
            for one, length in verified.items()
            if not self._reopened(one, at)
        )
        self._rounds += 1
        self._sent_at[self._rounds] = at
        self._expected |= {row.session for row in rows}
        self._draft.post(Outcomes(BOOT, self._rounds, verify_us, fallback, rows), at)

    def collect(self, wanted: Iterable[Request], at: float, allowance_s: float) -> tuple[float, bool]:
        """Wait for the answers that are due; when the wait is over, and whether it was in vain."""
        wanted = list(wanted)
        until = at + allowance_s
        self._file(self._draft.run_until(until, lambda answers: self._complete(wanted, answers)), until)
        due = [one for one in wanted if one.session in self._expected]
        for one in due:
            self._expected.discard(one.session)
        if due:
            return until, True
        arrivals = [self._ready[one.session][0] for one in wanted if one.session in self._ready]
        return max([at, *arrivals]), False

    def proposed(self, request: Request, at: float) -> Proposal | None:
        """What stands behind the request's present text, if it has come by then."""
        arrives_at, length, proposal = self._ready.get(request.session, (math.inf, -1, None))
        return proposal if length == request.length and arrives_at <= at else None

    def take_answer_times(self) -> list[AnswerTime]:
        """Since the last call."""
        times, self.late = self.late, []
        return times

    def _reopened(self, request: Request, at: float) -> bool:
        """Start again under a new epoch when the draft server is too far behind."""
        if len(request.tail) <= 4 * (self._num_steps + 1):
            return False
        request.epoch += 1
        self.open(request, at)
        return True

    def _complete(self, wanted: Iterable[Request], answers: list[Answer]) -> bool:
        answered = {row.session for answer in answers for row in answer.message.rows}
        return all(one.session not in self._expected or one.session in answered for one in wanted)

    def _file(self, answers: list[Answer], until: float) -> None:
        for answer in answers:
            in_time = False
            for row in answer.message.rows:
                in_time |= self._file_row(row, answer.arrives_at, until)
            sent_at = self._sent_at.get(answer.message.round)
            if sent_at is not None:
                drafted = any(row.source in ("jit", "partial") for row in answer.message.rows)
                self.late.append(AnswerTime(answer.arrives_at - sent_at, in_time, drafted))

    def _file_row(self, row: Speculation, arrives_at: float, until: float) -> bool:
        request = self._requests.get(row.session)
        if request is None or row.epoch != request.epoch:
            return False
        if row.base == 0:
            request.tail = [0] * (4 * self._num_steps + 5)  # lost: start again
            return False
        del request.tail[: row.base - request.confirmed]
        request.confirmed = row.base
        if request.tail:
            return False  # overtaken
        tokens = unpack_tokens(row.tokens, _NO_LIMIT).tolist()
        self._ready[row.session] = arrives_at, row.base, Proposal(tokens[: self._num_steps], row.source)
        if arrives_at > until or row.session not in self._expected:
            return False
        self._expected.discard(row.session)
        return True
