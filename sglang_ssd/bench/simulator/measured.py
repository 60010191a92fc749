"""``python -m sglang_ssd.bench profile``: a profile of the machine that a benchmark ran on.

It takes the times of forwards, draft steps and round trips, and nothing that is made of them: tokens per second,
hit rates and accepted lengths are what the simulator is to find.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from sglang_ssd.bench import machine
from sglang_ssd.bench.analysis import Point, closed, points
from sglang_ssd.bench.ceiling import round_time
from sglang_ssd.bench.results import Results, ResultsError
from sglang_ssd.bench.settings import SSD
from sglang_ssd.bench.simulator.profile import Profile, ProfileError, load_profile
from sglang_ssd.policy.clock import VerifyClock

PROGRAM = "python -m sglang_ssd.bench profile"


def measured_profile(results: Results, base: Profile) -> Profile:
    """``base`` with the times of the run. Raises ResultsError when it has none."""
    decisions = list(results.events("decisions"))
    steps = [event["draft_step_ms"] for event in decisions if event["server"] == SSD]
    scaling = next(results.events("scaling"), None)
    measured = closed(points(results.blocks))
    if not decisions or not steps or not measured:
        raise ResultsError("the results hold no times: they are written at the end of a run.")
    where = machine.label(results.header["machine"])
    batches = tuple(sorted({point.batch for point in measured}))
    host_ms, clock = round(_rest_ms(measured), 2), _clock(decisions)
    plain = {(point.temperature, point.batch): _plain_ms(point) - host_ms for point in measured}
    # Milliseconds a second: a forward of one token takes what it takes without speculation, as clients saw it.
    coldest = {batch: plain[min(point for point in plain if point[1] == batch)] for batch in batches}
    level = {batch: coldest[batch] / clock.estimate(batch, 1) for batch in batches}
    widths = tuple(range(1, base.num_steps + 2))
    return msgspec.structs.replace(
        base,
        source=f"Made by {PROGRAM} from a run of {results.header['command']}; {where}.",
        batches=batches,
        widths=widths,
        verify_ms=tuple(tuple(round(level[b] * clock.estimate(b, w), 1) for w in widths) for b in batches),
        step_ms=tuple((float(rows), float(ms)) for rows, ms in steps[-1]),
        plain_ms=_table(plain, batches),
        host_ms=host_ms,
        round_trip_ms=scaling["round_trip_ms"] if scaling is not None else base.round_trip_ms,
    )


def _clock(decisions: Sequence[Mapping[str, Any]]) -> VerifyClock:
    """What both speculating servers know of forwards. Each knows it at the pace of its own last moments, so they are
    brought to one pace by what both have measured.
    """
    known = [_forwards(event) for event in decisions]
    measured: dict[tuple[int, int], list[float]] = {}
    for mine in known:
        pace = median([seconds / mine[size] for size, seconds in known[0].items() if size in mine] or [1.0])
        for size, seconds in mine.items():
            measured.setdefault(size, []).append(pace * seconds)
    clock = VerifyClock()
    for (batch, width), times in measured.items():
        clock.observe(batch, width, fmean(times))
    return clock


def _forwards(event: Mapping[str, Any]) -> dict[tuple[int, int], float]:
    """Seconds by batch and width."""
    return {
        (int(batch), int(width)): ms / 1e3
        for batch, by_width in event["verify_ms"].items()
        for width, ms in by_width.items()
    }


def _plain_ms(point: Point) -> float:
    """From token to token without speculation, as the clients saw it."""
    assert point.off is not None
    return median([float(gap) for record in point.off.records for gap in record["itl_ms"]])


def _table(plain: Mapping[tuple[float, int], float], batches: Sequence[int]) -> dict[float, tuple[float, ...]]:
    """By temperature, those at which every batch size was measured."""
    temperatures = sorted({temperature for temperature, _ in plain})
    whole = [t for t in temperatures if all((t, batch) in plain for batch in batches)]
    return {t: tuple(round(plain[t, batch], 1) for batch in batches) for t in whole}


def _rest_ms(measured: Sequence[Point]) -> float:
    """Of a round with one request, neither forward nor wait."""
    alone = min(measured, key=lambda point: (point.batch, point.temperature))
    time = round_time(alone.ssd.records) if alone.ssd is not None else None
    return max(0.0, time.rest_ms) if time is not None else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 when a file cannot be used."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("results", type=Path, help="of python -m sglang_ssd.bench run")
    parser.add_argument("--base", default="demo-two-cores", help="profile that says all else (default: %(default)s)")
    parser.add_argument("--write", type=Path, help="file of the profile (default: print it)")
    options = parser.parse_args(argv)
    try:
        profile = measured_profile(Results.read(options.results), load_profile(options.base))
    except (ProfileError, ResultsError, OSError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    text = msgspec.json.format(msgspec.json.encode(profile), indent=2).decode() + "\n"
    if options.write is None:
        sys.stdout.write(text)
    else:
        options.write.write_text(text)
    return 0
