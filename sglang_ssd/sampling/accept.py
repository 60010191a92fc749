"""Verification by agreement: a draft token is accepted iff it is the token that the target drew there."""

from __future__ import annotations

import torch
from torch import Tensor


def accepted_lengths(drafts: Tensor, draws: Tensor, verified_lens: Tensor) -> Tensor:
    """Accepted length k of every request: how many leading draft tokens equal the target's draws.

    Lossless whatever the drafts are: row i's draw was made with drafts 0..i-1 before it, and it is used only if
    those are what the target itself drew. The draw after the last accepted token is the bonus.

    Args:
        drafts: int64 [B, W - 1]; entries at or beyond ``verified_lens`` are padding and never accepted.
        draws: int64 [B, W].
        verified_lens: int64 [B], each in 0..W-1.

    Returns:
        int64 [B], each at most its ``verified_len``.

    """
    columns = torch.arange(drafts.shape[1], device=drafts.device)
    agreed = (drafts == draws[:, :-1]) & (columns < verified_lens[:, None])
    return agreed.cumprod(dim=1).sum(dim=1)
