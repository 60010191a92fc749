"""The draw as simply as it can be said in torch: sort, mask, score everything. Production must give the same tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ssd.sampling.filters import Filters
from sglang_ssd.sampling.noise import gumbel, noise_bits, scrambled_ids


def reference_mask(p: Tensor, filters: Filters) -> Tensor:
    ranked, order = p.sort(dim=-1, descending=True, stable=True)
    before = ranked.double().cumsum(-1) - ranked
    kept = torch.arange(p.shape[-1]) < filters.top_ks[:, None]
    kept &= (before <= filters.top_ps[:, None]) | (filters.top_ps[:, None] >= 1)
    kept &= ranked >= ranked[:, :1] * filters.min_ps[:, None]
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def reference_scores(logits: Tensor, temperatures: Tensor, filters: Filters, key: tuple[Tensor, Tensor]) -> Tensor:
    """log p + g in float64, -inf where a filter cut; ``key`` is (seeds, positions)."""
    p = torch.softmax(logits.float() / temperatures[:, None], dim=-1)
    noise = gumbel(noise_bits(*key, scrambled_ids(torch.arange(p.shape[-1]))))
    return torch.where(reference_mask(p, filters), p.log().double() + noise, -torch.inf)
