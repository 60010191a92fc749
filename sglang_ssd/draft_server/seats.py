"""Sessions by their table rows: what work on rows of many sessions needs to know of each."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from sglang_ssd.draft_server.engine import Floats, Ints
from sglang_ssd.draft_server.session import Growth, Session
from sglang_ssd.draft_server.target import Target


class Seats:
    """Columns [rows] by the table row of a session, its *seat*; what nobody sits on means nothing."""

    def __init__(self, rows: int) -> None:
        self.sessions: list[Session | None] = [None] * rows
        self.targets: list[Target | None] = [None] * rows
        self._present: Counter[Target] = Counter()
        """The targets, by how many sessions of theirs sit here."""
        self.keys: Ints = np.zeros(rows, dtype=np.int64)
        """See Tree.key."""
        self.vocab_sizes: Ints = np.zeros(rows, dtype=np.int64)
        self.temperatures: Floats = np.zeros(rows, dtype=np.float32)
        self.seeds: Ints = np.zeros(rows, dtype=np.int64)
        self.plain: NDArray[np.bool_] = np.zeros(rows, dtype=np.bool_)
        """Whether temperature and seed say all."""
        self.samples: NDArray[np.bool_] = np.zeros(rows, dtype=np.bool_)
        """Whether its guesses come with a sample."""

    def take(self, seat: int, session: Session) -> None:
        """Sit down."""
        terms = session.terms
        self._present[session.target] += 1
        self.sessions[seat], self.targets[seat] = session, session.target
        self.keys[seat], self.vocab_sizes[seat] = session.key, session.target.vocab_size
        self.temperatures[seat], self.seeds[seat] = terms.temperature, terms.seed
        self.plain[seat], self.samples[seat] = terms.plain, terms.proposal is not None

    def leave(self, seat: int) -> None:
        """Get up."""
        self._present -= Counter([self.session(seat).target])  # which drops what is 0
        self.sessions[seat] = self.targets[seat] = None

    def session(self, seat: int) -> Session:
        """Who sits there; somebody does."""
        session = self.sessions[seat]
        if session is None:
            raise AssertionError(f"nobody has table row {seat}: this is a bug")
        return session

    def growths(self, seats: Ints) -> list[tuple[Growth, int]]:
        """The growths of the sessions at ``seats`` [n], each once, and how many of the n are its session's."""
        counts = Counter(seats.tolist())
        growths = [(self.session(seat).growth, count) for seat, count in counts.items()]
        return [(growth, count) for growth, count in growths if growth is not None]

    def by_target(self, seats: Ints) -> dict[Target, int]:
        """How many elements of ``seats`` [n] belong to each target."""
        if not len(seats):
            return {}
        if len(self._present) == 1:
            return dict.fromkeys(self._present, len(seats))
        counts = Counter(map(self.targets.__getitem__, seats.tolist()))
        return {target: count for target, count in counts.items() if target is not None}
