"""How many bonus candidates to prepare for each outcome "exactly k drafts accepted" of one request and round."""

from __future__ import annotations

from typing import Protocol

from sglang_ssd.policy.acceptance import Acceptance


class Planner(Protocol):
    """Spreads a request's row budget over the outcomes of one round, and learns from how rounds end."""

    acceptance: Acceptance

    def plan(self, budget: int, chain_length: int) -> list[int]:
        """Fan-outs F_0..F_j for an in-flight chain of j tokens; they sum to at most ``budget``."""


class GeometricPlanner:
    """Theorem 12 with the running acceptance of one target."""

    def __init__(self, exponent: float = 1.0) -> None:
        self.acceptance = Acceptance()
        self._exponent = exponent

    def plan(self, budget: int, chain_length: int) -> list[int]:
        """See :class:`Planner`."""
        return geometric(budget, chain_length, self.acceptance.rate, self._exponent)


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
