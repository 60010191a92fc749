"""What the project set out to reach, and whether a run reached it. A goal that was missed or not measured says so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ssd.bench.analysis import Point, decode_rate, pair
from sglang_ssd.bench.ceiling import ceiling
from sglang_ssd.bench.intervals import Ratio, paired_ratio

OF_CEILING, OVER_SYNC, OVER_OFF, NEVER_BELOW = 0.90, 1.25, 1.30, 0.93
NOTHING = "-"


@dataclass(frozen=True)
class Goal:
    """``met`` is None when it was not measured, or in too few blocks."""

    what: str
    measured: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """For a table."""
        unknown = "**not measured**" if self.measured == NOTHING else "**too few blocks**"
        return {True: "met", False: "**missed**", None: unknown}[self.met]


def goals(closed_points: Sequence[Point]) -> list[Goal]:
    """All of them, by the time in which the batch is full and decodes."""
    first = next((p for p in closed_points if p.batch == 1 and p.temperature == 0), None)
    top = ceiling(first) if first is not None else None
    return [
        _at_least("batch 1, T = 0: share of the ceiling", OF_CEILING, top.share if top is not None else None),
        _at_least("batch 1, T = 0: over sync at its best K", OVER_SYNC, first.against(first.sync) if first else None),
        _at_least("batch 1, T = 0: over off", OVER_OFF, first.against(first.off) if first else None),
        *_never_below(closed_points),
    ]


def _at_least(what: str, wanted: float, ratio: Ratio | None) -> Goal:
    what = f"{what}, at least {wanted:.2f}"
    if ratio is None or not ratio.has_interval:
        return Goal(what, NOTHING if ratio is None else str(ratio), None)
    return Goal(what, str(ratio), ratio.mean >= wanted)


def _never_below(closed_points: Sequence[Point]) -> list[Goal]:
    """The lower end against the best other: at every batch size over all temperatures, and at every single point."""
    by_batch: dict[int, list[float]] = defaultdict(list)
    for point in closed_points:
        other = point.best_other
        if point.ssd is not None and other is not None:
            by_batch[point.batch] += pair(point.ssd, other, decode_rate)
    found = [_lower_end(f"batch {batch}, all T", paired_ratio(ratios)) for batch, ratios in sorted(by_batch.items())]
    return [*found, _all_points(closed_points)]


def _lower_end(where: str, ratio: Ratio | None) -> Goal:
    what = f"{where}: lower end of the 95 % interval over the best other, at least {NEVER_BELOW:.2f}"
    if ratio is None or not ratio.has_interval:
        return Goal(what, NOTHING if ratio is None else str(ratio), None)
    return Goal(what, str(ratio), ratio.low >= NEVER_BELOW)


def _all_points(closed_points: Sequence[Point]) -> Goal:
    what = f"the same at every single batch size and temperature, at least {NEVER_BELOW:.2f}"
    ratios = [ratio for p in closed_points if (ratio := p.against(p.best_other)) is not None]
    known = [ratio for ratio in ratios if ratio.has_interval]
    good = sum(ratio.low >= NEVER_BELOW for ratio in known)
    if not known:
        return Goal(what, f"{len(ratios)} points" if ratios else NOTHING, None)
    untold = f", {len(ratios) - len(known)} with too few blocks" if len(known) < len(ratios) else ""
    complete = good == len(known) == len(ratios)
    return Goal(what, f"{good} of {len(ratios)} points{untold}", complete)
