"""The draft server behind a real socket: in a thread, and as the process that users start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np
import pytest
import torch
import zmq

from sglang_ssd.draft_server.engine import EngineSettings, Rows
from sglang_ssd.draft_server.engine_torch import TorchEngine
from sglang_ssd.draft_server.server import DraftServer, Offer
from sglang_ssd.draft_server.socket import Door
from sglang_ssd.protocol import (
    Close,
    Outcome,
    Outcomes,
    Ping,
    Pong,
    Prefill,
    Refused,
    Reset,
    Sampling,
    Speculations,
    Welcome,
    decode_at_target,
    encode,
    pack_tokens,
)
from tests.models import make_llama
from tests.support import FakeEngine, guess, hello

BOOT = 4242
WAIT_MS = 20_000


class Peer:
    """A scripted target on a DEALER socket."""

    def __init__(self, endpoint, **terms):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.round, self.texts, self.epochs = 0, {}, {}
        self.send(hello(**terms))
        self.welcome = self.receive()

    def send(self, message):
        self.socket.send(encode(message))

    def receive(self, kind=object):
        """The next message of one kind."""
        while True:
            assert self.socket.poll(WAIT_MS), "no answer"
            message = decode_at_target(self.socket.recv())
            if isinstance(message, kind):
                return message

    def prefill(self, session, tokens, *, epoch=1):
        self.texts[session], self.epochs[session] = list(tokens), epoch
        self.send(Prefill(self.welcome.boot, session, epoch, pack_tokens(tokens), Sampling()))

    def play(self, news, *, verified=0, epoch=None):
        """One round: session -> tokens; returns session -> (source, draft tokens)."""
        rows = []
        for session, tokens in news.items():
            base = len(self.texts[session])
            self.texts[session] += tokens
            at = self.epochs[session] if epoch is None else epoch
            rows.append(Outcome(session, at, base, verified, 1000, pack_tokens(tokens)))
        self.round += 1
        self.send(Outcomes.of(self.welcome.boot, self.round, 0, ("jit",), tuple(rows)))
        found = {}
        while len(found) < len(news):
            answer = self.receive(Speculations)
            assert answer.round == self.round
            for row in answer.rows:
                assert row.base == len(self.texts[row.session])
                found[row.session] = row.source, memoryview(row.tokens).cast("i").tolist()
        return found

    def figures(self):
        self.send(Ping(1))
        return self.receive(Pong).figures

    def until(self, condition):
        """Ping until the figures fulfil ``condition``."""
        until = time.monotonic() + WAIT_MS / 1e3
        while not condition(figures := self.figures()):
            assert time.monotonic() < until, figures
        return figures

    def close(self):
        self.socket.close()
        self.context.term()


@pytest.fixture
def serve(tmp_path):
    """Starts a server with an engine in a thread; returns its endpoint."""
    running = []

    def start(engine):
        endpoint = f"ipc://{tmp_path}/draft"
        door = Door(endpoint, BOOT)
        server = DraftServer(engine, door, Offer(BOOT, "fake", "", max_sessions=8))
        thread = threading.Thread(target=server.run)
        thread.start()
        running.append((door, thread, server))
        return endpoint

    yield start
    for door, thread, server in running:
        door.stop()
        thread.join()
        door.close()
        server.cache.check()


def prompt(session):
    return [session % 6, 1, 2, 3, 4, 5]


def copy_of(text, count):
    text, drafts = list(text), []
    for _ in range(count):
        drafts.append(guess([*text, *drafts], None, 6, 4)[0])
    return drafts


def follow(peer, session, rounds, steps):
    """Rounds in which the target agrees with the draft; the sources of the answers."""
    sources = []
    news = copy_of(peer.texts[session], 1)
    for _ in range(rounds):
        source, drafts = peer.play({session: news}, verified=steps)[session]
        assert drafts == copy_of(peer.texts[session], steps)
        sources.append(source)
        news = copy_of(peer.texts[session], steps + 1)
    return sources


def test_a_copy_draft_hits_every_round_on_a_real_model(serve, tmp_path):
    path = make_llama(tmp_path / "model", seed=3)
    target = TorchEngine(EngineSettings(str(path), slots=300, rows=1))
    endpoint = serve(TorchEngine(EngineSettings(str(path), slots=2000, rows=80)))
    peer = Peer(endpoint, vocab_size=1000, num_steps=4, fan_out=10, planner="geometric")
    text = torch.randint(4, 1000, (40,), generator=torch.Generator().manual_seed(1)).tolist()

    def continuation(count):
        """Greedy, by the same model on an engine of its own."""
        drafts: list[int] = []
        known = np.array(peer.texts[1], dtype=np.int64)
        target.extend(0, 0, known[:-1], np.arange(1, len(known)))
        for token in [known[-1], *([None] * (count - 1))]:
            at = len(known) - 1 + len(drafts)
            column = [np.array([value]) for value in (0, at, drafts[-1] if token is None else token, at + 1)]
            drafts.append(int(target.decode(Rows(*column, np.zeros(1, np.float32), column[0])).ids[0, 0]))
        return drafts

    peer.prefill(1, text)
    sources, news = [], continuation(1)
    for _ in range(6):
        source, drafts = peer.play({1: news}, verified=4)[1]
        sources.append(source)
        assert drafts == continuation(4)
        news = continuation(5)
    assert sources == ["hit"] * 6
    peer.close()


def test_two_targets_at_once_and_nothing_left_at_the_end(serve):
    endpoint = serve(FakeEngine(slots=500, rows=80, context_length=200))
    one, two = Peer(endpoint), Peer(endpoint, num_steps=2, wait="auto")
    for session in (1, 2, 3):
        one.prefill(session, prompt(session))
        two.prefill(session, prompt(session + 7))
    for session in (1, 2, 3):
        assert follow(one, session, 4, 3) == ["hit"] * 4
        follow(two, session, 4, 2)
    one.send(Close(BOOT, (1, 2, 3)))
    two.send(Close(BOOT, (1, 2, 3)))
    figures = one.until(lambda figures: figures["sessions"] == 0)
    assert figures["slots_free"] + figures["slots_cached"] == figures["slots"]
    one.send(Reset(BOOT))
    one.until(lambda figures: figures["slots_free"] == figures["slots"])
    one.close()
    two.close()


def test_sync_is_ordinary_speculative_decoding(serve):
    peer = Peer(serve(FakeEngine(slots=500, rows=80, context_length=200)), mode="sync", wait="auto")
    peer.prefill(1, prompt(1))
    assert follow(peer, 1, 4, 3) == ["jit"] * 4
    figures = peer.until(lambda figures: figures["forwards"] >= 12)
    assert figures["forwards"] == 4 * 3
    peer.close()


def test_faulty_frames_are_counted_and_others_go_on(serve):
    endpoint = serve(FakeEngine(slots=500, rows=80, context_length=200))
    good, bad = Peer(endpoint), Peer(endpoint, version=99)
    assert isinstance(bad.welcome, Refused)
    assert "version 99" in bad.welcome.reason
    good.prefill(1, prompt(1))
    good.play({1: copy_of(good.texts[1], 1)})
    for junk in (b"", b"\x00", b"junk", os.urandom(2000), encode(Welcome(1, "", 1, 1, 1)), encode(Ping(1))[:-1]):
        bad.socket.send(junk)
    bad.socket.send_multipart([b"two", b"parts"])
    bad.send(Prefill(BOOT + 1, 1, 1, pack_tokens([1, 2]), Sampling()))
    assert bad.receive(Refused).hello_again
    bad.send(Close(BOOT + 1, (1,)))
    good.send(Prefill(BOOT, 1, 0, pack_tokens([5, 5]), Sampling()))  # an older epoch
    figures = good.until(lambda figures: figures["stale_frames"] >= 3)
    assert (figures["bad_frames"], figures["stale_frames"], figures["sessions"]) == (7, 3, 1)
    assert follow(good, 1, 2, 3)[-1] == "hit"
    bad.close()
    good.close()


@pytest.mark.parametrize("frame", [["hello", 1], ["hello", 3, 6, "", 3, "coupled", "ssd"], ["hello", 99, {"new": 1}]])
def test_a_target_of_any_version_is_refused_in_words(serve, frame):
    """Also one whose Hello has other fields than ours."""
    peer = Peer(serve(FakeEngine()))
    peer.socket.send(msgspec.msgpack.encode(frame))
    refused = peer.receive(Refused)
    assert f"version {frame[1]}" in refused.reason
    assert not refused.hello_again
    assert peer.figures()["bad_frames"] == 0
    peer.close()


def test_a_long_forward_does_not_delay_a_pong(serve):
    """The pong comes while the engine is held inside a forward, and says for how long it has been."""
    held, entered = threading.Event(), threading.Event()

    class Slow(FakeEngine):
        def decode(self, batch):
            entered.set()
            assert held.wait(WAIT_MS / 1e3)
            return super().decode(batch)

    peer = Peer(serve(Slow(slots=500, rows=80)))
    peer.prefill(1, prompt(1))
    assert entered.wait(WAIT_MS / 1e3)
    peer.send(Ping(8))
    pong = peer.receive(Pong)
    assert (pong.nonce, pong.boot) == (8, BOOT)
    assert pong.busy_us > 0
    held.set()
    peer.close()


class Process:
    """``python -m sglang_ssd.draft_server`` on a tiny checkpoint."""

    def __init__(self, tmp_path, *more, pass_fds=()):
        self.endpoint = f"ipc://{tmp_path}/draft"
        path = make_llama(tmp_path / "model", seed=3)
        command = [sys.executable, "-m", "sglang_ssd.draft_server", "--model-path", str(path), "--engine", "torch"]
        self.child = subprocess.Popen(
            [*command, "--endpoint", self.endpoint, "--max-total-tokens", "500", "--max-rows", "50", *more],
            pass_fds=pass_fds,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def wait_until_ready(self):
        lines = []
        for line in self.child.stderr:
            lines.append(line)
            if "ready at" in line:
                return line
        raise AssertionError("".join(lines))


@pytest.fixture
def process(tmp_path):
    started = []

    def start(*more, **options):
        started.append(Process(tmp_path, *more, **options))
        return started[-1]

    yield start
    for each in started:
        if each.child.poll() is None:
            each.child.kill()
        each.child.wait()
        each.child.stderr.close()


def test_the_process_serves_and_ends_on_sigterm(process):
    server = process()
    assert "500 KV slots" in server.wait_until_ready()
    peer = Peer(server.endpoint, vocab_size=1000, num_steps=2)
    assert (peer.welcome.draft, peer.welcome.vocab_size, peer.welcome.capacity) == ("model", 1000, 500)
    other = Peer(server.endpoint, vocab_size=1000, fingerprint="of another tokenizer")
    assert "tokenizer" in other.welcome.reason
    peer.prefill(1, list(range(4, 30)))
    source, drafts = peer.play({1: [7]})[1]
    assert source in {"hit", "partial", "jit"}
    assert len(drafts) == 2
    with open(f"/proc/{server.child.pid}/cmdline") as line:
        assert line.read().startswith("sglang-ssd::draft")
    server.child.send_signal(signal.SIGTERM)
    assert server.child.wait(timeout=20) == 0
    peer.close()
    other.close()


def test_the_process_ends_when_its_parent_s_pipe_does(process):
    theirs, ours = os.pipe()
    server = process("--parent-pipe", str(theirs), pass_fds=(theirs,))
    os.close(theirs)
    server.wait_until_ready()
    os.close(ours)
    assert server.child.wait(timeout=20) == 0


def test_settings_that_cannot_work_end_at_once(tmp_path):
    command = [sys.executable, "-m", "sglang_ssd.draft_server", "--model-path", str(tmp_path), "--endpoint"]
    for endpoint, words in (("tcp://0.0.0.0:1", "not an endpoint"), (f"ipc://{tmp_path}/d", "no config.json")):
        ended = subprocess.run([*command, endpoint], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2
        assert words in ended.stderr
        assert "Traceback" not in ended.stderr
