"""Stand-ins for tests of the draft server: an engine that reads its text back from the slots, a mailbox, a target."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_ssd.draft_server.engine import Candidates, EngineLimits, Rows
from sglang_ssd.draft_server.server import DraftServer, Offer
from sglang_ssd.draft_server.tree import ROOT
from sglang_ssd.protocol import (
    PROTOCOL_VERSION,
    Close,
    Hello,
    Legal,
    LegalRow,
    Outcome,
    Outcomes,
    Prefill,
    Sampling,
    Speculation,
    Speculations,
    ToTarget,
    pack_tokens,
    unpack_tokens,
)

BOOT = 77


class FakeEngine:
    """A model whose next token is a hash of the whole text, where the text is what the table's slots hold.

    One wrong entry in a row, one slot given to two owners or one token never run gives another text, so every
    guess can be compared with :func:`guess` of the text that it should have come from.
    """

    def __init__(self, *, slots=64, rows=16, context_length=64, vocab_size=6, candidates=4):
        self.limits = EngineLimits(slots, rows, context_length, vocab_size)
        self.candidates = candidates
        self.table = np.zeros((rows, context_length), dtype=np.int64)
        self.held: dict[int, tuple[int, int]] = {}  # slot -> (position, token)
        self.extended: list[int] = []
        self.decoded: list[int] = []

    def write(self, rows, positions, slots):
        self.table[rows, positions] = slots

    def fork(self, sources, lengths, targets):
        for source, length, target in zip(sources, lengths, targets, strict=True):
            self.table[target, :length] = self.table[source, :length]

    def decode(self, batch):
        assert len(set(batch.slots.tolist())) == len(batch)
        assert len(set(zip(batch.rows.tolist(), batch.positions.tolist(), strict=True))) == len(batch)
        self.write(batch.rows, batch.positions, batch.slots)
        for slot, position, token in zip(batch.slots, batch.positions, batch.tokens, strict=True):
            self.held[int(slot)] = int(position), int(token)
        self.decoded.append(len(batch))
        found = [
            guess(self.read(row, position), key_of(temperature, seed), self.limits.vocab_size, self.candidates)
            for row, position, temperature, seed in zip(
                batch.rows, batch.positions, batch.temperatures, batch.seeds, strict=True
            )
        ]
        ids = np.array(found, dtype=np.int64)
        scores = np.tile(-np.arange(self.candidates, dtype=np.float32), (len(batch), 1))
        return Candidates(ids, scores)

    def extend(self, row, start, tokens, slots):
        positions = np.arange(start, start + len(tokens))
        self.write(np.full_like(positions, row), positions, slots)
        for slot, position, token in zip(slots, positions, tokens, strict=True):
            self.held[int(slot)] = int(position), int(token)
        self.extended.append(len(tokens))

    def read(self, row, position):
        """The text that a row attends to. Every slot must hold its own position."""
        held = [self.held[int(slot)] for slot in self.table[row, : position + 1]]
        assert [at for at, _ in held] == list(range(position + 1)), "a row reads a slot of another position"
        return tuple(token for _, token in held)


def rows_by(terms, positions):
    """Rows of a forward that draw by ``terms``; what they forward is of no matter."""
    nothing = np.zeros(len(terms), dtype=np.int64)
    return Rows(
        nothing,
        positions,
        nothing,
        nothing,
        temperatures=np.array([row.temperature for row in terms], dtype=np.float32),
        seeds=np.array([row.seed for row in terms], dtype=np.int64),
        terms=None if all(row.plain for row in terms) else tuple(terms),
    )


def text_of(tree, node):
    """The tokens that lead to a node of the draft server's tree."""
    tokens = []
    while node != ROOT:
        tokens.append(int(tree.token[node]))
        node = int(tree.parent[node])
    return tokens[::-1]


def key_of(temperature, seed):
    return (round(float(temperature), 3), int(seed)) if temperature > 0 else None


def guess(text: Sequence[int], key, vocab_size: int, count: int) -> list[int]:
    """The fake model: ``count`` distinct next tokens, best first."""
    return random.Random(repr((tuple(text), key))).sample(range(vocab_size), count)


@dataclass
class FakeMailbox:
    """Collects what the server sends."""

    sent: list[tuple[bytes, ToTarget]] = field(default_factory=list)
    figures: dict[str, int] = field(default_factory=dict)
    busy_since: float | None = None
    heard: dict[bytes, float] = field(default_factory=dict)

    def receive(self, timeout_s):
        return [], True

    def send(self, identity, message):
        self.sent.append((identity, message))

    def take(self, kind=object):
        """What was sent since the last call, of one kind."""
        taken, self.sent = self.sent, []
        return [message for _, message in taken if isinstance(message, kind)]


class Clock:
    """Time that tests move."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def hello(**changes) -> Hello:
    terms = {
        "version": PROTOCOL_VERSION,
        "vocab_size": 6,
        "fingerprint": "",
        "num_steps": 3,
        "verify": "coupled",
        "mode": "ssd",
        "wait": "full",
        "fan_out": 6,
        "target": "test",
    }
    return Hello(**(terms | changes))


def legal_row(session, epoch, base, legal) -> LegalRow:
    counts = tuple(-1 if tokens is None else len(tokens) for tokens in legal)
    return LegalRow(session, epoch, base, counts, pack_tokens([t for tokens in legal for t in tokens or ()]))


class Harness:
    """A draft server on a fake (or given) engine, and one scripted target that knows each session's text."""

    def __init__(self, engine=None, *, max_sessions=4, prefill_chunk=8, identity=b"one", server=None, **terms):
        self.engine = engine if engine is not None else FakeEngine()
        self.terms = hello(**({"vocab_size": self.engine.limits.vocab_size} | terms))
        if server is None:
            self.mailbox = FakeMailbox()
            self.clock = Clock()
            offer = Offer(BOOT, "fake", "", max_sessions, prefill_chunk)
            server = DraftServer(self.engine, self.mailbox, offer, self.clock)
        self.server = server
        self.identity = identity
        self.texts: dict[int, list[int]] = {}
        self.epochs: dict[int, int] = {}
        self.chains: dict[int, list[int]] = {}
        self.round = 0
        self.handle(self.terms)

    def handle(self, message):
        self.server.handle(self.identity, message)

    def branches(self, session):
        """The branches of a session's tree."""
        return self.server.cache.branches.listed(self.session(session).row)

    def settle(self, limit=1000):
        """Work until there is none."""
        for _ in range(limit):
            if not self.server.turn():
                return
        raise AssertionError("the server never rests")

    def prefill(self, session, tokens, *, epoch=1, temperature=0.0, seed=0):
        self.texts[session], self.epochs[session], self.chains[session] = list(tokens), epoch, []
        self.handle(Prefill(BOOT, session, epoch, pack_tokens(tokens), Sampling(temperature, seed)))

    def outcome(self, session, tokens, *, remaining=1000, verified=None, base=None, epoch=None):
        """One row; the text moves on."""
        text = self.texts[session]
        base = len(text) if base is None else base
        verified = len(self.chains[session]) if verified is None else verified
        block = pack_tokens([*text[base:], *tokens])
        text += tokens
        return Outcome(session, self.epochs[session] if epoch is None else epoch, base, verified, remaining, block)

    def send(self, *rows, fallback=("jit",), verify_us=0):
        self.round += 1
        self.handle(Outcomes.of(BOOT, self.round, verify_us, fallback, rows))

    def play(self, session, tokens, **options) -> Speculation:
        """One round of one session, answered."""
        fallback = options.pop("fallback", ("jit",))
        self.send(self.outcome(session, tokens, **options), fallback=fallback)
        for _ in range(200):
            self.server.turn()
            rows = [row for message in self.mailbox.take(Speculations) for row in message.rows]
            if rows:
                (row,) = rows
                assert row.source == "none" or row.base == len(self.texts[session])
                self.chains[session] = unpack_tokens(row.tokens, 1 << 30).tolist()
                return row
        raise AssertionError("no answer")

    def restrict(self, session, *legal, base=None, epoch=None):
        """What a grammar allows after 0, 1, ... accepted drafts: lists of tokens, None for anything."""
        base = len(self.texts[session]) if base is None else base
        epoch = self.epochs[session] if epoch is None else epoch
        self.handle(Legal(BOOT, (legal_row(session, epoch, base, legal),)))

    def close(self, *sessions):
        self.handle(Close(BOOT, sessions))

    def session(self, number):
        (target,) = [t for t in self.server.sessions.targets.values() if t.identity == self.identity]
        return self.server.sessions.find(target, number)
