"""Who can win a draw, on a CPU: most of a vocabulary is ruled out by its hash bits alone, without a logarithm.

With u a token's hash as a fraction, its score is ``log p - log(-log u)``. So it beats a favourite f only if
``-log u <= p (-log u_f) / p_f``, and ``1 - u`` is smaller still: its hash must be that near to the top. The comparison
is in float32 and leaves out the hash's last step, which changes the lower half of the bits only; it lets a few more
tokens pass, never fewer. Their scores then decide, computed as anywhere else.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_ssd.sampling.murmur import UINT32_MAX
from sglang_ssd.sampling.noise import gumbel
from sglang_ssd.sampling.rough_noise import RoughNoise, finished

_HALF = 2.0**31
_SLACK = 2.0**15 + 2.0**10
"""In halves of hash bits: what the hash's last step changes, and float32's rounding near ``_HALF``."""
_MARGIN = 1 + 1e-4
"""For the rounding of scores, of this bound, and of the noise at either end."""


def contest(p: Tensor, seeds: Tensor, positions: Tensor, noise: RoughNoise) -> Tensor:
    """The argmax of ``log p + g`` of each row, the lowest id where scores are equal: int64 [S].

    Args:
        p: float32 [S, V] on a CPU, not negative, more than 0 somewhere in each row; of any sum.
        seeds: int64 [S].
        positions: int64 [S].
        noise: for at least V tokens.

    """
    favourites = p.max(dim=-1).indices  # a fraction of argmax's time
    weights, states = p.numpy(), noise.states(seeds, positions)
    height, halves = np.empty(p.shape[-1], dtype=np.float32), np.empty(p.shape[-1], dtype=np.float32)
    rows, ids, bits = [], [], []
    for row, (state, favourite) in enumerate(zip(states, favourites.tolist(), strict=True)):
        rough = noise.row(state, p.shape[-1])
        passed = contenders(weights[row], favourite, rough, (height, halves))
        rows.append(np.full(len(passed), row))
        ids.append(passed)
        bits.append(rough[passed])
    where = torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.concatenate(ids))
    scores = gumbel(finished(np.concatenate(bits))).add_(p[where].log())
    return _first_of_best(scores, *where, favourites)


def contenders(
    p: NDArray[np.float32], favourite: int, rough: NDArray[np.uint32], room: tuple[NDArray[np.float32], ...]
) -> NDArray[np.int64]:
    """The ids, ascending, of all tokens of a row whose score can be the favourite's or more; ``room`` is for two rows
    of numbers.
    """
    height, halves = room
    bits = int(rough[favourite])
    u = (bits ^ (bits >> 16)) / UINT32_MAX
    with np.errstate(over="ignore", invalid="ignore"):
        reach = np.float32(_HALF * _MARGIN) * np.float32(_exponential(u)) / p[favourite]
        np.multiply(p, reach, out=height)
        np.copyto(halves, (rough >> np.uint32(1)).view(np.int32), casting="same_kind")
        height += halves
    return np.nonzero(height >= np.float32(_HALF - _SLACK))[0]


def _exponential(u: float) -> float:
    """``-log u``. At 1 the noise has a little more than 0; who ties with that has the highest bits and passes too."""
    return -math.log(u) if u > 0 else math.inf


def _first_of_best(scores: Tensor, rows: Tensor, ids: Tensor, favourites: Tensor) -> Tensor:
    """The id of the best score of each row; ``favourites`` [S] says how many rows there are."""
    best = scores.new_full(favourites.shape, -torch.inf).scatter_reduce_(0, rows, scores, "amax")
    winners = scores == best[rows]
    return favourites.scatter_reduce(0, rows[winners], ids[winners], "amin", include_self=False)
