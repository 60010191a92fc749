"""The scheduler's side of a round's drafts: what is asked for, how long it is waited for, and what it was worth.

The decisions are :mod:`sglang_ssd.policy`'s; here they meet the link and what is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sglang_ssd.policy.deadline import Deadline
from sglang_ssd.policy.rounds import RoundPolicy
from sglang_ssd.policy.running import RunningMean
from sglang_ssd.scheduler.committed import RoundPlan
from sglang_ssd.scheduler.draft_client import DraftClient
from sglang_ssd.scheduler.figures import Figures
from sglang_ssd.scheduler.mailbox import Ready
from sglang_ssd.scheduler.requests import RequestState
from sglang_ssd.scheduler.supports import NOTHING, Proposed


@dataclass(frozen=True)
class Answer:
    """What one request's round is verified with, and what made it; no source where nothing was asked for."""

    proposed: Proposed = NOTHING
    source: str = ""


class Collector:
    """One server's drafts. ``client`` None: nobody drafts, here or on this rank."""

    def __init__(
        self,
        client: DraftClient | None,
        policy: RoundPolicy,
        deadline: Deadline,
        figures: Figures,
        num_steps: int,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._client, self._policy, self._deadline, self._figures = client, policy, deadline, figures
        self._now = now
        self.plan = RoundPlan(num_steps, policy.rule(1, num_steps))
        self._boot = 0
        self._saved = 0
        self._began: float | None = None
        self._busy_s = 0.0
        # Hopeful at first, and slow to despair: a draft that is not waited for cannot show what it is worth.
        self._accepted = RunningMean(float(num_steps), gain=1 / 32, observed=True)

    def collect(self, states: list[RequestState], limits: list[int]) -> list[Answer]:
        """What is proposed for every row; what is late is a miss and is not waited for again."""
        self._note_rest(len(states))
        most = self.plan.num_steps if self.plan.wanted else 0
        limits = [min(limit, most) for limit in limits]
        wanted = {
            state.session: state.length
            for state, limit in zip(states, limits, strict=True)
            if limit > 0 and state.session is not None
        }
        if self._client is None or not wanted:
            return [Answer() for _ in states]
        began = self._now()
        if self._client.boot not in (0, self._boot):
            self._boot = self._client.boot
            self._deadline.forget()
        for answer in self._client.take_answer_times():
            self._deadline.answered(answer.seconds, in_time=answer.expected, drafted=answer.drafted)
        allowance_s = self._deadline.allowance_s(self._worth_s(len(states)))
        found, timed_out = self._client.collect(wanted, allowance_s)
        if timed_out and allowance_s > 0:
            self._figures.timeouts += 1
            self._deadline.missed(allowance_s)
        answers = [self._take(state, found, limit) for state, limit in zip(states, limits, strict=True)]
        waited_s = self._now() - began
        self._busy_s += waited_s
        self._learn(answers, limits, waited_s)
        return answers

    def interrupted(self) -> None:
        """Something else than a round runs before the next one."""
        self._began = None

    def joined(self) -> None:
        """A request is about to be drafted for."""
        self._policy.joined()

    def plan_round(self, batch: int) -> None:
        """Decide about the next round of a batch of this size."""
        if self._client is not None:
            self._policy.step_clock.replace(self._client.draft_steps)
        num_steps = self._policy.num_steps(batch)
        self.plan = RoundPlan(num_steps, self._policy.rule(batch, num_steps), wanted=not self._policy.blind)

    def expected_us(self, batch: int) -> int:
        """What the next forward of a batch of this size should take; 0 when unknown."""
        return int(1e6 * self._policy.verify_clock.estimate(batch, self.plan.num_steps + 1))

    def settled(self, source: str, accepted: int, verified: int) -> None:
        """A row's outcome."""
        self._figures.count_outcome(accepted, verified)
        self._saved += accepted
        if verified:
            self._accepted.observe(accepted)
            self._policy.verified(source, accepted, verified)

    def forwarded(self, batch: int, width: int, seconds: float) -> None:
        """The target's forward of a decode batch took so long."""
        self._busy_s += seconds
        self._deadline.earned(seconds)
        self._deadline.gained(seconds * self._saved / batch)
        self._saved = 0
        self._policy.forwarded(batch, width, seconds)
        self._figures.verify_s += seconds

    def describe(self) -> dict[str, object]:
        """The decisions' part of ``/ssd/status``: K and fallback by batch size, where the fallback changes (b*), and
        what decides: the target's forward by batch and width, the draft's step as (rows, ms), chances and waits.
        """
        policy = self._policy
        verify_ms = {
            batch: {width: round(1e3 * seconds, 2) for width, seconds in by_width.items()}
            for batch, by_width in policy.verify_clock.points().items()
        }
        return {
            "lookahead": policy.lookaheads(),
            "fallback_chosen": policy.fallbacks(),
            "switch_point": policy.switch_point(),
            "verify_ms": verify_ms,
            "expected": policy.expectations(),
            "draft_step_ms": [(rows, micros / 1e3) for rows, micros in policy.step_clock.points()],
        }

    def _note_rest(self, batch: int) -> None:
        """What the last round took beside its forward and its wait, if this one follows it at once."""
        now = self._now()
        if self._began is not None:
            self._policy.between(batch, max(0.0, now - self._began - self._busy_s))
        self._began, self._busy_s = now, 0.0

    def _worth_s(self, batch: int) -> float:
        """What the drafts of a round save: accepted tokens times the time of a forward."""
        verify_s = self._policy.verify_clock.estimate(batch, self.plan.num_steps + 1)
        return self._accepted.value * verify_s if verify_s else 1.0

    def _take(self, state: RequestState, found: dict[int, Ready], limit: int) -> Answer:
        if limit == 0 or state.session is None:
            return Answer()
        ready = found.get(state.session)
        source = ready.source if ready is not None else "none"
        state.figures.count(source)
        self._figures.count_round(source)
        if ready is None:
            return Answer(source=source)
        return Answer(Proposed(ready.proposed.tokens[:limit], ready.proposed.q), source)

    def _learn(self, answers: list[Answer], limits: list[int], waited_s: float) -> None:
        """Nothing can be learnt about drafts from a draft server that is away."""
        if self._client is None or self._client.state != "up":
            return
        asked = [(answer, limit) for answer, limit in zip(answers, limits, strict=True) if answer.source]
        for answer, limit in asked:
            self._policy.answered(answer.source, len(answer.proposed.tokens), limit)
        if not any(answer.source == "jit" for answer, _ in asked):
            self._policy.waited(len(answers), self.plan.num_steps, waited_s)
