"""A target that writes conversations in batches, without padding to the right: rows that are done leave the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sglang_ssd.demo.distill.attention import STEPPED, KeyValues
from sglang_ssd.demo.distill.texts import Text

TURN_TEMPERATURE = 0.9
_COMPACT_BELOW = 0.75
"""The batch is made smaller when fewer of its rows than this are unfinished."""


@dataclass(frozen=True)
class Frame:
    """Tokens of the chat template: ``before`` the first user turn, ``after`` it, and the ``ends`` of any turn."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    ends: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Any) -> Frame:  # noqa: ANN401 - a transformers tokenizer
        """By the tokenizer's own chat template. Raises ValueError when that changes the user's words."""
        mark = "@@@"
        turn = [{"role": "user", "content": mark}]
        rendered: str = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        before, found, after = rendered.partition(mark)
        if not found:
            raise ValueError("the chat template does not keep what the user says")
        first, then = (tuple(tokenizer.encode(part, add_special_tokens=False)) for part in (before, after))
        return cls(first, then, frozenset({then[0], tokenizer.eos_token_id}))


@dataclass
class Conversation:
    """A row that is being written: a user turn until ``prompt`` is set to its length, then the answer."""

    ids: list[int]
    temperature: float
    prompt: int = 0
    done: bool = False
    _forced: list[int] = field(default_factory=list)

    def take(self, token: int, frame: Frame, turn: int, answer: int) -> None:
        """Go on with ``token``; a turn that is over goes on with what the template puts there."""
        if self.done:
            return
        if self.prompt:
            self.ids.append(token)
            self.done = token in frame.ends or len(self.ids) - self.prompt >= answer
            return
        if not self._forced and (token in frame.ends or len(self.ids) - len(frame.before) >= turn):
            self._forced = list(frame.after)
        self.ids.append(self._forced.pop(0) if self._forced else token)
        if not self._forced and tuple(self.ids[-len(frame.after) :]) == frame.after:
            self.prompt = len(self.ids)


class Writer:
    """``model`` is a target made with ``attn_implementation=STEPPED``; user turns and answers have at most so many
    tokens.
    """

    def __init__(self, model: Any, frame: Frame, *, turn: int, answer: int) -> None:  # noqa: ANN401
        assert model.config._attn_implementation == STEPPED
        self._model, self._frame = model, frame
        self._turn, self._answer = turn, answer

    @torch.inference_mode()
    def write(self, conversations: Sequence[Conversation], seed: int) -> list[Text]:
        """Finish them, one token of each at a time; the same texts for the same seed on one machine."""
        noise = torch.Generator(self._model.device).manual_seed(seed)
        rows, frame = list(conversations), self._frame
        width = max(len(row.ids) for row in rows)
        room = width + self._turn + len(frame.after) + self._answer
        memory = KeyValues(self._model.config.num_hidden_layers, room)
        offsets = torch.tensor([width - len(row.ids) for row in rows])
        inputs = torch.tensor([[0] * (width - len(row.ids)) + row.ids for row in rows])
        while rows:
            temperatures = [row.temperature if row.prompt else TURN_TEMPERATURE for row in rows]
            chosen = draw(self._forward(inputs, offsets, memory), torch.tensor(temperatures), noise)
            for row, token in zip(rows, chosen.tolist(), strict=True):
                row.take(token, frame, self._turn, self._answer)
            alive = torch.tensor([not row.done for row in rows]).nonzero()[:, 0]
            if len(alive) < _COMPACT_BELOW * len(rows):
                memory.keep(alive)
                offsets, rows = offsets[alive], [rows[i] for i in alive.tolist()]
            inputs = torch.tensor([[row.ids[-1]] for row in rows])
        return [Text(tuple(row.ids), row.prompt) for row in conversations]

    def _forward(self, inputs: Tensor, offsets: Tensor, memory: KeyValues) -> Tensor:
        """Logits [B, V] after the last column of ``inputs`` [B, n]; the first ``offsets`` [B] columns are padding."""
        start, device = memory.filled, self._model.device
        columns = torch.arange(start + inputs.shape[1])
        now = columns[start:, None]
        # A pad sees itself, or its row would be nothing but masked out.
        visible = (columns <= now) & (columns >= offsets[:, None, None]) | (columns == now)  # [B, n, filled + n]
        hidden = self._model.model(
            input_ids=inputs.to(device),
            position_ids=(columns[start:] - offsets[:, None]).clamp_min(0).to(device),
            use_cache=False,
            memory=memory,
            visible=visible[:, None].to(device),
        ).last_hidden_state
        memory.advance(inputs.shape[1])
        logits: Tensor = self._model.lm_head(hidden[:, -1]).float()
        return logits


def draw(logits: Tensor, temperatures: Tensor, noise: torch.Generator) -> Tensor:
    """One token [B] from each row of logits [B, V]; temperature 0 is greedy."""
    chosen = logits.argmax(-1)
    hot = temperatures.nonzero()[:, 0].to(logits.device)
    if len(hot):
        scaled = logits[hot] / temperatures.to(logits.device)[hot, None]
        chosen[hot] = torch.multinomial(scaled.softmax(-1), 1, generator=noise)[:, 0]
    return chosen
