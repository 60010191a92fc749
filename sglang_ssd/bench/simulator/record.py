"""``python -m sglang_ssd.bench.simulator.record``: what the demo pair says, as traces for the simulator.

The target answers prompts at each temperature, all of them side by side; then the draft reads the answers. Without the
data sets in ``--data`` our own prompts are used alone. A trace holds scores and ranks, no text.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from sglang_ssd.bench.exactness import PROMPTS
from sglang_ssd.bench.prompts import MIXED, load_prompts
from sglang_ssd.bench.simulator.reader import Reader, Shape
from sglang_ssd.bench.simulator.texts import Author, Writing
from sglang_ssd.bench.simulator.trace import BENCHMARK, DEMO, Trace, trace_name
from sglang_ssd.demo import demo_pair

logger = logging.getLogger(__name__)

OWN_FOLDER = Path(__file__).parent.parent / "traces"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", stream=sys.stderr)
    torch.set_num_threads(1)
    pair = demo_pair()
    target, draft = options.target or pair.target, options.draft or pair.draft
    prompts, ends = _prompts(target, options)
    logger.info("%d prompts at temperatures %s", len(prompts), options.temperatures)
    options.out.mkdir(parents=True, exist_ok=True)
    for trace in record(target, draft, prompts, ends, options):
        path = options.out / trace_name(BENCHMARK if options.mixed else DEMO, trace.temperature)
        trace.save(path)
        kilobytes = path.stat().st_size / 1e3
        said = f"{len(trace)} positions, acceptance {trace.acceptance:.3f}, {kilobytes:.0f} kB"
        sys.stdout.write(f"{path.name}: {said}\n")
    return 0


def record(
    target: Path, draft: Path, prompts: Sequence[list[int]], ends: frozenset[int], options: argparse.Namespace
) -> Iterator[Trace]:
    """A trace for each temperature."""
    longest = max(map(len, prompts)) + options.tokens
    requests = [
        Writing(list(prompt), len(prompt), temperature, seed)
        for temperature in options.temperatures
        for seed, prompt in enumerate(prompts, start=1)  # as the benchmark asks
    ]
    Author(target, len(requests), longest, ends, options.dtype).write(requests, options.tokens)
    logger.info("the target has written %d tokens", sum(len(request.answer) for request in requests))
    reader = Reader(draft, Shape(options.candidates, options.num_steps, longest), options.dtype)
    for temperature in options.temperatures:
        yield reader.trace([one for one in requests if one.temperature == temperature], temperature)


def _prompts(target: Path, options: argparse.Namespace) -> tuple[list[list[int]], frozenset[int]]:
    """Prompts in the target's chat template, none of them too long, and the tokens that end an answer."""
    from transformers import AutoTokenizer

    from sglang_ssd.demo.distill.generate import Source
    from sglang_ssd.demo.distill.writer import Frame

    tokenizer = AutoTokenizer.from_pretrained(target)
    source = Source(tokenizer, Frame.of(tokenizer))
    if options.mixed:
        mixed = load_prompts(tokenizer, options.data).take(MIXED, 0, options.mixed)
        return [list(prompt.ids) for prompt in mixed], source.frame.ends
    chosen: list[list[int]] = []
    for texts in _texts(options.data):
        turns = [turn for turn in map(source.turn, texts) if len(turn) <= options.longest_prompt]
        count = min(options.prompts, len(turns))
        chosen += [turns[i * len(turns) // count] for i in range(count)]
    return chosen, source.frame.ends


def _texts(data: Path | None) -> Iterator[list[str]]:
    """Sets of user turns."""
    from sglang_ssd.demo.evaluate import DATA_SETS

    found = False
    for each in DATA_SETS if data is not None else ():
        file = (data or Path()) / each.file
        if file.is_file():
            found = True
            yield [each.prompt(json.loads(line)) for line in file.read_text().splitlines()]
        else:
            logger.warning("%s is not recorded: %s has no %s.", each.name, data, each.file)
    if not found:
        yield list(PROMPTS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_ssd.bench.simulator.record",
        description="Record traces of the demo pair.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", type=Path, help="folder with held-out prompts; without it our own are used")
    parser.add_argument("--out", type=Path, default=OWN_FOLDER, help="folder for the traces")
    parser.add_argument("--target", type=Path, help="checkpoint folder; default: the demo's target")
    parser.add_argument("--draft", type=Path, help="checkpoint folder; default: the demo's draft")
    parser.add_argument("--prompts", type=int, default=4, help="of each data set")
    parser.add_argument("--mixed", type=int, help="so many of the benchmark's prompts instead, in its order")
    parser.add_argument("--longest-prompt", type=int, default=200, help="in tokens; longer ones are passed over")
    parser.add_argument("--dtype", default="bfloat16", help="of both models, as they are served")
    parser.add_argument("--tokens", type=int, default=92, help="of an answer")
    parser.add_argument("--num-steps", type=int, default=6, help="draft tokens of the longest chain")
    parser.add_argument("--candidates", type=int, default=16, help="of a row")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    return parser


if __name__ == "__main__":
    sys.exit(main())
