"""A session's chain as planners see it: from the guesses behind its nodes to arrays of scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sglang_ssd.draft_server.tree import Guesses
from sglang_ssd.policy.planner import Chain, Planner

WIDTH = 16
"""Candidates that planners look at."""


class Ended(NamedTuple):
    """A round that is over: the chain, the guesses behind its text and each of its tokens, and how it ended."""

    chain: Sequence[int]
    guesses: Sequence[Guesses | None]
    temperature: float
    accepted: int
    bonus: int


def outlook(chain: Sequence[int], guesses: Sequence[Guesses | None], temperature: float, usable: int) -> Chain:
    """The chain of j tokens with j + 1 ``guesses``; see :class:`~sglang_ssd.policy.planner.Chain`."""
    served = np.full(len(chain), -np.inf)
    others = np.full((len(chain) + 1, WIDTH), -np.inf)
    for k, each in enumerate(guesses):
        if each is None:
            others[k] = np.nan
            continue
        scores, place = each.scores, _place(chain, k, each)
        if place >= 0:
            served[k] = scores[place]
            scores = scores[:place] + scores[place + 1 :]
        scores = scores[:WIDTH]
        others[k, : len(scores)] = scores
    return Chain(served, others, temperature, usable)


def learn(planner: Planner, ended: Sequence[Ended]) -> None:
    """Tell ``planner`` how rounds ended."""
    for round_ in ended:
        chain = outlook(round_.chain, round_.guesses, round_.temperature, len(round_.chain) + 1)
        planner.observe(chain, round_.accepted, _rank(round_))


def _rank(round_: Ended) -> int | None:
    """The bonus's place among the other candidates where the chain ended; -1 beyond them, None when unknown."""
    guesses = round_.guesses[round_.accepted]
    if guesses is None:
        return None
    if round_.bonus not in guesses.ids:
        return -1
    rank, place = guesses.ids.index(round_.bonus), _place(round_.chain, round_.accepted, guesses)
    rank -= 0 <= place < rank
    return rank if rank < WIDTH else -1


def _place(chain: Sequence[int], k: int, guesses: Guesses) -> int:
    """Where the chain's own next token stands among the candidates; -1 when it is not one of them."""
    if k == len(chain):
        return -1
    return 0 if guesses.ids[0] == chain[k] else guesses.ids.index(chain[k]) if chain[k] in guesses.ids else -1
