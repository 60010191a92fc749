"""The ceiling of SSD: ``sync`` at its own best K with the time of drafting taken out; and where the rest of it went.

All of it is in milliseconds a token of one request's share of the batch's rounds, in the time without prefill (the
batch shrinks towards its end). A round of either mode takes

    verify    the target's forward, until its outcome is on the host
    wait      for speculations
    rest      what remains of the round: SGLang's scheduling, streaming, our bookkeeping, other processes on the core
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_ssd.bench.analysis import Point, Record, Samples
from sglang_ssd.bench.intervals import Ratio, paired_ratio


@dataclass(frozen=True)
class RoundTime:
    """One round on average: its parts in ms, and the tokens that it gave to the whole batch."""

    round_ms: float
    verify_ms: float
    wait_ms: float
    hit_wait_ms: float
    """The part of ``wait_ms`` in rounds whose rows were all hits."""
    tokens: float

    @property
    def rest_ms(self) -> float:
        """Neither verify nor wait."""
        return self.round_ms - self.verify_ms - self.wait_ms

    @property
    def work_ms(self) -> float:
        """The round without waiting."""
        return self.round_ms - self.wait_ms

    @property
    def ceiling(self) -> float:
        """Tokens per second if drafting took no time."""
        return 1e3 * self.tokens / self.work_ms


def round_time(records: list[Record]) -> RoundTime | None:
    """Of the blocks of one variant; None without speculation, or when nothing was decoded."""
    forwards = sum(record.get("server", {}).get("forwards", 0) for record in records)
    decoded = sum(record["tokens"] - len(record["requests"]) for record in records)
    span_s, in_span = (sum(record["decode"][name] for record in records) for name in ("s", "tokens"))
    if not forwards or not decoded or not in_span:
        return None
    parts = {
        name: sum(r["server"]["parts_s"].get(name, 0.0) for r in records) for name in ("verify", "wait", "hit_wait")
    }
    tokens = decoded / forwards
    return RoundTime(
        round_ms=1e3 * span_s * tokens / in_span,
        verify_ms=1e3 * parts["verify"] / forwards,
        wait_ms=1e3 * parts["wait"] / forwards,
        hit_wait_ms=1e3 * parts["hit_wait"] / forwards,
        tokens=tokens,
    )


@dataclass(frozen=True)
class Ceiling:
    """At one point: a round of ``sync`` at its best K, one of ``ssd``, and ssd's rate as a share of the ceiling."""

    point: Point
    sync: RoundTime
    ssd: RoundTime
    share: Ratio

    def waterfall(self, round_trip_ms: float = 0.0) -> list[tuple[str, float]]:
        """Milliseconds a token: from the ceiling to what ssd takes; the parts add up.

        ``round_trip_ms`` is what an answer takes that is there already (measured apart); of it, no more is charged than
        was waited.
        """
        ssd, sync = self.ssd, self.sync
        trip = min(round_trip_ms, ssd.hit_wait_ms)
        return [
            ("ceiling", sync.work_ms / sync.tokens),
            ("other tokens a round", sync.work_ms * (1 / ssd.tokens - 1 / sync.tokens)),
            ("slower or faster verify", (ssd.verify_ms - sync.verify_ms) / ssd.tokens),
            ("bookkeeping and HTTP", (ssd.rest_ms - sync.rest_ms) / ssd.tokens),
            ("round trip", trip / ssd.tokens),
            ("late trees", (ssd.hit_wait_ms - trip) / ssd.tokens),
            ("drafting after misses", (ssd.wait_ms - ssd.hit_wait_ms) / ssd.tokens),
            ("ssd", ssd.round_ms / ssd.tokens),
        ]


def ceiling(point: Point) -> Ceiling | None:
    """None where ``sync`` or ``ssd`` was not measured."""
    if point.sync is None or point.ssd is None:
        return None
    sync, ssd = round_time(point.sync.records), round_time(point.ssd.records)
    share = paired_ratio(_shares(point.sync, point.ssd))
    if sync is None or ssd is None or share is None:
        return None
    return Ceiling(point, sync, ssd, share)


def _shares(sync: Samples, ssd: Samples) -> list[float]:
    """The rate of ssd over the ceiling of the same block."""
    ceilings = {record["block"]: round_time([record]) for record in sync.records}
    shares = []
    for record in ssd.records:
        here, there = round_time([record]), ceilings.get(record["block"])
        if here is not None and there is not None and there.work_ms > 0:
            shares.append(1e3 * here.tokens / here.round_ms / there.ceiling)
    return shares
