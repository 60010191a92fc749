"""The plots of the report, as small SVG files that are the same for the same results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from sglang_ssd.bench.goals import NEVER_BELOW
from sglang_ssd.bench.intervals import Ratio
from sglang_ssd.bench.report import Page, waterfall_of
from sglang_ssd.bench.tables import miss_law, miss_points

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_ssd.bench.analysis import Samples

_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "sglang-ssd", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
_COLOURS = {"off": "#777777", "sync": "#1f77b4", "ssd": "#d62728"}


def draw_all(page: Page, folder: Path) -> dict[str, str]:
    """Write every plot that the results allow into ``folder``; returns name -> file name."""
    wanted: dict[str, tuple[bool, Callable[[Page, Figure], None]]] = {
        "ratios": (bool(page.closed), _ratios),
        "pareto": (bool(page.closed), _pareto),
        "waterfall": (bool(page.ceilings), _waterfall),
        "misses": (len(miss_points(page.sweeps)) > 1, _misses),
        "scaling": (page.scaling is not None, _scaling),
    }
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for name, (possible, draw) in wanted.items():
        if possible:
            drawn[name] = f"{name}.svg"
            with _figure(folder / drawn[name]) as figure:
                draw(page, figure)
    return drawn


@contextmanager
def _figure(path: Path) -> Iterator[Figure]:
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure
        figure.savefig(path, format="svg", metadata={"Date": None})


def _ratios(page: Page, figure: Figure) -> None:
    """Ratios of ssd to off and to sync by batch size, one panel for each temperature, with intervals."""
    temperatures = sorted({point.temperature for point in page.closed})
    panels = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    for panel, temperature in zip(panels, temperatures, strict=True):
        here = [point for point in page.closed if point.temperature == temperature]
        for name, shift in (("off", 0.97), ("sync", 1.03)):
            found = [(p.batch * shift, r) for p in here if (r := p.against(getattr(p, name))) is not None]
            x, y = [at for at, _ in found], [ratio.mean for _, ratio in found]
            reach = [_reach(ratio) for _, ratio in found]
            ends = [[low for low, _ in reach], [high for _, high in reach]]
            panel.errorbar(x, y, ends, marker="o", capsize=2, color=_COLOURS[name], label=f"ssd / {name}")
        panel.axhline(1, color="black", linewidth=0.8)
        panel.axhline(NEVER_BELOW, color="black", linewidth=0.6, linestyle=":")
        _batch_axis(panel, [point.batch for point in here], f"T = {temperature:g}")
    panels[0].set_ylabel("ratio of tokens per second")
    panels[0].legend()


def _reach(ratio: Ratio) -> tuple[float, float]:
    """How far the interval goes below and above the mean."""
    return (ratio.mean - ratio.low, ratio.high - ratio.mean) if ratio.has_interval else (0.0, 0.0)


def _pareto(page: Page, figure: Figure) -> None:
    """Median time a token against throughput, a line over the batch sizes for each mode."""
    temperatures = sorted({point.temperature for point in page.closed})
    panels = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    for panel, temperature in zip(panels, temperatures, strict=True):
        for mode, colour in _COLOURS.items():
            line = [_latency_and_rate(getattr(p, mode)) for p in page.closed if p.temperature == temperature]
            known = [point for point in line if point is not None]
            panel.plot([x for x, _ in known], [y for _, y in known], marker="o", color=colour, label=mode)
        panel.set_title(f"T = {temperature:g}")
        panel.set_xlabel("median TPOT, ms")
    panels[0].set_ylabel("tokens per second")
    panels[0].legend()


def _latency_and_rate(samples: Samples | None) -> tuple[float, float] | None:
    tpot = samples.of_requests("tpot_ms") if samples is not None else None
    return None if samples is None or tpot is None else (tpot[0], samples.decode_rate)


def _waterfall(page: Page, figure: Figure) -> None:
    """From the ceiling to ssd, ms a token, at batch 1 and T = 0."""
    found = waterfall_of(page.ceilings)
    if found is None:
        return
    steps = found.waterfall(page.round_trip_ms)
    panel = figure.subplots()
    level = 0.0
    for index, (name, value) in enumerate(steps):
        whole = name in ("ceiling", "ssd")
        start = 0.0 if whole else level
        colour = _COLOURS["ssd"] if name == "ssd" else "#2ca02c" if name == "ceiling" or value < 0 else "#ff7f0e"
        panel.bar(index, value, bottom=start, color=colour, width=0.6)
        level = start + value
        panel.annotate(f"{value:+.1f}", (index, max(start, level)), ha="center", va="bottom")
    sync = found.sync.round_ms / found.sync.tokens
    panel.axhline(sync, color=_COLOURS["sync"], linestyle="--", label=f"sync, {sync:.1f}")
    panel.set_xticks(range(len(steps)), [name.replace(" ", "\n") for name, _ in steps])
    panel.set_ylabel("ms a token")
    panel.set_title(f"batch {found.point.batch}, T = {found.point.temperature:g}")
    panel.legend()


def _misses(page: Page, figure: Figure) -> None:
    """The miss rate against the fan-out, both logarithmic, with the fitted power law."""
    found = miss_points(page.sweeps)
    panel = figure.subplots()
    panel.loglog([x for x, _ in found], [y for _, y in found], "o", color=_COLOURS["ssd"], label="measured")
    law = miss_law(page.sweeps)
    if law is not None:
        ends = [found[0][0], found[-1][0]]
        panel.loglog(ends, [law[0] * x ** -law[1] for x in ends], color="black", label=f"{law[0]:.2f} F^-{law[1]:.2f}")
    panel.minorticks_off()
    panel.set_xticks([x for x, _ in found], [f"{x:g}" for x, _ in found])
    panel.set_yticks([y for _, y in found], [f"{y:.2f}" for _, y in found])
    panel.set_xlabel("fan-out F, branches a round")
    panel.set_ylabel("rounds that were no hits")
    panel.legend()


def _scaling(page: Page, figure: Figure) -> None:
    """Milliseconds of bookkeeping against what grows, both logarithmic, with a line of slope 1."""
    curves = page.scaling["curves"] if page.scaling is not None else {}
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for panel, (name, curve) in zip(panels, curves.items(), strict=True):
        x, y = [point[0] for point in curve], [point[1] for point in curve]
        panel.loglog(x, y, "o-", color=_COLOURS["ssd"], label="measured")
        panel.loglog(x, [y[-1] * at / x[-1] for at in x], ":", color="black", label="linear")
        panel.set_xlabel(name.partition(" (")[0])
        panel.minorticks_off()
    panels[0].set_ylabel("ms of a round")
    panels[0].legend()


def _batch_axis(panel: Axes, batches: list[int], title: str) -> None:
    panel.set_xscale("log", base=2)
    panel.minorticks_off()  # each is a line of the file
    panel.set_xticks(sorted(set(batches)), [str(batch) for batch in sorted(set(batches))])
    panel.set_xlabel("batch size")
    panel.set_title(title)
