"""A planner from counts alone: how often exactly k were accepted, and at which rank the bonus then was."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_ssd.policy.acceptance import Acceptance
from sglang_ssd.policy.planner import Chain, Floats, outcome_odds, padded, spread

_MEMORY = 0.998
_PRIOR = 10.0
"""Rounds that the prior curves count for."""


class MeasuredPlanner:
    """Marginal gains P(k) * P(rank i | k), taken greedily; ranks after a rejection and after full acceptance apart."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self._accepted: dict[int, Floats] = {}
        self._ranks: dict[bool, Floats] = {}

    def chances(self, chains: Sequence[Chain]) -> Floats:
        """See :class:`~sglang_ssd.policy.planner.Planner`."""
        width = chains[0].others.shape[1]
        rejected, full = (self._curve(last, width) for last in (False, True))
        rows = []
        for chain in chains:
            bonus = np.tile(rejected, (chain.length + 1, 1))
            bonus[-1] = full
            rows.append(self._odds(chain)[:, None] * bonus)
        return padded(rows, chains, width)

    def plan(self, chances: Floats, chains: Sequence[Chain], budget: int) -> list[list[int]]:  # noqa: ARG002
        """See :class:`~sglang_ssd.policy.planner.Planner`."""
        return spread(chances, budget)

    def observe(self, chain: Chain, accepted: int, rank: int | None) -> None:
        """See :class:`~sglang_ssd.policy.planner.Planner`."""
        self.acceptance.observe(accepted, chain.length)
        counts = self._accepted.setdefault(chain.length, np.zeros(chain.length + 1))
        counts *= _MEMORY
        counts[accepted] += 1
        if rank is not None:
            ranks = self._ranks.setdefault(accepted == chain.length, np.zeros(chain.others.shape[1] + 1))
            ranks *= _MEMORY
            ranks[rank] += 1  # -1, a bonus beyond the candidates, is the last one

    def _odds(self, chain: Chain) -> Floats:
        prior = outcome_odds(chain, self.acceptance.rate) * _PRIOR
        counts = prior + self._accepted.get(chain.length, 0.0)
        odds: Floats = counts / counts.sum()
        return odds

    def _curve(self, last: bool, width: int) -> Floats:
        """[width]: the chance of each rank, made to fall."""
        prior = 0.5 / np.arange(1, width + 1) / (1 + np.log(width)) * _PRIOR
        known = self._ranks.get(last, np.zeros(width + 1))
        curve: Floats = (prior + known[:width]) / (_PRIOR + known.sum())
        return np.minimum.accumulate(curve)
