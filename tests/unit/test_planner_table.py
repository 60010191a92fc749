"""The planners on recorded rounds of the demo pair: the table's command, and the order that it is to show."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_ssd.bench.__main__ import main
from sglang_ssd.bench.simulator.planners import chain_of, hit_rate
from sglang_ssd.bench.simulator.trace import BEYOND, RecordedRound, shipped_trace
from sglang_ssd.policy.planners import PLANNERS

SCORES = np.array([[-0.1, -2.0, -3.0], [-0.5, -1.0, -4.0], [-0.2, -2.5, -2.6]], dtype=np.float32)


@pytest.mark.parametrize(
    ("accepted", "rank", "expected"), [(0, 1, 0), (1, 2, 1), (2, 0, 0), (2, 2, 2), (1, BEYOND, BEYOND)]
)
def test_the_served_token_is_no_candidate_where_it_was_rejected(accepted, rank, expected):
    ended = chain_of(RecordedRound(SCORES, accepted, rank), 0.7)
    assert (ended.accepted, ended.rank) == (accepted, expected)
    assert ended.chain.served == pytest.approx([-0.1, -0.5])
    assert ended.chain.others[0] == pytest.approx([-2.0, -3.0, -np.inf])
    assert ended.chain.others[2] == pytest.approx([-0.2, -2.5, -2.6])


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_confidence_beats_the_theorem_and_that_beats_uniform_at_equal_rows(temperature):
    trace = shipped_trace("demo", temperature)
    rounds = [chain_of(each, temperature) for each in trace.rounds(4)]
    uniform, geometric, confidence = (
        hit_rate(PLANNERS[name](), rounds, 15) for name in ("uniform", "geometric", "confidence")
    )
    assert uniform < geometric < confidence


def test_more_rows_hit_more_and_all_rows_hit_all_that_is_known():
    trace = shipped_trace("demo", 0.0)
    rounds = [chain_of(each, 0.0) for each in trace.rounds(2)]
    rates = [hit_rate(PLANNERS["confidence"](), rounds, rows) for rows in (2, 6, 18)]
    assert rates == sorted(rates)
    known = sum(each.rank != BEYOND for each in rounds) / len(rounds)
    assert hit_rate(PLANNERS["confidence"](), rounds, 48) == pytest.approx(known)


def test_the_command_prints_the_table(capsys):
    assert main(["planners", "--rows", "15", "--temperatures", "0"]) == 0
    assert "confidence" in capsys.readouterr().out
    assert main(["planners", "--temperatures", "0.3"]) == 2
    assert "no trace" in capsys.readouterr().err
