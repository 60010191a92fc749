"""Guesses from what other requests said: SGLang's ``NgramCorpus``, built in the background if there is a compiler."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

logger = logging.getLogger(__name__)

_LONGEST_TEXT = 4096
_SUFFIX = 8
_CAPACITY = 200_000
_LOWEST_PRIORITY = 19


class SharedPast:
    """Texts of ended sessions. Until it is built, and for good where it cannot be, it knows nothing.

    ``most`` is the longest guess. Building compiles C++ once for a machine, about a minute of one core, so it is
    done at the lowest priority and nobody waits for it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._corpus: Any = None
        threading.Thread(target=self._build, name="ssd-ngram-build", daemon=True).start()

    @property
    def ready(self) -> bool:
        """Whether it is built."""
        return self._corpus is not None

    def put(self, tokens: list[int]) -> None:
        """Remember the end of a text; returns at once."""
        if self._corpus is not None and len(tokens) > 1:
            self._corpus.batch_put([tokens[-_LONGEST_TEXT:]])

    def forget(self) -> None:
        """Everything."""
        if self._corpus is not None:
            self._corpus.synchronize()  # what is still being inserted would come after the flush
            self._corpus.reset()

    def guess(self, tokens: list[int], count: int) -> list[int]:
        """Up to ``count`` tokens that may follow ``tokens``; often none."""
        if self._corpus is None or count <= 0:
            return []
        end = tokens[-_SUFFIX:]
        found, _ = self._corpus.batch_get(["one"], [end], [len(end)])
        self._corpus.erase_match_state(["one"])
        guess: list[int] = found.tolist()[1 : 1 + min(count, self._most)]  # the first is the text's own last token
        return guess[: guess.index(0)] if 0 in guess else guess  # 0 is also its padding

    def _build(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        try:
            from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

            self._corpus = NgramCorpus(
                max_trie_depth=_SUFFIX + self._most,
                min_bfs_breadth=1,
                max_bfs_breadth=1,
                draft_token_num=self._most + 1,
                match_type="BFS",
                capacity=_CAPACITY,
            )
        except (ImportError, OSError, RuntimeError) as error:
            logger.info(
                "ngram guesses come from a request's own text only: SGLang's corpus cannot be built (%s)", error
            )
