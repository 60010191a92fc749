"""The draft's side of the coupling: its best guesses, ranked by the target's own noise."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ssd.sampling.noise import gumbel, noise_bits, scrambled_ids

SHORTLIST = 256
"""At T > 0 the noise is computed for this many likeliest tokens only; it costs speed to be wrong, never text."""


def best_candidates(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The ``count`` best next tokens of each row, best first: the draft's own draw, then its runners-up.

    A row's score is ``log q / T + g`` with the Gumbel noise ``g`` of (seed, position, token), the same score by
    which the target draws (DESIGN section 5); at T = 0 it is the log-probability.

    Args:
        logits: [B, V], any float dtype.
        temperatures: float32 [B], 0 for greedy.
        seeds: int64 [B].
        positions: int64 [B], the position of the token that was forwarded.
        count: how many, at most V.

    Returns:
        ids int64 [B, count] and scores float32 [B, count].

    """
    greedy = temperatures <= 0
    scale = torch.where(greedy, torch.ones_like(temperatures), temperatures)
    log_q = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    # Asking a GPU would stall its queue, and noise for a shortlist costs it nothing; a CPU saves the longer sort.
    sampling = logits.device.type != "cpu" or not bool(greedy.all())
    shortlist = max(SHORTLIST, count) if sampling else count
    scores, ids = log_q.topk(min(shortlist, logits.shape[-1]), dim=-1)
    if sampling:
        noise = gumbel(noise_bits(seeds, positions, scrambled_ids(ids))).to(scores.dtype)
        scores = torch.where(greedy[:, None], scores, scores + noise)
    top, order = scores.topk(count, dim=-1)
    return ids.gather(-1, order), top
