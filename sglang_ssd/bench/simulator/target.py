"""A target in virtual time: closed-loop requests in rounds. What decides about drafts is the scheduler's real code."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np

from sglang_ssd.bench.simulator.client import Client, Request
from sglang_ssd.bench.simulator.clock import VirtualClock
from sglang_ssd.bench.simulator.engine import Language
from sglang_ssd.bench.simulator.profile import Times
from sglang_ssd.bench.simulator.trace import Trace
from sglang_ssd.scheduler.collector import Answer, Collector
from sglang_ssd.scheduler.figures import Figures
from sglang_ssd.scheduler.link import SchedulerOptions


@dataclass
class Tally:
    """What happened. ``by_source`` counts rows by the source of their drafts, ``by_length`` by how many there were;
    ``draft_rows`` are those of the draft server's forwards.
    """

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    timeouts: int = 0
    draft_rows: int = 0
    by_source: Counter[str] = field(default_factory=Counter)
    by_length: Counter[int] = field(default_factory=Counter)

    @property
    def tokens_per_s(self) -> float:
        """Of the whole batch."""
        return self.tokens / self.seconds

    @property
    def tokens_per_round(self) -> float:
        """Of one request."""
        return self.tokens / max(1, self.by_length.total())

    @property
    def mean_drafts(self) -> float:
        """Draft tokens verified, of one request and round."""
        return sum(length * count for length, count in self.by_length.items()) / max(1, self.by_length.total())

    @property
    def hit_rate(self) -> float:
        """Rows whose drafts were all prepared, of those for which any were asked for."""
        return self.by_source["hit"] / max(1, self.by_source.total())

    @property
    def rows_per_round(self) -> float:
        """Tokens that the draft server ran, for one request and round."""
        return self.draft_rows / max(1, self.by_length.total())

    @property
    def round_ms(self) -> float:
        """The mean round."""
        return 1e3 * self.seconds / max(1, self.rounds)


class Asked(NamedTuple):
    """A request to come: the position of the trace where its text begins, and its new tokens."""

    begin: int
    new_tokens: int


def anywhere(trace: Trace, batch: int, new_tokens: int, seed: int) -> Iterator[Asked]:
    """Texts that begin anywhere; the first ``batch`` of them are under way already."""
    dice = random.Random(seed)  # noqa: S311 - an experiment's seed
    for count in itertools.count():
        tokens = dice.randrange(new_tokens // 2, new_tokens) if count < batch else new_tokens
        yield Asked(dice.randrange(len(trace)), tokens)


def in_turn(trace: Trace, new_tokens: int) -> Iterator[Asked]:
    """The texts of the trace from their beginnings, round and round."""
    begins = np.cumsum(trace.lengths) - trace.lengths
    texts = [Asked(int(begin), min(new_tokens, int(n))) for begin, n in zip(begins, trace.lengths, strict=True)]
    return itertools.cycle(texts)


class Crowd:
    """``batch`` requests that are always there: when one has ended the next of ``asked`` begins."""

    def __init__(self, language: Language, batch: int, asked: Iterator[Asked]) -> None:
        self._language, self._asked = language, asked
        self._count = 0
        self.temperature = language.trace.temperature
        self.requests = [self.new() for _ in range(batch)]

    def new(self) -> Request:
        """A request that has had its prefill."""
        self._count += 1
        begin, new_tokens = next(self._asked)
        return Request(self._count, [self._language.prompt(begin, self._count)], begin, new_tokens)

    def truth(self, request: Request, count: int) -> list[int]:
        """The request's next tokens."""
        truth, at = self._language.truth, request.position
        return [int(truth[(at + i) % len(truth)]) for i in range(count)]


@dataclass(frozen=True)
class Verified:
    """A row's outcome."""

    source: str
    accepted: int
    length: int


class Target:
    """Rounds of a batch. Without a client nothing is drafted: mode ``off``."""

    def __init__(
        self, crowd: Crowd, times: Times, clock: VirtualClock, client: Client | None, options: SchedulerOptions, k: int
    ) -> None:
        self._temperature = crowd.temperature
        self._crowd, self._times, self._clock, self._client, self._num_steps = crowd, times, clock, client, k
        self._host_s = times.profile.host_ms / 1e3
        self._figures = Figures(accepted_per_position=[0] * k, verified_per_position=[0] * k)
        policy, deadline = options.policy(k), options.deadline()
        # What the collector asks of its client and of requests is there; the types name the real ones.
        self._collector = Collector(cast(Any, client), policy, deadline, self._figures, k, clock.now)
        self._settling: list[Verified] = []
        self.tally = Tally()
        for request in crowd.requests:
            self._begin(request)
        self._tell(dict.fromkeys(crowd.requests, 0))

    def run(self, tokens: int) -> Tally:
        """Rounds until the batch has so many new tokens; what happened in them."""
        self.tally, begun, timeouts, rows = Tally(), self._clock.time, self._figures.timeouts, self._draft_rows()
        while self.tally.tokens < tokens:
            self._round()
        self.tally.seconds = self._clock.time - begun
        self.tally.timeouts = self._figures.timeouts - timeouts
        self.tally.draft_rows = self._draft_rows() - rows
        return self.tally

    def _draft_rows(self) -> int:
        return 0 if self._client is None else self._client.draft_rows

    def _round(self) -> None:
        """As the worker does it: settle, collect, verify, decide about the next round, commit."""
        self._clock.advance(self._host_s)
        for row in self._settling:
            self._collector.settled(row.source, row.accepted, row.length)
        requests = self._crowd.requests
        answers = self._collect(requests)
        width = 1 + max(len(answer.proposed.tokens) for answer in answers)
        seconds = self._forward_s(len(requests), width)
        self._clock.advance(seconds)
        self._settling = [self._verify(request, answer) for request, answer in zip(requests, answers, strict=True)]
        self._collector.forwarded(len(requests), width, seconds)
        if self._client is not None:
            self._collector.plan_round(len(requests))
        self._tell({request: row.length for request, row in zip(requests, self._settling, strict=True)})
        self.tally.rounds += 1

    def _forward_s(self, batch: int, width: int) -> float:
        if self._client is None:
            return self._times.plain(batch, self._temperature, self._clock.time)
        return self._times.verify(batch, width, self._clock.time)

    def _collect(self, requests: Sequence[Request]) -> Sequence[Answer]:
        """The drafts of every request, after a wait that the policy bounds."""
        began = self._clock.time
        limits = [max(0, min(self._num_steps, request.remaining - 1)) for request in requests]
        answers = self._collector.collect(cast(Any, requests), limits)
        self.tally.waited_s += self._clock.time - began
        self.tally.by_source.update(answer.source for answer in answers if answer.source)
        return answers

    def _verify(self, request: Request, answer: Answer) -> Verified:
        """Accept the drafts that are the truth, and the one token behind them."""
        drafts = answer.proposed.tokens
        truth = self._crowd.truth(request, len(drafts) + 1)
        accepted = next((i for i, draft in enumerate(drafts) if draft != truth[i]), len(drafts))
        request.commit(truth[: accepted + 1])
        self.tally.tokens += accepted + 1
        self.tally.by_length[len(drafts)] += 1
        return Verified(answer.source, accepted, len(drafts))

    def _tell(self, verified: dict[Request, int]) -> None:
        """Send the outcomes. Requests that have ended make room for new ones, whose first token is an outcome too."""
        verified = dict(self._renewed(verified))
        self._crowd.requests = list(verified)
        if self._client is not None:
            self._client.commit(verified, self._collector.expected_us(len(verified)), self._collector.plan)

    def _renewed(self, verified: dict[Request, int]) -> Iterator[tuple[Request, int]]:
        for request, length in verified.items():
            if request.remaining > 0:
                yield request, length
                continue
            if self._client is not None:
                self._client.close(request)
            fresh = self._crowd.new()
            self._begin(fresh)
            yield fresh, 0

    def _begin(self, request: Request) -> None:
        """The prefill is free here: it costs every mode the same."""
        if self._client is not None:
            self._client.open(request)
        request.commit(self._crowd.truth(request, 1))
