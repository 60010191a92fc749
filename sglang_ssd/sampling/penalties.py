"""Penalties at every position of a verify window: row i counts the drafts before it as if they were emitted.

They are functions of the request's output tokens and the window, rebuilt each round, so that retraction,
rejection and batch changes cannot leave them behind. (SGLang accumulates them once per verify step.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PenaltyRow:
    """One request that has a penalty: its row in the batch, what it emitted so far (bonus included), and its terms."""

    row: int
    output_ids: list[int]
    frequency: float
    presence: float
    repetition: float
    min_new_tokens: int
    stop_ids: list[int]


def apply_penalties(logits: Tensor, drafts: Tensor, rows: list[PenaltyRow]) -> None:
    """Change ``logits`` in place, for the requests in ``rows`` only.

    Order and formulas are SGLang's: ``logit - frequency * count - presence * [count > 0]``, stop tokens
    to -inf below ``min_new_tokens``, then repetition scaling of every token that was emitted.

    Args:
        logits: float [B, W, V].
        drafts: int64 [B, W - 1]; draft i is emitted before window position i + 1.
        rows: requests that have a penalty.

    """
    if not rows:
        return
    device, vocab_size = logits.device, logits.shape[-1]
    index = torch.tensor([row.row for row in rows], device=device)
    counts = torch.stack([_counts(row.output_ids, vocab_size) for row in rows]).to(device)
    frequency, presence, repetition = (
        torch.tensor([getattr(row, name) for row in rows], device=device, dtype=torch.float32)[:, None]
        for name in ("frequency", "presence", "repetition")
    )
    for position in range(logits.shape[1]):
        if position:
            drafted = drafts[index, position - 1][:, None]
            counts.scatter_add_(1, drafted, torch.ones_like(drafted, dtype=counts.dtype))
        emitted = counts > 0
        window = logits[index, position].float()
        window -= frequency * counts + presence * emitted
        _forbid_stops(window, rows, position)
        scaled = torch.where(window < 0, window * repetition, window / repetition)
        logits[index, position] = torch.where(emitted, scaled, window).to(logits.dtype)


def _counts(output_ids: list[int], vocab_size: int) -> Tensor:
    return torch.bincount(torch.tensor(output_ids, dtype=torch.int64), minlength=vocab_size).float()


def _forbid_stops(window: Tensor, rows: list[PenaltyRow], position: int) -> None:
    for i, row in enumerate(rows):
        if len(row.output_ids) + position < row.min_new_tokens and row.stop_ids:
            window[i, row.stop_ids] = -torch.inf
