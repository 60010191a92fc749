"""The one device-to-host copy of a round: what every row committed."""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor


class HostCopy:
    """Committed tokens on their way to the host. Any thread may ask for them; the first one waits.

    Args:
        tokens: integer [B, W] or [B], the committed tokens of each row first.
        counts: integer [B], how many of them count.

    """

    def __init__(self, tokens: Tensor, counts: Tensor) -> None:
        packed = torch.cat([counts.view(-1, 1).long(), tokens.view(counts.shape[0], -1).long()], dim=1)
        self._lock = threading.Lock()
        self._rows: list[list[int]] | None = None
        self._arrived: torch.cuda.Event | None = None
        self._host = packed
        self.arrived_at = time.perf_counter()
        """When the tokens were on the host, as far as is known: exact once `committed` has been called."""
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def committed(self) -> list[list[int]]:
        """The tokens that each row committed; blocks until the copy has arrived."""
        with self._lock:
            if self._rows is None:
                if self._arrived is not None:
                    self._arrived.synchronize()
                    self.arrived_at = time.perf_counter()
                self._rows = [row[1 : 1 + row[0]] for row in self._host.tolist()]
            return self._rows
