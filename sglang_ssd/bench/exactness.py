"""``python -m sglang_ssd.bench.exactness``: acceptance and hit rates by temperature and verify rule, as a table.

Everything runs in one process on the torch engine, without clocks: the figures depend on the models only. What a rule
is worth is its tokens in the time of one verify, of which a draft step takes ``--step`` (0.19 with the demo pair on two
CPU cores, docs/demo-draft.md).
``--write FILE`` puts the table between the two marker lines of that file (docs/exactness.md).
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from sglang_ssd.bench.in_process import Ask, Rule, Tally, Target, play
from sglang_ssd.draft_server.engine import EngineSettings
from sglang_ssd.draft_server.engine_torch import TorchEngine
from sglang_ssd.draft_server.token_map import token_map_of

logger = logging.getLogger(__name__)

BEGIN, END = "<!-- table: bench.exactness -->", "<!-- end of table -->"
CONTEXT = 512
PROMPTS = (
    "Write a short story about a lighthouse keeper.",
    "Explain why the sky is blue to a child.",
    "List five uses of a paper clip.",
    "Give me a recipe for pancakes.",
    "What is the difference between a list and a tuple in Python?",
    "Summarise the plot of Romeo and Juliet.",
    "How do bees make honey?",
    "Write a polite email that asks for a day off.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", stream=sys.stderr)
    target_path, draft_path = _models(options)
    prompts = _prompts(target_path)[: options.prompts]
    lines = list(table(target_path, draft_path, prompts, options))
    sys.stdout.write("\n".join(lines) + "\n")
    if options.write is not None:
        write_between_markers(options.write, lines)
    return 0


def table(target_path: Path, draft_path: Path, prompts: list[list[int]], options: argparse.Namespace) -> Iterator[str]:
    """The lines of the table, and how it was made."""
    target = Target(target_path, CONTEXT)
    settings = EngineSettings(str(draft_path), dtype="float32", slots=8 * CONTEXT, rows=64, context_length=CONTEXT)
    yield (
        f"{target_path.name} and {draft_path.name}, K = {options.num_steps}, fan-out {options.fan_out}, "
        f"{len(prompts)} prompts of {options.tokens} tokens."
    )
    yield ""
    yield f"| T | rule | acceptance | hit rate | tokens per round | tokens per verify time (a step: {options.step:g}) |"
    yield "|---|---|---|---|---|---|"
    best: list[str] = []
    for temperature in options.temperatures:
        speeds: dict[str, float] = {}
        asks = [Ask(prompt, options.tokens, temperature, seed) for seed, prompt in enumerate(prompts)]
        for name, rule in _rules(options, temperature):
            # A new engine: nothing that one rule left in a tree may help the next.
            tally = play(target, TorchEngine(_with_map(settings, draft_path)), rule, asks)
            logger.info("T=%s %s: %s rounds", temperature, name, tally.rounds)
            speeds[name] = tally.speed(options.step)
            yield _line(temperature, name, tally, options.step)
        best.append(_winner(temperature, speeds))
    yield ""
    yield f"Most tokens per verify time: {'; '.join(best)}."


def write_between_markers(file: Path, lines: Sequence[str]) -> None:
    """Replace what stands between the marker lines of ``file``. Raises ValueError when they are not there."""
    before, found, rest = file.read_text().partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not (found and closed):
        raise ValueError(f"{file} has no lines {BEGIN} and {END}.")
    file.write_text("\n".join([before + BEGIN, *lines, END + after]))


def _rules(options: argparse.Namespace, temperature: float) -> Iterator[tuple[str, Rule]]:
    yield "coupled", Rule(options.num_steps, options.fan_out)
    if temperature > 0:  # greedy rows go by agreement in both modes
        for c in options.saguaro_c:
            yield f"rejection, C = {c:g}", Rule(options.num_steps, options.fan_out, "rejection", c)


def _winner(temperature: float, speeds: dict[str, float]) -> str:
    """The fastest rule, and by how much the next is slower."""
    first, *rest = sorted(speeds, key=lambda name: -speeds[name])
    behind = f" ({rest[0]}: {100 * (speeds[rest[0]] / speeds[first] - 1):+.0f} %)" if rest else ""
    return f"T = {temperature:g} {first}{behind}"


def _line(temperature: float, name: str, tally: Tally, step: float) -> str:
    figures = f"{tally.acceptance:.2f} | {tally.hit_rate:.2f} | {tally.tokens_per_round:.2f} | {tally.speed(step):.2f}"
    return f"| {temperature:g} | {name} | {figures} |"


def _with_map(settings: EngineSettings, draft_path: Path) -> EngineSettings:
    token_map = token_map_of(str(draft_path), None)
    return EngineSettings(**{**vars(settings), "token_map": token_map})


def _models(options: argparse.Namespace) -> tuple[Path, Path]:
    if options.target is not None and options.draft is not None:
        return options.target, options.draft
    from sglang_ssd.demo import demo_pair

    pair = demo_pair()
    return options.target or pair.target, options.draft or pair.draft


def _prompts(target_path: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_path)
    turns = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    texts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sglang_ssd.bench.exactness", description=__doc__)
    parser.add_argument("--target", type=Path, help="Checkpoint folder. Default: the demo's target.")
    parser.add_argument("--draft", type=Path, help="Checkpoint folder. Default: the demo's draft.")
    parser.add_argument("--num-steps", type=int, default=4, help="K.")
    parser.add_argument("--fan-out", type=int, default=12, help="Branches per round.")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="How many of the built-in prompts.")
    parser.add_argument("--tokens", type=int, default=64, help="New tokens per prompt.")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.3, 0.7, 1.0, 1.3])
    parser.add_argument("--saguaro-c", type=float, nargs="+", default=[1.0, 0.5, 0.2])
    parser.add_argument("--step", type=float, default=0.19, help="A draft step's share of the time of a verify.")
    parser.add_argument("--write", type=Path, help="File whose table is replaced.")
    return parser


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
