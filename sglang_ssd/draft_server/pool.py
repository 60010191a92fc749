"""A pool of integer ids: the KV slots and the table rows of the engine."""

from __future__ import annotations


class Pool:
    """Hands out the ids ``first..first+count-1``, the one given back last first."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count
        self._free = list(range(first + count - 1, first - 1, -1))

    def __len__(self) -> int:
        """How many are free."""
        return len(self._free)

    def take(self) -> int | None:
        """A free id, or None."""
        return self._free.pop() if self._free else None

    def give(self, taken: int) -> None:
        """Back into the pool."""
        self._free.append(taken)

    def free_ids(self) -> list[int]:
        """The free ids, for checks."""
        return list(self._free)
