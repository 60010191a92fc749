"""A trace from published figures, for pairs of which nobody published one.

Positions are easy or hard, and that lasts for a while, because acceptance is published to rise along a chain. The
draft is right at a position with its kind's chance. Where it is wrong, the true token's rank among its other candidates
follows the paper's power law: a chance of ``missed * (3 / F) ** exponent`` of not being among F. Scores are the logs of
these chances with noise, so a planner that trusts them is neither fooled nor told everything.
"""

from __future__ import annotations

import msgspec
import numpy as np

from sglang_ssd.bench.simulator.trace import BEYOND, Floats, Ints, Trace

_SEED = 2603_03251


class Synthetic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``easy`` and ``hard`` are chances that the draft is right, ``to_hard`` and ``to_easy`` of a change from one
    position to the next, ``missed`` that a rejected position's token is not among 3 candidates, ``noise`` the standard
    deviation of the log-odds that a position's scores show.
    """

    easy: float
    hard: float
    to_hard: float
    to_easy: float
    missed: float
    exponent: float
    noise: float
    positions: int = 6000
    candidates: int = 16
    depth: int = 8


def synthetic_trace(how: Synthetic, temperature: float) -> Trace:
    """A trace of one long text. The same ``how`` gives the same trace."""
    dice = np.random.default_rng(_SEED)
    chances = _chances(how, dice)
    right = dice.random(how.positions) < chances
    ranks = np.where(right, 0, _other_ranks(how, dice))
    shown = _shown(how, chances, dice)
    off_path = np.full((int((~right).sum()), how.depth), how.hard)  # behind a wrong token the draft is unsure
    beyond = _scores(how, _shown(how, off_path.reshape(-1), dice))
    return Trace(
        temperature,
        np.array([how.positions]),
        ranks,
        _scores(how, shown),
        beyond.reshape(-1, how.depth, how.candidates),
    )


def _chances(how: Synthetic, dice: np.random.Generator) -> Floats:
    """Of being right, by position."""
    easy, kinds = True, []
    for throw in dice.random(how.positions):
        kinds.append(easy)
        easy = throw >= how.to_hard if easy else throw < how.to_easy
    chances: Floats = np.where(kinds, how.easy, how.hard)
    return chances


def _other_ranks(how: Synthetic, dice: np.random.Generator) -> Ints:
    """Ranks 1.. of true tokens that the draft did not put first; BEYOND where they are no candidates."""
    edges = np.cumsum(other_masses(how))
    places = np.searchsorted(edges, dice.random(how.positions))
    return np.where(places < how.candidates - 1, places + 1, BEYOND)


def other_masses(how: Synthetic) -> Floats:
    """Chances [M - 1] of a rejected position's token being the first, second, ... of the other candidates."""
    places = np.arange(1, how.candidates)
    missing = np.minimum(1.0, how.missed * (3.0 / places) ** how.exponent)
    masses: Floats = -np.diff(missing, prepend=1.0)
    return masses


def _shown(how: Synthetic, chances: Floats, dice: np.random.Generator) -> Floats:
    """What the draft thinks that its chances are."""
    odds = np.log(chances / (1 - chances)) + how.noise * dice.standard_normal(len(chances))
    shown: Floats = 1 / (1 + np.exp(-odds))
    return shown


def _scores(how: Synthetic, first: Floats) -> Floats:
    """Log-probabilities [n, M] with ``first`` for the best candidate."""
    others = (1 - first)[:, None] * other_masses(how)
    scores: Floats = np.log(np.concatenate([first[:, None], others], axis=1)).astype(np.float32)
    return scores
