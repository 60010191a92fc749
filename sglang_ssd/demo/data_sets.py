"""Held-out prompts in public files: which line of a file is a user turn. The files are not in the package."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DataSet:
    """Held-out prompts: ``prompt(row)`` is the user's turn of a line of ``file``."""

    name: str
    file: str
    prompt: Callable[[dict[str, Any]], str]

    def is_in(self, folder: Path) -> bool:
        """Whether ``folder`` has the file."""
        return (folder / self.file).is_file()

    def read(self, folder: Path) -> list[str]:
        """The user's turns, in the file's order. Raises OSError without the file."""
        return [self.prompt(json.loads(line)) for line in (folder / self.file).read_text().splitlines()]


def _alpaca(row: dict[str, Any]) -> str:
    given = row["instances"][0]["input"]
    return f"{row['instruction']}\n\n{given}" if given else str(row["instruction"])


HUMAN_EVAL = DataSet("HumanEval", "humaneval.jsonl", lambda row: str(row["prompt"]))
GSM8K = DataSet("GSM8K test", "gsm8k_test.jsonl", lambda row: str(row["question"]))
SPEC_BENCH = DataSet("Spec-Bench", "spec_bench.jsonl", lambda row: str(row["turns"][0]))
ALPACA = DataSet("Alpaca seed", "alpaca_seed.jsonl", _alpaca)
