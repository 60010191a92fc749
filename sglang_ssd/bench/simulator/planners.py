"""``python -m sglang_ssd.bench planners``: hit rates of the planners at equal rows, on recorded rounds.

Every planner learns online, round by round, from nothing; all see the same rounds. A hit is a bonus that was among the
candidates planned for its outcome. Speed is not in it: the simulator has that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_ssd.bench.simulator.profile import ProfileError, load_profile
from sglang_ssd.bench.simulator.trace import BEYOND, RecordedRound, Trace
from sglang_ssd.policy.planner import Chain, Planner
from sglang_ssd.policy.planners import PLANNERS

PROGRAM = "python -m sglang_ssd.bench planners"
_SHOWN = ("uniform", "geometric", "measured", "confidence")


@dataclass(frozen=True)
class Ended:
    """A recorded round as planners see it: the ``rank`` counts without the chain's own next token."""

    chain: Chain
    accepted: int
    rank: int


def chain_of(recorded: RecordedRound, temperature: float) -> Ended:
    """Behind the last token nothing was served: all M candidates stand there; before, all but the first."""
    scores = recorded.scores.astype(np.float64)
    others = np.full_like(scores, -np.inf)
    others[:-1, :-1] = scores[:-1, 1:]
    others[-1] = scores[-1]
    chain = Chain(scores[:-1, 0], others, temperature)
    rejected = recorded.accepted < chain.length
    return Ended(chain, recorded.accepted, recorded.rank - rejected if recorded.rank != BEYOND else BEYOND)


def hit_rate(planner: Planner, rounds: Sequence[Ended], rows: int, at_once: int = 1) -> float:
    """The share of rounds that hit when ``at_once`` sessions share ``rows`` each."""
    hits = 0
    for start in range(0, len(rounds) - at_once + 1, at_once):
        group = rounds[start : start + at_once]
        chains = [each.chain for each in group]
        fan_outs = planner.plan(planner.chances(chains), chains, rows * at_once)
        for each, fan_out in zip(group, fan_outs, strict=True):
            hits += 0 <= each.rank < fan_out[each.accepted]
            planner.observe(each.chain, each.accepted, each.rank)
    return hits / (len(rounds) // at_once * at_once)


def table(traces: Sequence[Trace], lookahead: int, rows: Sequence[int], at_once: int) -> Iterator[str]:
    """Markdown: a line for each temperature and number of rows."""
    yield "| T | rounds | acceptance | rows | " + " | ".join(_SHOWN) + " | best possible |"
    yield "|---" * (len(_SHOWN) + 5) + "|"
    for trace in traces:
        rounds = [chain_of(each, trace.temperature) for each in trace.rounds(lookahead)]
        known = sum(each.rank != BEYOND for each in rounds) / len(rounds)
        for count in rows:
            rates = [hit_rate(PLANNERS[name](), rounds, count, at_once) for name in _SHOWN]
            cells = " | ".join(f"{rate:.3f}" for rate in [*rates, known])
            yield f"| {trace.temperature:g} | {len(rounds)} | {trace.acceptance:.2f} | {count} | {cells} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 when there is no such trace."""
    options = _parser().parse_args(argv)
    try:
        traces = [load_profile(options.profile).trace(temperature) for temperature in options.temperatures]
    except ProfileError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    sys.stdout.write(f"K = {options.num_steps}, {options.at_once} at once; every planner learns from nothing.\n\n")
    for line in table(traces, options.num_steps, options.rows, options.at_once):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Hit rates of the planners on recorded rounds.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--profile", default="demo-two-cores", help="whose traces")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--num-steps", type=int, default=4, help="K")
    parser.add_argument("--rows", type=int, nargs="+", default=[5, 10, 15, 20, 30, 40], help="of a request and round")
    parser.add_argument("--at-once", type=int, default=1, help="requests that compete for the rows of all")
    return parser


if __name__ == "__main__":
    sys.exit(main())
