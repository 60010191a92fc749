"""The policies against the numbers of the paper's theorem, brute force and their edges."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ssd.policy.acceptance import Acceptance
from sglang_ssd.policy.fan_out import geometric
from sglang_ssd.policy.waiting import best_depth


@pytest.mark.parametrize(
    ("acceptance", "exponent", "real_valued"),
    [
        (0.65, 1.0, [5.5, 4.4, 3.6, 2.9, 2.3, 1.9, 1.5, 2.0]),
        (0.8, 0.5, [4.2, 3.6, 3.1, 2.7, 2.3, 2.0, 1.7, 4.3]),
        (0.8, 1.0, [3.9, 3.5, 3.1, 2.8, 2.5, 2.2, 2.0, 4.0]),
        (0.9, 1.0, [2.9, 2.8, 2.6, 2.5, 2.4, 2.3, 2.1, 6.4]),
    ],
)
def test_theorem_12_at_k_7_budget_24(acceptance, exponent, real_valued):
    large = geometric(24_000, 7, acceptance, exponent)
    assert [count / 1000 for count in large] == pytest.approx(real_valued, abs=0.051)
    whole = geometric(24, 7, acceptance, exponent)
    assert all(abs(count - share) < 1 for count, share in zip(whole, real_valued, strict=True))
    assert sum(whole) == 24


def test_the_allocation_minimises_the_miss_probability():
    """Brute force over every split of a small budget in which each outcome has a row."""
    acceptance, exponent = 0.8, 1.0

    def miss(split):
        odds = [acceptance**k * (1 - acceptance) for k in range(3)] + [acceptance**3]
        return sum(chance * count**-exponent for chance, count in zip(odds, split, strict=True))

    splits = [split for split in itertools.product(range(1, 13), repeat=4) if sum(split) == 12]
    best = min(map(miss, splits))
    assert miss(geometric(12, 3, acceptance, exponent)) <= best * 1.02


def test_without_a_chain_everything_goes_to_the_first_position():
    assert geometric(12, 0, 0.7, 1.0) == [12]
    assert geometric(0, 3, 0.7, 1.0) == [0, 0, 0, 0]


@settings(derandomize=True, deadline=None)
@given(st.integers(0, 200), st.integers(0, 20), st.floats(0.05, 0.95), st.floats(0.1, 4))
def test_allocations_sum_and_fall_until_the_last_position(budget, length, acceptance, exponent):
    counts = geometric(budget, length, acceptance, exponent)
    assert len(counts) == length + 1
    assert sum(counts) == budget
    before_last = counts[:-1]
    assert before_last == sorted(before_last, reverse=True)
    if length:
        assert counts[-1] >= before_last[-1] - 1 or acceptance < 0.5


def test_acceptance_estimates_the_chance_of_one_more_token():
    estimate = Acceptance()
    for accepted in [2, 0, 4, 1] * 200:  # of 4: 7 accepted of 2+1, 0+1, 4, 1+1 = 10 tried
        estimate.observe(accepted, 4)
    assert estimate.rate == pytest.approx(0.7, abs=0.02)
    before = estimate.rate
    estimate.observe(0, 0)
    assert estimate.rate == before


def test_best_depth_waits_only_when_it_pays():
    assert best_depth(1, 4, 0.9, verify_us=0, step_us=5) == 4
    assert best_depth(1, 4, 0.9, verify_us=1000, step_us=1) == 4
    assert best_depth(1, 4, 0.9, verify_us=10, step_us=1000) == 1
    assert best_depth(3, 3, 0.9, verify_us=10, step_us=1000) == 3
    assert best_depth(0, 8, 0.05, verify_us=1000, step_us=400) == 0


@settings(derandomize=True, deadline=None)
@given(st.integers(0, 6), st.integers(0, 6), st.floats(0.05, 0.95), st.floats(1, 1e5), st.floats(0, 1e5))
def test_best_depth_is_the_best_by_simulation(ready, more, acceptance, verify_us, step_us):
    limit = ready + more

    def rate(drafts):
        tokens = sum(acceptance**i for i in range(drafts + 1))
        return tokens / (verify_us + (drafts - ready) * step_us)

    chosen = best_depth(ready, limit, acceptance, verify_us, step_us)
    assert rate(chosen) >= max(map(rate, range(ready, limit + 1))) * (1 - 1e-9)
