"""What a pair of models said, as far as speculation sees it: candidate scores of the draft, and where the truth stood.

A *position* is one token of a target's text. The draft's candidates for it, behind the true text, are ``scores``, best
first, and the true token stands among them at ``ranks``. Where the draft is wrong, the chain goes on behind its wrong
token: ``beyond`` holds the candidates there, one row for each further draft token. They depend on the position only,
so every round of every lookahead up to D can be put together from them, whatever tokens these were.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]

BEYOND = -1
"""The rank of a true token that is not among the candidates."""

TRACES = "sglang_ssd.bench"
"""The package with the folder ``traces``."""
DEMO, BENCHMARK = "demo", "benchmark"
"""What is recorded there of the demo pair: answers to held-out prompts, and to the benchmark's own, in its order."""


class RecordedRound(NamedTuple):
    """A chain of j draft tokens and how it ended.

    ``scores`` [j+1, M] are the candidates behind 0..j of its tokens; the chain's own next token is the first of a row,
    but in the last row, behind which nothing was served. ``accepted`` tokens were right, and the bonus is candidate
    ``rank`` of row ``accepted``, ``BEYOND`` if none.
    """

    scores: Floats
    accepted: int
    rank: int


@dataclass(frozen=True, eq=False)
class Trace:
    """Texts at one temperature: their ``lengths`` [texts], then all n positions one after another.

    ``ranks`` [n], ``scores`` [n, M], and of the w positions whose rank is not 0, in order, ``beyond`` [w, D, M].
    """

    temperature: float
    lengths: Ints
    ranks: Ints
    scores: Floats
    beyond: Floats

    def __post_init__(self) -> None:
        if self.lengths.sum() != len(self.ranks) or len(self.scores) != len(self.ranks):
            raise ValueError("a trace needs a rank and scores for each position of its texts")
        if len(self.beyond) != np.count_nonzero(self.ranks):
            raise ValueError("a trace needs what follows for each position where the draft is wrong")

    def __len__(self) -> int:
        return len(self.ranks)

    def first(self, texts: int) -> Trace:
        """Of the first so many texts only."""
        lengths = self.lengths[:texts]
        count = int(lengths.sum())
        wrong = np.count_nonzero(self.ranks[:count])
        return Trace(self.temperature, lengths, self.ranks[:count], self.scores[:count], self.beyond[:wrong])

    @property
    def candidates(self) -> int:
        """M."""
        return int(self.scores.shape[1])

    @property
    def depth(self) -> int:
        """D, the longest lookahead whose rounds can be put together."""
        return int(self.beyond.shape[1])

    @property
    def acceptance(self) -> float:
        """The share of positions at which the draft is right."""
        return float((self.ranks == 0).mean())

    @cached_property
    def wrong_before(self) -> Ints:
        """How many positions before each one have a wrong draft: where its own ``beyond`` stands. [n]."""
        wrong = (self.ranks != 0).astype(np.int64)
        before: Ints = np.cumsum(wrong) - wrong
        return before

    def rounds(self, lookahead: int) -> Iterator[RecordedRound]:
        """All whole rounds, text by text."""
        if lookahead > self.depth:
            raise ValueError(f"this trace has chains of {self.depth} tokens, not {lookahead}")
        start = 0
        for end in np.cumsum(self.lengths).tolist():
            while start + lookahead < end:
                found = self.round_at(start, lookahead)
                yield found
                start += found.accepted + 1
            start = end

    def round_at(self, start: int, lookahead: int) -> RecordedRound:
        """The round whose chain begins at position ``start``."""
        window = self.ranks[start : start + lookahead]
        wrong = np.flatnonzero(window)
        accepted = int(wrong[0]) if len(wrong) else lookahead
        on_path = self.scores[start : start + accepted + 1]
        off_path = (
            self.beyond[self.wrong_before[start + accepted], : lookahead - accepted] if len(wrong) else on_path[:0]
        )
        return RecordedRound(np.concatenate([on_path, off_path]), accepted, int(self.ranks[start + accepted]))

    def save(self, path: Path) -> None:
        """As compressed npz; scores in half precision."""
        np.savez_compressed(
            path,
            temperature=np.float64(self.temperature),
            lengths=self.lengths.astype(np.int32),
            ranks=self.ranks.astype(np.int8),
            scores=self.scores.astype(np.float16),
            beyond=self.beyond.astype(np.float16),
        )

    @classmethod
    def load(cls, path: Path) -> Trace:
        """What :meth:`save` wrote. Raises OSError, KeyError, ValueError."""
        with np.load(path, allow_pickle=False) as kept:
            return cls(
                float(kept["temperature"]),
                kept["lengths"].astype(np.int64),
                kept["ranks"].astype(np.int64),
                kept["scores"].astype(np.float32),
                kept["beyond"].astype(np.float32),
            )


def trace_name(pair: str, temperature: float) -> str:
    """The file of a pair's trace at one temperature."""
    return f"{pair}-t{temperature:g}.npz"


def shipped_trace(pair: str, temperature: float) -> Trace:
    """A trace of the package. Raises FileNotFoundError."""
    path = files(TRACES).joinpath("traces", trace_name(pair, temperature))
    return Trace.load(Path(str(path)))
