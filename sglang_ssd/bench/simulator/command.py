"""``python -m sglang_ssd.bench simulate``: what a profile's devices would do, by batch size, temperature and draft."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from sglang_ssd.bench.results import ResultsError
from sglang_ssd.bench.simulator import comparison, reference
from sglang_ssd.bench.simulator.profile import Profile, ProfileError, load_profile, profile_names
from sglang_ssd.bench.simulator.simulation import Load

PROGRAM = "python -m sglang_ssd.bench simulate"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 when a file cannot be used."""
    options = _parser().parse_args(argv)
    try:
        for line in _report(load_profile(options.profile), options):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    except (ProfileError, ResultsError, OSError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    return 0


def _report(profile: Profile, options: argparse.Namespace) -> Iterator[str]:
    load = Load(num_steps=options.num_steps, fan_out=options.fan_out, tokens=options.tokens, seed=options.seed)
    yield f"{profile.name}: {profile.source}"
    yield ""
    if options.measured is not None:
        yield from comparison.validation(profile, comparison.read_measured(options.measured), load)
        return
    if profile.reference is not None:
        yield "The reference engine's own policy, published and by this model of times:"
        yield ""
        yield from reference.validation(profile)
        yield ""
    yield "All figures below are predictions: our policy's real code in virtual time."
    yield ""
    loads = [
        replace(load, batch=batch, temperature=temperature, slow=slow)
        for temperature, batch, slow in itertools.product(options.temperatures, options.batches, options.slow)
    ]
    yield from comparison.table(comparison.compare(profile, each) for each in loads)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--profile", default="demo-two-cores", help=f"a file, or one of {', '.join(profile_names())}")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="requests at a time")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0], help="of all requests")
    parser.add_argument("--slow", type=float, nargs="+", default=[1.0], help="times that the draft is slower")
    parser.add_argument("--num-steps", type=int, help="K; default: the profile's")
    parser.add_argument("--fan-out", type=int, help="branches of a request and round; default: the profile's")
    parser.add_argument(
        "--tokens",
        type=int,
        default=400,
        help="of each mode and place in the batch, after 60 to warm up; --measured has its own",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    parser.add_argument("--measured", type=Path, help="results of a benchmark run: play what it asked for, and compare")
    return parser


if __name__ == "__main__":
    sys.exit(main())
