"""glibc's memory on a CPU: kept while training, given back now and then."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h


def keep_freed() -> None:
    """Tell glibc to keep what is freed: a step spends half of its time on getting the same pages again, else."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def give_back() -> None:
    """Return to the system what is free now: packs of many sizes leave more and more of it, else."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
