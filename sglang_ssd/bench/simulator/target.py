"""A target in virtual time: closed-loop requests, verified in rounds, and the scheduler's policy about drafts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from sglang_ssd.bench.simulator.client import Client, Request
from sglang_ssd.bench.simulator.engine import Language
from sglang_ssd.bench.simulator.profile import Times
from sglang_ssd.policy.deadline import Deadline
from sglang_ssd.policy.running import RunningMean


@dataclass
class Tally:
    """What happened. ``by_source`` counts rows by the source of their drafts, ``by_length`` by how many there were."""

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    timeouts: int = 0
    by_source: Counter[str] = field(default_factory=Counter)
    by_length: Counter[int] = field(default_factory=Counter)

    @property
    def tokens_per_s(self) -> float:
        """Of the whole batch."""
        return self.tokens / self.seconds

    @property
    def tokens_per_round(self) -> float:
        """Of one request."""
        return self.tokens / max(1, self.by_source.total())

    @property
    def mean_drafts(self) -> float:
        """Draft tokens verified, of one request and round."""
        return sum(length * count for length, count in self.by_length.items()) / max(1, self.by_length.total())

    @property
    def hit_rate(self) -> float:
        """Rows whose drafts were all prepared."""
        return self.by_source["hit"] / max(1, self.by_source.total())

    @property
    def round_ms(self) -> float:
        """The mean round."""
        return 1e3 * self.seconds / max(1, self.rounds)


class Crowd:
    """``batch`` requests that are always there: when one has ended the next begins, elsewhere in the trace."""

    def __init__(self, language: Language, batch: int, new_tokens: int, seed: int) -> None:
        self._language, self._new_tokens = language, new_tokens
        self._dice = random.Random(seed)  # noqa: S311 - an experiment's seed
        self._count = 0
        self.requests = [self.new(self._dice.randrange(new_tokens // 2, new_tokens)) for _ in range(batch)]

    def new(self, new_tokens: int | None = None) -> Request:
        """A request that has had its prefill."""
        self._count += 1
        begin = self._dice.randrange(len(self._language.trace))
        prompt = self._language.prompt(begin, self._count)
        return Request(self._count, [prompt], begin, new_tokens or self._new_tokens)

    def truth(self, request: Request, count: int) -> list[int]:
        """The request's next tokens."""
        truth, at = self._language.truth, request.position
        return [int(truth[(at + i) % len(truth)]) for i in range(count)]


class Target:
    """Rounds of a batch. Without a client nothing is drafted: mode ``off``."""

    def __init__(self, crowd: Crowd, times: Times, client: Client | None, num_steps: int) -> None:
        self._crowd, self._times, self._client, self._num_steps = crowd, times, client, num_steps
        self._host_s = times.profile.host_ms / 1e3
        self._deadline = Deadline()
        self._accepted = RunningMean(float(num_steps), gain=1 / 32, observed=True)
        self._verify_s = RunningMean(0.0, gain=1 / 16)
        self._time = 0.0
        self.tally = Tally()
        for request in crowd.requests:
            self._begin(request)
        self._tell(dict.fromkeys(crowd.requests, 0))

    def run(self, tokens: int) -> Tally:
        """Rounds until the batch has so many new tokens; what happened in them."""
        self.tally, begun = Tally(), self._time
        while self.tally.tokens < tokens:
            self._round()
        self.tally.seconds = self._time - begun
        return self.tally

    def _round(self) -> None:
        requests = self._crowd.requests
        self._time += self._host_s
        limits = {request: max(0, min(self._num_steps, request.remaining - 1)) for request in requests}
        drafts = self._collect(limits)
        width = 1 + max(map(len, drafts.values()))
        verify_s = self._times.verify(len(requests), width)
        self._time += verify_s
        self._verify_s.observe(verify_s)
        self._deadline.earned(verify_s)
        self.tally.rounds += 1
        for request, tokens in drafts.items():
            self._verify(request, tokens)
        self._tell({request: len(tokens) for request, tokens in drafts.items()})

    def _collect(self, limits: dict[Request, int]) -> dict[Request, list[int]]:
        """The drafts of every request, after a wait that the policy bounds."""
        if self._client is None:
            self.tally.by_source["none"] += len(limits)
            return {request: [] for request in limits}
        for answer in self._client.take_answer_times():
            self._deadline.answered(answer.seconds, in_time=answer.expected, drafted=answer.drafted)
        worth_s = self._accepted.value * self._verify_s.value if self._verify_s.observed else 1.0
        allowance_s = self._deadline.allowance_s(worth_s)
        wanted = [request for request, limit in limits.items() if limit > 0]
        until, timed_out = self._client.collect(wanted, self._time, allowance_s)
        if timed_out and allowance_s > 0:
            self.tally.timeouts += 1
            self._deadline.missed(allowance_s)
        self.tally.waited_s += until - self._time
        self._time = until
        return {request: self._take(request, limit) for request, limit in limits.items()}

    def _take(self, request: Request, limit: int) -> list[int]:
        proposal = self._client.proposed(request, self._time) if self._client is not None else None
        self.tally.by_source[proposal.source if proposal is not None else "none"] += 1
        return proposal.tokens[:limit] if proposal is not None else []

    def _verify(self, request: Request, drafts: list[int]) -> None:
        """Accept the drafts that are the truth, and the one token behind them."""
        truth = self._crowd.truth(request, len(drafts) + 1)
        accepted = next(
            (i for i, (draft, true) in enumerate(zip(drafts, truth, strict=False)) if draft != true), len(drafts)
        )
        request.commit(truth[: accepted + 1])
        self.tally.tokens += accepted + 1
        self.tally.by_length[len(drafts)] += 1
        if drafts:
            self._accepted.observe(accepted)

    def _tell(self, verified: dict[Request, int]) -> None:
        """Send the outcomes. Requests that have ended make room for new ones, whose first token is an outcome too."""
        verified = dict(self._renewed(verified))
        self._crowd.requests = list(verified)
        if self._client is not None:
            self._client.commit(verified, self._time, int(1e6 * self._verify_s.value), ("jit",))

    def _renewed(self, verified: dict[Request, int]) -> Iterator[tuple[Request, int]]:
        for request, length in verified.items():
            if request.remaining > 0:
                yield request, length
                continue
            if self._client is not None:
                self._client.close(request, self._time)
            fresh = self._crowd.new()
            self._begin(fresh)
            yield fresh, 0

    def _begin(self, request: Request) -> None:
        """The prefill is free here: it costs every mode the same."""
        if self._client is not None:
            self._client.open(request, self._time)
        request.commit(self._crowd.truth(request, 1))
