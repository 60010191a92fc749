"""Who gets the rows: planners against brute force, against outcomes they should learn, and at their edges."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ssd.policy.calibration import Calibration, rising, temperature_range
from sglang_ssd.policy.confidence import ConfidencePlanner
from sglang_ssd.policy.fan_out import FullAcceptancePlanner, GeometricPlanner, UniformPlanner
from sglang_ssd.policy.planner import Chain, expected_hits, spread
from sglang_ssd.policy.planners import PLANNERS
from sglang_ssd.policy.shape import Setting, Shape, best_shape

M = 6


def chain(accepts, temperature=0.0, known=True, usable=99):
    """A chain whose own tokens have these chances, and whose other candidates halve from rank to rank."""
    falling = 0.5 ** np.arange(1, M + 1)
    served = np.log(np.array(accepts, dtype=float))
    shares = [1 - each for each in accepts] + [1.0]
    others = np.log(np.array([share * falling / falling.sum() for share in shares]))
    if not known:
        others[-1] = np.nan
    return Chain(served, others, temperature, usable)


def fan_outs(planner, chains, budget):
    return planner.plan(planner.chances(chains), chains, budget)


# ---- the allocation -------------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 7), st.randoms(use_true_random=False))
def test_the_allocation_equals_brute_force_on_concave_curves(budget, dice):
    """Two sessions, two positions, gains that fall from rank to rank."""
    gains = np.array([[sorted((dice.random() for _ in range(4)), reverse=True) for _ in range(2)] for _ in range(2)])
    plans = itertools.product(range(5), repeat=4)

    def worth(plan):
        return sum(gains[i // 2, i % 2, :count].sum() for i, count in enumerate(plan))

    best = max(worth(plan) for plan in plans if sum(plan) <= budget)
    chosen = list(itertools.chain(*spread(gains, budget)))
    assert sum(chosen) <= budget
    assert worth(chosen) == pytest.approx(best)
    assert expected_hits(gains, budget)[-1] == pytest.approx(best)


def test_no_row_goes_to_what_cannot_happen():
    gains = np.zeros((1, 2, 3))
    gains[0, 0, :2] = 0.5, 0.1
    assert spread(gains, 10) == [[2, 0]]
    assert expected_hits(gains, 4) == pytest.approx([0, 0.5, 0.6, 0.6, 0.6])


@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_every_planner_keeps_to_the_budget_and_to_what_is_usable(name):
    planner = PLANNERS[name]()
    chains = [chain([0.6, 0.5, 0.4]), chain([]), chain([0.9], usable=1), chain([0.7, 0.7], known=False)]
    for budget in (0, 1, 7, 20):
        plans = fan_outs(planner, chains, budget)
        assert [len(plan) for plan in plans] == [4, 4, 4, 4]
        assert sum(map(sum, plans)) <= budget
        assert all(count == 0 for plan, each in zip(plans, chains, strict=True) for count in plan[each.length + 1 :])
        assert plans[2][1] == 0
    assert sum(map(sum, fan_outs(planner, chains[:2], 6))) == 6
    chances = planner.chances(chains)
    assert (np.diff(chances, axis=2) <= 1e-12).all()


@pytest.mark.parametrize("name", ["measured", "geometric"])
def test_what_happens_always_is_learnt(name):
    """Every round ends with one accepted and the bonus at rank 2: soon that outcome has its three rows."""
    planner = PLANNERS[name]()
    each = chain([0.7, 0.7, 0.7])
    for _ in range(400):
        planner.observe(each, 1, 2)
        planner.chances([each])
    if name == "geometric":
        assert planner.acceptance.rate == pytest.approx(0.5, abs=0.03)
        return
    assert fan_outs(planner, [each], 4)[0][1] >= 3


def test_uniform_and_full_acceptance_are_what_they_are_called():
    each = chain([0.9, 0.1, 0.5])
    assert fan_outs(UniformPlanner(), [each], 8) == [[2, 2, 2, 2]]
    assert fan_outs(FullAcceptancePlanner(), [each], 4) == [[0, 0, 0, 4]]


def test_the_geometric_exponent_follows_the_ranks():
    planner, each = GeometricPlanner(), chain([0.5])
    for _ in range(2000):
        planner.observe(each, 0, 0)
    near = planner.exponent
    for _ in range(2000):
        planner.observe(each, 0, -1)
    assert near == 2.0  # capped
    assert planner.exponent == 0.3


# ---- confidence -----------------------------------------------------------------------------------------------------


def test_a_doubtful_token_draws_the_rows_to_itself():
    """All else equal, the outcome goes where the draft is least sure."""
    plan = fan_outs(ConfidencePlanner(), [chain([0.95, 0.1, 0.95, 0.95])], 6)[0]
    assert plan[1] == max(plan)
    sure = fan_outs(ConfidencePlanner(), [chain([0.98, 0.98, 0.98])], 6)[0]
    assert sure[-1] == max(sure)


def test_sessions_compete_for_the_rows():
    """One session is sure that all is accepted and what follows; another has no idea: rows go where they hit."""
    sure = chain([0.99, 0.99])
    peaked = replace(sure, others=np.vstack([sure.others[:2], [0.0] + [-20.0] * (M - 1)]))
    vague = Chain(np.full(2, -9.0), np.full((3, M), -9.0))
    plans = fan_outs(ConfidencePlanner(), [vague, peaked], 8)
    assert sum(plans[1]) < sum(plans[0])
    assert plans[1][-1] >= 1


def test_unknown_candidates_at_the_end_get_their_expected_share():
    planner = ConfidencePlanner()
    known, unknown = chain([0.95, 0.95]), chain([0.95, 0.95], known=False)
    for _ in range(300):
        planner.observe(known, 2, 0)
        planner.chances([known])
    plan = fan_outs(planner, [unknown], 4)[0]
    assert plan[2] >= 1
    assert planner.chances([unknown])[0, 2, 0] > 0.5


def test_a_bonus_after_all_drafts_is_another_matter_than_one_after_a_rejection():
    """After a rejection it is always the first candidate, after full acceptance never one of them."""
    planner, each = ConfidencePlanner(), chain([0.5, 0.5])
    for _ in range(300):
        planner.observe(each, 0, 0)
        planner.observe(each, 2, -1)
    chances = planner.chances([each])[0]
    assert chances[0, 0] > 0.8 * chances[0].sum()
    assert chances[2].sum() < 0.1


def test_temperatures_are_calibrated_apart():
    planner = ConfidencePlanner()
    cold, hot = chain([0.5, 0.5]), chain([0.5, 0.5], temperature=1.0)
    for _ in range(300):
        planner.observe(cold, 2, 0)
        planner.observe(hot, 0, 0)
    chances = planner.chances([cold, hot])
    assert chances[0, 2].sum() > 0.6
    assert chances[1, 2].sum() < 0.1


def test_a_calibration_learns_what_predictions_are_worth():
    calibration, dice = Calibration(), np.random.default_rng(0)
    predicted = dice.random(20_000)
    happened = (dice.random(20_000) < predicted**2).astype(float)
    calibration.observe(predicted, happened, np.zeros(20_000, dtype=np.int64))
    at = np.array([[0.1, 0.3, 0.5, 0.7, 0.9]])
    assert calibration(at, np.array([0]))[0] == pytest.approx(at[0] ** 2, abs=0.06)
    assert calibration(at, np.array([3]))[0] == pytest.approx(at[0])  # another temperature knows nothing of it
    assert temperature_range(np.array([0.0, 0.3, 0.7, 1.0, 1.3])).tolist() == [0, 1, 2, 3, 4]


def test_a_curve_is_made_to_rise_by_pooling():
    values, weights = np.array([0.5, 0.1, 0.4, 0.3, 0.9]), np.array([1.0, 3.0, 1.0, 1.0, 9.0])
    assert rising(values, weights) == pytest.approx([0.2, 0.2, 0.35, 0.35, 0.9])


# ---- rows and depth -------------------------------------------------------------------------------------------------

HITS = [0.0, *np.cumsum(0.4 * 0.75 ** np.arange(16)) / 1.7]


def a_setting(step_us=10_000.0, verify_us=100_000.0, available_us=95_000.0, sessions=1, limit=4):
    return Setting(sessions, limit, available_us, verify_us, lambda rows: step_us * (1 + rows / 64), 0.6, limit, 99)


def test_nothing_known_means_everything():
    assert best_shape(HITS, a_setting(verify_us=0.0)) == Shape(16, 4)


def test_a_fast_draft_takes_all_and_a_slow_one_less():
    shapes = [best_shape(HITS, a_setting(step_us=step)) for step in (1e3, 15e3, 25e3, 40e3, 80e3)]
    assert shapes[0] == Shape(16, 4)
    assert [shape.depth for shape in shapes] == sorted((shape.depth for shape in shapes), reverse=True)
    assert shapes[-1].depth == 1


def test_rows_cost_time_too():
    """When rows are dear, fewer of them are prepared."""
    dear = replace(a_setting(), step_us=lambda rows: 4_000.0 * rows)
    assert best_shape(HITS, dear).rows < 12


def test_the_next_larger_step_is_tried_and_no_giant():
    """What steps take was seen up to so many rows only; a guess about ten times as many is worth nothing."""
    rows = [best_shape(HITS, replace(a_setting(step_us=1.0), tried_rows=tried)).rows for tried in (1, 2, 3, 8)]
    assert rows == [2, 4, 6, 16]


def test_there_may_be_nothing_to_prepare():
    assert best_shape([0.0], a_setting()).rows == 0
    assert best_shape([0.0], a_setting(limit=0)) == Shape(0, 0)
