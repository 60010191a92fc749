"""SGLang's engine in a child process: its runtime context is global, and nothing of it may leak into other tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import numpy as np

from sglang_ssd.draft_server.engine import Candidates, EngineLimits, EngineSettings, Rows


def engine_process() -> ProcessPoolExecutor:
    """A pool of one worker, which the engine lives in."""
    return ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))


def ints(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


@cache
def _engine(settings: EngineSettings):
    from sglang_ssd.draft_server.engine_sglang import SGLangEngine

    return SGLangEngine(settings)


def _call(settings: EngineSettings, method: str, *args):
    return getattr(_engine(settings), method)(*args)


def _limits(settings: EngineSettings) -> EngineLimits:
    return _engine(settings).limits


class RemoteEngine:
    """A DraftEngine whose calls run in the only worker of ``pool``."""

    def __init__(self, pool: ProcessPoolExecutor, settings: EngineSettings) -> None:
        self._pool, self._settings = pool, settings
        self.limits = pool.submit(_limits, settings).result()

    def _call(self, method: str, *args):
        return self._pool.submit(_call, self._settings, method, *args).result()

    def write(self, rows: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> None:
        self._call("write", ints(rows), ints(positions), ints(slots))

    def fork(self, sources: Sequence[int], lengths: Sequence[int], targets: Sequence[int]) -> None:
        self._call("fork", ints(sources), ints(lengths), ints(targets))

    def decode(self, batch: Rows) -> Candidates:
        return self._call("decode", batch)

    def extend(self, row: int, start: int, tokens: Sequence[int], slots: Sequence[int]) -> None:
        self._call("extend", row, start, ints(tokens), ints(slots))
