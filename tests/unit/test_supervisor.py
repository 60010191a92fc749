"""A supervised child that dies, floods, refuses, never gets ready or will not end; and an owner that is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sglang_ssd.supervisor import PIPE, Backoff, Child, ChildState, Supervisor, Timing

FAST = Timing(first_delay=0.01, longest_delay=0.05, terminate=0.3, poll=0.01)
PATIENCE = 30.0

CHILD = textwrap.dedent(
    """
    import os, pathlib, signal, sys, time
    ready, starts, pipe, behaviour = sys.argv[1:5]
    with open(starts, "a") as file:
        file.write(f"{os.getpid()}\\n")
    print("hello from the child", flush=True)
    if behaviour == "refuse":
        print("this cannot work", file=sys.stderr)
        sys.exit(2)
    if behaviour == "die" or (behaviour == "die once" and len(open(starts).readlines()) == 1):
        print("something broke", file=sys.stderr)
        sys.exit(3)
    if behaviour == "never ready":
        time.sleep(600)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "flood":
        for number in range(20000):
            sys.stderr.write(f"line {number} " + "x" * 200 + "\\n")
    if behaviour == "one long line":
        sys.stderr.write("y" * 1_000_000)
        sys.stderr.flush()
    pathlib.Path(ready).touch()
    os.read(int(pipe), 1)
    """
)


class Bench:
    """Makes supervised children and waits for facts about them."""

    def __init__(self, directory: Path) -> None:
        self.ready = directory / "ready"
        self.starts = directory / "starts"
        self.lines: list[str] = []

    def supervise(self, behaviour: str, timing: Timing = FAST, **changes: object) -> Supervisor:
        command = (sys.executable, "-S", "-c", CHILD, str(self.ready), str(self.starts), PIPE, behaviour)
        child = Child("child", command, os.environ, self.ready, **changes)
        return Supervisor(child, timing=timing, forward=self.lines.append)

    def pids(self) -> list[int]:
        return [int(line) for line in self.starts.read_text().split()] if self.starts.exists() else []


def wait_until(fact: Callable[[], bool]) -> None:
    """Bounded wait for something that another process does."""
    waiting = threading.Event()
    for _ in range(int(PATIENCE / 0.01)):
        if fact():
            return
        waiting.wait(0.01)
    pytest.fail("it did not happen")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_a_child_becomes_ready_and_is_gone_after_stop(bench: Bench) -> None:
    supervisor = bench.supervise("serve")
    assert supervisor.state is ChildState.STARTING
    with supervisor:
        wait_until(lambda: supervisor.state is ChildState.UP)
        assert bench.pids() == [supervisor.pid]
    assert supervisor.state is ChildState.STOPPED
    assert not running(bench.pids()[0])
    assert bench.lines == ["hello from the child"]


def test_a_killed_child_is_started_again_and_readiness_is_observed_anew(bench: Bench) -> None:
    with bench.supervise("serve") as supervisor:
        wait_until(lambda: supervisor.state is ChildState.UP)
        first = bench.pids()[0]
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: len(bench.pids()) == 2 and supervisor.state is ChildState.UP)
        assert supervisor.pid == bench.pids()[1] != first


def test_death_shows_the_childs_last_lines(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with bench.supervise("die once") as supervisor:
        wait_until(lambda: supervisor.state is ChildState.UP)
    deaths = [record.getMessage() for record in caplog.records if "died" in record.getMessage()]
    assert len(deaths) == 1
    assert "exit status 3" in deaths[0]
    assert "something broke" in deaths[0]


def test_a_child_that_refuses_is_not_tried_again(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    supervisor = bench.supervise("refuse")
    supervisor.start()
    wait_until(lambda: supervisor.state is ChildState.REFUSED)
    supervisor._thread.join(PATIENCE)
    assert len(bench.pids()) == 1
    assert "this cannot work" in caplog.text
    supervisor.stop()


def test_a_child_that_keeps_dying_is_tried_again_until_stop(bench: Bench) -> None:
    with bench.supervise("die") as supervisor:
        wait_until(lambda: len(bench.pids()) >= 4)
    assert supervisor.state is ChildState.STOPPED
    assert not any(running(pid) for pid in bench.pids())


def test_a_child_that_ignores_sigterm_is_killed(bench: Bench) -> None:
    with bench.supervise("stubborn") as supervisor:
        wait_until(lambda: supervisor.state is ChildState.UP)
    assert not running(bench.pids()[0])


def test_a_flood_on_stderr_neither_blocks_the_child_nor_gets_lost(bench: Bench) -> None:
    with bench.supervise("flood") as supervisor:
        wait_until(lambda: supervisor.state is ChildState.UP)
        wait_until(lambda: len(bench.lines) == 20001)
    assert bench.lines[-1].startswith("line 19999 ")


def test_a_line_without_end_is_cut(bench: Bench) -> None:
    with bench.supervise("one long line") as supervisor:
        wait_until(lambda: supervisor.state is ChildState.UP)
        wait_until(lambda: sum(map(len, bench.lines)) > 1_000_000 - 8192)
    assert max(map(len, bench.lines)) <= 8192


def test_a_child_that_is_not_ready_by_the_deadline_is_ended_and_tried_again(bench: Bench) -> None:
    timing = Timing(first_delay=0.01, longest_delay=0.05, terminate=0.3, poll=0.01, ready_deadline=0.2)
    with bench.supervise("never ready", timing):
        wait_until(lambda: len(bench.pids()) >= 2)
        wait_until(lambda: not running(bench.pids()[0]))


def test_stop_during_the_delay_between_two_starts_does_not_wait_for_it(bench: Bench) -> None:
    timing = Timing(first_delay=3600, longest_delay=3600, poll=0.01)
    supervisor = bench.supervise("die", timing)
    supervisor.start()
    wait_until(lambda: supervisor.state is ChildState.DOWN)
    supervisor.stop()
    assert len(bench.pids()) == 1


def test_a_stale_ready_file_is_not_taken_for_readiness(bench: Bench) -> None:
    bench.ready.touch()
    with bench.supervise("never ready") as supervisor:
        wait_until(lambda: bool(bench.lines))
        assert not bench.ready.exists()
        assert supervisor.state is ChildState.STARTING


def test_many_lives_leave_no_file_descriptor(bench: Bench) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with bench.supervise("die"):
        wait_until(lambda: len(bench.pids()) >= 5)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_child_runs_on_its_cores_and_we_stay_on_ours(bench: Bench) -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    with bench.supervise("serve", cores=frozenset({core})) as supervisor:
        wait_until(lambda: supervisor.state is ChildState.UP)
        assert os.sched_getaffinity(supervisor.pid) == {core}
        assert os.sched_getaffinity(0) == before


def test_delays_double_up_to_a_bound_and_start_anew_after_a_settled_life() -> None:
    backoff = Backoff(Timing())
    assert [backoff.after(1.0) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff.after(61.0) == 0.5
    assert backoff.after(1.0) == 1


OWNER = textwrap.dedent(
    """
    import os, pathlib, sys, threading
    from sglang_ssd.supervisor import Child, PIPE, Supervisor
    code, ready, starts, behaviour = sys.argv[1:5]
    command = (sys.executable, "-S", "-c", code, ready, starts, PIPE, behaviour)
    with Supervisor(Child("child", command, os.environ, pathlib.Path(ready))):
        threading.Event().wait()
    """
)


@pytest.fixture
def owner(bench: Bench) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", OWNER, CHILD, str(bench.ready), str(bench.starts), "stubborn"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_the_child_ends_when_its_owner_is_killed(
    bench: Bench, owner: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    wait_until(bench.ready.exists)
    (child,) = bench.pids()
    owner.send_signal(number)
    owner.wait(PATIENCE)
    wait_until(lambda: not running(child))
