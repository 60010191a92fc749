"""The fan-out planner for 8 to 4,096 rows of a round, spread over as many sessions as there are eights."""

from __future__ import annotations

import pytest

from sglang_ssd.policy.fan_out import GeometricPlanner


@pytest.mark.parametrize("rows", [8, 64, 512, 4096])
def test_geometric(benchmark, rows):
    planner = GeometricPlanner()

    def plan():
        return [planner.plan(8, 4) for _ in range(rows // 8)]

    assert sum(map(sum, benchmark(plan))) == rows
