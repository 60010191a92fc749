"""One child process, kept running: started, watched, started again when it dies, and ended with its owner.

The thread that supervises is also the one that starts the child, and it lives until the child is gone: a child that
asked to die with its parent (:func:`sglang_ssd.processes.die_with_parent`) dies with that thread, and a child
inherits that thread's CPU affinity.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

logger = logging.getLogger(__name__)

REFUSED_STATUS = 2
"""Exit status of a child that says its settings cannot work: starting it again would not help."""
PIPE = "{pipe}"
_LAST_LINES = 20
_LONGEST_LINE = 8192


class ChildState(enum.StrEnum):
    """What the supervisor knows of its child."""

    STARTING = "starting"
    UP = "up"
    DOWN = "down"
    REFUSED = "refused"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Child:
    """What to run. Where ``command`` says PIPE the child gets a file descriptor; its end of file means we are gone."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    ready_path: Path
    """The child makes this file (its socket) when it is ready."""
    cores: frozenset[int] | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds."""

    first_delay: float = 0.5
    longest_delay: float = 30.0
    settled: float = 60.0
    """A child that lived this long starts the delays anew."""
    ready_deadline: float = 900.0
    terminate: float = 5.0
    poll: float = 0.1
    still_waiting: float = 10.0


@dataclass
class Backoff:
    """The delay before each new start: doubling, bounded, reset by a child that lived a while."""

    timing: Timing
    _next: float = field(init=False)

    def __post_init__(self) -> None:
        self._next = self.timing.first_delay

    def after(self, lived: float) -> float:
        """The delay, in seconds, after a child that lived ``lived`` seconds."""
        if lived >= self.timing.settled:
            self._next = self.timing.first_delay
        delay, self._next = self._next, min(self._next * 2, self.timing.longest_delay)
        return delay


class Supervisor:
    """Keeps ``child`` running from ``start`` to ``stop``; also a context manager."""

    def __init__(
        self, child: Child, *, timing: Timing | None = None, forward: Callable[[str], None] | None = None
    ) -> None:
        """``forward`` receives each line that the child writes; by default it goes to our standard error."""
        self._child = child
        self._timing = timing or Timing()
        self._forward = forward or _to_stderr(child.name)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"supervise-{child.name}", daemon=True)
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._state = ChildState.STARTING
        self._pid: int | None = None

    @property
    def state(self) -> ChildState:
        """What is known now."""
        return self._state

    @property
    def pid(self) -> int | None:
        """The running child's process id."""
        return self._pid

    def start(self) -> None:
        """Start the child and watch it from now on. Returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """End the child (SIGTERM, a bounded wait, SIGKILL) and return when it is gone. Safe to call twice."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._state = ChildState.STOPPED

    def __enter__(self) -> Supervisor:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        if self._child.cores:
            os.sched_setaffinity(0, self._child.cores)  # of this thread: the children inherit it
        backoff = Backoff(self._timing)
        read_end, write_end = os.pipe()
        try:
            while not self._stopping.is_set() and self._state is not ChildState.REFUSED:
                self._live_once(read_end, backoff)
        finally:
            os.close(write_end)
            os.close(read_end)

    def _live_once(self, pipe: int, backoff: Backoff) -> None:
        started = time.monotonic()
        process = self._spawn(pipe)
        reader = threading.Thread(target=self._read_lines, args=(process.stdout,), daemon=True)
        reader.start()
        self._watch(process, started)
        _terminate(process, self._timing.terminate)
        reader.join(timeout=1.0)
        self._pid = None
        if not self._stopping.is_set():
            self._after_death(process.returncode, time.monotonic() - started, backoff)

    def _spawn(self, pipe: int) -> subprocess.Popen[bytes]:
        self._child.ready_path.unlink(missing_ok=True)
        self._last_lines.clear()
        self._state = ChildState.STARTING
        process = subprocess.Popen(  # noqa: S603 - the command is the owner's
            [str(pipe) if part == PIPE else part for part in self._child.command],
            env=dict(self._child.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(pipe,),
            start_new_session=True,  # Ctrl-C is for us; we end the child
        )
        self._pid = process.pid
        return process

    def _watch(self, process: subprocess.Popen[bytes], started: float) -> None:
        """Return when the child exited, when we are asked to stop, or when it is not ready by the deadline."""
        next_word = started + self._timing.still_waiting
        while process.poll() is None and not self._stopping.wait(self._timing.poll):
            if self._state is ChildState.UP:
                continue
            now = time.monotonic()
            if self._child.ready_path.exists():
                self._state = ChildState.UP
                logger.info("The %s is ready after %.1f s.", self._child.name, now - started)
            elif now - started > self._timing.ready_deadline:
                logger.error("The %s is not ready after %.0f s; ending it.", self._child.name, now - started)
                return
            elif now > next_word:
                next_word += self._timing.still_waiting
                logger.info("Waiting for the %s (%.0f s).", self._child.name, now - started)

    def _after_death(self, status: int, lived: float, backoff: Backoff) -> None:
        if status == REFUSED_STATUS:
            self._state = ChildState.REFUSED
            logger.error("The %s refuses to start and is not tried again. %s", self._child.name, self._last_words())
            return
        self._state = ChildState.DOWN
        # Reported after the delay: when the whole server is being stopped, the child may go first, which is no news.
        if not self._stopping.wait(backoff.after(lived)):
            logger.error(
                "The %s died (%s) after %.1f s; starting it again. %s",
                self._child.name, _describe(status), lived, self._last_words(),
            )  # fmt: skip

    def _last_words(self) -> str:
        return "Its last lines:\n" + "\n".join(f"    {line}" for line in self._last_lines) if self._last_lines else ""

    def _read_lines(self, stream: IO[bytes]) -> None:
        with stream:
            while raw := stream.readline(_LONGEST_LINE):
                line = raw.decode("utf-8", "replace").rstrip("\r\n")
                self._last_lines.append(line)
                self._forward(line)


def _to_stderr(name: str) -> Callable[[str], None]:
    def forward(line: str) -> None:
        sys.stderr.write(f"[{name}] {line}\n")

    return forward


def _terminate(process: subprocess.Popen[bytes], patience: float) -> None:
    """End ``process`` and everything in its process group; returns when it is reaped."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _describe(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
