"""The target's draw: one token per row of processed logits, from noise that depends on nothing but the request.

Legend: p is the target's distribution after everything a request asks for. The draw is the argmax of
``log p + g`` with Gumbel noise ``g`` of (seed, position, token id): a sample of p, and the same sample whoever
computes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_ssd.sampling.contest import contest
from sglang_ssd.sampling.filters import Filters, filter_mask
from sglang_ssd.sampling.noise import NoiseTable, gumbel

_LOGITS_AT_A_TIME, _CONTEST_AT_A_TIME = 4 * 49_152, 16 * 49_152


@dataclass(frozen=True)
class DrawParameters:
    """What the S sampling rows of a batch draw with. Rows that are not named are greedy."""

    rows: Tensor  # int64 [S], ascending: which rows of the batch sample
    temperatures: Tensor  # float32 [S], above 0
    seeds: Tensor  # int64 [S]
    positions: Tensor  # int64 [S], index of the token whose logits these are
    filters: Filters | None = None  # of the S rows; None: no filter of theirs can cut

    def part(self, rows: slice | Tensor) -> DrawParameters:
        """Of these of the S rows, which then are all the rows there are."""
        filters = self.filters
        if filters is not None:
            filters = Filters(filters.top_ks[rows], filters.top_ps[rows], filters.min_ps[rows])
        chosen = self.seeds[rows]
        everyone = torch.arange(len(chosen), device=chosen.device)
        return DrawParameters(everyone, self.temperatures[rows], chosen, self.positions[rows], filters)

    def of(self, rows: Tensor) -> DrawParameters | None:
        """As if ``rows``, int64 [R] of the batch, were the batch; None when none of them samples."""
        places = torch.searchsorted(self.rows, rows).clamp_(max=len(self.rows) - 1)
        sampling = (self.rows[places] == rows).nonzero().squeeze(-1)
        return replace(self.part(places[sampling]), rows=sampling) if len(sampling) else None


def draw(logits: Tensor, parameters: DrawParameters | None, noise: NoiseTable) -> Tensor:
    """One token per row.

    Args:
        logits: [R, V], processed (penalties, bias, grammar), any float dtype.
        parameters: of the rows that sample; None: all are greedy. Known on the host, so no device value is read.
        noise: for at least V tokens.

    Returns:
        int64 [R].

    """
    if parameters is None:
        return logits.argmax(-1)
    if len(parameters.rows) == len(logits):
        return _draw_all(logits, parameters, noise)
    draws = logits.argmax(-1)
    draws[parameters.rows] = _draw_all(logits[parameters.rows], parameters, noise)
    return draws


def _draw_all(logits: Tensor, parameters: DrawParameters, noise: NoiseTable) -> Tensor:
    """Of S rows that all sample. A CPU takes a few at a time, which stay in its cache: 160 rows cost half then."""
    size = len(logits)
    if logits.device.type == "cpu":
        together = _CONTEST_AT_A_TIME if parameters.filters is None else _LOGITS_AT_A_TIME
        size = max(1, together // logits.shape[-1])
    parts = [slice(at, at + size) for at in range(0, len(logits), size)]
    drawn = [_draw_part(logits[part], parameters.part(part), noise) for part in parts]
    return torch.cat(drawn) if drawn else torch.empty(0, dtype=torch.int64, device=logits.device)


def _draw_part(logits: Tensor, parameters: DrawParameters, noise: NoiseTable) -> Tensor:
    key = (parameters.seeds, parameters.positions)
    if logits.device.type == "cpu" and parameters.filters is None:
        return contest(_softmax(logits, parameters), *key, noise.rough)
    return sample(log_distribution(logits, parameters), *key, noise)


def _softmax(logits: Tensor, parameters: DrawParameters) -> Tensor:
    return torch.softmax(logits.float() / parameters.temperatures[:, None], dim=-1)


def log_distribution(logits: Tensor, parameters: DrawParameters) -> Tensor:
    """``log p`` of the S sampling rows, float32 [S, V]: -inf where a filter cut, and then not normalised again."""
    p = _softmax(logits, parameters)
    log_p = p.log()
    if parameters.filters is None:
        return log_p
    return log_p.masked_fill_(~filter_mask(p, parameters.filters), -torch.inf)


def sample(log_weights: Tensor, seeds: Tensor, positions: Tensor, noise: NoiseTable) -> Tensor:
    """A sample of each row's weights, given by their logs (float32 [S, V], of any sum): int64 [S].

    The score is the float64 noise plus the float32 log; the lowest id wins a tie.
    """
    if log_weights.device.type == "cpu":
        possible = (log_weights > -torch.inf).numpy()
        if 4 * np.count_nonzero(possible) < possible.size:
            return _sample_of_few(log_weights, np.nonzero(possible), (seeds, positions), noise)
    bits = noise.bits(seeds, positions, log_weights.shape[-1])
    return gumbel(bits).add_(log_weights).argmax(-1)


def _sample_of_few(
    log_weights: Tensor, where: tuple[NDArray[np.intp], ...], key: tuple[Tensor, Tensor], noise: NoiseTable
) -> Tensor:
    """The same draw, but noise for the tokens (rows and ids, both ascending) that have a weight only."""
    rows, ids = map(torch.from_numpy, where)
    seeds, positions = key
    scores = gumbel(noise.bits_at(seeds[rows], positions[rows], ids)).add_(log_weights[rows, ids])
    best = scores.new_full((len(log_weights),), -torch.inf).scatter_reduce_(0, rows, scores, "amax")
    winners = (scores == best[rows]).nonzero().squeeze(-1)
    draws = torch.full((len(log_weights),), log_weights.shape[-1])
    draws.scatter_reduce_(0, rows[winners], ids[winners], "amin")
    return torch.where(best > -torch.inf, draws, 0)  # where nothing is possible, what argmax says
