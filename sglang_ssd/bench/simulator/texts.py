"""What a target answers, token by token as it would be served: many requests side by side, in lockstep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sglang_ssd.draft_server.engine import EngineSettings, Rows
from sglang_ssd.draft_server.engine_torch import TorchEngine
from sglang_ssd.sampling.draw import DrawParameters, draw
from sglang_ssd.sampling.noise import NoiseTable


@dataclass
class Writing:
    """A request and its text so far: ``prompt`` tokens of it are the prompt."""

    tokens: list[int]
    prompt: int
    temperature: float
    seed: int
    done: bool = False
    slots: list[int] = field(default_factory=list)

    @property
    def answer(self) -> list[int]:
        """The new tokens."""
        return self.tokens[self.prompt :]


class Author:
    """A target that writes for all requests at once."""

    def __init__(
        self, path: Path, requests: int, longest: int, ends: frozenset[int] = frozenset(), dtype: str = "float32"
    ) -> None:
        settings = EngineSettings(
            str(path), dtype=dtype, slots=requests * longest, rows=requests, context_length=longest, candidates=1
        )
        self._engine = TorchEngine(settings)
        self._noise = NoiseTable.of(self._engine.limits.vocab_size)
        self._longest, self._ends = longest, ends

    def write(self, requests: Sequence[Writing], new_tokens: int) -> None:
        """Answer every request with up to ``new_tokens`` tokens; an end token is the last of its text."""
        for row, request in enumerate(requests):
            first = 1 + row * self._longest
            request.slots = list(range(first, first + self._longest))
            self._read(row, request)
        for _ in range(new_tokens):
            self._step([(row, request) for row, request in enumerate(requests) if not request.done])

    def _read(self, row: int, request: Writing) -> None:
        """All of the prompt but its last token, which the first step runs."""
        tokens = np.array(request.tokens[:-1], dtype=np.int64)
        if len(tokens):
            self._engine.extend(row, 0, tokens, np.array(request.slots[: len(tokens)], dtype=np.int64))

    def _step(self, live: Sequence[tuple[int, Writing]]) -> None:
        """One token more for each."""
        if not live:
            return
        positions = [len(request.tokens) - 1 for _, request in live]
        rows = Rows(
            rows=np.array([row for row, _ in live]),
            positions=np.array(positions),
            tokens=np.array([request.tokens[-1] for _, request in live]),
            slots=np.array([request.slots[at] for at, (_, request) in zip(positions, live, strict=True)]),
            temperatures=np.zeros(len(live), dtype=np.float32),
            seeds=np.zeros(len(live), dtype=np.int64),
        )
        drawn = self._draw(self._engine.logits(rows), [request for _, request in live], positions)
        for token, (_, request) in zip(drawn, live, strict=True):
            request.tokens.append(token)
            request.done = token in self._ends

    def _draw(self, logits: Tensor, live: Sequence[Writing], positions: Sequence[int]) -> list[int]:
        sampled = [at for at, request in enumerate(live) if request.temperature > 0]
        parameters = None
        if sampled:
            parameters = DrawParameters(
                rows=torch.tensor(sampled),
                temperatures=torch.tensor([live[at].temperature for at in sampled]),
                seeds=torch.tensor([live[at].seed for at in sampled]),
                positions=torch.tensor([positions[at] for at in sampled]),
            )
        tokens: list[int] = draw(logits, parameters, self._noise).tolist()
        return tokens
