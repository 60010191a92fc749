"""The target's own text for training, one resumable slice after the other.

The target writes both sides: after the bare chat prefix and a short opening it goes on with a user turn, then it
answers. Given prompts are used as they are. Half of the answers are greedy, as most text is served.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ssd.demo.distill.texts import Text, write_texts
from sglang_ssd.demo.distill.writer import Conversation, Frame, Writer

logger = logging.getLogger(__name__)

TURN, ANSWER = 96, 256
"""The longest user turn and answer, in tokens."""

OPENINGS = (
    "", "", "What", "How", "Why", "Who", "When did", "Where", "Which", "Can you", "I", "Explain", "Describe", "Give me",
    "Write a story", "Write an email", "Write a short", "Create a", "List", "Compare", "Rewrite the following",
    "Summarize the following article:\n\n", "Summarize:", "Translate the following sentence into English:", "Translate",
    "Read the following text and answer the question.\n\n", "Answer the question based on the context.\n\nContext:",
    "Solve", "Calculate", "If", "A train", "There are", "Imagine you are", "Pretend", "Extract", "Classify", "Is it",
    "Implement a function in Python that", "Write a Python function", "Write a Python program", "Complete the code:\n",
    "def ", "def is_", "from typing import List\n\n\ndef ", "import ", "class ", "Fix this function:\n\n```python\n",
    "Complete this Python function:\n\ndef ", "\ndef ", "def count_", "def find_",
)  # fmt: skip
"""How a user turn may begin; they are ours, none is taken from an evaluation prompt."""

TEMPERATURES = (0.0, 0.0, 0.0, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Source:
    """Where conversations begin: ``share_given`` of a slice's ``rows`` with a given prompt, if there are any."""

    tokenizer: Any
    frame: Frame
    given: Sequence[str] = ()
    rows: int = 96
    share_given: float = 0.3

    def start(self, number: int) -> list[Conversation]:
        """The beginnings of slice ``number``."""
        dice = random.Random(number)  # noqa: S311 - an experiment's seed
        return [self._begin(dice) for _ in range(self.rows)]

    def turn(self, text: str) -> list[int]:
        """A whole user turn in its frame, up to where the answer begins."""
        return [*self.frame.before, *self._encode(text), *self.frame.after]

    def _begin(self, dice: random.Random) -> Conversation:
        temperature = dice.choice(TEMPERATURES)
        if self.given and dice.random() < self.share_given:
            ids = self.turn(dice.choice(self.given))
            return Conversation(ids, temperature, prompt=len(ids))
        return Conversation([*self.frame.before, *self._encode(dice.choice(OPENINGS))], temperature)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


def write_slices(writer: Writer, source: Source, folder: Path, minutes: float) -> None:
    """Fill ``folder`` with slices that are not there yet; the last one begins before so many minutes are over."""
    folder.mkdir(parents=True, exist_ok=True)
    begun, number = time.monotonic(), 0
    while time.monotonic() - begun < 60 * minutes:
        path = folder / f"slice-{number:05d}.jsonl"
        if not path.exists():
            started = time.monotonic()
            texts = writer.write(source.start(number), seed=number)
            write_texts(path, texts)
            _log(path, texts, time.monotonic() - started)
        number += 1


def read_prompts(paths: Sequence[Path]) -> list[str]:
    """The ``question`` or ``prompt`` of every JSON line."""
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [row["question"] if "question" in row else row["prompt"] for row in rows]


def _log(path: Path, texts: Sequence[Text], seconds: float) -> None:
    tokens = sum(len(text.ids) - text.prompt for text in texts)
    logger.info("%s: %d texts, %d answer tokens, %.0f a second.", path, len(texts), tokens, tokens / seconds)
