"""What a round asks for and how long it waits, with a link that is played."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_ssd.policy.deadline import Deadline
from sglang_ssd.policy.rounds import RoundPolicy
from sglang_ssd.scheduler.collector import Collector
from sglang_ssd.scheduler.figures import Figures, RequestFigures
from sglang_ssd.scheduler.mailbox import AnswerTime, Ready
from sglang_ssd.scheduler.supports import Proposed

K = 3
SLOW = AnswerTime(seconds=0.04, expected=True, drafted=True)


class Link:
    """Answers with what it was given; notes how long it was allowed to take."""

    def __init__(self):
        self.boot, self.state, self.draft_steps = 1, "up", ()
        self.times, self.ready, self.late, self.allowances = [], {}, False, []

    def take_answer_times(self):
        times, self.times = self.times, []
        return times

    def collect(self, wanted, allowance_s):
        self.allowances.append(allowance_s)
        return {session: self.ready[session] for session in wanted if session in self.ready}, self.late


@pytest.fixture
def link():
    return Link()


@pytest.fixture
def policy():
    return RoundPolicy(K, frozenset(("jit",)), adaptive=True)


@pytest.fixture
def collector(link, policy):
    return Collector(link, policy, Deadline(), figures(), K)


def figures():
    return Figures(accepted_per_position=[0] * K, verified_per_position=[0] * K)


def request(session=1, length=10):
    return SimpleNamespace(session=session, length=length, figures=RequestFigures())


def run_out_of_credit(collector, link):
    """Answers take 40 ms; half a second is waited in vain, and the pause after it is over."""
    link.times = [SLOW] * 50
    collector.collect([request()], [K])
    collector._deadline.missed(0.5)
    for _ in range(2):
        collector.collect([request()], [K])
    assert link.allowances[-1] == 0


def test_what_is_there_is_proposed_and_no_more_than_k_of_it(collector, link):
    link.ready = {1: Ready(10, Proposed([5, 6, 7]), "hit")}
    one, two = collector.collect([request(), request(session=2)], [2, K])
    assert (one.proposed.tokens, one.source) == ([5, 6], "hit")
    assert (two.proposed.tokens, two.source) == ([], "none")
    assert collector._figures.as_dict()["hits"] == 1


def test_with_k_0_nobody_is_asked(collector, link, policy):
    for _ in range(300):
        policy.forwarded(1, 1, 0.1)
        policy.forwarded(1, K + 1, 0.9)
    collector.plan_round(1)
    assert collector.plan.num_steps == 0
    (answer,) = collector.collect([request()], [K])
    assert (answer.source, link.allowances) == ("", [])


def test_accepted_drafts_earn_the_time_to_wait_for_more(collector, link):
    run_out_of_credit(collector, link)
    collector.settled("hit", 2, K)
    collector.forwarded(1, K + 1, 0.1)  # two tokens saved two forwards of 100 ms
    collector.collect([request()], [K])
    assert link.allowances[-1] >= 0.04


def test_rejected_drafts_do_not(collector, link):
    run_out_of_credit(collector, link)
    collector.settled("hit", 0, K)
    collector.forwarded(1, K + 1, 0.1)
    collector.collect([request()], [K])
    assert link.allowances[-1] == 0


def test_another_draft_server_is_waited_for_anew(collector, link):
    collector.collect([request()], [K])
    link.times = [SLOW] * 50
    collector.collect([request()], [K])
    collector._deadline.missed(0.2)
    collector.collect([request()], [K])
    assert link.allowances[-1] == 0  # the pause
    collector._deadline.missed(0.0)
    link.boot = 2
    collector.collect([request()], [K])
    assert link.allowances[-1] > 0.1  # nobody knows yet how long it takes


def test_a_draft_server_that_is_away_teaches_nothing(collector, link, policy):
    before = policy._hit.value
    link.state = "down"
    for _ in range(50):
        collector.collect([request()], [K])
    assert policy._hit.value == before
    link.state = "up"
    policy.num_steps(1)
    collector.collect([request()], [K])
    assert policy._hit.value < before


def test_before_a_look_the_draft_server_prepares_and_nobody_asks(collector, link, policy):
    policy.forwarded(1, 1, 0.1)
    for _ in range(300):
        policy.forwarded(1, K + 1, 0.9)
    asked = []
    for _ in range(80):
        collector.plan_round(1)
        before = len(link.allowances)
        collector.collect([request()], [K])
        if collector.plan.num_steps:
            asked.append(len(link.allowances) - before)
    assert asked == [0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(("source", "waits"), [("hit", True), ("none", True), ("jit", False)])
def test_a_wait_for_what_is_not_drafted_counts_against_its_k(link, policy, source, waits):
    """Also in vain: a draft server that is always busy must not keep its K by never being counted."""
    clock = iter([0.0, 1.0, 1.25, 2.0, 2.25, 3.0, 3.25])
    collector = Collector(link, policy, Deadline(), figures(), K, now=lambda: next(clock))
    link.ready = {1: Ready(10, Proposed([5, 6, 7] if source != "none" else []), source)}
    collector.plan_round(1)
    collector.collect([request()], [K])
    assert (policy.expectations()["wait_ms"][1].get(K, 0) > 0) == waits


def test_what_lies_between_rounds_is_known_unless_a_prefill_does(link, policy):
    """Rounds of a second: 300 ms of forward, 250 ms of waiting, the rest is nobody's."""
    times = iter([0.0, 0.0, 0.25, 1.0, 1.0, 1.25, 9.0, 9.0, 9.25])
    collector = Collector(link, policy, Deadline(), figures(), K, now=lambda: next(times))
    for interrupted in (False, False, True):
        if interrupted:
            collector.interrupted()
        collector.collect([request()], [K])
        collector.forwarded(1, 2, 0.3)
    assert policy._of(1).rest_s.value == pytest.approx(0.45)
