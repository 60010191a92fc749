"""How many KV slots beyond its committed tokens a request must own before a decode step.

SGLang reserves ``2 (K + 1)``: the window, and once more because in the overlap loop the committed length lags by a
round. A pool that lacks that much for the whole batch would make it retract or even abort a request
that fits without speculation. Then the step is prepared *narrow*: one position wide, no drafts.

    kv_committed_len        true length      + width
    |-- lag: last round ----|-- this round --|          sync loop: no lag
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.runtime_context import get_schedule, get_spec

_ATTRIBUTE = "_ssd_narrow"


def is_narrow(batch: Any) -> bool:  # noqa: ANN401 - sglang's ScheduleBatch
    """Whether this decode batch owns slots for one position per request only."""
    return bool(getattr(batch, _ATTRIBUTE, False))


class KVReserve:
    """The reserve that SGLang's allocation functions see. One per process, used by the scheduler's thread only."""

    def __init__(self) -> None:
        self._narrow: int | None = None

    def reserve(self, full: Callable[[], int]) -> int:
        """Around ``get_alloc_reserve_per_decode``: the narrow reserve while one is set, else SGLang's."""
        return full() if self._narrow is None else self._narrow

    def check_decode_mem(self, check: Callable[..., bool], batch: Any, *args: Any, **options: Any) -> bool:  # noqa: ANN401
        """Around ``ScheduleBatch.check_decode_mem``: if the full reserve does not fit, try the narrow one."""
        lag_is_wide = not is_narrow(batch)
        fits = check(batch, *args, **options)
        setattr(batch, _ATTRIBUTE, not fits)
        if fits or not _is_ours(batch):
            return fits
        with self._narrowed(_narrow_reserve(lag_is_wide=lag_is_wide)):
            return check(batch, *args, **options)

    def prepare_for_decode(self, prepare: Callable[..., None], batch: Any) -> None:  # noqa: ANN401
        """Around ``ScheduleBatch.prepare_for_decode``: allocate what the check has found room for."""
        if not (is_narrow(batch) and _is_ours(batch)):
            prepare(batch)
            return
        with self._narrowed(_narrow_reserve(lag_is_wide=True)):
            prepare(batch)

    @contextmanager
    def _narrowed(self, reserve: int) -> Iterator[None]:
        self._narrow = reserve
        try:
            yield
        finally:
            self._narrow = None


def _is_ours(batch: Any) -> bool:  # noqa: ANN401
    return bool(batch.spec_algorithm is not None and getattr(batch.spec_algorithm, "name", None) == "SSD")


def _narrow_reserve(*, lag_is_wide: bool) -> int:
    if get_schedule().disable_overlap_schedule:
        return 1
    lag = int(get_spec().speculative_num_draft_tokens) if lag_is_wide else 1
    return lag + 1
