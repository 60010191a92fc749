"""The tables of the report, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang_ssd.bench.analysis import Point, Samples, whole_rate
from sglang_ssd.bench.ceiling import Ceiling, round_time
from sglang_ssd.bench.goals import Goal
from sglang_ssd.bench.intervals import power_law

NONE = "-"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """One Markdown table; None is written as a dash."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += ["| " + " | ".join(NONE if cell is None else str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def goal_table(goals: Sequence[Goal]) -> str:
    """What was wanted, what was measured, and the verdict."""
    return table(("goal", "measured", ""), ((goal.what, goal.measured, goal.verdict) for goal in goals))


def throughput_table(points: Sequence[Point], devices: Mapping[str, int]) -> str:
    """Rates and ratios; a device is what one side computes on, and ``off`` has none for a draft."""
    both = devices["target"] + devices["draft"]
    head = (
        "T", "batch", "blocks", "off", "sync", "ssd", "off per device", "sync per device", "ssd per device",
        "ssd / off", "ssd / sync", "ssd / best other", "the same with prefill",
    )  # fmt: skip
    note = (
        f"Tokens per second while the batch is full and decodes. Devices: {devices['target']} for `off`, {both} for "
        "`sync` and `ssd`. The last column is the ratio to the best other by whole blocks, prefill included."
    )
    return note + "\n\n" + table(head, (_throughput(point, devices["target"], both) for point in points))


def _throughput(point: Point, target: int, both: int) -> list[object]:
    modes = [(point.off, target), (point.sync, both), (point.ssd, both)]
    rates = _rates(*(samples for samples, _ in modes))
    rates[1] = _with_steps(rates[1], point.sync)
    per_device = [f"{samples.decode_rate / max(1, count):.1f}" if samples else None for samples, count in modes]
    other = point.best_other
    ratios = [point.against(point.off), point.against(point.sync), point.against(other)]
    head = [f"{point.temperature:g}", point.batch, _blocks(point)]
    return [*head, *rates, *per_device, *ratios, point.against(other, whole_rate)]


def latency_table(points: Sequence[Point]) -> str:
    """p50 / p95 / p99 in ms."""
    head = ("T", "batch", "mode", "TPOT ms, p50 / p95 / p99", "ITL ms", "TTFT ms")
    rows = (
        (f"{point.temperature:g}", point.batch, samples.name, _three(samples.of_requests("tpot_ms")),
         _three(samples.itl()), _three(samples.of_requests("ttft_ms")))
        for point in points
        for samples in _modes(point)
    )  # fmt: skip
    return table(head, rows)


def rounds_table(points: Sequence[Point]) -> str:
    """What the speculating modes did."""
    head = (
        "T", "batch", "mode", "tokens a round and request", "hit / partial / miss", "misses by", "accepted by position",
        "round ms", "verify", "wait", "rest", "timeouts", "draft rows a forward", "draft ms a forward",
    )  # fmt: skip
    rows = (
        _round(point, samples) for point in points for samples in _modes(point) if samples.total("server", "rounds")
    )
    return table(head, rows)


def _round(point: Point, samples: Samples) -> list[object]:
    rounds = samples.total("server", "rounds")
    shares = [samples.total("server", name) / rounds for name in ("hits", "partial")]
    time = round_time(samples.records)
    forwards = samples.total("draft", "forwards")
    rows = samples.total("draft", "rows") + samples.total("draft", "path_rows")
    parts = [time.round_ms, time.verify_ms, time.wait_ms, time.rest_ms] if time else []
    return [
        f"{point.temperature:g}", point.batch, samples.name, f"{_tokens_a_round(samples):.2f}",
        f"{shares[0]:.2f} / {shares[1]:.2f} / {1 - sum(shares):.2f}", _misses(samples),
        " ".join(f"{rate:.2f}" for rate in samples.accepted()), *(f"{part:.1f}" for part in parts),
        *([None] * (4 - len(parts))), int(samples.total("server", "timeouts")),
        f"{rows / forwards:.1f}" if forwards else None,
        f"{samples.total('draft', 'forward_us') / 1e3 / forwards:.1f}" if forwards else None,
    ]  # fmt: skip


def _tokens_a_round(samples: Samples) -> float:
    """Of one request: its bonus and what was accepted."""
    accepted = sum(sum(record["server"]["accepted_per_position"]) for record in samples.records)
    return 1 + accepted / samples.total("server", "rounds")


def _misses(samples: Samples) -> str:
    sources = sorted({name for r in samples.records for name in r["server"]["misses"] if name != "total"})
    return ", ".join(f"{name} {int(samples.total('server', 'misses', name))}" for name in sources) or NONE


def ceiling_table(found: Sequence[Ceiling]) -> str:
    """T_sd, the ceiling, and how near ssd comes."""
    head = ("T", "batch", "sync at", "T_sd ms", "tokens a round (batch)", "ceiling tokens/s", "ssd tokens/s", "share")
    rows = (
        (f"{c.point.temperature:g}", c.point.batch, c.point.sync.name.removeprefix("sync ") if c.point.sync else None,
         f"{c.sync.round_ms:.1f}", f"{c.sync.tokens:.2f}", f"{c.sync.ceiling:.1f}",
         f"{1e3 * c.ssd.tokens / c.ssd.round_ms:.1f}", c.share)
        for c in found
    )  # fmt: skip
    return table(head, rows)


def waterfall_table(found: Sequence[Ceiling], round_trip_ms: float) -> str:
    """The parts of every point."""
    names = [name for name, _ in found[0].waterfall()]
    rows = (
        [f"{c.point.temperature:g}", c.point.batch, *(f"{value:+.1f}" for _, value in c.waterfall(round_trip_ms))]
        for c in found
    )
    return table(("T", "batch", *names), rows)


def decision_table(event: Mapping[str, Any]) -> str:
    """By batch size, when the run was over: K, the fallback, and the target's forward by tokens a request."""
    chosen, fallbacks = event["lookahead"], event["fallback_chosen"]
    rows = [
        (batch, steps, fallbacks.get(batch), ", ".join(f"{w}: {ms:.0f}" for w, ms in event["verify_ms"][batch].items()))
        for batch, steps in sorted(chosen.items(), key=lambda item: int(item[0]))
        if batch in event["verify_ms"]
    ]
    switch, steps = event["switch_point"], ", ".join(f"{rows}: {ms:.1f}" for rows, ms in event["draft_step_ms"])
    return (
        table(("batch", "K", "usual misses get", "forward by width, ms"), rows)
        + f"\n\nb* (the smallest batch whose usual misses are not drafted): {switch or 'none'}. "
        + f"Draft step by rows, ms: {steps}."
    )


def data_set_table(by_set: Mapping[str, Point]) -> str:
    """One row for each data set."""
    head = ("data set", "blocks", "off", "sync", "ssd", "ssd / off", "ssd / sync", "hit rate")
    rows = (
        (name, len(point.ssd.records), *_rates(point.off, point.sync, point.ssd),
         point.against(point.off), point.against(point.sync), _two(point.ssd.hit_rate()))
        for name, point in by_set.items()
        if point.ssd is not None
    )  # fmt: skip
    return table(head, rows)


def steady_table(points: Sequence[Point]) -> str:
    """Whole rates of requests that follow one another."""
    head = ("T", "at once", "requests a block", "blocks", "off", "sync", "ssd", "ssd / off", "ssd / sync")
    return table(head, map(_steady_row, points))


def _steady_row(point: Point) -> tuple[object, ...]:
    rates = [f"{samples.rate:.1f}" if samples else None for samples in (point.off, point.sync, point.ssd)]
    rates[1] = _with_steps(rates[1], point.sync)
    ratios = [point.against(point.off), point.against(point.sync)]
    return f"{point.temperature:g}", point.batch, point.batch * point.turns, _blocks(point), *rates, *ratios


def open_table(points: Sequence[Point]) -> str:
    """Throughput and latency by rate of arrival."""
    head = ("requests/s", "requests", "mode", "tokens/s", "TPOT ms, p50 / p95 / p99", "TTFT ms, p50 / p95 / p99")
    rows = (
        (f"{point.rate:g}", sum(len(r["requests"]) for r in samples.records), samples.name, f"{samples.rate:.1f}",
         _three(samples.of_requests("tpot_ms")), _three(samples.of_requests("ttft_ms")))
        for point in points
        for samples in _modes(point)
    )  # fmt: skip
    return table(head, rows)


def sweep_table(points: Sequence[Point], failed: Sequence[Mapping[str, Any]]) -> str:
    """Every value of every sweep; those that a server refused are named."""
    head = ("server", "T", "batch", "blocks", "tokens/s", "tokens a round", "hit rate", "partial", "draft rows a round")
    rows = [
        _sweep_row(point, samples)
        for point in points
        for samples in point.variants.values()
    ]  # fmt: skip
    text = table(head, rows) if rows else ""
    fit = miss_law(points)
    if fit is not None:
        text += f"\n\nMiss rate against fan-out F: {fit[0]:.2f} * F^-{fit[1]:.2f} (least squares on logarithms)."
    refused = [f"**{event['variant']} could not be measured: {event['why'].strip()}**" for event in failed]
    return "\n\n".join([text, *refused]).strip()


def _sweep_row(point: Point, samples: Samples) -> list[object]:
    rounds = samples.total("server", "rounds")
    return [
        samples.name, f"{point.temperature:g}", point.batch, len(samples.records), f"{samples.decode_rate:.1f}",
        f"{_tokens_a_round(samples):.2f}" if rounds else None, _two(samples.hit_rate()),
        _two(samples.total("server", "partial") / rounds if rounds else None),
        f"{samples.total('draft', 'rows') / rounds:.1f}" if rounds else None,
    ]  # fmt: skip


def miss_points(points: Sequence[Point]) -> list[tuple[float, float]]:
    """(fan-out, share of rounds that were no hits) of the longest sweep of the fan-out, other settings equal."""
    found: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        for name, samples in point.variants.items():
            value, _, others = name.removeprefix("fan-out=").partition(" ")
            hits = samples.hit_rate()
            if name.startswith("fan-out=") and hits is not None:
                found.setdefault(others, []).append((float(value), 1 - hits))
    longest: list[tuple[float, float]] = max(found.values(), key=len, default=[])
    return sorted(longest)


def miss_law(points: Sequence[Point]) -> tuple[float, float] | None:
    """(c, r) of miss rate = c * F**-r."""
    found = miss_points(points)
    return power_law([x for x, _ in found], [y for _, y in found])


def memory_table(points: Sequence[Point], kv_bytes: int | None) -> str:
    """Slots in use at the fullest moment seen, looked at once a second; a slot holds ``kv_bytes``."""
    head = ("T", "batch", "draft slots in use (tokens)", "per session", "KiB per session", "of it text, at most")
    rows = []
    for point in points:
        seen = [r["draft_memory"] for r in point.ssd.records if "draft_memory" in r] if point.ssd else []
        if not seen:
            continue
        peak = max(seen, key=lambda memory: memory["slots"])
        text = [q["prompt"] + q["tokens"] for r in point.ssd.records for q in r["requests"]] if point.ssd else [0]
        each = peak["slots"] / peak["sessions"]
        kib = f"{each * kv_bytes / 1024:.0f}" if kv_bytes else None
        rows.append((f"{point.temperature:g}", point.batch, peak["slots"], f"{each:.0f}", kib, max(text)))
    return table(head, rows)


def cores_table(points: Sequence[Point]) -> str:
    """Cores used on average, by process."""
    roles = ("scheduler", "draft server", "HTTP", "detokenizer", "load generator", "other", "others")
    names = (*roles[:-1], "rest of the machine")
    rows = (
        (f"{point.temperature:g}", point.batch, samples.name, *(_two(samples.cores().get(role)) for role in roles))
        for point in points
        for samples in _modes(point)
    )
    return table(("T", "batch", "mode", *names), rows)


def scaling_table(event: Mapping[str, Any]) -> str:
    """Milliseconds of one round's bookkeeping by what grows, and the growth as a power of it."""
    head = ("what grows", "ms of a round", "grows as")
    rows = []
    for name, curve in event["curves"].items():
        law = power_law([x for x, _ in curve], [y for _, y in curve])
        values = ", ".join(f"{x:g}: {y:.2f}" for x, y in curve)
        rows.append((name, values, f"x^{-law[1]:.2f}" if law else None))
    return (
        "The draft server on an engine that costs nothing: what is left is our own work in a round, on one core. The "
        f"round trip of an answer that is there already, over the socket, takes {event['round_trip_ms']:.2f} ms.\n\n"
        + table(head, rows)
    )


def _modes(point: Point) -> list[Samples]:
    every = (point.off, point.sync, point.standalone, point.ssd)
    return [samples for samples in every if samples is not None]


def _rates(*variants: Samples | None) -> list[str | None]:
    return [f"{samples.decode_rate:.1f}" if samples else None for samples in variants]


def _with_steps(rate: str | None, sync: Samples | None) -> str | None:
    """The rate of ``sync``, and its K."""
    return rate if sync is None else f"{rate} ({sync.name.removeprefix('sync ')})"


def _blocks(point: Point) -> int:
    return len(point.ssd.records) if point.ssd is not None else 0


def _three(values: tuple[float, float, float] | None) -> str | None:
    return None if values is None else " / ".join(f"{value:.0f}" for value in values)


def _two(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"
