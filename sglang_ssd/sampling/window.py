"""What a round verifies, and how that ended."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Support:
    """A q for each of [...] draft tokens: ``ids`` int64 [..., M] and ``q`` float32 [..., M], 0 where there is less."""

    ids: Tensor
    q: Tensor

    def of(self, tokens: Tensor) -> Tensor:
        """The q of ``tokens`` [...], float64."""
        return torch.where(self.ids == tokens[..., None], self._normal(), 0.0).sum(-1)

    def dense(self, vocab_size: int) -> Tensor:
        """All of q, float64 [..., V]."""
        normal = self._normal()
        return normal.new_zeros(*self.ids.shape[:-1], vocab_size).scatter_add_(-1, self.ids, normal)

    def select(self, *index: Tensor) -> Support:
        """The entries at ``index``."""
        return Support(self.ids[index], self.q[index])

    def _normal(self) -> Tensor:
        """Float32 sums to 1 up to rounding only; the draw went by the ratios."""
        q = self.q.double()
        return q / q.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Window:
    """What B requests have verified: drafts int64 [B, W - 1] (padded with 0), how many of each row count, int64 [B],
    and the q of every draft; None when they are verified by agreement.
    """

    drafts: Tensor
    verified_lens: Tensor
    support: Support | None = None

    @property
    def width(self) -> int:
        """W: the pending bonus token and the drafts."""
        return self.drafts.shape[1] + 1

    def select(self, rows: Tensor) -> Window:
        """The windows of ``rows``."""
        support = None if self.support is None else self.support.select(rows)
        return Window(self.drafts[rows], self.verified_lens[rows], support)


@dataclass(frozen=True)
class Verdict:
    """How the verification of B windows ended: ``accepted`` k int64 [B] and the ``bonus`` token int64 [B]."""

    accepted: Tensor
    bonus: Tensor

    def committed(self, drafts: Tensor) -> Tensor:
        """int64 [B, W]: k accepted drafts, then the bonus; what follows is 0 and never read."""
        columns = torch.arange(drafts.shape[1] + 1, device=drafts.device)
        padded = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], dim=1)
        behind = torch.where(columns == self.accepted[:, None], self.bonus[:, None], 0)
        return torch.where(columns < self.accepted[:, None], padded, behind)
