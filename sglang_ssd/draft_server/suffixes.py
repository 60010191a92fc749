"""Guesses from a text's own past: what came after the last time that it said the same few tokens."""

from __future__ import annotations

from typing import Protocol

_LENGTHS = (4, 3, 2)
"""Suffixes looked for, longest first."""


class Past(Protocol):
    """What other requests said."""

    def put(self, tokens: list[int]) -> None:
        """A text that has ended."""

    def guess(self, tokens: list[int], count: int) -> list[int]:
        """Up to ``count`` tokens that may follow ``tokens``; often none."""

    def forget(self) -> None:
        """Everything, as a flush asks for."""


class Suffixes:
    """An index of one growing text. Each new token costs a few dictionary entries, once."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def guess(self, tokens: list[int], count: int) -> list[int]:
        """Up to ``count`` tokens that may follow ``tokens``, which begin with what was given before; often none."""
        for end in range(self._indexed, len(tokens)):
            for length in _LENGTHS:
                if length <= end:
                    self._after[tuple(tokens[end - length : end])] = end
        self._indexed = len(tokens)
        for length in _LENGTHS:
            at = self._after.get(tuple(tokens[-length:]))
            if at is not None:
                return tokens[at : at + count]
        return []
