"""The log while requests run."""

from __future__ import annotations

import logging

import pytest

from sglang_ssd.scheduler.decode_log import DecodeLog
from sglang_ssd.scheduler.figures import Figures


@pytest.fixture
def figures() -> Figures:
    return Figures(accepted_per_position=[0, 0], verified_per_position=[0, 0])


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def forward(figures: Figures, *rows: tuple[str, int]) -> None:
    """One forward whose rows had two drafts each, of which so many were accepted."""
    figures.forwards += 1
    figures.wait_s += 0.004
    for source, accepted in rows:
        figures.count_round(source)
        figures.count_outcome(accepted, 2)


def test_a_line_tells_of_the_forwards_since_the_last(figures: Figures, logged: pytest.LogCaptureFixture) -> None:
    log = DecodeLog(every=2)
    for _ in range(2):
        forward(figures, ("hit", 2), ("hit", 2))
        log.note(figures, "up")
    for _ in range(2):
        forward(figures, ("hit", 1), ("jit", 0))
        log.note(figures, "down")
    first, second = (message.removeprefix("SSD rounds, #round: 4, ") for message in logged.messages)
    rest = "wait (ms): 4.0, #timeout: 0, draft:"
    assert first == f"hit: 1.00, partial: 0.00, accepted drafts: 2.00, {rest} up"
    assert second == f"hit: 0.50, partial: 0.00, jit: 0.50, accepted drafts: 0.50, {rest} down"


def test_nothing_is_said_where_nobody_asks_for_drafts(figures: Figures, logged: pytest.LogCaptureFixture) -> None:
    log = DecodeLog(every=1)
    for _ in range(3):
        forward(figures)
        log.note(figures, "up")
    assert logged.messages == []


def test_a_draft_that_is_never_right_is_named_once(figures: Figures, logged: pytest.LogCaptureFixture) -> None:
    log = DecodeLog(every=10**9)

    def run(forwards: int, accepted: int) -> int:
        before = len(logged.messages)
        for _ in range(forwards):
            forward(figures, ("jit", accepted))
            log.note(figures, "up")
        return len(logged.messages) - before

    assert run(511, 0) == 0
    assert run(1, 0) == 1
    assert "of the last 512 first draft tokens the target took 0;" in logged.messages[0]
    assert run(2000, 0) == 0
    assert run(1024, 1) == 0
    assert run(1024, 0) == 1


def test_a_poor_draft_is_not(figures: Figures, logged: pytest.LogCaptureFixture) -> None:
    log = DecodeLog(every=10**9)
    for number in range(2048):
        forward(figures, ("jit", int(number % 32 == 0)))
        log.note(figures, "up")
    assert logged.messages == []
