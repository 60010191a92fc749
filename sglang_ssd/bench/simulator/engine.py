"""A draft engine without a model: candidates come from a trace, and a forward is a step of a virtual clock.

Every KV slot remembers one number: which row of the trace follows it. A forward finds a token's row from its
predecessor's slot and the token, as a model would find its state from the KV before it. On a session's true text
that is the next position; behind a wrong guess what was recorded there, and behind any other token a row that was
recorded behind some other wrong guess, always the same one.

Ids: the candidate of rank r in row i has the id i (M + 1) + r, and a true token that is no candidate r = M. So one
table tells the next row, and no text repeats itself: its past says nothing of its future, here. A session's prompt is
one token that says where in the trace its text begins, and whose it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_ssd.bench.simulator.clock import VirtualClock
from sglang_ssd.bench.simulator.profile import Times
from sglang_ssd.bench.simulator.trace import BEYOND, Ints, Trace
from sglang_ssd.draft_server.engine import Candidates, EngineLimits, Rows

_SESSIONS = 1 << 14
"""Prompts of one begin that differ."""


@dataclass(frozen=True)
class Language:
    """A trace as token ids: ``truth`` [n] is the true token at each position, ``following`` [R, M + 1] the row behind
    each row and rank; rows 0..n-1 are the positions, the others lie beyond wrong guesses.
    """

    trace: Trace
    truth: Ints
    following: NDArray[np.int32]
    scores: NDArray[np.float32]

    @classmethod
    def of(cls, trace: Trace) -> Language:
        """The positions go round in a ring."""
        n, m, wrong, depth = len(trace), trace.candidates, len(trace.beyond), trace.depth
        rows = np.arange(n + wrong * depth, dtype=np.int64)
        following = n + depth * (_scattered(rows[:, None], np.arange(m + 1)) % max(1, wrong))
        inner = rows[n:][(rows[n:] - n) % depth < depth - 1]
        following[inner, 0] = inner + 1
        following[np.flatnonzero(trace.ranks), 0] = n + depth * np.arange(wrong)
        truth = np.where(trace.ranks == BEYOND, m, trace.ranks)
        following[rows[:n], truth] = (rows[:n] + 1) % n
        scores = np.concatenate([trace.scores, trace.beyond.reshape(-1, m)])
        return cls(trace, truth + rows[:n] * (m + 1), following.astype(np.int32), scores)

    @property
    def _candidates_end(self) -> int:
        return self.following.size

    @property
    def vocab_size(self) -> int:
        """Ids of all prompts included."""
        return self._candidates_end + len(self.trace) * _SESSIONS

    def prompt(self, begin: int, session: int) -> int:
        """The one prompt token of a session whose text begins at position ``begin``."""
        return self._candidates_end + begin * _SESSIONS + session % _SESSIONS

    def begins(self, prompts: Ints) -> Ints:
        """The positions that :meth:`prompt` was told."""
        return (prompts - self._candidates_end) // _SESSIONS


class VirtualEngine:
    """See :class:`~sglang_ssd.draft_server.engine.DraftEngine`."""

    def __init__(self, language: Language, times: Times, clock: VirtualClock, limits: EngineLimits) -> None:
        self.limits = limits
        self._language, self._times, self._clock = language, times, clock
        self._table = np.zeros((limits.rows, limits.context_length), dtype=np.int32)
        self._row_behind = np.zeros(limits.slots + 1, dtype=np.int32)
        self._ranks = np.arange(language.trace.candidates, dtype=np.int64)
        self.rows = 0
        """Of all forwards."""

    def write(self, rows: Ints, positions: Ints, slots: Ints) -> None:
        """See DraftEngine."""
        self._table[rows, positions] = slots

    def fork(self, sources: Ints, lengths: Ints, targets: Ints) -> None:
        """See DraftEngine."""
        for source, length, target in zip(sources.tolist(), lengths.tolist(), targets.tolist(), strict=True):
            self._table[target, :length] = self._table[source, :length]

    def decode(self, batch: Rows) -> Candidates:
        """See DraftEngine."""
        self.write(batch.rows, batch.positions, batch.slots)
        self._place(batch.rows, batch.positions, batch.tokens, batch.slots)
        self._clock.advance(self._times.step(len(batch), self._clock.time))
        self.rows += len(batch)
        behind = self._row_behind[batch.slots].astype(np.int64)
        ids = behind[:, None] * (self._language.trace.candidates + 1) + self._ranks
        return Candidates(ids, self._language.scores[behind])

    def extend(self, row: int, start: int, tokens: Ints, slots: Ints) -> None:
        """See DraftEngine."""
        positions = np.arange(start, start + len(tokens))
        rows = np.full_like(positions, row)
        self.write(rows, positions, slots)
        self._place(rows, positions, tokens, slots)
        self._clock.advance(self._times.step(len(tokens), self._clock.time))

    def _place(self, rows: Ints, positions: Ints, tokens: Ints, slots: Ints) -> None:
        """Find the trace row behind every token; those of one sequence build on one another, in rising positions."""
        where = self._table[rows, np.maximum(positions - 1, 0)]
        inside = np.isin(where, slots) & (positions > 0)
        self._set(where[~inside], positions[~inside], tokens[~inside], slots[~inside])
        late = np.flatnonzero(inside)
        for at in late[np.argsort(positions[late], kind="stable")].tolist():
            one = slice(at, at + 1)
            self._set(where[one], positions[one], tokens[one], slots[one])

    def _set(self, before: NDArray[np.int32], positions: Ints, tokens: Ints, slots: Ints) -> None:
        first = positions == 0
        language = self._language
        row = self._row_behind[before]
        ranks = np.where(first, 0, tokens - row.astype(np.int64) * (language.trace.candidates + 1))
        inner = language.following[row, ranks]
        self._row_behind[slots] = np.where(first, language.begins(tokens), inner)


def _scattered(rows: Ints, tokens: Ints) -> Ints:
    """A number for each pair that looks random and never changes."""
    mixed = (rows * 2_654_435_761 + (tokens + 1) * 40_503) & 0x7FFF_FFFF
    mixed = ((mixed >> 13) ^ mixed) * 1_274_126_177 & 0x7FFF_FFFF
    return (mixed >> 11) ^ mixed
