"""``python -m sglang_ssd.bench report RESULTS.json --write docs/benchmarks.md``: a page and its plots.

Everything on the page comes from the results files. With several files the first is the run that is judged; the others
add sweeps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from sglang_ssd.bench import machine
from sglang_ssd.bench.analysis import by_data_set, closed, is_sweep, points, steady
from sglang_ssd.bench.ceiling import Ceiling, ceiling
from sglang_ssd.bench.goals import goals
from sglang_ssd.bench.results import Results, ResultsError
from sglang_ssd.bench.settings import SSD
from sglang_ssd.bench.tables import (
    ceiling_table,
    cores_table,
    data_set_table,
    decision_table,
    goal_table,
    latency_table,
    memory_table,
    open_table,
    rounds_table,
    scaling_table,
    steady_table,
    sweep_table,
    throughput_table,
    waterfall_table,
)

_SETTINGS = ("num_steps", "fan_out", "planner", "wait", "fallback", "verify")
_WIDTH = 120
BUSY_CORES = 0.1
"""More cores than this used by other processes, on average, make a run doubtful."""


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, or 2 when a file cannot be read."""
    options = _parser().parse_args(argv)
    try:
        results = [Results.read(path) for path in options.json]
    except (OSError, ResultsError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    page = Page(results)
    if options.write is None:
        sys.stdout.write(page.text(plots=None))
        return 0
    from sglang_ssd.bench.plots import draw_all

    folder = options.write.with_suffix("")
    plots = draw_all(page, folder)
    options.write.write_text(page.text(plots={name: f"{folder.name}/{file}" for name, file in plots.items()}))
    return 0


class Page:
    """What one run (and the sweeps of others) says."""

    def __init__(self, results: Sequence[Results]) -> None:
        self.run = results[0]
        self.commands = [each.header["command"] for each in results]
        every = [record for each in results for record in each.blocks]
        self.points = points(record for record in self.run.blocks if not is_sweep(record))
        self.closed = closed(self.points)
        self.open = [point for point in points(every) if point.rate is not None]
        self.steady = steady(points(every))
        self.ceilings = [found for point in self.closed if (found := ceiling(point)) is not None]
        self.sweeps = points(record for record in every if is_sweep(record))
        self.failed = [event for each in results for event in each.events("failed")]
        self.scaling = next((event for each in results for event in each.events("scaling")), None)
        self.decisions = next((e for e in self.run.events("decisions") if e["server"] == SSD), None)
        # Of the same name the first counts: it is the judged run's.
        self.servers = {event["name"]: event for each in reversed(results) for event in each.events("server")}
        self._drafts = {each.header["command"]: draft for each in results if (draft := _draft_of(each)) is not None}

    @property
    def round_trip_ms(self) -> float:
        """Of an answer that is there already."""
        return float(self.scaling["round_trip_ms"]) if self.scaling is not None else 0.0

    @property
    def kind(self) -> str:
        """The kind of machine."""
        return machine.label(self.run.header["machine"])

    def text(self, plots: dict[str, str] | None) -> str:
        """The page in Markdown."""
        parts = [self._head(), *self._sections(plots or {})]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _head(self) -> str:
        header = self.run.header
        versions = ", ".join(f"{name} {number}" for name, number in header["versions"].items())
        lines = [
            "# Benchmarks",
            "Made by `python -m sglang_ssd.bench report` from the results of\n\n    " + "\n    ".join(self.commands),
            fill(f"{self.kind}; {versions}. {self._models()}", _WIDTH),
            *(fill(doubt, _WIDTH) for doubt in self._doubts()),
            fill(_READING, _WIDTH),
        ]
        return "\n\n".join(lines)

    def _models(self) -> str:
        ssd = self.servers.get("ssd", {})
        about, devices = ssd.get("about", {}), ssd.get("devices", {})
        unit = "GPU" if self.run.header["machine"]["gpus"] else "core"
        settings = ", ".join(f"{name.replace('_', '-')} {about[name]}" for name in _SETTINGS if name in about)
        return (
            f"Target {about.get('target', 'unknown')} on {devices.get('target', '?')} {unit}(s), draft "
            f"{about.get('draft', 'unknown')} on {devices.get('draft', '?')}; `ssd` runs with {settings}. "
            + self._lengths()
            + ("" if self.run.header["machine"]["gpus"] else _CORES)
        )

    def _lengths(self) -> str:
        requests = [request for record in self.run.blocks for request in record["requests"]]
        count = max(1, len(requests))
        ended = sum(request["finish"] == "stop" for request in requests) / count
        prompt = sum(request["prompt"] for request in requests) / count
        caps = ", ".join(f"{tokens} at batch {batch}" for batch, tokens in self._caps())
        return (
            f"Prompts of {prompt:.0f} tokens on average, chat template included; at most {caps} new tokens; the end "
            f"of a text is respected ({100 * ended:.0f} % of the requests came to it)."
        )

    def _caps(self) -> list[tuple[int, int]]:
        cells = self.run.header["plan"]["cells"]
        alone = (cell for cell in cells if cell["rate"] is None and cell.get("turns", 1) == 1)
        return sorted({(cell["batch"], cell["tokens"]) for cell in alone})

    def _doubts(self) -> list[str]:
        doubts = []
        if not self.run.complete:
            doubts.append("**The run is not complete.**")
        wanted = {_cell_key(cell) for cell in self.run.header["plan"]["cells"]}
        missing = wanted - {record["cell"] for record in self.run.blocks}
        if missing:
            doubts.append(f"**Not measured for want of time: {', '.join(sorted(missing))}.**")
        seconds = sum(record["wall_s"] for record in self.run.blocks)
        others = sum(record["cores"]["others"] * record["wall_s"] for record in self.run.blocks) / max(seconds, 1e-9)
        if others > BUSY_CORES:
            doubts.append(f"**Other processes used {others:.2f} cores on average meanwhile: rates are too low.**")
        judged = self._drafts.get(self.commands[0])
        others_drafts = ((command, draft) for command, draft in self._drafts.items() if draft != judged)
        return doubts + [f"**`{command}` was run with another draft ({draft}).**" for command, draft in others_drafts]

    def _sections(self, plots: dict[str, str]) -> Iterable[str]:
        yield "## Goals\n\n" + goal_table(goals(self.closed))
        if self.closed:
            yield "## Tokens per second\n\n" + throughput_table(self.closed, self._devices())
            yield (_picture(plots, "ratios") + "\n\n" + _picture(plots, "pareto")).strip()
            yield "## Latency\n\n" + latency_table(self.closed)
            yield "## Rounds\n\n" + rounds_table(self.closed)
        if self.decisions is not None:
            yield "## What the policy chose\n\n" + _DECISIONS + "\n\n" + decision_table(self.decisions)
        if self.ceilings:
            yield from self._ceiling_section(plots)
        single = next((p for p in self.closed if p.batch == 1 and p.temperature == 0), None)
        if single is not None and len(by_data_set(single)) > 1:
            yield "## Data sets (batch 1, T = 0)\n\n" + data_set_table(by_data_set(single))
        if self.steady:
            yield "## Requests that follow one another\n\n" + _STEADY + "\n\n" + steady_table(self.steady)
        if self.open:
            yield "## Requests at random arrivals\n\n" + open_table(self.open)
        if self.sweeps or self.failed:
            yield "## Sweeps\n\n" + _SWEEPS + "\n\n" + sweep_table(self.sweeps, self.failed)
            yield _picture(plots, "misses")
        yield self._memory_section()
        if self.closed:
            yield "## Who used the cores\n\n" + cores_table(self.closed)
        if self.scaling is not None:
            yield "## Round bookkeeping\n\n" + scaling_table(self.scaling)
            yield _picture(plots, "scaling")

    def _ceiling_section(self, plots: dict[str, str]) -> Iterable[str]:
        yield "## The ceiling\n\n" + _CEILING + "\n\n" + ceiling_table(self.ceilings)
        yield "Where the rest went, ms a token:\n\n" + waterfall_table(self.ceilings, self.round_trip_ms)
        yield _picture(plots, "waterfall")

    def _devices(self) -> dict[str, int]:
        devices: dict[str, int] = self.servers.get("ssd", {}).get("devices", {"target": 1, "draft": 1})
        return devices

    def _memory_section(self) -> str:
        measured = [p for p in self.closed if p.ssd is not None and any("draft_memory" in r for r in p.ssd.records)]
        return (
            "## Memory of the speculation cache\n\n" + memory_table(measured, self.run.header.get("draft_kv_bytes"))
            if measured
            else ""
        )


def _draft_of(results: Results) -> str | None:
    """The draft's folder in a file's servers."""
    return next((event["about"]["draft"] for event in results.events("server") if "draft" in event["about"]), None)


def waterfall_of(found: Sequence[Ceiling]) -> Ceiling | None:
    """The one to draw: batch 1, T = 0, or else the first."""
    return next((c for c in found if c.point.batch == 1 and c.point.temperature == 0), found[0] if found else None)


_READING = """\
`off` is SGLang without speculation, `sync` the same draft server with the cache off (drafts after each outcome) at the
K that is best for it at each point (every K is tried in the first quarter of the blocks there), `ssd` the cache ahead.
The modes alternate in blocks on the same prompts; a ratio is the geometric mean over paired blocks with its 95 %
bootstrap interval. Rates count the time in which a batch is full and decodes, unless said otherwise: from its last
first token until more than a quarter of its requests have ended. (Answers here are short, and prefill is the same for
all; speculation ends some of a batch early.) ITL is the time between two events of a stream; the tokens of one round
come as one event. The caches of both sides are emptied before every block. All modes have the same attention on a CPU
(ours); at T > 0 `off` draws with SGLang's sampler and the others with ours, which costs less in a large batch, so that
there a part of what they gain is not speculation's."""

_CORES = """ \
Each model computes on one thread a core it is given; beside a draft server all of SGLang's processes keep to the
target's cores, and without one (`off`) its HTTP server and detokenizer may use the others."""

_DECISIONS = """\
At the end of the run, after all temperatures in turn. Batch sizes in between are those of answers that ended early."""

_STEADY = """\
So many are always under way: when one ends the next begins, with its prefill. Their lengths differ by up to half of the
mean, so that no mode has them begin and end in step. Rates are those of whole blocks, from the first request to the end
of the last answer, in which the batch becomes small at last."""

_CEILING = """\
T_sd is a round of `sync` at its best K. The ceiling is that mode with its waiting for drafts taken out; `ssd` is
measured against it in the same blocks."""


_SWEEPS = """\
The server of mode `ssd` with other settings, one after another on the same prompts (not alternating: rates may drift).
`planner=full` prepares one outcome only, full acceptance, as AMUSD and PEARL do."""


def _picture(plots: dict[str, str], name: str) -> str:
    return f"![{name}]({plots[name]})" if name in plots else ""


def _cell_key(cell: dict[str, Any]) -> str:
    from sglang_ssd.bench.settings import Cell

    return Cell(**cell).key


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sglang_ssd.bench report", description="A page from results.")
    parser.add_argument("json", type=Path, nargs="+", help="results; the first is judged, the others add sweeps")
    parser.add_argument(
        "--write", type=Path, help="page to write, with plots in a folder of its name (default: stdout)"
    )
    return parser
