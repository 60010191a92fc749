"""What things take: running estimates that one slow start cannot spoil."""

from __future__ import annotations

import pytest

from sglang_ssd.policy.clock import StepClock, VerifyClock
from sglang_ssd.policy.pace import Expected


def test_a_step_takes_what_its_neighbours_say():
    clock = StepClock()
    assert clock.estimate(4) == 0.0
    clock.observe(1, 100.0)
    assert clock.estimate(99) == 100.0
    clock.observe(64, 730.0)
    assert clock.estimate(1) == 100.0
    assert clock.estimate(8) == pytest.approx(170.0)
    assert clock.estimate(100) == pytest.approx(1090.0)  # more rows than ever go on as they did
    assert clock.most_rows == 64
    for _ in range(100):
        clock.observe(1, 200.0)
    assert clock.estimate(1) == pytest.approx(200.0)


def test_a_slow_first_step_is_not_believed_beyond_reason():
    clock = StepClock()
    clock.observe(8, 100.0)
    clock.observe(16, 90_000.0)
    assert clock.estimate(16) == 200.0  # 16 rows are at most two steps of 8
    clock.observe(4, 5_000.0)
    assert clock.estimate(4) == 100.0  # and fewer rows take no longer than more


def test_a_clock_travels_over_the_wire():
    clock, other = StepClock(), StepClock()
    for rows, micros in ((1, 100.0), (12, 180.0), (40, 400.0)):
        clock.observe(rows, micros)
    other.replace(clock.points())
    assert [other.estimate(n) for n in (1, 5, 12, 30, 99)] == [clock.estimate(n) for n in (1, 5, 12, 30, 99)]


def test_a_verify_follows_batch_and_width():
    clock = VerifyClock()
    assert clock.estimate(1, 3) == 0.0
    clock.observe(1, 1, 0.080)
    assert clock.estimate(1, 5) == 0.080  # hopeful until it was tried
    clock.observe(1, 5, 0.100)
    assert clock.estimate(1, 3) == pytest.approx(0.090)
    assert clock.estimate(1, 7) == pytest.approx(0.110)
    clock.observe(16, 1, 0.3)
    assert clock.estimate(20, 1) == 0.3
    assert clock.estimate(2, 1) == pytest.approx(0.085)  # two positions, as one request of width 2 has
    assert clock.estimate(2, 2) == pytest.approx(0.095)


def test_a_stall_of_the_machine_moves_an_estimate_little():
    clock = VerifyClock()
    for _ in range(20):
        clock.observe(1, 1, 0.1)
    clock.observe(1, 1, 60.0)
    assert clock.estimate(1, 1) < 0.15


def test_a_machine_that_slows_down_slows_all_forwards():
    """Sizes seen at different times keep their ratio, and one noisy sample does not move it for long."""
    clock = VerifyClock()
    for width, seconds in ((1, 0.100), (3, 0.120)):
        for _ in range(10):
            clock.observe(8, width, seconds)
    for _ in range(100):
        clock.observe(8, 1, 0.200)
    assert clock.estimate(8, 1) == pytest.approx(0.200, rel=0.01)
    assert clock.estimate(8, 3) == pytest.approx(0.240, rel=0.15)
    clock.observe(8, 3, 0.290)
    for _ in range(10):
        clock.observe(8, 1, 0.200)
    assert clock.estimate(8, 3) == pytest.approx(0.240, rel=0.15)
    clock.observe(16, 1, 0.300)  # a size that is new was seen at the present pace
    assert clock.estimate(16, 1) == pytest.approx(0.300)


def test_a_size_that_has_changed_against_the_others_is_learnt():
    clock = VerifyClock()
    for round_ in range(600):
        clock.observe(1, 1, 0.100)
        clock.observe(1, 2, 0.110 if round_ < 100 else 0.180)
    assert clock.estimate(1, 2) / clock.estimate(1, 1) == pytest.approx(1.8, rel=0.02)


def test_a_step_is_not_begun_when_an_outcome_is_about_to_come():
    expected = Expected(at_s=10.0, verify_s=4.0)
    assert expected.leaves_time(9.9, 1.0, planned=True)
    assert not expected.leaves_time(9.9, 1.0, planned=False)
    assert expected.leaves_time(8.9, 1.0, planned=False)
    assert not expected.leaves_time(10.1, 1.0, planned=True)
    assert expected.leaves_time(12.0, 1.0, planned=False)  # late by half a verify: who knows when
