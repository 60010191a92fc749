"""SGLang's n-gram corpus behind our interface, the real one."""

from __future__ import annotations

import shutil
import time

import pytest

from sglang_ssd.draft_server.ngram_sglang import SharedPast

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(shutil.which("g++") is None, reason="building SGLang's corpus needs a C++ compiler"),
]


@pytest.mark.timeout(600)
def test_what_ended_texts_said_is_guessed():
    past = SharedPast(4)
    assert past.guess([1, 2, 3], 4) == []  # whoever asks before it is built gets nothing, at once
    until = time.monotonic() + 500
    while not past.ready:
        assert time.monotonic() < until, "it was never built"
        time.sleep(0.2)
    past.put([50, 51, 52, 53, 54, 55, 56, 57])
    until = time.monotonic() + 20
    while not past.guess([9, 51, 52], 3):
        assert time.monotonic() < until, "nothing was remembered"
        time.sleep(0.01)
    assert past.guess([9, 51, 52], 3) == [53, 54, 55]
    assert past.guess([9, 51, 52], 99) == [53, 54, 55, 56]  # the longest that it was made for
    assert past.guess([55, 56], 3) == [57]
    assert past.guess([70, 71], 3) == []
    assert past.guess([51, 52], 0) == []
    past.put([80, 81, 82, 83])
    past.forget()
    assert past.guess([9, 51, 52], 3) == []
    assert past.guess([80, 81], 2) == []
