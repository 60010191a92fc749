"""What is asked: public data sets where their files are given, and prompts of our own; in the chat template."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from sglang_ssd.bench.own_prompts import OWN_PROMPTS
from sglang_ssd.demo.data_sets import ALPACA, GSM8K, HUMAN_EVAL, SPEC_BENCH

logger = logging.getLogger(__name__)

OWN, MIXED = "own", "mixed"
_SETS = {"humaneval": HUMAN_EVAL, "gsm8k": GSM8K, "alpaca": ALPACA, "spec-bench": SPEC_BENCH}
NAMES = (MIXED, OWN, *_SETS)
LONGEST_PROMPT = 160
"""Tokens; longer prompts are passed over, so that what is measured is decoding."""
_OF_EACH = 64
"""Prompts of each data set, spread evenly over its file."""


@dataclass(frozen=True)
class Prompt:
    """A user's turn behind the chat template, as token ids."""

    data_set: str
    ids: tuple[int, ...]


class Prompts:
    """Prompts by data set. ``mixed`` is all of them in turn: one of each, then the next of each."""

    def __init__(self, by_set: dict[str, list[Prompt]]) -> None:
        turns = chain.from_iterable(zip_longest(*by_set.values()))
        self._by_set = {**by_set, MIXED: [prompt for prompt in turns if prompt is not None]}

    @property
    def names(self) -> list[str]:
        """The data sets that there are."""
        return [name for name in self._by_set if name != MIXED]

    def take(self, data_set: str, start: int, count: int) -> list[Prompt]:
        """``count`` prompts from the ``start``-th on, round and round. Raises KeyError for a set that is not there."""
        prompts = self._by_set[data_set]
        return [prompts[(start + i) % len(prompts)] for i in range(count)]


def load_prompts(tokenizer: Any, folder: Path | None) -> Prompts:  # noqa: ANN401 - a transformers tokenizer
    """Our own prompts and every data set whose file is in ``folder``; the log names those that are not."""
    texts = {OWN: list(OWN_PROMPTS)}
    for name, data in _SETS.items():
        if folder is not None and data.is_in(folder):
            texts[name] = data.read(folder)
        elif folder is not None:
            logger.warning("%s is left out: the data folder has no %s.", data.name, data.file)
    return Prompts({name: _short_ones(name, turns, tokenizer) for name, turns in texts.items()})


def _short_ones(name: str, turns: list[str], tokenizer: Any) -> list[Prompt]:  # noqa: ANN401
    """Evenly spread prompts of at most LONGEST_PROMPT tokens."""
    count = min(_OF_EACH, len(turns))
    spread = (turns[i * len(turns) // count] for i in range(count))
    prompts = (Prompt(name, tuple(chat_ids(tokenizer, turn))) for turn in spread)
    return [prompt for prompt in prompts if len(prompt.ids) <= LONGEST_PROMPT]


def chat_ids(tokenizer: Any, turn: str) -> list[int]:  # noqa: ANN401
    """Token ids of one user's turn and the opening of the answer."""
    messages = [{"role": "user", "content": turn}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
