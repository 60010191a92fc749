"""Texts of the target: token ids in JSON lines, counted, held out and packed."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Text:
    """``ids`` of which the first ``prompt`` are the conversation so far and the rest is the target's answer."""

    ids: tuple[int, ...]
    prompt: int


def read_texts(paths: Iterable[Path], longest: int) -> list[Text]:
    """Every text of JSON-lines files (``ids``, ``prompt``), or of the files in a folder, in order.

    Cut to ``longest`` tokens; a text without an answer is left out.
    """
    files = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    rows = (json.loads(line) for file in files for line in file.read_text().splitlines())
    texts = (Text(tuple(row["ids"][:longest]), row["prompt"]) for row in rows)
    return [text for text in texts if len(text.ids) > text.prompt > 0]


def write_texts(path: Path, texts: Iterable[Text]) -> None:
    """One JSON line for each text; the file is there whole or not at all."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("".join(json.dumps({"ids": text.ids, "prompt": text.prompt}) + "\n" for text in texts))
    os.replace(unfinished, path)


def pack(texts: Sequence[Text], tokens: int, seed: int) -> list[list[Text]]:
    """Texts in a random order, as many to a pack as fit into ``tokens``; a longer text is a pack of its own."""
    packs: list[list[Text]] = []
    filled = tokens
    for text in random.Random(seed).sample(texts, len(texts)):  # noqa: S311 - an order, not a secret
        if filled + len(text.ids) > tokens:
            packs.append([])
            filled = 0
        packs[-1].append(text)
        filled += len(text.ids)
    return packs


def count_tokens(texts: Iterable[Text]) -> Counter[int]:
    """How often each token occurs."""
    return Counter(token for text in texts for token in text.ids)
