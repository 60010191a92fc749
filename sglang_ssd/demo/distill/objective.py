"""Forward KL from the target to a student that may say mapped tokens only."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ssd.demo.distill.teacher import Targets

_LEAST = 1e-6


def places_in_map(token_map: Tensor, vocab_size: int) -> Tensor:
    """int64 [V]: where a token stands in the map [M], -1 for one that is not mapped."""
    places = torch.full((vocab_size,), -1)
    places[token_map] = torch.arange(len(token_map))
    return places


def forward_kl(logits: Tensor, targets: Targets, places: Tensor) -> Tensor:
    """Sum over positions of KL(p || q) in nats, a scalar.

    ``logits`` float32 [n, M] over the map. The outcomes are the target's likeliest tokens, one by one, and all other
    tokens as one. Of an unmapped one the student can say nothing: its share of p is left out of the sum, so that a
    position counts by the mass that is mapped.
    """
    place = places[targets.ids.long()]  # [n, TOP]
    mapped = place >= 0
    p = targets.log_p.float().exp()
    rest_p = (1 - p.sum(-1)).clamp_min(_LEAST)
    p = torch.where(mapped, p, torch.zeros(()))
    log_q = logits.gather(-1, place.clamp_min(0)) - logits.logsumexp(-1, keepdim=True)
    rest_q = (1 - torch.where(mapped, log_q.exp(), torch.zeros(())).sum(-1)).clamp_min(_LEAST)
    weight = p.sum(-1) + rest_p
    cross = -(p * log_q).sum(-1) - rest_p * rest_q.log()
    entropy = -(torch.special.xlogy(p, p)).sum(-1) - torch.special.xlogy(rest_p, rest_p)
    kl: Tensor = cross - entropy - torch.special.xlogy(weight, weight)
    return kl.sum()


def agreement(logits: Tensor, targets: Targets, token_map: Tensor) -> Tensor:
    """How many of n positions have the same likeliest token on both sides, a scalar."""
    return (token_map[logits.argmax(-1)] == targets.ids[:, 0]).sum()
