"""Student against teacher on packs of texts: the loss of training, and the score of evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from sglang_ssd.demo.distill.objective import agreement, forward_kl, places_in_map
from sglang_ssd.demo.distill.teacher import Pack, Targets, Teacher
from sglang_ssd.demo.distill.texts import Text


@dataclass(frozen=True)
class Score:
    """Means over answer positions: KL in nats, share of positions at which both sides prefer the same token."""

    kl: float
    agreement: float


class Comparison:
    """``token_map`` int64 [M] are the tokens that the student may say: only those rows of its output layer are used.

    With ``autocast`` products are made in bfloat16; weights stay as they are.
    """

    def __init__(self, student: Any, teacher: Teacher, token_map: Tensor, *, autocast: bool) -> None:  # noqa: ANN401
        self.student = student
        self._teacher, self._autocast = teacher, autocast
        self._token_map = token_map.to(student.device)
        output = student.get_output_embeddings().weight
        self._output = output[self._token_map].to(torch.bfloat16 if autocast else torch.float32)
        self._places = places_in_map(token_map, len(output)).to(student.device)

    def loss(self, texts: Sequence[Text]) -> Tensor:
        """Mean KL over the answer positions of a pack, a scalar."""
        logits, targets = self._forward(texts)
        return forward_kl(logits, targets, self._places) / len(logits)

    @torch.no_grad()
    def score(self, texts: Sequence[Text]) -> Score:
        """Of a pack that was not trained on."""
        logits, targets = self._forward(texts)
        kl = forward_kl(logits, targets, self._places)
        return Score(float(kl) / len(logits), int(agreement(logits, targets, self._token_map)) / len(logits))

    def _forward(self, texts: Sequence[Text]) -> tuple[Tensor, Targets]:
        """Logits float32 [n, M] of the student and what the teacher says at the same n positions."""
        device = self.student.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self._autocast):
            logits = linear(Pack.of(texts).hidden(self.student), self._output)
        return logits.float(), self._teacher.targets(texts).to(device)
