"""A draft engine that costs nothing: what is left of a round is our own work."""

from __future__ import annotations

import numpy as np

from sglang_ssd.draft_server.engine import Candidates, EngineLimits, Ints, Rows

_CANDIDATES = 16


class CostlessEngine:
    """Its next tokens are a function of token and position, so every text has its own tree. See ``DraftEngine``."""

    def __init__(self, *, slots: int, rows: int, context_length: int, vocab_size: int = 49_152) -> None:
        self.limits = EngineLimits(slots, rows, context_length, vocab_size)
        self._table = np.zeros((rows, context_length), dtype=np.int64)
        self._ranks = np.arange(_CANDIDATES, dtype=np.int64)

    def write(self, rows: Ints, positions: Ints, slots: Ints) -> None:
        """As a real one does."""
        self._table[rows, positions] = slots

    def fork(self, sources: Ints, lengths: Ints, targets: Ints) -> None:
        """As a real one does: it copies slot ids, in proportion to the context."""
        for source, length, target in zip(sources, lengths, targets, strict=True):
            self._table[target, :length] = self._table[source, :length]

    def decode(self, batch: Rows) -> Candidates:
        """Candidates [B, 16] without any model."""
        start = (batch.tokens * 31 + batch.positions * 7) % self.limits.vocab_size
        ids = (start[:, None] + self._ranks * 97) % self.limits.vocab_size
        scores = np.broadcast_to(-self._ranks.astype(np.float32), ids.shape)
        return Candidates(ids, scores)

    def extend(self, row: int, start: int, tokens: Ints, slots: Ints) -> None:
        """Enter the slots."""
        self._table[row, start : start + len(tokens)] = slots
