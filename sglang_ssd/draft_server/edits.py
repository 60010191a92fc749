"""Changes of an engine's block table, made on the host and applied where the table is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from sglang_ssd.draft_server.engine import Ints


@dataclass(frozen=True)
class Entries:
    """``table[rows[i], positions[i]] = slots[i]``, all int64 [n]."""

    rows: Tensor
    positions: Tensor
    slots: Tensor

    @classmethod
    def of(cls, rows: Ints, positions: Ints, slots: Ints) -> Entries:
        """From arrays [n], which must not change afterwards."""
        return cls(torch.from_numpy(rows), torch.from_numpy(positions), torch.from_numpy(slots))

    def apply(self, table: Tensor) -> None:
        """To ``table`` [rows, positions]."""
        table[self.rows, self.positions] = self.slots.to(table.dtype)


@dataclass(frozen=True)
class Forks:
    """``table[targets[i], :lengths[i]] = table[sources[i], :lengths[i]]``, all int64 [n]; ``width`` is the longest."""

    sources: Tensor
    lengths: Tensor
    targets: Tensor
    width: int

    @classmethod
    def of(cls, sources: Ints, lengths: Ints, targets: Ints) -> Forks:
        """From arrays [n], which must not change afterwards."""
        width = int(lengths.max(initial=0))
        return cls(torch.from_numpy(sources), torch.from_numpy(lengths), torch.from_numpy(targets), width)

    def apply(self, table: Tensor) -> None:
        """To ``table`` [rows, positions]."""
        inside = torch.arange(self.width, device=table.device) < self.lengths[:, None]
        kept = table[self.targets, : self.width]
        table[self.targets, : self.width] = torch.where(inside, table[self.sources, : self.width], kept)


Edit: TypeAlias = Entries | Forks
