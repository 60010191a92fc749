"""A draft that reads finished texts: its candidates at every position, and behind its own wrong guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglang_ssd.bench.simulator.texts import Writing
from sglang_ssd.bench.simulator.trace import BEYOND, Floats, Ints, Trace
from sglang_ssd.draft_server.engine import Candidates, EngineSettings, Rows
from sglang_ssd.draft_server.engine_torch import TorchEngine
from sglang_ssd.draft_server.token_map import token_map_of


@dataclass(frozen=True)
class Shape:
    """Candidates of a row, draft tokens of the longest chain, and tokens of the longest text."""

    candidates: int
    depth: int
    longest: int


class Reader:
    """A draft. Table row 0 is the text, row 1 + i the guess at its i-th answer token."""

    def __init__(self, path: Path, shape: Shape, dtype: str = "float32") -> None:
        rows = 1 + shape.longest
        settings = EngineSettings(
            str(path),
            dtype=dtype,
            slots=rows * (shape.longest + shape.depth),
            rows=rows,
            context_length=shape.longest + shape.depth,
            candidates=shape.candidates,
            token_map=token_map_of(str(path), None),
        )
        self._engine, self._shape = TorchEngine(settings), shape

    def trace(self, texts: Sequence[Writing], temperature: float) -> Trace:
        """All texts in one trace. Their first answer token comes from prefill and is guessed by nobody."""
        texts = [text for text in texts if len(text.answer) > 1]
        read = [self._read(text) for text in texts]
        return Trace(
            temperature,
            np.array([len(text.answer) - 1 for text in texts]),
            np.concatenate([ranks for ranks, _, _ in read]),
            np.concatenate([scores for _, scores, _ in read]),
            np.concatenate([beyond for _, _, beyond in read]),
        )

    def _read(self, text: Writing) -> tuple[Ints, Floats, Floats]:
        """Ranks [n], scores [n, M] and what lies beyond [w, D, M] of one text."""
        tokens = np.array(text.tokens, dtype=np.int64)
        begin = text.prompt  # the first answer token; behind it the first guess is made
        self._engine.extend(0, 0, tokens[:begin], np.arange(1, begin + 1))
        positions = np.arange(begin, len(tokens) - 1)
        found = self._decode(text, np.zeros_like(positions), positions, tokens[positions], positions + 1)
        same = found.ids == tokens[positions + 1, None]
        ranks = np.where(same.any(1), same.argmax(1), BEYOND)
        wrong = np.flatnonzero(ranks)
        return ranks, found.scores, self._beyond(text, positions[wrong] + 1, found.ids[wrong, 0])

    def _beyond(self, text: Writing, positions: Ints, guesses: Ints) -> Floats:
        """The draft's candidates behind its own wrong ``guesses`` at ``positions``, each in a row of its own."""
        if not len(positions):
            return np.zeros((0, self._shape.depth, self._shape.candidates), dtype=np.float32)
        rows = 1 + np.arange(len(positions))
        self._engine.fork(np.zeros_like(rows), positions, rows)
        scores, free = [], 1 + self._shape.longest
        for depth in range(self._shape.depth):
            slots = free + depth * len(rows) + np.arange(len(rows))
            found = self._decode(text, rows, positions + depth, guesses, slots)
            scores.append(found.scores)
            guesses = found.ids[:, 0]
        return np.stack(scores, axis=1)

    def _decode(self, text: Writing, rows: Ints, positions: Ints, tokens: Ints, slots: Ints) -> Candidates:
        temperatures = np.full(len(rows), text.temperature, dtype=np.float32)
        return self._engine.decode(Rows(rows, positions, tokens, slots, temperatures, np.full(len(rows), text.seed)))
