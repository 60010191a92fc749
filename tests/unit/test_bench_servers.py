"""Starting a benchmark's servers: a refusal is an error with the server's own words, and nothing stays behind."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from sglang_ssd.bench.servers import ServerError, running


def test_a_server_that_refuses_is_told_with_its_words_and_nothing_stays(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with (
        pytest.raises(ServerError, match=r"(?s)odd ended while it started.*no option --speculative-ssd-nonsense"),
        running({"odd": ("--model-path", str(tmp_path), "--speculative-ssd-nonsense", "1")}, tmp_path),
    ):
        pass
    assert set(psutil.Process().children(recursive=True)) <= before
