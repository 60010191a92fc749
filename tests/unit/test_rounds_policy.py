"""The scheduler's decisions: K by batch, the fallback by missed rows, the look back from K = 0."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from sglang_ssd.policy.fallback import Fallback, Round, best_fallback, rule
from sglang_ssd.policy.rounds import RoundPolicy
from sglang_ssd.policy.worth import expected_tokens

ALL = frozenset(("jit", "ngram", "none"))


def a_round(batch=4, limit=4, step_s=0.01, verify_s=0.1, ngram=1.2):
    return Round(
        batch=batch,
        limit=limit,
        hit_tokens=3.0,
        hit_width=limit + 1,
        jit_acceptance=0.7,
        ngram_tokens=ngram,
        verify_s=lambda width: verify_s,
        step_s=lambda rows: step_s * rows,
    )


def test_a_cheap_draft_answers_every_miss_and_a_dear_one_none():
    assert best_fallback(1, a_round(step_s=0.001), ALL) == Fallback("jit", 4)
    assert best_fallback(1, a_round(step_s=1.0), ALL).kind == "ngram"
    assert best_fallback(1, a_round(step_s=1.0), frozenset(("jit", "none"))).kind == "none"
    assert best_fallback(1, a_round(step_s=1.0, ngram=0.9), ALL).kind == "none"
    assert best_fallback(1, a_round(step_s=1.0), frozenset(("jit",))) == Fallback("jit", 1)  # it was asked for


@pytest.mark.parametrize("missed", [1, 2, 3, 4])
@pytest.mark.parametrize("step_s", [0.002, 0.01, 0.03, 0.2])
def test_the_fallback_is_the_best_by_brute_force(missed, step_s):
    round_ = a_round(step_s=step_s)
    kinds = frozenset(("jit", "none"))

    def rate(steps):
        tokens = (4 - missed) * 3.0 + missed * expected_tokens(0.7, steps)
        return tokens / (0.1 + steps * step_s * missed)

    best = max(range(5), key=rate)
    assert best_fallback(missed, round_, kinds) == (Fallback("jit", best) if best else Fallback("none"))


def test_one_miss_among_many_is_not_worth_their_waiting():
    """A step of the same length makes all wait, so it is the many misses that are drafted."""
    round_ = replace(a_round(batch=32), step_s=lambda rows: 0.02)
    answers = rule(round_, frozenset(("jit", "none")), 32)
    assert len(answers) == 32
    kinds = [answer.kind for answer in answers]
    assert kinds[0] == "none"
    assert kinds[-1] == "jit"
    assert kinds == sorted(kinds, reverse=True)


def test_the_switch_point_is_the_batch_whose_misses_are_no_longer_drafted():
    policy = RoundPolicy(4, frozenset(("jit", "none")), adaptive=True)
    for batch in (1, 2, 4, 8, 16):
        teach(policy, batch, {1: 0.100, 5: 0.101}, hit=0.9, draft_us=((1, 20_000), (16, 20_000)))
        assert policy.num_steps(batch) == 4
    kinds = policy.fallbacks()
    assert (kinds[1], kinds[16]) == ("jit", "none")
    assert policy.switch_point() == min(batch for batch, kind in kinds.items() if kind == "none")


def test_before_anything_is_known_it_speculates():
    policy = RoundPolicy(4, ALL, adaptive=True)
    assert policy.num_steps(3) == 4
    assert policy.rule(3, 4)[0] == Fallback("jit", 4)


def test_fixed_choices_stay():
    policy = RoundPolicy(4, frozenset(("none",)), adaptive=False)
    teach(policy, batch=1, widths={1: 0.01, 5: 10.0})
    assert policy.num_steps(1) == 4
    assert policy.rule(1, 4) == (Fallback("none"),)
    assert RoundPolicy(4, frozenset(("jit",)), adaptive=False).rule(9, 4) == (Fallback("jit", 4),)


def teach(policy, batch, widths, hit=0.8, accepted=3, draft_us=((1, 10_000), (12, 12_000)), rounds=300):
    policy.step_clock.replace(draft_us)
    for i in range(rounds):
        for width, seconds in widths.items():
            policy.forwarded(batch, width, seconds)
        source = "hit" if (i % 10) < 10 * hit else "jit"
        policy.answered(source, 4, 4)
        policy.verified(source, accepted, 4)


def test_k_follows_what_a_wider_verify_costs():
    policy = RoundPolicy(4, ALL, adaptive=True)
    teach(policy, 1, {1: 0.100, 5: 0.102})
    assert policy.num_steps(1) == 4
    teach(policy, 1, {1: 0.100, 5: 0.500})
    assert policy.num_steps(1) == 0
    teach(policy, 8, {1: 0.100, 5: 0.110})
    assert (policy.num_steps(8), policy.num_steps(1)) == (4, 0)
    assert policy.lookaheads() == {1: 0, 8: 4}


def test_a_new_request_is_reason_to_look_again():
    policy = RoundPolicy(4, ALL, adaptive=True)
    for batch in (1, 8):
        teach(policy, batch, {1: 0.1, 5: 0.5})
        assert policy.num_steps(batch) == 0
        assert not any(policy.num_steps(batch) for _ in range(30))
        policy.joined()
        assert (policy.num_steps(batch) > 0) == (batch == 1)


def test_with_a_fixed_k_the_fallback_still_learns():
    """Guesses from the text that are never found are given up for what is worth more."""
    policy = RoundPolicy(4, ALL, adaptive=False)
    policy.num_steps(1)
    teach(policy, 1, {1: 0.100, 5: 0.101}, draft_us=((1, 500_000),))
    assert policy.rule(1, 4)[0].kind == "ngram"  # hopeful at first
    for _ in range(200):
        policy.num_steps(1)
        policy.answered("none", 0, 4)
    assert policy.rule(1, 4)[0].kind == "none"


def test_all_that_a_short_k_asked_for_says_little_about_longer_ones():
    """Answers of 2 at most were all that came at K = 4: full ones at K = 2 are no reason to expect four."""
    policy = RoundPolicy(4, ALL, adaptive=True)
    teach(policy, 1, {1: 0.100, 5: 0.112})
    assert policy.num_steps(1) == 4
    for drafts, asked in [(2, 4)] * 200 + [(2, 2)] * 200:
        policy.answered("partial" if drafts < asked else "hit", drafts, asked)
    assert 2 <= policy.num_steps(1) <= 3


def test_k_falls_when_few_drafts_are_accepted():
    policy = RoundPolicy(8, ALL, adaptive=True)
    teach(policy, 1, {1: 0.100, 9: 0.140}, accepted=1)
    assert 0 < policy.num_steps(1) < 4


def test_from_zero_it_looks_again_ever_more_seldom_and_comes_back():
    policy = RoundPolicy(4, ALL, adaptive=True)
    teach(policy, 1, {1: 0.1, 5: 0.5})
    chosen = [policy.num_steps(1) for _ in range(2000)]
    looks = [i for i in range(1, 2000) if chosen[i] and not chosen[i - 1]]
    assert 3 <= len(looks) <= 12
    assert sum(map(bool, chosen)) < 0.03 * len(chosen)
    pauses = [b - a for a, b in pairwise(looks)]
    assert pauses == sorted(pauses)
    for _ in range(600):
        width = policy.num_steps(1) + 1
        policy.forwarded(1, width, 0.1)
    assert policy.num_steps(1) > 0


def test_what_no_speculation_costs_is_measured_for_every_size():
    """The second token of a forward may cost more than the third: a line through wider ones promises too much."""
    policy = RoundPolicy(4, ALL, adaptive=True)
    teach(policy, 32, {2: 0.275, 3: 0.290})
    assert policy.num_steps(32) == 0
    policy.forwarded(32, 1, 0.207)
    assert policy.num_steps(32) > 0
    assert policy.num_steps(30) > 0  # of nearly the same size
    teach(policy, 8, {2: 0.147})
    assert policy.num_steps(8) == 0


def test_one_forward_without_drafts_may_have_met_a_bad_moment_so_there_are_three():
    policy = RoundPolicy(4, ALL, adaptive=True)
    teach(policy, 8, {5: 0.110})
    chosen = []
    for _ in range(60):
        chosen.append(policy.num_steps(8))
        policy.forwarded(8, chosen[-1] + 1, 0.1 + 0.0025 * chosen[-1])
    assert [i for i, k in enumerate(chosen) if k == 0] == [0, 5, 10]


def test_it_is_measured_again_now_and_then():
    policy = RoundPolicy(4, ALL, adaptive=True)
    teach(policy, 1, {1: 0.100, 5: 0.102})
    chosen = []
    for _ in range(600):
        chosen.append(policy.num_steps(1))
        policy.forwarded(1, chosen[-1] + 1, 0.1)
    assert chosen.count(0) == 2


def test_nobody_waits_before_a_look_and_the_look_is_short_in_a_large_batch():
    for batch, rounds in ((1, 3), (6, 2), (32, 1)):
        policy = RoundPolicy(4, ALL, adaptive=True)
        teach(policy, batch, {1: 0.1, 5: 0.5})
        look = []
        while len(look) < 4 or look[-1][0]:
            k = policy.num_steps(batch)
            if k or look:
                look.append((k, policy.blind, {answer.kind for answer in policy.rule(batch, k)}))
        planned = [k for k, _, _ in look[:-1]]
        assert all(planned)
        assert len(planned) == 4 + rounds
        assert [blind for _, blind, _ in look] == [True] * 4 + [False] * (rounds + 1)
        assert [kinds for _, _, kinds in look[:4]] == [{"none"}] * 4
