"""The q that comes with draft tokens in rejection mode: from the wire to the tensors of a window.

What cannot be the q of its tokens is dropped, and the tokens are then a deterministic proposal, whose q has one token.
That is exact for any token, whatever made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_ssd.config import MAX_SUPPORT
from sglang_ssd.protocol import Floats, Tokens
from sglang_ssd.sampling.window import Support


@dataclass(frozen=True)
class SparseQ:
    """The q of n draft tokens: ``ids`` int32 [n, M] and ``q`` float32 [n, M]."""

    ids: Tokens
    q: Floats


@dataclass(frozen=True)
class Proposed:
    """The draft tokens of one request in one round, and the q that they were sampled from, if they were."""

    tokens: list[int]
    q: SparseQ | None = None


NOTHING = Proposed([])


def read_q(ids: Tokens, q: Floats, tokens: Tokens, vocab_size: int) -> SparseQ | None:
    """The q of ``tokens`` int32 [n], told as ``ids`` and probabilities ``q`` [n * M]; None when it cannot be theirs."""
    count = len(tokens)
    if not count or not len(ids) or len(ids) != len(q) or len(ids) % count or len(ids) > count * MAX_SUPPORT:
        return None
    if ids.min() < 0 or ids.max() >= vocab_size or not np.isfinite(q).all():
        return None
    ids, q = ids.reshape(count, -1), q.reshape(count, -1)
    of_tokens = np.where(ids == tokens[:, None], q, 0).sum(-1)
    return SparseQ(ids, q) if (q >= 0).all() and (of_tokens > 0).all() else None


def window_support(proposed: Sequence[Proposed], columns: int) -> Support:
    """Every row's q, [B, columns, M] on the host; where there is none, all of it on the draft token."""
    widest = max((row.q.ids.shape[1] for row in proposed if row.q is not None), default=1)
    ids = np.zeros((len(proposed), columns, widest), dtype=np.int64)
    q = np.zeros((len(proposed), columns, widest), dtype=np.float32)
    q[..., 0] = 1.0
    for index, row in enumerate(proposed):
        count = min(len(row.tokens), columns)
        ids[index, :count, 0] = row.tokens[:count]
        if row.q is not None:
            ids[index, :count, : row.q.ids.shape[1]] = row.q.ids[:count]
            q[index, :count, : row.q.ids.shape[1]] = row.q.q[:count]
    return Support(torch.from_numpy(ids), torch.from_numpy(q))
