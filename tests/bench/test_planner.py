"""Every planner, for 8 to 4,096 rows of a round: chances and plan, eight rows a session, K = 4, 16 candidates each."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_ssd.policy.confidence import ConfidencePlanner
from sglang_ssd.policy.fan_out import GeometricPlanner, UniformPlanner
from sglang_ssd.policy.measured import MeasuredPlanner
from sglang_ssd.policy.planner import Chain

K, CANDIDATES, ROWS_EACH = 4, 16, 8


def chains(count):
    chance = np.random.default_rng(1)
    return [
        Chain(chance.normal(-1, 1, K), -np.sort(chance.exponential(3, (K + 1, CANDIDATES)), axis=1))
        for _ in range(count)
    ]


@pytest.mark.parametrize("kind", [ConfidencePlanner, MeasuredPlanner, GeometricPlanner, UniformPlanner])
@pytest.mark.parametrize("rows", [8, 64, 512, 4096])
def test_planner(benchmark, rows, kind):
    """With one outcome of every session to learn from in between, as in a round."""
    planner, sessions = kind(), chains(rows // ROWS_EACH)

    def a_round():
        for chain in sessions:
            planner.observe(chain, 2, 0)
        return planner.plan(planner.chances(sessions), sessions, rows)

    assert 0 < sum(map(sum, benchmark(a_round))) <= rows
