"""What rounds wait, by K: learnt at once, and forgotten when it is not tried again."""

from __future__ import annotations

import pytest

from sglang_ssd.policy.rounds import RoundPolicy
from sglang_ssd.policy.waits import Waits


def waits_after(*rounds: tuple[int, float], quiet: int = 0) -> Waits:
    waits = Waits()
    for num_steps, seconds in rounds:
        waits.begin_round()
        waits.observe(num_steps, seconds)
    for _ in range(quiet):
        waits.begin_round()
    return waits


def test_what_was_never_tried_is_hoped_for_but_not_beyond_a_shorter_one() -> None:
    waits = waits_after(*[(2, 0.04)] * 6)
    assert waits.estimate(1) == 0
    assert waits.estimate(4) == waits.estimate(2) > 0.03


def test_one_bad_moment_counts_half_and_many_count_whole() -> None:
    assert waits_after((1, 0.1)).estimate(1) == pytest.approx(0.05)
    assert 0.08 < waits_after(*[(1, 0.1)] * 8).estimate(1) < 0.1


def test_a_change_is_noticed_within_a_few_rounds() -> None:
    assert waits_after(*[(3, 0.0)] * 50, *[(3, 0.1)] * 8).estimate(3) > 0.05


def test_what_is_not_tried_fades_to_what_a_shorter_one_is_waited_for() -> None:
    known = waits_after((1, 0.01), (3, 0.1))
    faded = waits_after((1, 0.01), (3, 0.1), quiet=1000)
    assert faded.estimate(3) < 0.01 < known.estimate(3)
    assert set(faded.estimates()) == {1, 3}


@pytest.mark.parametrize("bad_s", [0.03, 0.06, 0.1])
def test_a_bad_beginning_does_not_end_speculation(bad_s: float) -> None:
    """Thirty-two requests begin at once, and the first rounds wait long for a draft server that is behind. Later ones
    wait for nothing, half of them hit, and speculation is worth a tenth more than none.
    """
    policy = RoundPolicy(4, frozenset(("jit", "none")), adaptive=True)
    policy.step_clock.replace(((1, 30_000), (32, 40_000)))
    batch, chosen, done = 32, [], [0]

    def run(rounds: int, wait_s: float) -> None:
        num_steps = policy.num_steps(batch)
        for _ in range(rounds):
            asked = num_steps if not policy.blind else 0
            policy.forwarded(batch, 1 + asked, 0.1 + 0.007 * asked)
            if asked:
                policy.waited(batch, num_steps, wait_s)
            for row in range(batch if asked else 0):
                done[0] += 1
                source = "hit" if done[0] % 2 else "none"
                policy.answered(source, num_steps if source == "hit" else 0, num_steps)
                if source == "hit":
                    policy.verified(source, row // 2 % 2, num_steps)
            chosen.append(num_steps)
            num_steps = policy.num_steps(batch)

    run(12, bad_s)  # time enough to try every K
    run(380, 0.001)
    assert chosen.count(0) > 50
    assert chosen[-100:].count(0) <= 2  # a forward without drafts is measured now and then
