"""``python -m sglang_ssd.bench.draws``: what the target's draw costs on one CPU core, in milliseconds.

Five rows of 49,152 logits are one round of the demo pair (K = 4), whose verify takes about 120 ms on one core.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from sglang_ssd.sampling.draw import DrawParameters, draw
from sglang_ssd.sampling.filters import TOP_K_ALL, Filters
from sglang_ssd.sampling.noise import NoiseTable

ROWS, VOCAB_SIZE, VERIFY_MS = 5, 49_152, 120.0
REPEATS = 51


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    noise = NoiseTable.of(VOCAB_SIZE)
    logits = torch.randn(ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
    cases = {
        "greedy": None,
        "temperature": _parameters(None),
        "top-p 0.9": _parameters(_filters(top_p=0.9)),
        "top-k 50": _parameters(_filters(top_k=50)),
        "top-k 50, top-p 0.9, min-p 0.05": _parameters(_filters(top_k=50, top_p=0.9, min_p=0.05)),
    }
    seeds = positions = torch.arange(ROWS)
    _report("hash bits alone", _milliseconds(lambda: noise.bits(seeds, positions, VOCAB_SIZE)))
    for name, parameters in cases.items():
        _report(f"draw, {name}", _milliseconds(lambda chosen=parameters: draw(logits, chosen, noise)))  # type: ignore[misc]


def _parameters(filters: Filters | None) -> DrawParameters:
    rows = torch.arange(ROWS)
    return DrawParameters(rows, torch.full((ROWS,), 0.8), rows + 17, rows + 100, filters)


def _filters(*, top_k: int = TOP_K_ALL, top_p: float = 1.0, min_p: float = 0.0) -> Filters:
    return Filters(torch.full((ROWS,), top_k), torch.full((ROWS,), top_p), torch.full((ROWS,), min_p))


def _milliseconds(work: Callable[[], object]) -> tuple[float, float]:
    """Best and median of many runs, of this thread's own time: what else runs on the machine is not in it."""
    taken = []
    for _ in range(REPEATS):
        started = time.thread_time()
        work()
        taken.append(1e3 * (time.thread_time() - started))
    return min(taken), median(taken)


def _report(name: str, times: tuple[float, float]) -> None:
    best, usual = times
    share = 100 * best / VERIFY_MS
    sys.stdout.write(f"{name:40} best {best:6.2f} ms   median {usual:6.2f} ms   {share:4.1f} % of a verify\n")


if __name__ == "__main__":
    main()
