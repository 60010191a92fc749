"""What the draft server asks of a model: a paged KV pool that is filled and read by rows of slot ids.

The engine owns tensors; the tree owns slots. A *slot* holds the KV of one token. A *row* of the engine's block
table lists the slots of one sequence by position, so that a branch is a row that shares its first entries
with others. Nothing is ever copied but slot ids, and no mask exists.

One forward may hold several tokens of one sequence (same row, rising positions): every token's KV is written before
any attention reads, layer by layer, so a token sees the ones before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_ssd.draft_server.terms import Terms

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True)
class EngineLimits:
    """Sizes fixed at start. Slot ids are 1..``slots``; row ids are 0..``rows``-1; slot 0 is nobody's."""

    slots: int
    rows: int
    context_length: int
    vocab_size: int


@dataclass(frozen=True)
class EngineSettings:
    """What a draft engine is made of: ``Engine(settings)``. Its ``limits`` may be smaller than asked here.

    ``dtype`` is ``auto`` (the checkpoint's), ``float32`` or ``bfloat16``; ``candidates`` is M, the best next tokens
    that every row of a forward keeps; ``context_length`` None is the checkpoint's own; ``token_map`` is a
    file of the only tokens that it may propose (:mod:`~sglang_ssd.draft_server.token_map`). ``packed`` lets a CPU have
    the weights in its own order (:mod:`~sglang_ssd.cpu.packed_linear`).
    """

    model_path: str
    device: str = "cpu"
    dtype: str = "auto"
    slots: int = 32768
    rows: int = 1024
    context_length: int | None = None
    candidates: int = 16
    token_map: str | None = None
    packed: bool = True


@dataclass(frozen=True)
class Rows:
    """The tokens of one decode forward, all arrays [B]: token ``tokens[i]`` at ``positions[i]`` of table row
    ``rows[i]``, its KV into ``slots[i]``; its next token is drawn with ``temperatures[i]`` and ``seeds[i]``, and by
    ``terms[i]``, which the rows of a session share; None when temperatures and seeds say all.
    """

    rows: Ints
    positions: Ints
    tokens: Ints
    slots: Ints
    temperatures: Floats
    seeds: Ints
    terms: tuple[Terms, ...] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, rows: slice) -> Rows:
        """Some of them."""
        return Rows(
            self.rows[rows],
            self.positions[rows],
            self.tokens[rows],
            self.slots[rows],
            self.temperatures[rows],
            self.seeds[rows],
            None if self.terms is None else self.terms[rows],
        )


class Sample(NamedTuple):
    """A draft token and the q that it was drawn from: ids (int32) and probabilities (float32), M of each, as bytes."""

    token: int
    ids: bytes
    q: bytes


@dataclass(frozen=True)
class Candidates:
    """Best next tokens after each row of a forward, best first: ids [B, M] and scores [B, M]; and of the rows whose
    terms have a proposal, in order, the sample.
    """

    ids: Ints
    scores: Floats
    samples: tuple[Sample, ...] = ()


class DraftEngine(Protocol):
    """A draft model behind a block table. Calls come from one thread."""

    limits: EngineLimits

    def write(self, rows: Ints, positions: Ints, slots: Ints) -> None:
        """Set ``table[rows[i], positions[i]] = slots[i]``."""

    def fork(self, sources: Ints, lengths: Ints, targets: Ints) -> None:
        """Set ``table[targets[i], :lengths[i]] = table[sources[i], :lengths[i]]``."""

    def decode(self, batch: Rows) -> Candidates:
        """Forward every row's token (its slot is entered in the table first) and return what comes next."""

    def extend(self, row: int, start: int, tokens: Ints, slots: Ints) -> None:
        """Forward one prefill chunk: ``tokens`` at positions ``start, start+1, ...`` of ``row`` into ``slots``
        (entered in the table first).
        """
