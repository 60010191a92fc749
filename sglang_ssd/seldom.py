"""Log lines whose number somebody else decides: one of a kind in ten seconds, the rest counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_EVERY_S = 10.0
_KINDS = 1000
"""Kinds remembered; a kind may name a peer, and anybody can make up peers."""


class Seldom:
    """Lets one event of a kind through in ten seconds and says how many it held back."""

    def __init__(self, logger: logging.Logger, now: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._now = now
        self._last: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def warn(self, kind: str, sentence: str) -> None:
        """Log ``sentence``, or only count it."""
        if not self.allows(kind):
            return
        held = self._held.pop(kind, 0)
        self._logger.warning("%s%s", sentence, f" ({held} more like it were not logged)" if held else "")

    def allows(self, kind: str) -> bool:
        """Whether it is time for an event of this kind again."""
        now = self._now()
        if now - self._last.get(kind, -_EVERY_S) < _EVERY_S:
            self._held[kind] = self._held.get(kind, 0) + 1
            return False
        if len(self._last) >= _KINDS:
            self._last.clear()
            self._held.clear()
        self._last[kind] = now
        return True
