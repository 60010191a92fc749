"""Real servers for tests: SGLang with and without our plugin, and draft servers that can be swapped under it.

Everything binds to loopback or ``ipc://`` and is ended by its process group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import requests

START_TIMEOUT_S = 240
CPU_FLAGS = [
    "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--sleep-on-idle",
    "--host", "127.0.0.1", "--random-seed", "1", "--log-level", "info",
]  # fmt: skip


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition, timeout_s: float, what: str):
    """The first true value of ``condition()``; fails with ``what`` after ``timeout_s``."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {timeout_s:.0f} s for {what}")


@dataclass
class Process:
    """A child in its own process group, with its output in a file."""

    command: list[str]
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | self.env
        with self.log.open("ab") as output:
            self.child = subprocess.Popen(
                self.command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def alive(self) -> bool:
        return self.child is not None and self.child.poll() is None

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        assert self.child is not None
        self.child.send_signal(how)

    def stop(self, timeout_s: float = 20) -> None:
        """SIGTERM, a bounded wait, then SIGKILL for the whole group."""
        if self.child is None:
            return
        self.child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


@dataclass
class SGLangServer:
    """An HTTP server under test."""

    process: Process
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.alive(), f"the server ended while starting:\n{self.process.tail()}"
            try:
                return requests.get(f"{self.url}/ready", timeout=2).status_code == 200
            except requests.RequestException:
                return False

        wait_until(ready, START_TIMEOUT_S, f"a server to start; its log ends with:\n{self.process.tail()}")

    def status(self) -> dict:
        return requests.get(f"{self.url}/ssd/status", timeout=30).json()

    def generate(self, **body: object) -> dict:
        answer = requests.post(f"{self.url}/generate", json=body, timeout=240)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def flush(self) -> None:
        wait_until(lambda: requests.post(f"{self.url}/flush_cache", timeout=30).status_code == 200, 30, "a flush")


def start_stock(model: Path, log: Path, *flags: str) -> SGLangServer:
    """SGLang as it comes: our package prepares the CPU host and is not loaded as a plugin."""
    port = free_port()
    command = [sys.executable, "-m", "tests.e2e.stock_server", "--model-path", str(model), "--port", str(port)]
    process = Process([*command, *CPU_FLAGS, *flags], log, env={"SGLANG_PLUGINS": "none_of_ours"})
    process.start()
    return SGLangServer(process, port)


def start_ssd(
    model: Path,
    draft: Path,
    log: Path,
    *flags: str,
    module: str = "sglang_ssd.launch_server",
    env: dict[str, str] | None = None,
) -> SGLangServer:
    """Our launcher, or a module that is it with a mistake."""
    port = free_port()
    command = [sys.executable, "-m", module, "--model-path", str(model), "--port", str(port)]
    process = Process([*command, "--speculative-draft-model-path", str(draft), *CPU_FLAGS, *flags], log, env or {})
    process.start()
    return SGLangServer(process, port)


@dataclass
class DraftServer:
    """A draft server on the torch engine at a fixed endpoint; `use` swaps the model by restarting it."""

    endpoint: str
    log: Path
    flags: tuple[str, ...] = ()
    process: Process | None = None
    model: Path | None = None

    def use(self, model: Path) -> None:
        self.stop()
        command = [sys.executable, "-m", "sglang_ssd.draft_server", "--model-path", str(model)]
        command += ["--endpoint", self.endpoint, "--engine", "torch", "--device", "cpu", "--dtype", "float32"]
        self.process = Process([*command, *self.flags], self.log)
        self.process.start()
        self.model = model

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()
            self.process = self.model = None
