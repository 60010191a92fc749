"""Sessions' chains as planners see them: from the guesses behind their nodes to arrays of scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_ssd.draft_server.engine import Ints
from sglang_ssd.policy.planner import Chains, Floats, Planner

WIDTH = 16
"""Candidates that planners look at."""


class Known(NamedTuple):
    """What may follow the text and each token of S chains, the longest of J tokens: ``ids`` and ``scores``
    [S, J + 1, M], best first, where they are ``known`` [S, J + 1].
    """

    ids: NDArray[np.int32]
    scores: NDArray[np.float32]
    known: NDArray[np.bool_]


class Ended(NamedTuple):
    """Rounds of S sessions that are over: the chains, what was known of them, and how they ended."""

    chains: Sequence[Sequence[int]]
    known: Known
    temperatures: Floats
    accepted: Ints
    bonus: Ints


def outlook(chains: Sequence[Sequence[int]], seen: Known, temperatures: Floats, usable: Ints) -> Chains:
    """The chains as planners see them; see :class:`~sglang_ssd.policy.planner.Chain` for ``usable`` [S]."""
    lengths = np.array([len(chain) for chain in chains])
    places = _places(chains, seen)
    scores = np.full((*seen.known.shape, seen.scores.shape[2] + 1), -np.inf)  # nothing at the last rank
    scores[:, :, :-1] = seen.scores
    session, position = np.ogrid[: places.shape[0], : places.shape[1]]
    served = scores[session, position, places]  # of place -1, nothing
    columns = np.arange(min(WIDTH, seen.scores.shape[2]))
    skipped = columns + ((places[:, :, None] >= 0) & (columns >= places[:, :, None]))
    others = np.full((*seen.known.shape, WIDTH), -np.inf)
    others[:, :, : len(columns)] = scores[session[:, :, None], position[:, :, None], skipped]
    others[~seen.known] = np.nan
    others[np.arange(seen.known.shape[1]) > lengths[:, None]] = -np.inf
    return Chains(served[:, :-1], others, lengths, temperatures, usable)


def learn(planner: Planner, ended: Sequence[Ended]) -> None:
    """Tell ``planner`` how rounds ended."""
    for rounds in ended:
        chains = outlook(
            rounds.chains, rounds.known, rounds.temperatures, np.array([len(c) + 1 for c in rounds.chains])
        )
        for chain, accepted, rank in zip(chains, rounds.accepted.tolist(), _ranks(rounds), strict=True):
            planner.observe(chain, accepted, rank)


def _ranks(rounds: Ended) -> list[int | None]:
    """The places of bonus tokens among the other candidates where the chains ended; -1 beyond them, None unknown."""
    at = np.arange(len(rounds.accepted)), rounds.accepted
    found = rounds.known.ids[at] == rounds.bonus[:, None]
    rank, place = found.argmax(axis=1), _places(rounds.chains, rounds.known)[at]
    rank -= (place >= 0) & (place < rank)
    ranks = np.where(found.any(axis=1) & (rank < WIDTH), rank, -1).tolist()
    return [rank if known else None for rank, known in zip(ranks, rounds.known.known[at].tolist(), strict=True)]


def _places(chains: Sequence[Sequence[int]], seen: Known) -> Ints:
    """[S, J + 1]: where the chain's own next token stands among the candidates; -1 when it is not one of them."""
    longest = seen.known.shape[1]
    own = np.array([[*chain, *[-1] * (longest - len(chain))] for chain in chains])
    same = (seen.ids == own[:, :, None]) & seen.known[:, :, None]
    return np.where(same.any(axis=2), same.argmax(axis=2), -1)
