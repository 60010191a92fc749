"""A whole run: texts, token map, student, training, and the draft as a checkpoint that SGLang loads."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_ssd.demo.distill.comparison import Comparison, Score
from sglang_ssd.demo.distill.student import load_target, make_student, make_token_map, save_layers
from sglang_ssd.demo.distill.teacher import Teacher
from sglang_ssd.demo.distill.texts import Text, count_tokens, pack, read_texts
from sglang_ssd.demo.distill.training import Progress, Recipe, Trainer
from sglang_ssd.draft_server.token_map import FILE_NAME, load_token_map

logger = logging.getLogger(__name__)

HELD_OUT = 12
"""The first texts are not trained on; text that is added later does not change which these are."""


class NoText(ValueError):
    """There is nothing to train on; the message says how to make it."""


def distil(options: argparse.Namespace, recipe: Recipe) -> str:
    """Train (or go on training) in ``options.out``, write the draft, and return the final table. Raises NoText."""
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    held_out, texts = _texts(options)
    target = load_target(options.target, options.device)
    token_map = _token_map(out / FILE_NAME, texts, options.map_size, target.config.vocab_size)
    student = make_student(target, options.layers, options.start)
    teacher = Teacher(target, Path(options.target).name, out / "teacher")
    comparison = Comparison(student, teacher, token_map, autocast=True)
    first = comparison.score(held_out)
    packs = pack(texts, options.pack, recipe.seed)
    logger.info("%d texts in %d packs; %d tokens mapped.", len(texts), len(packs), len(token_map))
    trainer = Trainer(comparison, recipe, out / "checkpoint.pt")
    trainer.run(packs, held_out)
    last = comparison.score(held_out)
    _write_draft(student, options.target, token_map, out)
    return _table(first, last, trainer.progress, len(packs))


def _texts(options: argparse.Namespace) -> tuple[list[Text], list[Text]]:
    """Held out and to train on."""
    given: Sequence[Path] = options.texts or [options.out / "text"]
    texts = read_texts(given, options.longest)
    if len(texts) <= HELD_OUT:
        raise NoText(f"{len(texts)} texts in {', '.join(map(str, given))} are too few: run with --generate MINUTES.")
    return texts[:HELD_OUT], texts[HELD_OUT:]


def _token_map(path: Path, texts: Sequence[Text], size: int, vocab_size: int) -> Tensor:
    """The map of this run: made once, for a student that has learnt to speak with one keeps it."""
    if not path.exists():
        torch.save(make_token_map(count_tokens(texts), min(size, vocab_size), vocab_size).int(), path)
    return load_token_map(str(path), vocab_size)


def _write_draft(student: Any, target: str, token_map: Tensor, out: Path) -> None:  # noqa: ANN401
    """``out/draft``, a complete checkpoint in bfloat16, and ``out/layers.safetensors``, what the target lacks of it."""
    from transformers import AutoTokenizer

    save_layers(student, out / "layers.safetensors")
    draft = out / "draft"
    student.to(torch.bfloat16).save_pretrained(draft)
    AutoTokenizer.from_pretrained(target).save_pretrained(draft)
    torch.save(token_map.int(), draft / FILE_NAME)
    logger.info("The draft is in %s.", draft)


def _table(first: Score, last: Score, progress: Progress, packs: int) -> str:
    return (
        f"{progress.step} steps, {progress.step / packs:.2f} epochs, {progress.seconds / 60:.1f} minutes\n\n"
        "| held out | KL (nats) | agreement |\n|---|---|---|\n"
        f"| at the start | {first.kl:.3f} | {first.agreement:.3f} |\n"
        f"| now | {last.kl:.3f} | {last.agreement:.3f} |\n"
    )
