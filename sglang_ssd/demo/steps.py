"""``python -m sglang_ssd.demo.steps``: what a draft step costs by layers and token map, before anything is trained.

Costs do not depend on what the weights are, so the target's own outermost layers stand for a student. On a CPU the
process's own time is taken, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch

from sglang_ssd.demo import demo_pair
from sglang_ssd.demo.economy import Costs, break_even, speed_ordinary, speed_ssd
from sglang_ssd.draft_server.engine import DraftEngine, EngineSettings, Rows
from sglang_ssd.draft_server.token_map import FILE_NAME

PROGRAM = "python -m sglang_ssd.demo.steps"
CONTEXT = 300
_REPEATS = 30


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; exit status 0."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    target = options.target or str(demo_pair().target)
    as_served = EngineSettings(target, options.device, packed=False)  # the target's layers are SGLang's own
    decode, verify = measure_apart(as_served, [1, options.lookahead + 1])
    write = sys.stdout.write
    write(f"Target: decode {decode:.1f} ms, verify of {options.lookahead + 1} tokens {verify:.1f} ms.\n\n")
    write(_header(options))
    for layers, size, (one, many) in _students(target, options):
        costs = Costs(decode, verify, many)
        write(f"| {layers} | {size} | {one:.1f} | {many:.1f} | {_predictions(costs, options)} |\n")
    return 0


def measure_apart(settings: EngineSettings, rows: Sequence[int]) -> list[float]:
    """:func:`measure` in a process of its own, for SGLang's runtime context is global."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure_with_sglang, settings, rows).result()


def measure(engine: DraftEngine, rows: Sequence[int], *, on_cpu: bool) -> list[float]:
    """Milliseconds of a forward of so many branches of a sequence of ``CONTEXT`` tokens: the least disturbed tenth."""
    engine.extend(0, 0, np.arange(CONTEXT), np.arange(1, CONTEXT + 1))
    branches = max(rows)
    engine.fork(np.zeros(branches, np.int64), np.full(branches, CONTEXT), np.arange(1, branches + 1))
    clock = time.process_time if on_cpu else time.perf_counter
    return [1000 * float(np.quantile(list(_times(engine, count, clock)), 0.1)) for count in rows]


def _times(engine: DraftEngine, count: int, clock: Callable[[], float]) -> Iterator[float]:
    for _ in range(_REPEATS):
        begun = clock()
        engine.decode(_branches(count))
        yield clock() - begun


def _branches(count: int) -> Rows:
    each = np.arange(count)
    return Rows(
        rows=each + 1,
        positions=np.full(count, CONTEXT),
        tokens=each + 10,
        slots=each + CONTEXT + 1,
        temperatures=np.zeros(count, np.float32),
        seeds=each,
    )


def _measure_with_sglang(settings: EngineSettings, rows: Sequence[int]) -> list[float]:
    from sglang_ssd.draft_server.engine_sglang import SGLangEngine

    return measure(SGLangEngine(settings), rows, on_cpu=settings.device == "cpu")


def _students(target: str, options: argparse.Namespace) -> Iterator[tuple[int, int, list[float]]]:
    """Layers, map size, and the milliseconds at 1 and at ``--rows`` rows."""
    from sglang_ssd.demo.distill.student import load_target, make_student

    model = load_target(target, "cpu")
    for layers in options.layers:
        with tempfile.TemporaryDirectory(prefix="sglang-ssd-steps-") as folder:
            make_student(model, layers).to(torch.bfloat16).save_pretrained(folder)
            for size in options.maps:
                file = Path(folder) / FILE_NAME
                torch.save(torch.arange(size), file)
                settings = EngineSettings(folder, options.device, token_map=str(file))
                yield layers, size, measure_apart(settings, [1, options.rows])


def _header(options: argparse.Namespace) -> str:
    given = f"with {options.tokens:.2f} tokens a round, {100 * options.hit_rate:.0f} % hits"
    names = ["layers", "map", "step, 1 row (ms)", f"step, {options.rows} rows (ms)", "K + 1 steps in a verify"]
    names += [f"SSD {given}", "ordinary", "break-even tokens a round"]
    return "| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|\n"


def _predictions(costs: Costs, options: argparse.Namespace) -> str:
    k, tokens, hits = options.lookahead, options.tokens, options.hit_rate
    fits = "yes" if (k + 1) * costs.step <= costs.verify else "no"
    ssd, ordinary = speed_ssd(costs, k, tokens, hits), speed_ordinary(costs, k, tokens)
    return f"{fits} | {ssd:.2f}x | {ordinary:.2f}x | {break_even(costs, k, hits):.2f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="What a draft step costs by layers and token map.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--target", help="folder of the target; without it the demo's")
    add("--device", default="cpu", help="cpu or cuda")
    add("--layers", type=int, nargs="+", default=[2, 4, 6], help="of the students")
    add("--maps", type=int, nargs="+", default=[8192, 16384, 49152], help="mapped tokens")
    add("--rows", type=int, default=10, help="branches of a step")
    add("--lookahead", type=int, default=4, metavar="K", help="draft tokens a round")
    add("--tokens", type=float, default=2.0, help="a round, as sglang_ssd.demo.evaluate measures it")
    add("--hit-rate", type=float, default=0.5, help="as sglang_ssd.demo.evaluate measures it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
