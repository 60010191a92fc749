"""Three starts of SGLang for the whole suite: the oracle, and two servers with SSD whose draft server is swapped.

| fixture  | loop    | wait | KV pool | what it is for                                             |
|----------|---------|------|---------|------------------------------------------------------------|
| `oracle` | sync    |      | large   | SGLang without our plugin                                  |
| `tight`  | sync    | full | 600     | retraction (also forced), narrow steps, repeatable rounds  |
| `roomy`  | overlap | auto | large   | long prompts, the context limit, everything that is timed  |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.servers import DraftServer, SGLangServer, free_port, start_ssd, start_stock, wait_until
from tests.models import make_constant, make_llama, make_noisy_copy

CONTEXT = 1024
CHUNK = 32
NUM_STEPS = 15
TIGHT_POOL = 600
# SGLang's own switch: every so many steps a batch of two or more loses a request, which is prefilled again later.
FORCED_RETRACTION = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "16"}
DRAFTS = ("copy", "other", "noisy", "constant")


@dataclass(frozen=True)
class Rig:
    """A server with SSD, and the draft server that it talks to."""

    server: SGLangServer
    draft: DraftServer
    models: Path
    patient: bool
    """Whether it waits for whole trees, so that what is accepted does not depend on the machine's load."""

    def use(self, name: str) -> None:
        """Put the draft ``name`` under the server, unless it is there, and wait until they know each other."""
        if self.draft.model == self.models / name:
            return
        before = self.server.status().get("reconnects", 0), self.server.status()["draft_state"]
        self.draft.use(self.models / name)

        def connected() -> bool:
            status = self.server.status()
            fresh = before[1] != "up" or status["reconnects"] > before[0]
            return fresh and status["draft_state"] == "up"

        wait_until(connected, 60, f"draft {name} to connect")

    def sessions(self) -> tuple[int, int]:
        """Open sessions as the scheduler and as the draft server count them."""
        status = self.server.status()
        return status["sessions"], status["draft_figures"].get("sessions", 0)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    target = make_llama(root / "target", seed=1, context_length=CONTEXT)
    make_llama(root / "copy", seed=1, context_length=CONTEXT)
    make_llama(root / "other", seed=2, context_length=CONTEXT)
    make_noisy_copy(target, root / "noisy", noise=0.08, seed=3)
    make_constant(target, root / "constant", token=17)
    return root


@pytest.fixture(scope="session")
def _servers(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """All three at once: starting is mostly imports."""
    root = tmp_path_factory.mktemp("servers")
    common = ["--context-length", str(CONTEXT), "--chunked-prefill-size", str(CHUNK), "--max-running-requests", "24"]
    common += ["--enable-return-hidden-states", "--reasoning-parser", "qwen3", "--tool-call-parser", "qwen25"]
    custom = ["--enable-custom-logit-processor"]
    target = models / "target"
    rigs: dict[str, Rig] = {}
    oracle = start_stock(
        target, root / "oracle.log", *common, "--max-total-tokens", "16384", "--disable-overlap-schedule"
    )
    for name, flags in {
        "tight": [
            "--disable-overlap-schedule",
            "--max-total-tokens",
            str(TIGHT_POOL),
            "--speculative-ssd-wait",
            "full",
        ],
        # A target this small decodes faster than it verifies: K is not left to the clock, or nothing would be drafted.
        "roomy": ["--max-total-tokens", "16384", "--speculative-ssd-lookahead", "fixed"],
    }.items():
        draft = DraftServer(f"tcp://127.0.0.1:{free_port()}", root / f"{name}-draft.log")
        ssd = ["--speculative-num-steps", str(NUM_STEPS), "--speculative-ssd-endpoint", draft.endpoint]
        server = start_ssd(
            target,
            models / "copy",
            root / f"{name}.log",
            *common,
            *custom,
            *ssd,
            *flags,
            env=FORCED_RETRACTION if name == "tight" else {},
        )
        rigs[name] = Rig(server, draft, models, patient=name == "tight")
    started: list[SGLangServer] = [oracle, *(rig.server for rig in rigs.values())]
    try:
        for server in started:
            server.wait_ready()
        yield {"oracle": oracle, **rigs}
    finally:
        for rig in rigs.values():
            rig.draft.stop()
        for server in started:
            server.process.stop()


@pytest.fixture(scope="session")
def oracle(_servers: dict[str, object]) -> SGLangServer:
    return _servers["oracle"]  # type: ignore[return-value]


@pytest.fixture(scope="session")
def tight(_servers: dict[str, object]) -> Rig:
    return _servers["tight"]  # type: ignore[return-value]


@pytest.fixture(scope="session")
def roomy(_servers: dict[str, object]) -> Rig:
    return _servers["roomy"]  # type: ignore[return-value]
