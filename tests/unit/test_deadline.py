"""How long a round waits."""

from __future__ import annotations

from sglang_ssd.policy.deadline import Deadline


def taught(deadline: Deadline, seconds: float, times: int = 50, *, drafted: bool = True) -> Deadline:
    for _ in range(times):
        deadline.answered(seconds, in_time=True, drafted=drafted)
    return deadline


def test_it_follows_the_answers_and_never_exceeds_what_they_are_worth() -> None:
    deadline = taught(Deadline(), 0.02)
    assert 0.02 <= deadline.allowance_s() < 0.03
    assert deadline.allowance_s(worth_s=0.012) == 0.012
    assert 0.2 <= taught(deadline, 0.2).allowance_s() < 0.4
    assert taught(Deadline(cap_s=0.05), 0.2).allowance_s() == 0.05


def test_a_run_of_ready_answers_leaves_time_for_one_that_is_drafted() -> None:
    deadline = taught(taught(Deadline(), 0.015), 0.001, times=500, drafted=False)
    assert deadline.allowance_s() >= 0.015
    assert taught(Deadline(), 0.001, drafted=False).allowance_s() > 0.4  # none was drafted yet: nobody knows


def test_waiting_in_vain_backs_off_exponentially_until_an_answer_is_in_time() -> None:
    deadline = taught(Deadline(), 0.02)
    waited = []
    for number in range(200):
        if deadline.allowance_s() > 0:
            waited.append(number)
            deadline.missed(0.0)
    assert waited == [0, 2, 5, 10, 19, 36, 69, 134]
    deadline.answered(0.5, in_time=False, drafted=True)
    assert deadline.allowance_s() == 0
    deadline.answered(0.02, in_time=True, drafted=True)
    assert deadline.allowance_s() > 0


def test_while_it_backs_off_it_still_takes_what_is_ready() -> None:
    deadline = taught(taught(Deadline(), 0.1), 0.006, drafted=False)
    deadline.missed(deadline.allowance_s())
    assert 0.006 <= deadline.allowance_s() < 0.01
    deadline.missed(0.006)  # a short wait in vain makes the long pause no longer
    deadline.missed(deadline.allowance_s())
    assert [deadline.allowance_s() > 0 for _ in range(3)] == [False, True, True]


def test_another_draft_server_begins_anew_but_what_was_spent_is_spent() -> None:
    deadline = taught(Deadline(), 0.02)
    deadline.missed(0.3)
    deadline.forget()
    assert deadline.allowance_s() == 0.5 - 0.3


def test_a_draft_that_seems_worthless_is_looked_at_now_and_then() -> None:
    deadline = taught(Deadline(), 0.1)
    long_waits = [number for number in range(200) if deadline.allowance_s(worth_s=0.0) > 0.05]
    assert len(long_waits) == 12


def test_without_credit_for_a_whole_answer_it_saves_up_for_one() -> None:
    """To wait for less than an answer takes would be in vain, and use the little up for ever."""
    deadline = taught(Deadline(), 0.04)
    deadline.missed(0.49)
    assert deadline.allowance_s() == 0  # the pause
    assert deadline.allowance_s() == 0  # 10 ms of credit
    deadline.earned(4.0)
    assert 0.04 <= deadline.allowance_s() <= 0.05


def test_a_draft_that_is_accepted_may_be_late_more_often() -> None:
    deadline = taught(Deadline(), 0.04)
    deadline.missed(0.5)
    assert deadline.allowance_s() == 0
    deadline.gained(0.4)
    assert deadline.allowance_s() >= 0.04


def test_a_patient_one_waits() -> None:
    deadline = Deadline(patient=True)
    deadline.missed(100.0)
    assert deadline.allowance_s(worth_s=0) > 1000


def test_what_is_waited_in_vain_is_bounded_by_a_share_of_the_work() -> None:
    """Whatever the answers do: at most half a second, and then a hundredth of the target's time."""
    for drafted in (True, False):
        deadline, wasted, worked = taught(Deadline(), 0.3, drafted=drafted), 0.0, 0.0
        for _ in range(5000):
            allowance = deadline.allowance_s()
            if allowance > 0:
                deadline.missed(allowance)
            wasted, worked = wasted + allowance, worked + 0.01
            deadline.earned(0.01)
            # Late answers that look timely, the worst case.
            deadline.answered(0.2, in_time=True, drafted=drafted)
            assert wasted <= 0.5 + worked / 100 + 1e-9
        assert wasted > 0.7  # it does keep trying
