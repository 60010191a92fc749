"""What the target says after every token of a pack: its likeliest tokens and the rest, computed once and kept."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_ssd.demo.distill.texts import Text

TOP = 64
_CHUNK = 512
"""Positions whose full logits are held at a time."""


@dataclass(frozen=True)
class Pack:
    """Texts side by side as a model reads them; ``answered`` [n] are the positions after which an answer token comes.

    ``ids`` and ``positions`` are int64 [1, tokens], ``lengths`` sum to tokens.
    """

    ids: Tensor
    positions: Tensor
    lengths: list[int]
    answered: Tensor

    @classmethod
    def of(cls, texts: Sequence[Text]) -> Pack:
        """The texts in their order."""
        lengths = [len(text.ids) for text in texts]
        answered = [torch.arange(text.prompt - 1, len(text.ids) - 1) for text in texts]
        starts = [sum(lengths[:i]) for i in range(len(texts))]
        return cls(
            ids=torch.tensor([[token for text in texts for token in text.ids]]),
            positions=torch.cat([torch.arange(length) for length in lengths])[None],
            lengths=lengths,
            answered=torch.cat([start + each for start, each in zip(starts, answered, strict=True)]),
        )

    def hidden(self, model: Any) -> Tensor:  # noqa: ANN401 - a transformers model
        """The model's last hidden states [n, hidden] at the ``answered`` positions."""
        device = model.device
        states: Tensor = model.model(
            input_ids=self.ids.to(device),
            position_ids=self.positions.to(device),
            lengths=self.lengths,
            use_cache=False,
        ).last_hidden_state[0]
        return states[self.answered.to(device)]


@dataclass(frozen=True)
class Targets:
    """At n positions: the target's ``TOP`` likeliest ids int32 [n, TOP] and log-probabilities float16 [n, TOP],
    best first. What they lack of 1 is the rest.
    """

    ids: Tensor
    log_p: Tensor

    def to(self, device: torch.device) -> Targets:
        """The same on ``device``."""
        return Targets(self.ids.to(device), self.log_p.to(device))


class Teacher:
    """The target, asked once for every pack: its answers are files of ``folder``, named by what was asked."""

    def __init__(self, model: Any, name: str, folder: Path) -> None:  # noqa: ANN401
        self._model, self._name, self._folder = model, name, folder
        folder.mkdir(parents=True, exist_ok=True)

    def targets(self, texts: Sequence[Text]) -> Targets:
        """For the pack of these texts."""
        asked = json.dumps([self._name, TOP, [(text.ids, text.prompt) for text in texts]])
        path = self._folder / f"{hashlib.sha256(asked.encode()).hexdigest()[:24]}.safetensors"
        if not path.exists():
            unfinished = path.with_suffix(f".{os.getpid()}")
            save_file(dict(zip(("ids", "log_p"), self._ask(Pack.of(texts)), strict=True)), unfinished)
            os.replace(unfinished, path)
        return Targets(**load_file(path))

    @torch.inference_mode()
    def _ask(self, pack: Pack) -> tuple[Tensor, Tensor]:
        tops = [self._top(part) for part in torch.split(pack.hidden(self._model), _CHUNK)]
        ids, log_p = (torch.cat(each).cpu() for each in zip(*tops, strict=True))
        return ids.int(), log_p.half()

    def _top(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._model.lm_head(hidden).float()
        best, ids = logits.topk(min(TOP, logits.shape[-1]), dim=-1)
        return ids, best - logits.logsumexp(-1, keepdim=True)
