"""The servers of a run: one launcher process each, on loopback, ended by their own pids whatever happens."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests

from sglang_ssd.bench.settings import STANDALONE
from sglang_ssd.processes import Port, die_with_parent

logger = logging.getLogger(__name__)

_FIRST_PORT = 31600
_START_S, _STOP_S = 600.0, 20.0
_ROLES = {"scheduler": "scheduler", "detoken": "detokenizer", "draft": "draft server"}
"""What SGLang and we write into a process's title, and what the report calls it; the launcher is ``HTTP``."""


class ServerError(RuntimeError):
    """A server did not start or did not answer; the message ends with its last lines."""


@dataclass
class Server:
    """A launcher and its children."""

    name: str
    flags: tuple[str, ...]
    port: int
    log: Path
    child: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def status(self) -> dict[str, Any]:
        """``/ssd/status``; SGLang's own STANDALONE has none."""
        return {"mode": STANDALONE, "draft_state": "none"} if self.name == STANDALONE else self._get("/ssd/status")

    def info(self) -> dict[str, Any]:
        """SGLang's ``/server_info``."""
        return self._get("/server_info")

    def flush(self) -> None:
        """Forget every cached prefix, on both sides. Raises ServerError when it stays busy for ten seconds."""
        for _ in range(50):
            if requests.post(f"{self.url}/flush_cache", timeout=30).status_code == 200:
                return
            time.sleep(0.2)
        raise ServerError(f"{self.name} does not become idle")

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Its processes by role."""
        root = psutil.Process(self.child.pid)
        found: dict[str, list[psutil.Process]] = {"HTTP": [root]}
        for process in root.children(recursive=True):
            title = " ".join(process.cmdline())
            role = next((role for part, role in _ROLES.items() if f"::{part}" in title), "other")
            found.setdefault(role, []).append(process)
        return found

    def wait_ready(self) -> None:
        """Return when it answers, with its draft server. Raises ServerError."""
        until = time.monotonic() + _START_S
        while time.monotonic() < until:
            if self.child.poll() is not None:
                raise ServerError(f"{self.name} ended while it started:\n{self.last_words()}")
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/ready", timeout=2).ok and self.status()["draft_state"] in ("up", "none"):
                    return
            time.sleep(0.5)
        raise ServerError(f"{self.name} is not ready after {_START_S:.0f} s:\n{self.last_words()}")

    def stop(self) -> None:
        """SIGTERM, a bounded wait, then SIGKILL for its process group."""
        self.child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()

    def last_words(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-8:])

    def _get(self, path: str) -> dict[str, Any]:
        answer = requests.get(self.url + path, timeout=30)
        answer.raise_for_status()
        body: dict[str, Any] = answer.json()
        return body


@contextmanager
def running(wanted: dict[str, tuple[str, ...]], logs: Path) -> Iterator[dict[str, Server]]:
    """Start servers (name -> flags) side by side, wait for all, and end them when the context does.

    Raises ServerError. SIGTERM ends the context as Ctrl-C does.
    """
    logs.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, _interrupt)
    servers: dict[str, Server] = {}
    try:
        for index, (name, flags) in enumerate(wanted.items()):
            servers[name] = _start(name, flags, _FIRST_PORT + 20 * index, logs)
        for server in servers.values():
            started = time.monotonic()
            server.wait_ready()
            logger.info("%s is ready (%.0f s).", server.name, time.monotonic() - started)
        yield servers
    finally:
        for server in servers.values():
            server.child.terminate()
        for server in servers.values():
            server.stop()
        signal.signal(signal.SIGTERM, before)


def _start(name: str, flags: tuple[str, ...], first_port: int, logs: Path) -> Server:
    port = Port.reserve_from("127.0.0.1", first_port)
    port.release()  # the launcher reserves it itself
    log = logs / f"{name.replace('/', '_').replace(' ', '_')}.log"
    module = "sglang.launch_server" if name == STANDALONE else "sglang_ssd.launch_server"
    command = [sys.executable, "-m", module, "--port", str(port.number), *flags]
    with log.open("wb") as output:
        child = subprocess.Popen(  # noqa: S603 - the command is ours
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for us; we end the server
            preexec_fn=die_with_parent,
        )
    return Server(name, flags, port.number, log, child)


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt
