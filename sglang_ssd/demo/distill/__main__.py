"""``python -m sglang_ssd.demo.distill``: make a small draft for a target.

    --generate 60 --out DIR      the target writes text for an hour; again for more of it
    --minutes 60 --out DIR       train on it; again after an interruption to go on

``DIR/draft`` is then an ordinary checkpoint with its token map, for ``--speculative-draft-model-path``.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_ssd.demo.distill.attention import STEPPED
from sglang_ssd.demo.distill.generate import ANSWER, TURN, Source, read_prompts, write_slices
from sglang_ssd.demo.distill.memory import keep_freed
from sglang_ssd.demo.distill.run import NoText, distil
from sglang_ssd.demo.distill.student import load_target
from sglang_ssd.demo.distill.training import Recipe
from sglang_ssd.demo.distill.writer import Frame, Writer

PROGRAM = "python -m sglang_ssd.demo.distill"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for what cannot work."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", stream=sys.stderr)
    keep_freed()
    if options.target is None:
        from sglang_ssd.demo import demo_pair

        options.target = str(demo_pair().target)
    try:
        if options.generate is not None:
            _generate(options)
        else:
            sys.stdout.write(distil(options, _recipe(options)))
    except (NoText, ValueError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    return 0


def _generate(options: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    source = Source(tokenizer, Frame.of(tokenizer), read_prompts(options.prompts), rows=options.rows)
    writer = Writer(load_target(options.target, options.device, STEPPED), source.frame, turn=TURN, answer=ANSWER)
    write_slices(writer, source, options.out / "text", options.generate)


def _recipe(options: argparse.Namespace) -> Recipe:
    minutes = None if options.steps is not None else options.minutes
    return Recipe(steps=options.steps, minutes=minutes, peak=options.rate, seed=options.seed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Make a small draft for a Llama-family target.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--target", help="folder of the target; without it the demo's")
    add("--out", type=Path, required=True, help="folder of everything that is made; a second run there goes on")
    add("--device", default="cpu", help="cpu or cuda")
    add("--generate", type=float, metavar="MINUTES", help="only let the target write text, into OUT/text")
    add("--prompts", type=Path, nargs="*", default=[], metavar="FILE", help="for --generate: JSON lines with question")
    add("--rows", type=int, default=96, help="for --generate: conversations written at the same time")
    add("--texts", type=Path, nargs="*", metavar="PATH", help="text to train on instead of OUT/text: files or folders")
    add("--start", type=Path, help="safetensors file of a student to begin with, else the target's outermost layers")
    add("--layers", type=int, default=4, help="of the student")
    add("--map-size", type=int, default=16384, help="tokens that the student may say")
    add("--minutes", type=float, default=60.0, help="of training; the learning rate falls along them")
    add("--steps", type=int, help="of training, instead of --minutes")
    add("--rate", type=float, default=4e-4, help="the highest learning rate")
    add("--pack", type=int, default=2048, help="tokens of a step")
    add("--longest", type=int, default=512, help="tokens of a text; what comes after is cut")
    add("--seed", type=int, default=0, help="of the order of the texts")
    return parser


if __name__ == "__main__":
    sys.exit(main())
