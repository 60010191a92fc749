"""The scheduler's end of the link against a scripted draft server on a real socket."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from sglang_ssd.policy.fallback import Fallback
from sglang_ssd.protocol import (
    PROTOCOL_VERSION,
    Build,
    Close,
    Hello,
    Legal,
    LegalRow,
    Outcomes,
    Ping,
    Prefill,
    Refused,
    Sampling,
    Speculation,
    Speculations,
    Welcome,
    decode_at_draft,
    encode,
    pack_tokens,
    unpack_tokens,
)
from sglang_ssd.scheduler.committed import CommittedRound, CommittedRow, RoundPlan
from sglang_ssd.scheduler.draft_client import DraftClient

HELLO = Hello(PROTOCOL_VERSION, 100, "", 4, "coupled", "ssd", "auto", 8, "target")
PATIENCE_S = 20
PLAN = RoundPlan(num_steps=2, answers=(Fallback("jit", 1), Fallback("none")))


class Peer:
    """The other end: reads messages, says what the test tells it to."""

    def __init__(self, endpoint: str, boot: int = 1) -> None:
        self.endpoint, self.boot, self.identity = endpoint, boot, b""
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)

    def expect(self, kind: type):
        """The next message of ``kind``; pings are passed over, other messages fail the test."""
        while True:
            assert self.socket.poll(PATIENCE_S * 1000), f"no {kind.__name__} came"
            self.identity, frame = self.socket.recv_multipart()
            message = decode_at_draft(frame)
            if isinstance(message, kind):
                return message
            assert isinstance(message, (Ping, Hello)), message

    def say(self, message) -> None:
        self.raw(encode(message))

    def raw(self, frame: bytes) -> None:
        self.socket.send_multipart([self.identity, frame])

    def welcome(self) -> None:
        self.expect(Hello)
        self.say(Welcome(self.boot, "draft", 100, 512, 1000))

    def answer(self, number: int, *rows: Speculation) -> None:
        self.say(Speculations.of(self.boot, number, rows, Build(steps=((4, 250),))))

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/draft.sock"


@pytest.fixture
def client(endpoint: str) -> Iterator[DraftClient]:
    client = DraftClient(endpoint, HELLO)
    yield client
    client.stop()


@pytest.fixture
def peer(endpoint: str, client: DraftClient) -> Iterator[Peer]:
    peer = Peer(endpoint)
    peer.welcome()
    until(lambda: client.state == "up")
    yield peer
    peer.close()


def until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def open_session(client: DraftClient, session: int = 1, epoch: int = 1, length: int = 3) -> None:
    client.open(session, epoch, np.arange(length, dtype=np.int32), Sampling())


def commit(client: DraftClient, number: int, length: int, tokens: list[int], session: int = 1, epoch: int = 1) -> None:
    row = CommittedRow(session, epoch, length, verified_len=0, remaining_before=50)
    client.commit(CommittedRound(number, (row,), lambda: [tokens], verify_us=1000, plan=PLAN))


def test_a_round_trip(client: DraftClient, peer: Peer) -> None:
    open_session(client)
    prefill = peer.expect(Prefill)
    assert unpack_tokens(prefill.tokens, 100).tolist() == [0, 1, 2]
    commit(client, 1, 3, [7])
    outcomes = peer.expect(Outcomes)
    assert (outcomes.fallback, outcomes.jit_steps, outcomes.num_steps) == (("jit", "none"), (1, 0), 2)
    (row,) = outcomes.rows
    assert (row.base, row.remaining, unpack_tokens(row.tokens, 100).tolist()) == (3, 49, [7])
    peer.answer(1, Speculation(1, 1, 4, "hit", pack_tokens([8, 9])))
    found, timed_out = client.collect({1: 4}, PATIENCE_S)
    assert (found[1].proposed.tokens, found[1].source, timed_out) == ([8, 9], "hit", False)
    assert client.draft_steps == ((4, 250),)


def test_unconfirmed_tokens_are_sent_again_until_an_answer_confirms_them(client: DraftClient, peer: Peer) -> None:
    open_session(client)
    peer.expect(Prefill)
    commit(client, 1, 3, [7])
    peer.expect(Outcomes)
    commit(client, 2, 4, [8, 9])
    row = peer.expect(Outcomes).rows[0]
    assert (row.base, unpack_tokens(row.tokens, 100).tolist()) == (3, [7, 8, 9])
    peer.answer(1, Speculation(1, 1, 4, "hit", pack_tokens([8])))  # late: confirms, but is not served
    peer.answer(2, Speculation(1, 1, 6, "partial", pack_tokens([5])))
    found, _ = client.collect({1: 6}, PATIENCE_S)
    assert found[1].proposed.tokens == [5]
    commit(client, 3, 6, [1])
    assert peer.expect(Outcomes).rows[0].base == 6


def test_a_late_answer_for_an_older_length_does_not_end_the_wait_for_the_newer(client: DraftClient, peer: Peer) -> None:
    open_session(client)
    peer.expect(Prefill)
    commit(client, 1, 3, [7])
    commit(client, 2, 4, [8])
    peer.expect(Outcomes)
    peer.expect(Outcomes)
    peer.answer(1, Speculation(1, 1, 4, "hit", pack_tokens([8])))
    found, timed_out = client.collect({1: 5}, 0.2)
    assert not found
    assert timed_out


def test_junk_stale_and_foreign_frames_are_counted_and_dropped(client: DraftClient, peer: Peer) -> None:
    open_session(client)
    peer.expect(Prefill)
    commit(client, 1, 3, [7])
    peer.expect(Outcomes)
    for frame in (b"", b"\x00junk", encode(Ping(1)), encode(Hello(1, 2, "", 3, "", "", "", 4, ""))):
        peer.raw(frame)
    peer.say(Speculations.of(999, 1, (Speculation(1, 1, 4, "hit", b""),), Build()))  # another boot
    peer.answer(1, Speculation(42, 1, 4, "hit", b""))  # unknown session
    peer.answer(1, Speculation(1, 7, 4, "hit", b""))  # another epoch
    peer.answer(1, Speculation(1, 1, 4, "hit", pack_tokens([100])))  # token outside the vocabulary
    peer.answer(1, Speculation(1, 1, 4, "hit", b"abc"))  # cut block
    peer.answer(1, Speculation(1, 1, 4, "hit", pack_tokens([8])))
    found, _ = client.collect({1: 4}, PATIENCE_S)
    assert found[1].proposed.tokens == [8]
    assert client.describe()["bad_frames"] == 6
    assert client.describe()["stale_frames"] == 3


def test_an_unknown_session_there_is_reported_as_lost_and_not_waited_for(client: DraftClient, peer: Peer) -> None:
    open_session(client)
    peer.expect(Prefill)
    commit(client, 1, 3, [7])
    peer.expect(Outcomes)
    peer.answer(1, Speculation(1, 1, 0, "none", b""))
    found, timed_out = client.collect({1: 4}, PATIENCE_S)
    assert not found
    assert not timed_out
    assert client.take_lost() == {1}
    open_session(client, epoch=2, length=4)
    assert peer.expect(Prefill).epoch == 2


def test_a_gap_of_more_than_four_windows_asks_for_a_new_epoch(client: DraftClient, peer: Peer) -> None:
    open_session(client)
    peer.expect(Prefill)
    length = 3
    for number in range(1, 6):
        commit(client, number, length, [1, 2, 3, 4, 5])
        length += 5
    for _ in range(4):
        peer.expect(Outcomes)
    until(lambda: client.take_lost() == {1})


def test_a_dead_server_is_noticed_at_once_and_its_successor_is_greeted(client: DraftClient, peer: Peer) -> None:
    open_session(client)
    peer.expect(Prefill)
    commit(client, 1, 3, [7])
    peer.expect(Outcomes)
    peer.close()
    found, timed_out = client.collect({1: 4}, PATIENCE_S)  # ends when the connection does, not at the deadline
    assert (found, timed_out) == ({}, False)
    until(lambda: client.state == "down")
    commit(client, 2, 4, [8])
    assert client.collect({1: 5}, PATIENCE_S) == ({}, False)  # nobody to wait for
    successor = Peer(peer.endpoint, boot=2)
    successor.welcome()
    until(lambda: client.state == "up")
    commit(client, 3, 5, [9])
    until(lambda: client.take_lost() == {1})
    open_session(client, epoch=2, length=6)
    assert (message := successor.expect(Prefill)).boot == 2
    assert len(unpack_tokens(message.tokens, 100)) == 6
    successor.close()


def test_a_server_that_forgot_us_is_greeted_again(client: DraftClient, peer: Peer) -> None:
    peer.say(Refused("unknown boot", hello_again=True))
    peer.boot = 5
    peer.welcome()
    until(lambda: client.state == "up" and client.welcome is not None and client.welcome.boot == 5)


def test_a_refusal_is_final_and_readable(endpoint: str, client: DraftClient) -> None:
    peer = Peer(endpoint)
    peer.expect(Hello)
    peer.say(Refused("the tokenizers differ"))
    until(lambda: client.state == "refused")
    assert client.describe()["refusal"] == "the tokenizers differ"
    peer.close()


def test_what_is_legal_is_told_of_sessions_that_the_server_knows(client: DraftClient, peer: Peer) -> None:
    open_session(client)
    peer.expect(Prefill)
    row = LegalRow(1, 1, 3, (1, -1), pack_tokens([9]))
    client.restrict(lambda: (row, LegalRow(2, 1, 3, (0,), b"")))
    assert peer.expect(Legal) == Legal(peer.boot, (row,))
    client.close((1,))
    peer.expect(Close)
    client.restrict(lambda: (row,))
    commit(client, 1, 3, [7])
    open_session(client, session=3)
    peer.expect(Prefill)  # and nothing before it


def test_nobody_to_tell_what_is_legal(endpoint: str, client: DraftClient) -> None:
    """Not even asked for, without a server and with one that grows no trees."""
    asked: list[str] = []
    client.restrict(lambda: asked.append("down") or ())
    hello = msgspec.structs.replace(HELLO, mode="sync")
    sync = DraftClient(endpoint + "sync", hello)
    peer = Peer(endpoint + "sync")
    peer.welcome()
    until(lambda: sync.state == "up")
    sync.restrict(lambda: asked.append("sync") or ())
    sync.stop()
    peer.close()
    assert asked == []


def test_close_reaches_the_server_once(client: DraftClient, peer: Peer) -> None:
    open_session(client)
    peer.expect(Prefill)
    client.close((1, 2))
    assert peer.expect(Close).sessions == (1,)
    assert client.describe()["sessions"] == 0


def test_a_server_that_does_not_read_does_not_block_us(client: DraftClient, peer: Peer) -> None:
    open_session(client)
    started = time.monotonic()
    for number in range(3000):
        commit(client, number, 3, [])
    assert time.monotonic() - started < PATIENCE_S
    until(lambda: client._jobs._queue.empty())
