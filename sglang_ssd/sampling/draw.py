"""The target's draw: one token per row of processed logits, from noise that depends on nothing but the request.

Legend: p is the target's distribution after everything a request asks for. The draw is the argmax of
``log p + g`` with Gumbel noise ``g`` of (seed, position, token id): a sample of p, and the same sample whoever
computes it. Filters are masks in vocabulary order, so that noise stays keyed by the token's id.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_ssd.sampling.noise import gumbel, noise_bits, scrambled_ids

TOP_K_ALL = 1 << 30
"""SGLang's ``TOP_K_ALL``: a top-k that keeps the whole vocabulary."""


@dataclass(frozen=True)
class DrawParameters:
    """What each of R rows draws with. Temperature 0 is greedy; the rest is ignored there."""

    temperatures: Tensor  # float32 [R]
    top_ks: Tensor  # int64 [R]
    top_ps: Tensor  # float32 [R]
    min_ps: Tensor  # float32 [R]
    seeds: Tensor  # int64 [R]
    positions: Tensor  # int64 [R], index of the token whose logits these are

    def select(self, rows: Tensor) -> DrawParameters:
        """The parameters of ``rows`` (bool [R] or int64)."""
        return DrawParameters(
            self.temperatures[rows],
            self.top_ks[rows],
            self.top_ps[rows],
            self.min_ps[rows],
            self.seeds[rows],
            self.positions[rows],
        )


def draw(logits: Tensor, parameters: DrawParameters, *, all_greedy: bool) -> Tensor:
    """One token per row.

    Args:
        logits: [R, V], processed (penalties, bias, grammar), any float dtype.
        parameters: of the R rows.
        all_greedy: no row samples; known on the host, so that no device value is read to learn it.

    Returns:
        int64 [R].

    """
    greedy_draws = logits.argmax(-1)
    if all_greedy:
        return greedy_draws
    scores = sampling_scores(logits, parameters)
    return torch.where(parameters.temperatures <= 0, greedy_draws, scores.argmax(-1))


def sampling_scores(logits: Tensor, parameters: DrawParameters) -> Tensor:
    """``log p + g`` in float64, [R, V]; -inf where a filter cut. Its argmax is the draw (lowest id on a tie)."""
    scale = torch.where(parameters.temperatures <= 0, 1.0, parameters.temperatures)
    p = torch.softmax(logits.float() / scale[:, None], dim=-1)
    kept = filter_mask(p, parameters)
    ids = scrambled_ids(torch.arange(p.shape[-1], device=p.device))
    noise = gumbel(noise_bits(parameters.seeds, parameters.positions, ids))
    return torch.where(kept, p.log().double() + noise, -torch.inf)


def filter_mask(p: Tensor, parameters: DrawParameters) -> Tensor:
    """Which tokens top-k, top-p and min-p leave, bool [R, V].

    All three look at the same p, as SGLang's torch sampler does: a token stays if fewer than k tokens come before it,
    their mass is at most top_p, and it has at least min_p times the largest probability. Order is probability
    descending, then id ascending.
    """
    ranked, order = p.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(p.shape[-1], device=p.device)
    kept = ranks < parameters.top_ks[:, None]
    kept &= ranked.cumsum(-1) - ranked <= parameters.top_ps[:, None]
    kept &= ranked >= ranked[:, :1] * parameters.min_ps[:, None]
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(-1, order, kept)
