"""What is due, and when it is no longer."""

from __future__ import annotations

from sglang_ssd.scheduler.mailbox import Mailbox, Ready
from sglang_ssd.scheduler.supports import NOTHING


def test_nothing_is_due_or_lost_while_nobody_is_there() -> None:
    mailbox = Mailbox()
    mailbox.expect([1], 1)
    mailbox.give_up([1], lost=True)
    mailbox.expect([1], 2)
    assert mailbox.collect({1: 5}, allowance_s=0.0) == ({}, False)
    assert mailbox.take_lost() == set()
    mailbox.peer_came()
    mailbox.expect([1], 3)
    assert mailbox.collect({1: 5}, allowance_s=0.0) == ({}, True)


def test_what_a_peer_said_goes_with_it() -> None:
    mailbox = Mailbox()
    mailbox.peer_came()
    ready = Ready(5, NOTHING, "hit")
    mailbox.file([(1, ready)], 1, sent_at=None, drafted=False)
    assert mailbox.collect({1: 5}, 0.0) == ({1: ready}, False)
    assert mailbox.collect({1: 6}, 0.0) == ({}, False)  # the request has gone on
    mailbox.peer_went()
    assert mailbox.collect({1: 5}, 0.0) == ({}, False)
