"""The default planner: each session's outcomes by the draft's own probabilities, calibrated against what happens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_ssd.policy.acceptance import Acceptance
from sglang_ssd.policy.calibration import Calibration, temperature_range
from sglang_ssd.policy.planner import Chain, Chains, Floats, Ints, spread

_GREEDY_EXPONENT = 0.6
"""Drafts are accepted more often than a small draft model believes; learnt anew for every pair."""
_NEWEST = 0.02
"""Weight of the newest full acceptance in the typical candidates behind one."""


class ConfidencePlanner:
    """P(k accepted) from the scores along the chain, P(bonus) from those behind its end or its first wrong token."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self._accepts = Calibration(_GREEDY_EXPONENT)
        self._after_rejection, self._after_all = Calibration(), Calibration()
        self._typical: dict[int, Floats] = {}
        self._outcomes: list[tuple[Chain, int, int | None]] = []

    def chances(self, chains: Sequence[Chain]) -> Floats:
        """See :class:`~sglang_ssd.policy.planner.Planner`."""
        self._learn()
        seen = _Batch(Chains.of(chains))
        accepts = self._accepts(seen.accepts, seen.ranges)
        rejected = self._after_rejection(seen.bonus, seen.ranges)
        full = self._after_all(seen.bonus, seen.ranges)
        bonus = np.where(seen.last[:, :, None], full, rejected)
        for i in np.flatnonzero(seen.unknown.any(axis=1)):
            bonus[i, seen.unknown[i]] = self._expected(int(seen.ranges[i]), bonus.shape[2])
        sums = bonus.sum(axis=2, keepdims=True)
        bonus = np.where(sums > 1, bonus / np.maximum(sums, 1e-9), bonus)
        odds = _odds(accepts, seen.last)
        chances = odds[:, :, None] * np.where(seen.usable[:, :, None], bonus, 0.0)
        return np.minimum.accumulate(chances, axis=2)

    def plan(self, chances: Floats, chains: Sequence[Chain], budget: int) -> list[list[int]]:  # noqa: ARG002
        """See :class:`~sglang_ssd.policy.planner.Planner`."""
        return spread(chances, budget)

    def observe(self, chain: Chain, accepted: int, rank: int | None) -> None:
        """See :class:`~sglang_ssd.policy.planner.Planner`. Learnt from when the next round is planned."""
        self.acceptance.observe(accepted, chain.length)
        self._outcomes.append((chain, accepted, rank))

    def _learn(self) -> None:
        """All outcomes since the last plan at once."""
        if not self._outcomes:
            return
        chains, accepted, ranks = zip(*self._outcomes, strict=True)
        self._outcomes = []
        seen, reached = _Batch(Chains.of(chains)), np.array(accepted)
        self._learn_acceptance(seen, reached)
        found = [i for i, rank in enumerate(ranks) if rank is not None and not seen.unknown[i, reached[i]]]
        if found:
            self._learn_bonus(seen, np.array(found), reached, np.array([ranks[i] for i in found]))

    def _learn_acceptance(self, seen: _Batch, reached: Ints) -> None:
        positions = np.arange(seen.accepts.shape[1])
        tried = (positions <= reached[:, None]) & (positions < seen.lengths[:, None]) & ~np.isnan(seen.accepts)
        sessions, places = np.nonzero(tried)
        happened = (places < reached[sessions]).astype(np.float64)
        self._accepts.observe(seen.accepts[sessions, places], happened, seen.ranges[sessions])

    def _learn_bonus(self, seen: _Batch, found: Ints, reached: Ints, ranks: Ints) -> None:
        predicted = seen.bonus[found, reached[found]]  # [n, M]
        happened = (np.arange(predicted.shape[1]) == ranks[:, None]).astype(np.float64)
        full = reached[found] == seen.lengths[found]
        ranges = np.repeat(seen.ranges[found][:, None], predicted.shape[1], axis=1)
        for calibration, mine in ((self._after_all, full), (self._after_rejection, ~full)):
            if mine.any():
                calibration.observe(predicted[mine].ravel(), happened[mine].ravel(), ranges[mine].ravel())
        for i in np.flatnonzero(full):
            known = self._expected(int(seen.ranges[found[i]]), predicted.shape[1])
            self._typical[int(seen.ranges[found[i]])] = known + _NEWEST * (happened[i] - known)

    def _expected(self, temperatures: int, width: int) -> Floats:
        """[width]: the chance of each rank behind a chain's end whose candidates are not known yet."""
        known = self._typical.get(temperatures)
        if known is None or len(known) != width:
            known = 0.5 / np.arange(1, width + 1) / (1 + np.log(width))
        return known


class _Batch:
    """Raw chances of S chains, padded: ``accepts`` [S, J], ``bonus`` [S, J + 1, M] and what is known of each."""

    def __init__(self, chains: Chains) -> None:
        served, others = chains.served, chains.others
        self.lengths, self.ranges = chains.lengths, temperature_range(chains.temperatures)
        positions = np.arange(others.shape[1])
        self.last = positions == self.lengths[:, None]
        self.usable = positions < np.minimum(chains.usable, self.lengths + 1)[:, None]
        self.unknown = np.isnan(others[:, :, 0])
        others = np.where(self.unknown[:, :, None], -np.inf, others)
        best = np.maximum(others[:, :, 0], np.append(served, np.full((len(chains), 1), -np.inf), axis=1))
        best = np.where(np.isfinite(best), best, 0.0)[:, :, None]
        weights = np.exp(others - best)
        mass = weights.sum(axis=2)
        own = np.exp(served - best[:, :-1, 0])
        self.accepts = own / np.maximum(own + mass[:, :-1], 1e-30)
        self.accepts[self.unknown[:, :-1]] = 0.5
        self.bonus = weights / np.maximum(mass, 1e-30)[:, :, None]


def _odds(accepts: Floats, last: NDArray[np.bool_]) -> Floats:
    """[S, J + 1]: the chance of exactly k accepted."""
    sessions = len(accepts)
    reached = np.concatenate([np.ones((sessions, 1)), np.cumprod(accepts, axis=1)], axis=1)
    rejected = np.concatenate([1 - accepts, np.zeros((sessions, 1))], axis=1)
    return np.where(last, reached, reached * rejected)
