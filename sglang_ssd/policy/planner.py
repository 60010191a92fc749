"""How many bonus candidates to prepare for each outcome "exactly k drafts accepted": what planners have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_ssd.policy.acceptance import Acceptance

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Chain:
    """What a planner sees of one session: the j draft tokens in flight, and what may follow after k of them.

    ``served`` [j] are the draft's scores of the chain's own tokens; ``others`` [j + 1, M] those of the M best bonus
    candidates after exactly k accepted, best first, without the chain's own next token: -inf where there are fewer,
    NaN rows where they are not known yet. Only the first ``usable`` positions may have branches.
    """

    served: Floats
    others: Floats
    temperature: float = 0.0
    usable: int = 1 << 30

    @property
    def length(self) -> int:
        """The tokens in flight, j."""
        return len(self.served)


class Planner(Protocol):
    """Spreads a round's rows over the outcomes of all sessions, and learns from how rounds end."""

    acceptance: Acceptance

    def chances(self, chains: Sequence[Chain]) -> Floats:
        """[S, J + 1, M], falling along M: the chance that candidate i after k accepted is a session's outcome.

        J is the longest chain's length. What cannot have a branch is 0.
        """

    def plan(self, chances: Floats, chains: Sequence[Chain], budget: int) -> list[list[int]]:
        """Fan-outs F_0..F_J of every session, at most ``budget`` in all; ``chances`` are those of ``chains``."""

    def observe(self, chain: Chain, accepted: int, rank: int | None) -> None:
        """One outcome: ``accepted`` of the whole chain, and the place of the bonus among the candidates there.

        -1 for a bonus beyond them, None when the candidates were not known.
        """


def spread(chances: Floats, budget: int) -> list[list[int]]:
    """Fan-outs F_k of every session, [S][J + 1]: the ``budget`` likeliest branches, all sessions against all.

    What has no chance gets no row. Ties go to the earlier session, position and rank, so that the best ranks of a
    position are always taken first.
    """
    flat = chances.reshape(-1)
    best = np.argsort(-flat, kind="stable")[:budget]
    best = best[flat[best] > 0]
    sessions, positions, ranks = chances.shape
    counts = np.bincount(best // ranks, minlength=sessions * positions)
    fan_outs: list[list[int]] = counts.reshape(sessions, positions).tolist()
    return fan_outs


def expected_hits(chances: Floats, most: int) -> list[float]:
    """[most + 1]: how many sessions are expected to hit with the 0, 1, ... best branches."""
    best = np.sort(chances.reshape(-1))[::-1][:most]
    hits = np.zeros(most + 1)
    hits[1 : len(best) + 1] = np.cumsum(best)
    hits[len(best) + 1 :] = hits[len(best)]
    return [float(each) for each in hits]


def outcome_odds(chain: Chain, rate: float) -> Floats:
    """[j + 1]: the chance of exactly k accepted when each token is, independently, with chance ``rate``."""
    k = np.arange(chain.length + 1)
    odds: Floats = np.power(float(rate), k, dtype=np.float64) * (1 - rate)
    odds[-1] = rate**chain.length
    return odds


def padded(rows: Sequence[Floats], chains: Sequence[Chain], width: int) -> Floats:
    """[S, J + 1, width] of the sessions' [j + 1, width]; 0 beyond a chain and where it may have no branches."""
    longest = max(chain.length for chain in chains)
    values = np.zeros((len(chains), longest + 1, width))
    for i, (row, chain) in enumerate(zip(rows, chains, strict=True)):
        usable = min(chain.usable, chain.length + 1)
        if usable > 0:
            values[i, :usable] = row[:usable, :width]
    return values
