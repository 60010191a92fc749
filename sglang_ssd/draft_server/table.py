"""Rows of the engine's block table, and the entries to write before the next forward."""

from __future__ import annotations

import numpy as np

from sglang_ssd.draft_server.engine import DraftEngine, Ints
from sglang_ssd.draft_server.pool import Pool


class Table:
    """Hands out table rows and gathers writes, so that a forward costs one ``write`` and one ``fork``."""

    def __init__(self, engine: DraftEngine) -> None:
        self._engine = engine
        self._rows = Pool(0, engine.limits.rows)
        self._entries: dict[tuple[int, int], int] = {}
        self._forks: list[tuple[int, int, int]] = []

    @property
    def free(self) -> int:
        """Rows that nobody has."""
        return len(self._rows)

    def take(self) -> int | None:
        """A row, or None."""
        return self._rows.take()

    def give(self, row: int) -> None:
        """Back, with no fork into it left to be made: it would meet its next owner's. Entries are overwritten."""
        self._forks = [fork for fork in self._forks if fork[2] != row]
        self._rows.give(row)

    def enter(self, row: int, position: int, slot: int) -> None:
        """``table[row, position] = slot`` before the next forward."""
        self._entries[row, position] = slot

    def fork(self, source: int, length: int, target: int) -> None:
        """``table[target, :length] = table[source, :length]`` before the next forward, after every ``enter``."""
        self._forks.append((source, length, target))

    def flush(self) -> None:
        """Write what was gathered."""
        if self._entries:
            where = _columns(list(self._entries), 2)
            self._engine.write(where[0], where[1], np.fromiter(self._entries.values(), np.int64, len(self._entries)))
            self._entries = {}
        if self._forks:
            sources, lengths, targets = _columns(self._forks, 3)
            self._engine.fork(sources, lengths, targets)
            self._forks = []


def _columns(tuples: list[tuple[int, int]] | list[tuple[int, int, int]], width: int) -> Ints:
    """int64 [width, n]."""
    return np.asarray(tuples, dtype=np.int64).reshape(-1, width).T.copy()
