"""From records to figures: blocks of one variant at one point, and pairs of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_ssd.bench.intervals import Ratio, paired_ratio, percentiles
from sglang_ssd.bench.settings import OFF, SSD, STANDALONE, SYNC

Record = dict[str, Any]
Rate = Callable[[Record], float]


def whole_rate(record: Record) -> float:
    """Tokens per second of the block, prefill included."""
    return float(record["tokens"] / record["wall_s"])


def decode_rate(record: Record) -> float:
    """Tokens per second while the batch is full and decodes; NaN where there was no such time."""
    full = record["full"]
    return float(full["tokens"] / full["s"]) if full["s"] > 0 and full["tokens"] else float("nan")


@dataclass(frozen=True)
class Samples:
    """Every block of one variant at one cell."""

    name: str
    records: list[Record]

    @property
    def rate(self) -> float:
        """Tokens per second over all blocks, prefill included."""
        return self.total("tokens") / self.total("wall_s")

    @property
    def decode_rate(self) -> float:
        """The same while the batch is full and decodes."""
        seconds, tokens = self.total("full", "s"), self.total("full", "tokens")
        return tokens / seconds if seconds else float("nan")

    def of_requests(self, name: str) -> tuple[float, float, float] | None:
        """p50, p95 and p99 of a figure of the requests."""
        values = [request[name] for r in self.records for request in r["requests"]]
        return percentiles([value for value in values if value is not None])

    def itl(self) -> tuple[float, float, float] | None:
        """p50, p95 and p99 of the time between two events of a stream, ms."""
        return percentiles([value for r in self.records for value in r["itl_ms"]])

    def total(self, *path: str) -> float:
        """The sum of a figure, by the names that lead to it; 0 where it is absent."""
        return sum(_at(record, path) for record in self.records)

    def hit_rate(self) -> float | None:
        """Hits of rounds, None without rounds."""
        rounds = self.total("server", "rounds")
        return self.total("server", "hits") / rounds if rounds else None

    def accepted(self) -> list[float]:
        """By position: accepted drafts of those verified there."""
        columns = [r["server"] for r in self.records if "server" in r]
        accepted = _columns(c["accepted_per_position"] for c in columns)
        verified = _columns(c["verified_per_position"] for c in columns)
        return [a / v for a, v in zip(accepted, verified, strict=True) if v]

    def cores(self) -> dict[str, float]:
        """Cores used on average, by role."""
        seconds = sum(r["wall_s"] for r in self.records)
        used: dict[str, float] = defaultdict(float)
        for record in self.records:
            for role, cores in record["cores"].items():
                used[role] += cores * record["wall_s"] / seconds
        return dict(used)


@dataclass(frozen=True)
class Point:
    """One cell: what was compared there."""

    batch: int
    temperature: float
    data_set: str
    rate: float | None
    variants: dict[str, Samples]
    turns: int = 1

    @property
    def sync(self) -> Samples | None:
        """``sync`` at its best K: of those tried in half of the blocks at least, the fastest against ``off``."""
        return self._fastest(f"{SYNC} K=")

    @property
    def ssd(self) -> Samples | None:
        """The variant that is judged."""
        return self.variants.get(SSD)

    @property
    def off(self) -> Samples | None:
        """Without speculation."""
        return self.variants.get(OFF)

    @property
    def standalone(self) -> Samples | None:
        """SGLang's own speculative decoding, where it took part."""
        return self.variants.get(STANDALONE)

    @property
    def best_other(self) -> Samples | None:
        """The best of ``off``, ``sync`` at its best K and SGLang's own, chosen afterwards, which favours them."""
        others = [samples for samples in (self.off, self.sync, self.standalone) if samples is not None]
        ranked = sorted(others, key=lambda samples: -self._against_off(samples))
        return ranked[0] if ranked else None

    @property
    def judged_rate(self) -> Rate:
        """While the batch is full; where requests follow one another it is full but for the end."""
        return decode_rate if self.turns == 1 else whole_rate

    def against(self, other: Samples | None, rate: Rate | None = None) -> Ratio | None:
        """The ratio of ssd to ``other`` in the blocks that both have, by the judged rate or another."""
        if self.ssd is None or other is None:
            return None
        return paired_ratio(pair(self.ssd, other, rate or self.judged_rate))

    def _fastest(self, prefix: str) -> Samples | None:
        tried = [samples for name, samples in self.variants.items() if name.startswith(prefix)]
        most = max((len(samples.records) for samples in tried), default=0)
        often = [samples for samples in tried if 2 * len(samples.records) >= most]
        return max(often, key=self._against_off, default=None)

    def _against_off(self, samples: Samples) -> float:
        ratio = paired_ratio(pair(samples, self.off, self.judged_rate)) if self.off is not None else None
        return ratio.mean if ratio is not None else 0.0


def pair(first: Samples, second: Samples, rate: Rate) -> list[float]:
    """The ratio of rates for each block that both have."""
    theirs = {record["block"]: rate(record) for record in second.records}
    ratios = (rate(record) / theirs[record["block"]] for record in first.records if record["block"] in theirs)
    return [ratio for ratio in ratios if ratio > 0]  # NaN, where nothing was decoded, is not


def points(records: Iterable[Record]) -> list[Point]:
    """Records by cell, in order of loop, temperature and batch size."""
    cells: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        cells[record["cell"]].append(record)
    made = map(_point, cells.values())
    return sorted(made, key=lambda p: (p.rate is not None, p.turns, p.temperature, p.batch, p.data_set, p.rate or 0))


def _point(records: list[Record]) -> Point:
    """Of the records of one cell."""
    variants: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        variants[record["variant"]].append(record)
    batch, temperature, data_set, rate = (records[0][name] for name in ("batch", "temperature", "data_set", "rate"))
    samples = {name: Samples(name, found) for name, found in variants.items()}
    return Point(batch, temperature, data_set, rate, samples, records[0].get("turns", 1))


def is_sweep(record: Record) -> bool:
    """Whether the record belongs to a sweep, whose variants are named ``flag=value``."""
    name: str = record["variant"]
    return "=" in name and not name.startswith(f"{SYNC} K=")


def closed(all_points: Sequence[Point]) -> list[Point]:
    """Those at which all modes were measured in closed batches."""
    return [p for p in all_points if p.rate is None and p.turns == 1 and p.off is not None and p.ssd is not None]


def steady(all_points: Sequence[Point]) -> list[Point]:
    """Those at which requests followed one another and all modes were measured."""
    return [p for p in all_points if p.turns > 1 and p.off is not None and p.ssd is not None]


def by_data_set(point: Point) -> dict[str, Point]:
    """A point with one request at a time, split by the data set of the prompt."""
    kinds = {r["requests"][0]["data_set"] for r in point.ssd.records} if point.ssd is not None else set()
    return {
        kind: Point(point.batch, point.temperature, kind, None, {
            name: Samples(name, [r for r in samples.records if r["requests"][0]["data_set"] == kind])
            for name, samples in point.variants.items()
        })
        for kind in sorted(kinds)
    }  # fmt: skip


def _at(record: Record, path: Sequence[str]) -> float:
    value: Any = record
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return float(value or 0)


def _columns(lists: Iterable[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*lists, strict=True)]
