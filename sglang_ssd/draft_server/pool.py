"""A pool of integer ids: the KV slots and the table rows of the engine."""

from __future__ import annotations

import numpy as np

from sglang_ssd.draft_server.engine import Ints


class Pool:
    """Hands out the ids ``first..first+count-1``, the one given back last first."""

    def __init__(self, first: int, count: int) -> None:
        self._free: Ints = np.arange(first + count - 1, first - 1, -1, dtype=np.int64)
        self._left = count

    def __len__(self) -> int:
        """How many are free."""
        return self._left

    def take(self) -> int | None:
        """A free id, or None."""
        if not self._left:
            return None
        self._left -= 1
        return int(self._free[self._left])

    def take_many(self, count: int) -> Ints:
        """Up to ``count`` free ids, int64, in the order in which :meth:`take` would give them."""
        start = max(0, self._left - count)
        taken = self._free[start : self._left][::-1].copy()
        self._left = start
        return taken

    def give(self, taken: int) -> None:
        """Back into the pool."""
        self._free[self._left] = taken
        self._left += 1

    def give_many(self, taken: Ints) -> None:
        """All of them back."""
        self._free[self._left : self._left + len(taken)] = taken
        self._left += len(taken)

    def free_ids(self) -> list[int]:
        """The free ids, for checks."""
        free: list[int] = self._free[: self._left].tolist()
        return free
