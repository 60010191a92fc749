"""Planners that know little: Theorem 12's shape, one fan-out for all, and full acceptance only."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sglang_ssd.policy.acceptance import Acceptance
from sglang_ssd.policy.planner import Chain, Floats, outcome_odds, padded, spread

_LEAST_EXPONENT, _LARGEST_EXPONENT = 0.3, 2.0
_MEMORY = 0.995
_PRIOR_TRIED = 20.0


class GeometricPlanner:
    """Theorem 12 with the running acceptance a_p and miss exponent r of one target."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self._found, self._logs = _PRIOR_TRIED, _PRIOR_TRIED

    @property
    def exponent(self) -> float:
        """R of the miss law (F + 1)**-r: found candidates over the sum of their log ranks, capped."""
        return min(_LARGEST_EXPONENT, max(_LEAST_EXPONENT, self._found / self._logs))

    def chances(self, chains: Sequence[Chain]) -> Floats:
        """See :class:`~sglang_ssd.policy.planner.Planner`."""
        width = chains[0].others.shape[1]
        miss = np.arange(1, width + 2, dtype=np.float64) ** -self.exponent
        gains = miss[:-1] - miss[1:]
        return padded([outcome_odds(each, self.acceptance.rate)[:, None] * gains for each in chains], chains, width)

    def plan(self, chances: Floats, chains: Sequence[Chain], budget: int) -> list[list[int]]:
        """See :class:`~sglang_ssd.policy.planner.Planner`; sessions share the rows evenly."""
        shares = _whole(budget, [1.0] * len(chains))
        plans = [geometric(share, each.length, self.acceptance.rate, self.exponent)
                 for share, each in zip(shares, chains, strict=True)]  # fmt: skip
        most, positions = chances.shape[2], chances.shape[1]
        usable = [[min(count, most) if k < chain.usable else 0 for k, count in enumerate(plan)]
                  for plan, chain in zip(plans, chains, strict=True)]  # fmt: skip
        return [row + [0] * (positions - len(row)) for row in usable]

    def observe(self, chain: Chain, accepted: int, rank: int | None) -> None:
        """See :class:`~sglang_ssd.policy.planner.Planner`."""
        self.acceptance.observe(accepted, chain.length)
        if rank is None:
            return
        beyond = chain.others.shape[1]
        self._found = self._found * _MEMORY + (rank >= 0)
        self._logs = self._logs * _MEMORY + math.log((rank if rank >= 0 else beyond) + 1.5)


class UniformPlanner:
    """The same fan-out for every outcome, as the reference engine has it. A baseline."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()

    def chances(self, chains: Sequence[Chain]) -> Floats:
        """See :class:`~sglang_ssd.policy.planner.Planner`; only the order means something."""
        width = chains[0].others.shape[1]
        falling = 1.0 / np.arange(1, width + 1) / width
        rows = [np.tile(falling / (each.length + 1), (each.length + 1, 1)) for each in chains]
        return padded(rows, chains, width)

    def plan(self, chances: Floats, chains: Sequence[Chain], budget: int) -> list[list[int]]:  # noqa: ARG002
        """See :class:`~sglang_ssd.policy.planner.Planner`."""
        return spread(chances, budget)

    def observe(self, chain: Chain, accepted: int, rank: int | None) -> None:  # noqa: ARG002
        """See :class:`~sglang_ssd.policy.planner.Planner`."""
        self.acceptance.observe(accepted, chain.length)


class FullAcceptancePlanner(UniformPlanner):
    """Prepares for full acceptance only, as AMUSD and PEARL do. A baseline."""

    def chances(self, chains: Sequence[Chain]) -> Floats:
        """See :class:`~sglang_ssd.policy.planner.Planner`; only the order means something."""
        width = chains[0].others.shape[1]
        rows = [np.zeros((each.length + 1, width)) for each in chains]
        for row in rows:
            row[-1] = 1.0 / np.arange(2, width + 2)
        return padded(rows, chains, width)


def geometric(budget: int, chain_length: int, acceptance: float, exponent: float) -> list[int]:
    """Theorem 12 of arXiv 2603.03251: the fan-outs that make a miss least likely, in whole rows.

    With probability P(k) of exactly k accepted and a miss probability F**-r at fan-out F, the best F_k is
    proportional to P(k)**(1/(1+r)). P(k) = a**k * (1-a) for k < j. At k = j nothing was rejected, so P(j) = a**j
    lacks the factor (1-a): the last position is usually the likeliest of all. Real shares become integers by largest
    remainder, ties to the smaller k.

    Args:
        budget: rows to spread, at least 0.
        chain_length: j, the tokens in flight; positions are 0..j.
        acceptance: a, the chance that one more draft token is accepted, in (0, 1).
        exponent: r > 0 of the miss law.

    Returns:
        j + 1 integers that sum to ``budget``.

    """
    odds = [acceptance**k * (1 - acceptance) for k in range(chain_length)] + [acceptance**chain_length]
    weights = [chance ** (1 / (1 + exponent)) for chance in odds]
    return _whole(budget, weights)


def _whole(budget: int, weights: list[float]) -> list[int]:
    """Integers that sum to ``budget``, in proportion to ``weights``, by largest remainder."""
    scale = budget / sum(weights)
    shares = [weight * scale for weight in weights]
    whole = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: (whole[k] - shares[k], k))
    for k in by_remainder[: budget - sum(whole)]:
        whole[k] += 1
    return whole
