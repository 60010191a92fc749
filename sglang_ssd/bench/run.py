"""``python -m sglang_ssd.bench run``: start the servers, measure every block of the plan, write the results.

A run that was stopped goes on with the same command. Servers of the modes ``off``, ``sync`` and ``ssd`` are up side by
side and have the same flags otherwise; one at a time is under load, and an idle one sleeps.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import requests
from transformers import AutoTokenizer

from sglang_ssd.bench import machine, report
from sglang_ssd.bench.analysis import is_sweep
from sglang_ssd.bench.bookkeeping import curves, round_trip_ms
from sglang_ssd.bench.load import Ask, LoadError
from sglang_ssd.bench.measure import HEARTBEAT_S, Record, measure
from sglang_ssd.bench.prompts import MIXED, NAMES, Prompts, load_prompts
from sglang_ssd.bench.results import Results, ResultsError
from sglang_ssd.bench.schedule import Block, Variant, blocks_in_turn, variants_of
from sglang_ssd.bench.servers import Server, ServerError, running
from sglang_ssd.bench.settings import PLANS, SSD, Cell, Plan, grid, parse_sweep

logger = logging.getLogger(__name__)

_SERVER_GIB = 4
_DECISIONS = ("lookahead", "fallback_chosen", "switch_point", "verify_ms", "draft_step_ms", "expected")
"""Of ``/ssd/status``, by batch size."""
_WARM_UP = Ask("warm-up", tuple(range(100, 140)), 16, 0.0, 1)


class Run:
    """A plan being carried out."""

    def __init__(self, plan: Plan, results: Results, prompts: Prompts, logs: Path) -> None:
        self._plan, self._results, self._prompts, self._logs = plan, results, prompts, logs

    def carry_out(self) -> None:
        """Everything that is not in the results yet. Raises ServerError and LoadError."""
        todo = [block for block in blocks_in_turn(self._plan.cells) if self._missing(block)]
        if todo and not self._out_of_time():
            self._main_part(todo)
        for sweep in self._plan.sweeps:
            for name, flags in sweep.variants():
                self._sweep_part(name, flags)
        if self._plan.bookkeeping and not any(self._results.events("scaling")):
            logger.info("our own work in a round")
            self._results.add({"event": "scaling", "curves": curves(), "round_trip_ms": round(round_trip_ms(), 3)})
        self._results.add({"event": "complete"})

    def _main_part(self, todo: list[Block]) -> None:
        wanted = {mode: self._plan.server_flags(mode) for mode in self._plan.modes}
        _check_memory(len(wanted))
        with running(wanted, self._logs) as servers:
            self._greet(servers)
            for done, block in enumerate(todo):
                if self._out_of_time():
                    logger.info("The time is over: %d of %d blocks remain unmeasured.", len(todo) - done, len(todo))
                    break
                logger.info("%d of %d: %s, block %d", done + 1, len(todo), block.cell.key, block.number + 1)
                for variant in self._missing(block):
                    self._measure(servers[variant.server], block, variant)
            self._note_decisions(servers)

    def _sweep_part(self, name: str, flags: tuple[str, ...]) -> None:
        blocks = [Block(cell, number) for cell in self._plan.sweep_cells for number in range(cell.blocks)]
        todo = [block for block in blocks if (block.cell.key, block.number, name) not in self._results.done()]
        failed = any(event["variant"] == name for event in self._results.events("failed"))
        if not todo or failed:
            return
        logger.info("sweep: %s", name)
        try:
            with running({name: (*self._plan.server_flags(SSD), *flags)}, self._logs) as servers:
                self._greet(servers)
                for block in todo:
                    self._measure(servers[name], block, Variant(name, name))
        except (ServerError, LoadError) as error:
            # One value that a server refuses is a result, not the end of the run.
            logger.warning("%s", error)
            self._results.add(
                {"event": "failed", "variant": name, "why": machine.without_paths(str(error).splitlines()[-1])}
            )

    def _measure(self, server: Server, block: Block, variant: Variant) -> None:
        cell = block.cell
        start = block.number * cell.requests
        prompts = self._prompts.take(cell.data_set, start, cell.requests)
        asks = [  # a prompt has the same seed at every batch size
            Ask(p.data_set, p.ids, cell.tokens_of(seed), cell.temperature, seed, variant.num_steps)
            for seed, p in enumerate(prompts, start=start + 1)
        ]
        where = {"cell": cell.key, "block": block.number, "variant": variant.name}
        point = {name: getattr(cell, name) for name in ("batch", "temperature", "data_set", "rate", "turns")}
        record: Record = where | point | measure(server, asks, cell.rate, cell.batch)
        logger.info("    %-12s %6.2f tokens/s", variant.name, record["tokens"] / record["wall_s"])
        self._results.add(record)

    def _note_decisions(self, servers: dict[str, Server]) -> None:
        """What the policies have come to, and the times that they know by now."""
        for name, server in servers.items():
            status = server.status()
            known = {key: status[key] for key in _DECISIONS if key in status}
            if known:
                self._results.add({"event": "decisions", "server": name, **known})

    def _missing(self, block: Block) -> list[Variant]:
        done = self._results.done()
        others = [r for r in self._results.blocks if (r["cell"], r["block"]) != (block.cell.key, block.number)]
        variants = variants_of(block, self._plan, others)
        return [variant for variant in variants if (block.cell.key, block.number, variant.name) not in done]

    def _out_of_time(self) -> bool:
        main = [record for record in self._results.blocks if not is_sweep(record)]
        used: float = sum(record["wall_s"] + 2 * HEARTBEAT_S for record in main)
        return used > 60 * self._plan.minutes

    def _greet(self, servers: dict[str, Server]) -> None:
        """Warm each server up, and note what it says of itself."""
        kind = self._results.header["machine"]
        for name, server in servers.items():
            measure(server, [_WARM_UP])
            self._results.add(
                {
                    "event": "server",
                    "name": name,
                    "flags": machine.shown(server.flags),
                    "about": machine.about(server.status()),
                    "devices": machine.devices(kind, server.info()),
                }
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 when a server or a request failed, 2 for settings that cannot work, 130 when interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", stream=sys.stderr, force=True)
    try:
        plan = _plan(options)
        target, draft = _models(plan)
        header = {
            "plan": {name: machine.shown(v) if "flags" in name else v for name, v in plan.as_json().items()},
            "command": machine.command_line(["run", *argv]),
            "machine": machine.machine(),
            "versions": machine.versions(),
            "draft_kv_bytes": machine.kv_bytes_per_token(draft) if draft is not None else None,
        }
        results = Results.open(options.json, header)
        started = time.monotonic()
        prompts = load_prompts(AutoTokenizer.from_pretrained(target), options.data)
        with tempfile.TemporaryDirectory(prefix="sglang-ssd-bench-") as logs:
            Run(plan, results, prompts, options.logs or Path(logs)).carry_out()
    except (ResultsError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except (ServerError, LoadError, requests.RequestException) as error:
        logger.error("%s", error)  # noqa: TRY400 - the sentence says all
        return 1
    except KeyboardInterrupt:
        logger.info("Stopped; the same command goes on.")
        return 130
    logger.info("Done in %.1f minutes.", (time.monotonic() - started) / 60)
    if options.write is None:
        return 0
    logger.info("The report is %s.", options.write)
    return report.main([str(options.json), "--write", str(options.write)])


def _plan(options: argparse.Namespace) -> Plan:
    """The named plan with what the command line changes. Raises ValueError."""
    plan = PLANS[options.plan]
    if options.batches or options.temperatures:
        plan = _with_grid(plan, options)
    elif options.blocks:
        raise ValueError("--blocks says how many of each cell: give --batches or --temperatures too.")
    if options.rates:
        count = options.requests
        open_cells = tuple(Cell(count, 0.0, options.tokens or 32, 1, options.data_set, rate) for rate in options.rates)
        plan = plan.replace(cells=plan.cells + open_cells)
    if options.sweep is not None:
        sweeps = tuple(parse_sweep(text) for text in options.sweep)
        plan = plan.replace(sweeps=sweeps, sweep_cells=plan.sweep_cells or (Cell(1, 0.0, options.tokens or 64, 4),))
    if options.data_set != MIXED:
        plan = plan.replace(cells=tuple(Cell(**{**vars(c), "data_set": options.data_set}) for c in plan.cells))
    return plan.replace(
        minutes=options.minutes or plan.minutes,
        sync_steps=tuple(options.sync_steps or plan.sync_steps),
        flags=tuple(shlex.split(options.flags)),
        ssd_flags=tuple(shlex.split(options.ssd_flags)),
        standalone_flags=tuple(shlex.split(options.standalone)),
    )


def _with_grid(plan: Plan, options: argparse.Namespace) -> Plan:
    batches = tuple(options.batches or sorted({cell.batch for cell in plan.cells if cell.rate is None}))
    temperatures = tuple(options.temperatures or sorted({cell.temperature for cell in plan.cells}))
    blocks = dict.fromkeys(batches, options.blocks) if options.blocks else {1: 6}
    cells = grid(batches, temperatures, blocks, options.tokens)
    turns = max((cell.turns for cell in plan.cells), default=1)  # other sizes of the same loop
    return plan.replace(cells=tuple(replace(cell, turns=turns) for cell in cells))


def _models(plan: Plan) -> tuple[str, Path | None]:
    """The model that the servers will serve, and the draft's folder where there is one."""
    given = dict(zip(plan.flags, plan.flags[1:], strict=False))
    if "--model-path" not in given:
        from sglang_ssd.demo import demo_pair

        pair = demo_pair()
        return str(pair.target), pair.draft
    draft = Path(given.get("--speculative-draft-model-path", ""))
    return given["--model-path"], draft if (draft / "config.json").is_file() else None


def _check_memory(servers: int) -> None:
    free = psutil.virtual_memory().available / 2**30
    if free < servers * _SERVER_GIB:
        logger.warning("%d servers may need %d GiB of memory; %.0f are free.", servers, servers * _SERVER_GIB, free)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_ssd.bench run",
        description="Measure off, sync and ssd against one another. The same command continues a stopped run.",
    )
    parser.add_argument("--plan", choices=PLANS, default="short")
    parser.add_argument(
        "--json", type=Path, default=Path("build/bench/results.json"), help="results (default: %(default)s)"
    )
    parser.add_argument("--minutes", type=float, help="time for the cells; the order is balanced, so less is fine")
    parser.add_argument("--data", type=Path, help="folder with humaneval.jsonl, gsm8k_test.jsonl, ...")
    parser.add_argument("--data-set", choices=NAMES, default=MIXED, help="prompts of all cells (default: all in turn)")
    parser.add_argument("--batches", type=int, nargs="+", help="instead of the plan's batch sizes")
    parser.add_argument("--temperatures", type=float, nargs="+", help="instead of the plan's")
    parser.add_argument("--tokens", type=int, help="new tokens of a request, with --batches, --rates or --sweep")
    parser.add_argument("--blocks", type=int, help="of each cell, with --batches or --temperatures")
    parser.add_argument("--sync-steps", type=int, nargs="+", metavar="K", help="K that sync is tried at")
    parser.add_argument("--rates", type=float, nargs="+", help="open loop: requests a second, one cell each")
    parser.add_argument("--requests", type=int, default=16, help="of a cell of --rates")
    parser.add_argument(
        "--sweep", action="append", metavar="FLAG=V,V[;FLAG=V]",
        help="restart the ssd server with each value: fan-out=1,2,4;wait=full. Again for another sweep.",
    )  # fmt: skip
    parser.add_argument("--flags", default="", help="for every server, as one string")
    parser.add_argument("--ssd-flags", default="", help="for the server of mode ssd alone")
    parser.add_argument("--standalone", default="", help="SGLang's flags of a STANDALONE server to compare with (GPUs)")
    parser.add_argument("--write", type=Path, help="then write the report to this page, with its plots")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs (default: they are not kept)")
    return parser
