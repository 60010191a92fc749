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
        self._width = engine.limits.context_length
        self._entries: dict[int, int] = {}
        """Slots by row * width + position: the newest counts."""
        self._forks: dict[int, tuple[int, int]] = {}
        """(source, length) by target."""

    @property
    def free(self) -> int:
        """Rows that nobody has."""
        return len(self._rows)

    def take(self) -> int | None:
        """A row, or None."""
        return self._rows.take()

    def take_many(self, count: int) -> Ints:
        """Up to ``count`` rows."""
        return self._rows.take_many(count)

    def give(self, row: int) -> None:
        """Back, with no fork into it left to be made: it would meet its next owner's. Entries are overwritten."""
        self._forks.pop(row, None)
        self._rows.give(row)

    def give_many(self, rows: Ints) -> None:
        """All of them back."""
        if self._forks:
            for row in rows.tolist():
                self._forks.pop(row, None)
        self._rows.give_many(rows)

    def enter(self, row: int, position: int, slot: int) -> None:
        """``table[row, position] = slot`` before the next forward."""
        self._entries[row * self._width + position] = slot

    def enter_many(self, rows: Ints, positions: Ints, slots: Ints) -> None:
        """:meth:`enter` for every element of three arrays [n]."""
        self._entries.update(zip((rows * self._width + positions).tolist(), slots.tolist(), strict=True))

    def fork_many(self, sources: Ints, lengths: Ints, targets: Ints) -> None:
        """``table[targets[i], :lengths[i]] = table[sources[i], :lengths[i]]`` before the next forward, after every
        ``enter``.
        """
        ends = zip(sources.tolist(), lengths.tolist(), strict=True)
        self._forks.update(zip(targets.tolist(), ends, strict=True))

    def flush(self) -> None:
        """Write what was gathered."""
        if self._entries:
            places = np.fromiter(self._entries, np.int64, len(self._entries))
            slots = np.fromiter(self._entries.values(), np.int64, len(self._entries))
            self._engine.write(places // self._width, places % self._width, slots)
            self._entries = {}
        if self._forks:
            sources, lengths = np.array(list(self._forks.values()), dtype=np.int64).T.copy()
            self._engine.fork(sources, lengths, np.fromiter(self._forks, np.int64, len(self._forks)))
            self._forks = {}
