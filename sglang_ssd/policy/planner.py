"""How many bonus candidates to prepare for each outcome "exactly k drafts accepted": what planners have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from sglang_ssd.policy.acceptance import Acceptance

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


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


class Chains(Sequence[Chain]):
    """S chains as one: ``served`` [S, J] and ``others`` [S, J + 1, M], -inf beyond a chain's end, and their
    ``lengths``, ``temperatures`` and ``usable``, all [S].
    """

    def __init__(self, served: Floats, others: Floats, lengths: Ints, temperatures: Floats, usable: Ints) -> None:
        self.served, self.others, self.lengths = served, others, lengths
        self.temperatures, self.usable = temperatures, usable

    @classmethod
    def of(cls, chains: Sequence[Chain]) -> Chains:
        """Any chains, at least one."""
        if isinstance(chains, Chains):
            return chains
        lengths = np.array([chain.length for chain in chains])
        longest, width = int(lengths.max()), chains[0].others.shape[1]
        served = np.full((len(chains), longest), -np.inf)
        others = np.full((len(chains), longest + 1, width), -np.inf)
        for i, chain in enumerate(chains):
            served[i, : chain.length] = chain.served
            others[i, : chain.length + 1] = chain.others
        temperatures = np.array([chain.temperature for chain in chains])
        return cls(served, others, lengths, temperatures, np.array([chain.usable for chain in chains]))

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, at: int) -> Chain: ...

    @overload
    def __getitem__(self, at: slice) -> Chains: ...

    def __getitem__(self, at: int | slice) -> Chain | Chains:
        if isinstance(at, slice):
            scores, usable = (self.served[at], self.others[at]), self.usable[at]
            return Chains(*scores, self.lengths[at], self.temperatures[at], usable)
        length = int(self.lengths[at])
        served, others = self.served[at, :length], self.others[at, : length + 1]
        return Chain(served, others, float(self.temperatures[at]), int(self.usable[at]))


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
    expected: list[float] = hits.tolist()
    return expected


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
