"""A target and a draft server in one process on the torch engine: rounds without HTTP, SGLang, sockets or clocks.

What is counted depends on the two models and the rule only: whole trees are awaited, as the paper does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sglang_ssd.draft_server.engine import DraftEngine, EngineSettings, Rows
from sglang_ssd.draft_server.engine_torch import TorchEngine
from sglang_ssd.draft_server.server import DraftServer, Offer
from sglang_ssd.draft_server.socket import Mail
from sglang_ssd.protocol import (
    PROTOCOL_VERSION,
    Close,
    Hello,
    Outcome,
    Outcomes,
    Prefill,
    Sampling,
    Speculation,
    Speculations,
    Tokens,
    ToTarget,
    pack_tokens,
    unpack_tokens,
)
from sglang_ssd.sampling.draw import DrawParameters
from sglang_ssd.sampling.noise import NoiseTable
from sglang_ssd.sampling.verdict import judge
from sglang_ssd.sampling.window import Window
from sglang_ssd.scheduler.supports import NOTHING, Proposed, SparseQ, read_q, window_support

_BOOT, _ME = 1, b"bench"


@dataclass(frozen=True)
class Rule:
    """How drafts are made and verified: K, the fan-out, and the rule with its C."""

    num_steps: int
    fan_out: int
    verify: str = "coupled"
    saguaro_c: float = 1.0

    def hello(self, vocab_size: int) -> Hello:
        """What the draft server is asked for."""
        return Hello(
            version=PROTOCOL_VERSION,
            vocab_size=vocab_size,
            fingerprint="",
            num_steps=self.num_steps,
            verify=self.verify,
            mode="ssd",
            wait="full",
            fan_out=self.fan_out,
            target="bench",
            saguaro_c=self.saguaro_c,
        )


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: list[int]
    new_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass
class Tally:
    """What happened in the rounds behind the first token of any number of requests."""

    rounds: int = 0
    hits: int = 0
    drafted: int = 0
    accepted: int = 0
    late: int = 0
    """Drafts made on demand, while the target waited."""
    texts: list[list[int]] = field(default_factory=list)

    @property
    def acceptance(self) -> float:
        """Accepted drafts of those verified."""
        return self.accepted / max(1, self.drafted)

    @property
    def hit_rate(self) -> float:
        """Rounds whose drafts were all prepared."""
        return self.hits / max(1, self.rounds)

    @property
    def tokens_per_round(self) -> float:
        """Accepted drafts and the bonus."""
        return 1 + self.accepted / max(1, self.rounds)

    def speed(self, step: float) -> float:
        """Tokens in the time of one verify, of which a draft step takes ``step``.

        A hit costs one verify; a miss also the draft steps that were waited for.
        """
        return (self.rounds + self.accepted) / max(1.0, self.rounds + step * self.late)


class Target:
    """A model that reads one text, and gives the logits of windows behind it."""

    def __init__(self, path: Path, context_length: int) -> None:
        settings = EngineSettings(str(path), dtype="float32", slots=context_length, rows=1, candidates=1)
        self._engine = TorchEngine(settings)
        self.vocab_size = self._engine.limits.vocab_size
        self.noise = NoiseTable.of(self.vocab_size)

    def read(self, tokens: list[int]) -> None:
        """A new text."""
        if tokens:
            positions = np.arange(len(tokens))
            self._engine.extend(0, 0, np.array(tokens), positions + 1)

    def window(self, length: int, tokens: list[int]) -> Tensor:
        """Logits [W, V] behind each of ``tokens``, of which the first is the text's last, at ``length`` - 1."""
        positions = np.arange(length - 1, length - 1 + len(tokens))
        zeros = np.zeros_like(positions)
        rows = Rows(zeros, positions, np.array(tokens), positions + 1, zeros.astype(np.float32), zeros)
        return self._engine.logits(rows)


class Draft:
    """A draft server that is spoken to by calls."""

    def __init__(self, engine: DraftEngine, hello: Hello) -> None:
        self._mailbox = _Mailbox()
        self._server = DraftServer(engine, self._mailbox, Offer(_BOOT, "draft", "", max_sessions=1))
        self._rounds = 0
        self._server.handle(_ME, hello)

    def open(self, session: int, tokens: list[int], sampling: Sampling) -> None:
        """A new request."""
        self._server.handle(_ME, Prefill(_BOOT, session, 1, pack_tokens(tokens), sampling))

    def answer(self, outcome: Outcome) -> Speculation:
        """What follows; the server works until it has answered."""
        self._rounds += 1
        self._mailbox.answers.clear()
        self._server.handle(_ME, Outcomes.of(_BOOT, self._rounds, 0, ("jit",), (outcome,)))
        while not self._mailbox.answers:
            self._server.turn()
        return self._mailbox.answers[0]

    def close(self, session: int) -> None:
        """The request has ended."""
        self._server.handle(_ME, Close(_BOOT, (session,)))


class _Mailbox:
    """Keeps the answers."""

    def __init__(self) -> None:
        self.figures: dict[str, int] = {}
        self.busy_since: float | None = None
        self.heard: dict[bytes, float] = {}
        self.answers: list[Speculation] = []

    def receive(self, timeout_s: float) -> tuple[list[Mail], bool]:  # noqa: ARG002
        """Nothing comes by mail."""
        return [], True

    def send(self, identity: bytes, message: ToTarget) -> None:  # noqa: ARG002
        """Answers only."""
        if isinstance(message, Speculations):
            self.answers += message.rows


def play(target: Target, engine: DraftEngine, rule: Rule, asks: list[Ask]) -> Tally:
    """All requests, one after another, on a new draft server."""
    draft, tally = Draft(engine, rule.hello(target.vocab_size)), Tally()
    for session, ask in enumerate(asks, start=1):
        draft.open(session, ask.prompt, Sampling(ask.temperature, ask.seed))
        target.read(ask.prompt[:-1])
        tally.texts.append(_play_one(target, draft, rule, (session, ask), tally))
        draft.close(session)
    return tally


def _play_one(target: Target, draft: Draft, rule: Rule, request: tuple[int, Ask], tally: Tally) -> list[int]:
    session, ask = request
    text, proposed = list(ask.prompt), NOTHING
    while (left := len(ask.prompt) + ask.new_tokens - len(text)) > 0:
        drafts = proposed.tokens[: left - 1]
        committed = _verify(target, rule, ask, text, Proposed(drafts, proposed.q))
        if len(text) > len(ask.prompt):
            tally.rounds += 1
            tally.drafted += len(drafts)
            tally.accepted += len(committed) - 1
        outcome = Outcome(session, 1, len(text), len(drafts), left - len(committed), pack_tokens(committed))
        text += committed
        if left > len(committed):
            answer = draft.answer(outcome)
            tokens = unpack_tokens(answer.tokens, target.vocab_size)
            proposed = Proposed(tokens.tolist(), _q_of(answer, tokens, target.vocab_size))
            tally.hits += answer.source == "hit"
            tally.late += len(tokens) if answer.source != "hit" else 0
    return text[len(ask.prompt) :]


def _q_of(answer: Speculation, tokens: Tokens, vocab_size: int) -> SparseQ | None:
    return read_q(np.frombuffer(answer.q_ids, "<i4"), np.frombuffer(answer.q, "<f4"), tokens, vocab_size)


def _verify(target: Target, rule: Rule, ask: Ask, text: list[int], proposed: Proposed) -> list[int]:
    """One round of the target."""
    drafts = torch.tensor([proposed.tokens], dtype=torch.int64).view(1, -1)
    logits = target.window(len(text), [text[-1], *proposed.tokens])
    support = window_support([proposed], drafts.shape[1]) if rule.verify == "rejection" else None
    window = Window(drafts, torch.tensor([drafts.shape[1]]), support)
    verdict = judge(logits, window, _parameters(ask, len(text) - 1, window.width), target.noise)
    return verdict.committed(drafts)[0, : int(verdict.accepted) + 1].tolist()


def _parameters(ask: Ask, first_position: int, width: int) -> DrawParameters | None:
    if ask.temperature == 0:
        return None
    return DrawParameters(
        rows=torch.arange(width),
        temperatures=torch.full((width,), ask.temperature),
        seeds=torch.full((width,), ask.seed),
        positions=first_position + torch.arange(width),
    )
