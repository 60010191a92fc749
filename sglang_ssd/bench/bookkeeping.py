"""What a round costs besides the models: against rows, sessions and context, and over the socket.

The draft server runs on an engine that costs nothing; every outcome is a hit (two drafts accepted, then the second
candidate), so that each round walks, answers, frees a tree and grows the next one.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import numpy as np

from sglang_ssd.bench.costless import CostlessEngine
from sglang_ssd.draft_server.server import DraftServer, Offer
from sglang_ssd.draft_server.socket import Door, Mail
from sglang_ssd.policy.fallback import Fallback
from sglang_ssd.processes import private_directory
from sglang_ssd.protocol import (
    PROTOCOL_VERSION,
    Hello,
    Outcome,
    Outcomes,
    Prefill,
    Sampling,
    Speculations,
    ToTarget,
    pack_tokens,
)
from sglang_ssd.scheduler.committed import CommittedRound, CommittedRow, RoundPlan
from sglang_ssd.scheduler.draft_client import DraftClient

NUM_STEPS = 4
ROWS = (8, 16, 32, 64, 128, 256, 512)
SESSIONS = (1, 4, 16, 64, 256)
CONTEXTS = (100, 400, 1600, 6400, 20_000)
_BOOT, _ME, _REMAINING = 1, b"bench", 1 << 20
_VOCAB_SIZE = 49_152
_ACCEPTED = 2

Curve = list[tuple[int, float]]


def curves(rounds: int = 15) -> dict[str, Curve]:
    """Milliseconds of a round by: rows of 8 sessions, sessions of 8 rows, tokens of context of 8 sessions."""
    with collecting_when_idle():
        return {
            "rows a round (8 sessions)": [(rows, Rounds(8, rows // 8, 200).milliseconds(rounds)) for rows in ROWS],
            "sessions (8 rows each)": [(count, Rounds(count, 8, 200).milliseconds(rounds)) for count in SESSIONS],
            "tokens of context (8 sessions, 64 rows)": [(c, Rounds(8, 8, c).milliseconds(rounds)) for c in CONTEXTS],
        }


@contextmanager
def collecting_when_idle() -> Iterator[None]:
    """Garbage is collected as the draft server's process does it: not while it works."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def hello(fan_out: int, planner: str = "confidence") -> Hello:
    """Whole trees, so that rounds repeat."""
    return Hello(
        version=PROTOCOL_VERSION,
        vocab_size=_VOCAB_SIZE,
        fingerprint="",
        num_steps=NUM_STEPS,
        verify="coupled",
        mode="ssd",
        wait="full",
        fan_out=fan_out,
        target="bench",
        planner=planner,
    )


class Rounds:
    """Sessions in step, each with a text of its own."""

    def __init__(self, sessions: int, fan_out: int, context: int, rounds: int = 64) -> None:
        room = context + rounds * (_ACCEPTED + 1) + NUM_STEPS + 2
        rows = sessions * (fan_out + 2)
        slots = sessions * (room + (fan_out + 1) * (NUM_STEPS + 1))
        engine = CostlessEngine(slots=slots, rows=rows, context_length=room, vocab_size=_VOCAB_SIZE)
        self._mailbox = _Mailbox()
        self.server = DraftServer(engine, self._mailbox, Offer(_BOOT, "draft", "", sessions, prefill_chunk=4096))
        self.server.handle(_ME, hello(fan_out))
        self._texts = {number: text_of(number, context) for number in range(1, sessions + 1)}
        self._served = 0
        for number, text in self._texts.items():
            self.server.handle(_ME, Prefill(_BOOT, number, 1, pack_tokens(text), Sampling()))
        self.settle()
        self._send({number: [7] for number in self._texts})
        self.settle()

    def play(self) -> None:
        """One round of every session, until its answer is out and the next trees stand."""
        self._send({number: next_tokens(text) for number, text in self._texts.items()})
        self.settle()

    def settle(self) -> None:
        """Work until there is none."""
        while self.server.turn():
            pass

    def milliseconds(self, rounds: int) -> float:
        """Processor time of a round, the median of so many."""
        taken = []
        for _ in range(rounds):
            started = time.process_time()
            self.play()
            taken.append(1e3 * (time.process_time() - started))
        return median(taken)

    @property
    def hits(self) -> float:
        """Share of the answers that were hits."""
        sources = [row.source for message in self._mailbox.sent for row in message.rows]
        return sources.count("hit") / max(1, len(sources))

    def _send(self, committed: dict[int, list[int]]) -> None:
        rows = []
        for number, tokens in committed.items():
            base = len(self._texts[number])
            self._texts[number] += tokens
            verified = NUM_STEPS if self._served else 0
            rows.append(Outcome(number, 1, base, verified, _REMAINING, pack_tokens(tokens)))
        self._served += 1
        self.server.handle(_ME, Outcomes.of(_BOOT, self._served, 0, ("jit",), tuple(rows)))


def text_of(number: int, length: int) -> list[int]:
    """A prompt of its own for each session."""
    return [(number * 7919 + index * 13) % _VOCAB_SIZE for index in range(length)]


def next_tokens(text: list[int]) -> list[int]:
    """Two drafts accepted, then the second candidate, as :class:`CostlessEngine` ranks them."""
    tokens: list[int] = []
    for rank in (*[0] * _ACCEPTED, 1):
        last = (tokens or text)[-1]
        position = len(text) + len(tokens) - 1
        tokens.append((last * 31 + position * 7 + 97 * rank) % _VOCAB_SIZE)
    return tokens


class _Mailbox:
    """Keeps what the server answers."""

    def __init__(self) -> None:
        self.figures: dict[str, int] = {}
        self.busy_since: float | None = None
        self.heard: dict[bytes, float] = {}
        self.sent: list[Speculations] = []

    def receive(self, timeout_s: float) -> tuple[list[Mail], bool]:  # noqa: ARG002
        """Nothing comes by mail."""
        return [], True

    def send(self, identity: bytes, message: ToTarget) -> None:  # noqa: ARG002
        """Answers only."""
        if isinstance(message, Speculations):
            self.sent.append(message)


def round_trip_ms(rounds: int = 40) -> float:
    """From an outcome's commit to its answer in the scheduler's hands, when the tree stands: the median.

    Both ends are threads of this process, with the real socket between them.
    """
    with private_directory() as directory:
        endpoint = f"ipc://{directory / 'draft.sock'}"
        door = Door(endpoint, _BOOT)
        engine = CostlessEngine(slots=4096, rows=64, context_length=1024, vocab_size=_VOCAB_SIZE)
        server = DraftServer(engine, door, Offer(_BOOT, "draft", "", 1))
        thread = threading.Thread(target=server.run)
        thread.start()
        client = DraftClient(endpoint, hello(8, "uniform"))  # which prepares every outcome, so that all are hits
        try:
            return median(_trips(client, rounds))
        finally:
            client.stop()
            door.stop()
            thread.join()
            door.close()


def _trips(client: DraftClient, rounds: int) -> list[float]:
    _wait_for(lambda: client.welcome is not None)
    text = text_of(1, 100)
    client.open(1, 1, np.array(text, dtype=np.int32), Sampling())
    trips, plan = [], RoundPlan(NUM_STEPS, (Fallback("jit", NUM_STEPS),))
    for number in range(1, rounds + 2):
        tokens = next_tokens(text) if number > 1 else [7]
        row = CommittedRow(1, 1, len(text), NUM_STEPS if number > 1 else 0, _REMAINING)
        text += tokens
        started = time.perf_counter()
        client.commit(CommittedRound(number, (row,), lambda tokens=tokens: [tokens], 0, plan))  # type: ignore[misc]
        found, _ = client.collect({1: len(text)}, 1.0)
        trips.append(1e3 * (time.perf_counter() - started))
        if number > 1 and found[1].source != "hit":
            raise AssertionError("the round trip of a miss was timed: this is a bug")
        time.sleep(0.02)  # the next tree
    return trips[1:]


def _wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("the draft server's socket does not answer")
        time.sleep(0.01)
