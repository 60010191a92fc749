"""``python -m sglang_ssd.demo.evaluate``: how often a draft guesses what its target says.

The target answers held-out prompts greedily, once (kept in ``--cache``); the draft reads the answers. Deterministic on
one machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from sglang_ssd.demo import demo_pair
from sglang_ssd.demo.agreement import TOP, Report, report
from sglang_ssd.demo.cache import cache_home
from sglang_ssd.demo.data_sets import GSM8K, HUMAN_EVAL, SPEC_BENCH, DataSet
from sglang_ssd.demo.distill.attention import STEPPED
from sglang_ssd.demo.distill.generate import Source
from sglang_ssd.demo.distill.student import load_draft, load_target
from sglang_ssd.demo.distill.teacher import Pack
from sglang_ssd.demo.distill.texts import Text, read_texts, write_texts
from sglang_ssd.demo.distill.writer import Conversation, Frame, Writer
from sglang_ssd.draft_server.token_map import load_token_map, token_map_of

logger = logging.getLogger(__name__)

PROGRAM = "python -m sglang_ssd.demo.evaluate"
LONGEST_PROMPT = 512
"""Tokens; longer prompts are passed over, for they cost most and say least about answers."""


DATA_SETS = (HUMAN_EVAL, GSM8K, SPEC_BENCH)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 when there is nothing to evaluate on."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", stream=sys.stderr)
    if options.target is None:
        pair = demo_pair()
        options.target, options.draft = str(pair.target), options.draft or str(pair.draft)
    if options.draft is None:
        sys.stderr.write(f"{PROGRAM}: --target needs a --draft.\n")
        return 2
    answers = {}
    for data in DATA_SETS:
        if data.is_in(Path(options.data)):
            answers[data.name] = answers_of(data, options)
        else:
            logger.warning("%s is not evaluated: %s has no %s.", data.name, options.data, data.file)
    if not answers:
        return 2
    reports = evaluate(answers, options)
    sys.stdout.write(table(reports, options.lookahead))
    if options.json:
        content = {"options": vars(options), "results": {name: asdict(each) for name, each in reports.items()}}
        Path(options.json).write_text(json.dumps(content, indent=2) + "\n")
    return 0


def evaluate(answers: dict[str, list[Text]], options: argparse.Namespace) -> dict[str, Report]:
    """A report for each data set, and for all of them as ``all``."""
    draft = load_draft(options.draft, load_target(options.target, options.device))
    token_map = _token_map(options, draft)
    ranks = {name: [ranks_in(draft, token_map, text) for text in texts] for name, texts in answers.items()}
    ranks["all"] = [each for texts in ranks.values() for each in texts]
    return {name: report(texts, options.lookahead, options.fan_out) for name, texts in ranks.items()}


@torch.inference_mode()
def ranks_in(draft: Any, token_map: Tensor | None, text: Text) -> list[int]:  # noqa: ANN401 - a transformers model
    """Where each answer token but the first stands among the draft's candidates for it, ``TOP`` if not at all.

    The first one comes from the target's prefill, before anything is drafted.
    """
    output = draft.get_output_embeddings().weight
    hidden = Pack.of([text]).hidden(draft)[1:]
    logits = linear(hidden, output if token_map is None else output[token_map]).float()
    ids = logits.topk(min(TOP, logits.shape[-1]), dim=-1).indices
    if token_map is not None:
        ids = token_map[ids]
    said = torch.tensor(text.ids[text.prompt + 1 :], device=ids.device)
    places = (ids == said[:, None]).int()
    found: list[int] = torch.where(places.any(-1), places.argmax(-1), TOP).tolist()
    return found


def answers_of(data: DataSet, options: argparse.Namespace) -> list[Text]:
    """The target's greedy answers to evenly spaced prompts, from the cache or made now."""
    parts = [data.file.removesuffix(".jsonl"), Path(options.target).name, options.prompts, options.tokens]
    kept = Path(options.cache) / ("-".join(map(str, parts)) + ".jsonl")
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        logger.info("%s: the target answers %d prompts.", data.name, options.prompts)
        write_texts(kept, _answer(data, options))
    return read_texts([kept], LONGEST_PROMPT + options.tokens)


def table(reports: dict[str, Report], lookahead: int) -> str:
    """For a terminal and for a README."""
    lines = [
        f"| K={lookahead} | texts | positions | agreement | tokens a round | bonus in top 4 | hit rate |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, each in reports.items():
        lines.append(
            f"| {name} | {each.texts} | {each.positions} | {each.agreement:.3f} | {each.tokens_per_round:.2f} "
            f"| {each.in_top_4:.2f} | {each.hit_rate:.2f} |"
        )
    ranks = next(reversed(reports.values())).rejected_ranks
    lines += ["", "Rank of the target's token at a rejected position (the rejected token aside):", ""]
    lines += ["| " + " | ".join(ranks) + " |", "|---" * len(ranks) + "|"]
    lines += ["| " + " | ".join(str(count) for count in ranks.values()) + " |", ""]
    return "\n".join(lines)


def _answer(data: DataSet, options: argparse.Namespace) -> list[Text]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    source = Source(tokenizer, Frame.of(tokenizer))
    model = load_target(options.target, options.device, STEPPED)
    writer = Writer(model, source.frame, turn=0, answer=options.tokens)
    turns = [source.turn(prompt) for prompt in data.read(Path(options.data))]
    turns = [turn for turn in turns if len(turn) <= LONGEST_PROMPT]
    count = min(options.prompts, len(turns))
    chosen = [turns[i * len(turns) // count] for i in range(count)]
    return writer.write([Conversation(turn, temperature=0.0, prompt=len(turn)) for turn in chosen], seed=0)


def _token_map(options: argparse.Namespace, draft: Any) -> Tensor | None:  # noqa: ANN401 - a transformers model
    path = token_map_of(options.draft, options.token_map)
    return None if path is None else load_token_map(path, draft.config.vocab_size).to(draft.device)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="How often a draft guesses what its target says.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--target", help="folder of the target; without it the demo's")
    parser.add_argument("--draft", help="folder of the draft, or a safetensors file of its layers; default: the demo's")
    parser.add_argument("--token-map", help="tokens that the draft may propose; default: token_map.pt beside the draft")
    parser.add_argument("--data", default="../shared/data", help="folder with " + ", ".join(d.file for d in DATA_SETS))
    parser.add_argument("--cache", default=str(cache_home() / "evaluate"), help="where the target's answers are kept")
    parser.add_argument("--prompts", type=int, default=16, help="of each data set")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--lookahead", type=int, default=4, metavar="K", help="draft tokens a round")
    parser.add_argument("--fan-out", type=_numbers, default=(4, 3, 3, 2, 5), help="candidates for 0 to K accepted")
    parser.add_argument("--device", default="cpu", help="as torch names it")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
