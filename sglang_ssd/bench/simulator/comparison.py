"""The three modes at one load, and the same ratios as a benchmark measured them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from sglang_ssd.bench.analysis import closed, points
from sglang_ssd.bench.results import Results
from sglang_ssd.bench.schedule import steps_of
from sglang_ssd.bench.settings import SSD
from sglang_ssd.bench.simulator.profile import Profile
from sglang_ssd.bench.simulator.simulation import Load, best_sync, simulate
from sglang_ssd.bench.simulator.target import Tally
from sglang_ssd.bench.simulator.trace import BENCHMARK

TOLERANCE = 0.10
_TIMES = 10


@dataclass(frozen=True)
class Comparison:
    """What each mode makes of a load; ``sync`` at its own best lookahead ``sync_steps``."""

    load: Load
    off: Tally
    sync_steps: int
    sync: Tally
    ssd: Tally

    @property
    def against_off(self) -> float:
        """How many times faster ``ssd`` is."""
        return self.ssd.tokens_per_s / self.off.tokens_per_s

    @property
    def against_sync(self) -> float:
        """How many times faster ``ssd`` is."""
        return self.ssd.tokens_per_s / self.sync.tokens_per_s

    @property
    def against_best(self) -> float:
        """How many times faster than the better of the two."""
        return min(self.against_off, self.against_sync)


def compare(profile: Profile, load: Load, sync_steps: int | None = None) -> Comparison:
    """Run the modes; ``sync`` with K = ``sync_steps``, or with its best."""
    if sync_steps is None:
        steps, sync = best_sync(profile, load)
    else:
        steps, sync = sync_steps, simulate(profile, "sync", replace(load, num_steps=sync_steps))
    return Comparison(load, simulate(profile, "off", load), steps, sync, simulate(profile, "ssd", load))


def table(comparisons: Iterable[Comparison]) -> Iterator[str]:
    """Markdown, a line for each load as it is done."""
    columns = "T, batch, draft, off tok/s, sync tok/s (K), ssd tok/s, ssd / off, ssd / sync, tokens, drafts, hit, round"
    yield "| " + " | ".join(columns.split(", ")) + " |"
    yield "|---" * len(columns.split(", ")) + "|"
    for each in comparisons:
        load, ssd = each.load, each.ssd
        yield (
            f"| {load.temperature:g} | {load.batch} | {load.slow:g}x | {each.off.tokens_per_s:.1f} "
            f"| {each.sync.tokens_per_s:.1f} ({each.sync_steps}) | {ssd.tokens_per_s:.1f} "
            f"| {each.against_off:.2f} | {each.against_sync:.2f} | {ssd.tokens_per_round:.2f} | {ssd.mean_drafts:.2f} "
            f"| {ssd.hit_rate:.2f} | {ssd.round_ms:.1f} ms |"
        )


@dataclass(frozen=True)
class Measured:
    """Ratios of a benchmark at one point; None where it did not measure the other.

    It asked the first ``prompts`` of its prompts for at most ``new_tokens``, which were ``tokens`` for each place in
    the batch; ``sync_steps`` is the K that it held for the best of ``sync``.
    """

    batch: int
    temperature: float
    new_tokens: int
    prompts: int
    tokens: int
    sync_steps: int | None
    against_off: float | None
    against_sync: float | None


def read_measured(path: Path) -> list[Measured]:
    """From the results of ``python -m sglang_ssd.bench run``. Raises OSError, ResultsError."""
    found = []
    for point in closed(points(Results.read(path).blocks)):
        ratios = point.against(point.off), point.against(point.sync)
        off, sync = (None if ratio is None else ratio.mean for ratio in ratios)
        tokens = [request["tokens"] for record in point.variants[SSD].records for request in record["requests"]]
        measured = Measured(
            batch=point.batch,
            temperature=point.temperature,
            new_tokens=max(tokens),
            prompts=len(tokens),
            tokens=sum(tokens) // point.batch,
            sync_steps=None if point.sync is None else steps_of(point.sync.name),
            against_off=off,
            against_sync=sync,
        )
        found.append(measured)
    return found


def validation(profile: Profile, measured: Sequence[Measured], load: Load) -> Iterator[str]:
    """A Markdown table of both, and a sentence that says where they differ by more than 10 %.

    What the benchmark asked for is played, its prompts in their order, after the same once more to warm up, and ten
    times over, so that little is left to the policy's luck; ``sync`` has the K that it had there. (A profile without
    the benchmark's traces plays its own.)
    """
    profile = msgspec.structs.replace(profile, traces=BENCHMARK)
    yield "| T | batch | ratio | measured | simulated | difference |"
    yield "|---|---|---|---|---|---|"
    outside = total = 0
    for point in measured:
        here = replace(
            load.at(point.batch, point.temperature),
            new_tokens=point.new_tokens,
            texts=point.prompts,
            warm_up=point.tokens,
            tokens=_TIMES * point.tokens,
        )
        found = compare(profile, here, point.sync_steps)
        for name, real, model in (
            ("ssd / off", point.against_off, found.against_off),
            ("ssd / sync", point.against_sync, found.against_sync),
        ):
            if real is not None:
                total, outside = total + 1, outside + (abs(model / real - 1) > TOLERANCE)
                differs = f"{model / real - 1:+.1%}"
                yield f"| {point.temperature:g} | {point.batch} | {name} | {real:.2f} | {model:.2f} | {differs} |"
    yield ""
    yield f"{total - outside} of {total} measured ratios are within 10 %."
