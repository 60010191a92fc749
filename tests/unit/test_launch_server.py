"""The launcher's own course, with SGLang's server and the draft server replaced by fakes."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_ssd import __version__, launch_server
from sglang_ssd.config import ConfigError
from sglang_ssd.launch_server import Plan
from sglang_ssd.launcher import arguments as command_line
from sglang_ssd.launcher import checks
from sglang_ssd.launcher.draft import draft_child, endpoint_in
from sglang_ssd.launcher.placement import Placement, place
from sglang_ssd.supervisor import PIPE, Child, ChildState, Supervisor
from tests.unit.test_supervisor import running, wait_until

FAKE_DRAFT = "import os, pathlib, sys; pathlib.Path(sys.argv[1]).touch(); os.read(int(sys.argv[2]), 1)"


def plan(*argv: str, stand_in: bool = False) -> Plan:
    parsed = command_line.parse(["--model-path", "target", "--speculative-draft-model-path", "draft", *argv])
    arguments = command_line.complete(parsed, on_cpu=True)
    return Plan(arguments, place(arguments.server, None, 0), stand_in)


def fake_draft(_arguments: object, _placement: object, directory: Path) -> Child:
    ready = directory / "draft.sock"
    return Child("draft server", (sys.executable, "-S", "-c", FAKE_DRAFT, str(ready), PIPE), os.environ, ready)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    cores, handler = os.sched_getaffinity(0), signal.getsignal(signal.SIGTERM)
    yield
    os.sched_setaffinity(0, cores)
    signal.signal(signal.SIGTERM, handler)


class FakeSGLang:
    """Stands for SGLang's HTTP server: waits for the draft, reports, and ends as it is told."""

    def __init__(self, end: Callable[[], None] = lambda: None) -> None:
        self.end = end
        self.supervisor: Supervisor | None = None
        self.endpoint: str | None = None
        self.child: int | None = None
        self.settings: dict[str, Any] = {}
        self.cores: set[int] = set()
        self.children_ended = threading.Event()

    def run(self, running_plan: Plan, when_ready: Callable[[], None]) -> None:
        self.settings = running_plan.arguments.server._ssd
        self.cores = os.sched_getaffinity(0)
        if self.supervisor is not None:
            supervisor = self.supervisor
            wait_until(lambda: supervisor.state is ChildState.UP)
            self.child = supervisor.pid
        when_ready()
        self.end()


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> FakeSGLang:
    fake = FakeSGLang()

    def supervise(child: Child) -> Supervisor:
        fake.supervisor = Supervisor(child)
        return fake.supervisor

    monkeypatch.setattr(launch_server, "draft_child", fake_draft)
    monkeypatch.setattr(launch_server, "Supervisor", supervise)
    monkeypatch.setattr(launch_server, "_run_sglang", fake.run)
    # The real one would end the children of other tests' fixtures too.
    monkeypatch.setattr(launch_server, "_end_children", fake.children_ended.set)
    return fake


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the launcher logs, whatever SGLang does to the handlers."""
    messages: list[str] = []
    monkeypatch.setattr(launch_server.logger, "info", lambda text, *values: messages.append(text % values))
    return messages


def test_both_run_and_nothing_is_left(sglang: FakeSGLang) -> None:
    launch_server._serve(plan())
    assert sglang.child is not None
    assert not running(sglang.child)
    directory = Path(sglang.settings["endpoint"].removeprefix("ipc://")).parent
    assert directory.name.startswith("sglang-ssd-")
    assert not directory.exists()


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda: (_ for _ in ()).throw(RuntimeError("Rank 0 scheduler died")), RuntimeError),
        (lambda: signal.raise_signal(signal.SIGTERM), SystemExit),
        (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt),
    ],
    ids=["crash", "SIGTERM", "SIGINT"],
)
def test_a_server_that_ends_badly_leaves_nothing(
    sglang: FakeSGLang, end: Callable[[], None], error: type[BaseException]
) -> None:
    sglang.end = end
    with pytest.raises(error):
        launch_server._serve(plan())
    assert sglang.child is not None
    assert not running(sglang.child)
    assert sglang.children_ended.is_set()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_sglangs_processes_inherit_the_targets_cores(sglang: FakeSGLang) -> None:
    running_plan = plan()
    launch_server._serve(running_plan)
    assert sglang.cores == running_plan.placement.target_cores


def test_without_speculation_there_is_no_draft(sglang: FakeSGLang) -> None:
    launch_server._serve(plan("--speculative-ssd-mode", "off"))
    assert sglang.supervisor is None
    assert sglang.settings["endpoint"] is None


def test_a_draft_server_that_runs_already_is_used(sglang: FakeSGLang, log: list[str]) -> None:
    before = os.sched_getaffinity(0)
    launch_server._serve(plan("--speculative-ssd-endpoint", "tcp://127.0.0.1:7777"))
    assert sglang.supervisor is None
    assert sglang.settings["endpoint"] == "tcp://127.0.0.1:7777"
    assert sglang.cores == before
    assert "running elsewhere, at tcp://127.0.0.1:7777" in log[-1]


def test_one_block_says_what_is_running(sglang: FakeSGLang, log: list[str]) -> None:
    launch_server._serve(plan("--speculative-num-steps", "5", stand_in=True))
    (block,) = [message for message in log if "The server is ready." in message]
    facts = (
        "target on CPU",
        "draft on CPU",
        "stand-in",
        "K = 5",
        "ssd",
        "draft server up",
        sglang.settings["endpoint"],
    )
    for fact in (*facts, __version__, importlib.metadata.version("sglang"), "http://127.0.0.1:"):
        assert fact in block


def test_a_busy_default_port_gives_way_to_a_free_one(sglang: FakeSGLang, log: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        running_plan = plan("--speculative-ssd-mode", "off")
        running_plan.arguments.server.port = taken
        launch_server._serve(running_plan)
        assert running_plan.arguments.server.port > taken
        assert f"Port {taken} is in use; serving on port {running_plan.arguments.server.port}." in log


def test_a_busy_port_that_was_asked_for_is_refused(sglang: FakeSGLang) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Port {taken}"):
            launch_server._serve(plan("--port", str(taken)))
    assert sglang.supervisor is None


def test_a_refusal_is_one_line_and_exit_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing_may_start(_plan: Plan) -> None:
        pytest.fail("started in spite of the refusal")

    monkeypatch.setattr(launch_server, "_serve", nothing_may_start)
    assert launch_server.main(["--model-path", "/nothing/here", "--speculative-draft-model-path", "x"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "sglang-ssd: --model-path: there is nothing at /nothing/here."


def test_help_needs_neither_plugin_nor_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "check_plugin_visible", lambda: pytest.fail("not needed"))
    assert launch_server.main(["--help"]) == 0
    assert "--speculative-ssd-mode" in capsys.readouterr().out


def test_without_a_model_the_demo_pair_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ssd import demo

    pair = demo.DemoPair(Path("/demo/target"), Path("/demo/draft"), stand_in=True)
    monkeypatch.setattr(demo, "demo_pair", lambda: pair)
    argv, stand_in = launch_server._with_demo_pair(["--port", "1"])
    server = command_line.parse(argv).server
    assert (server.model_path, server.speculative_draft_model_path) == ("/demo/target", "/demo/draft")
    assert stand_in
    assert launch_server._with_demo_pair(["--model", "m"]) == (["--model", "m"], False)


def test_a_demo_that_cannot_be_made_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ssd import demo

    def fail() -> None:
        raise demo.DemoError("No network. Do it by hand.")

    monkeypatch.setattr(demo, "demo_pair", fail)
    with pytest.raises(ConfigError, match="by hand"):
        launch_server._with_demo_pair([])


def options_of(child: Child) -> dict[str, str]:
    flags = child.command[child.command.index("sglang_ssd.draft_server") + 1 :]
    return dict(zip(flags[::2], flags[1::2], strict=True))


def test_the_draft_servers_command_line(tmp_path: Path) -> None:
    given = ["--dtype", "float32", "--context-length", "300", "--speculative-token-map", "map.pt"]
    decided = plan(*given, "--speculative-ssd-draft-engine", "torch")
    child = draft_child(decided.arguments, decided.placement, tmp_path)
    assert options_of(child) == {
        "--model-path": "draft",
        "--endpoint": f"ipc://{tmp_path}/draft.sock",
        "--engine": "torch",
        "--device": "cpu",
        "--dtype": "float32",
        "--max-total-tokens": "32768",
        "--max-sessions": "32",
        "--context-length": "300",
        "--token-map": "map.pt",
        "--parent-pipe": PIPE,
    }
    assert endpoint_in(tmp_path) == f"ipc://{child.ready_path}"
    assert "OMP_NUM_THREADS" in child.environment


def test_what_is_not_known_is_left_to_the_draft_server(tmp_path: Path) -> None:
    decided = plan()
    on_gpu = Placement("cuda", 3, "GPU 0", "GPU 3")
    child = draft_child(decided.arguments, on_gpu, tmp_path)
    assert not {"--dtype", "--context-length"} & set(options_of(child))
    assert child.environment["CUDA_VISIBLE_DEVICES"] == "3"
