"""The rounds that are timed are the ones that were meant."""

from __future__ import annotations

from sglang_ssd.bench.bookkeeping import NUM_STEPS, Rounds, round_trip_ms


def test_every_round_is_a_hit_and_grows_the_tree_that_was_asked_for() -> None:
    rounds = Rounds(sessions=3, fan_out=6, context=40)
    before = rounds.server.figures()
    for _ in range(5):
        rounds.play()
    after = rounds.server.figures()
    assert rounds.hits == 15 / 18  # the first answers, after the prefill, cannot be
    grown = after["rows"] - before["rows"]
    assert 5 * 3 * 6 <= grown <= 5 * 3 * 6 * NUM_STEPS
    rounds.server.cache.check()


def test_the_round_trip_is_that_of_hits() -> None:
    assert 0 < round_trip_ms(rounds=3) < 1000
