"""Tokens per second before a draft is trained: which layers, map and lookahead are worth it.

No speculation takes ``decode`` for a token. Ordinary speculation takes ``verify + K step`` for a round. SSD takes
``max(verify, (K + 1) step)``, and a missed round drafts first: ``K step`` more.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Milliseconds of the target's decode, of its verify of K + 1 tokens, and of one draft step."""

    decode: float
    verify: float
    step: float


def speed_ordinary(costs: Costs, lookahead: int, tokens: float) -> float:
    """How many times faster than no speculation, with ``tokens`` a round."""
    return tokens * costs.decode / (costs.verify + lookahead * costs.step)


def speed_ssd(costs: Costs, lookahead: int, tokens: float, hit_rate: float) -> float:
    """How many times faster than no speculation, with ``tokens`` a round."""
    return tokens * costs.decode / ssd_round(costs, lookahead, hit_rate)


def break_even(costs: Costs, lookahead: int, hit_rate: float) -> float:
    """Tokens a round at which SSD is as fast as no speculation."""
    return ssd_round(costs, lookahead, hit_rate) / costs.decode


def ssd_round(costs: Costs, lookahead: int, hit_rate: float) -> float:
    """Milliseconds of a round, hits and misses as they come."""
    hit = max(costs.verify, (lookahead + 1) * costs.step)
    return hit + (1 - hit_rate) * lookahead * costs.step
