"""The comparison that every exactness test rests on is able to fail: a server with one KV slot shifted is caught.

And then its launcher is killed outright, which must leave nothing behind either.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import CONTEXT
from tests.e2e.servers import SGLangServer, start_ssd, wait_until
from tests.e2e.workload import Case, Oracle, differences

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]


@pytest.fixture
def mutant(models: Path, tmp_path: Path) -> Iterator[SGLangServer]:
    flags = ["--max-total-tokens", "4096", "--context-length", str(CONTEXT), "--disable-overlap-schedule"]
    flags += ["--speculative-ssd-draft-engine", "torch", "--speculative-ssd-wait", "full"]
    server = start_ssd(models / "target", models / "copy", tmp_path / "log", *flags, module="tests.e2e.mutant_server")
    try:
        server.wait_ready()
        wait_until(lambda: server.status()["draft_state"] == "up", 120, "the draft server to be up")
        yield server
    finally:
        server.process.stop()


def test_a_shifted_slot_is_caught(mutant: SGLangServer, oracle: SGLangServer) -> None:
    truth = Oracle(oracle)
    cases = truth.clear_cases([Case(seed, 20 + seed, 40) for seed in range(4)])
    for case in cases:
        assert differences(mutant.generate(**case.body(enabled=False)), truth.answer(case)) == []
        assert differences(mutant.generate(**case.body()), truth.answer(case)) != []
    launcher = psutil.Process(mutant.process.child.pid)
    family = launcher.children(recursive=True)
    assert any("sglang-ssd::draft" in part for child in family for part in child.cmdline())
    mutant.process.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
