"""Ports, private directories, cores, and processes that end with their parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ssd import processes
from sglang_ssd.processes import Port, private_directory, split_cores

HOST = "127.0.0.1"


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def test_a_reserved_port_is_reserved_once(free_port: int) -> None:
    port = Port.reserve(HOST, free_port)
    assert port is not None
    assert Port.reserve(HOST, free_port) is None
    port.release()
    port.release()
    again = Port.reserve(HOST, free_port)
    assert again is not None
    again.release()


def test_a_reserved_port_can_be_listened_on_by_its_owner(free_port: int) -> None:
    port = Port.reserve(HOST, free_port)
    assert port is not None
    with socket.create_server((HOST, free_port)):
        port.release()
        assert Port.reserve(HOST, free_port) is None


def test_the_next_free_port_is_found() -> None:
    with socket.create_server((HOST, 0)) as server:
        taken = server.getsockname()[1]
        port = Port.reserve_from(HOST, taken)
        assert port.number > taken
        port.release()


def test_a_reservation_ends_with_its_process(free_port: int) -> None:
    code = f"from sglang_ssd.processes import Port; import os; assert Port.reserve('{HOST}', {free_port}); os.abort()"
    subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.DEVNULL)
    port = Port.reserve(HOST, free_port)
    assert port is not None
    port.release()


def test_a_private_directory_is_private_and_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processes, "_directory_for_sockets", lambda: tmp_path)
    with private_directory() as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "draft.sock").touch()
    assert not path.exists()


def test_directories_of_dead_servers_are_removed_and_those_of_living_ones_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "_directory_for_sockets", lambda: tmp_path)
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    names = (f"sglang-ssd-{gone.pid}-x", f"sglang-ssd-{os.getpid()}-x", "sglang-ssd-demo-x", "sglang-ssd-12x-y")
    dead, alive, other, not_ours = (tmp_path / name for name in names)
    for path in (dead, alive, other, not_ours):
        path.mkdir()
    with private_directory():
        pass
    assert [path.exists() for path in (dead, alive, other, not_ours)] == [False, True, True, True]


def test_a_long_temporary_directory_still_gives_a_usable_socket_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with private_directory() as path, socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path / "draft.sock"))


@given(st.sets(st.integers(0, 200), min_size=1))
@settings(derandomize=True, deadline=None)
def test_cores_are_shared_out_completely_and_without_overlap(cores: set[int]) -> None:
    target, draft = split_cores(cores)
    assert target | draft == cores
    if len(cores) == 1:
        assert target == draft == cores
    else:
        assert not target & draft
        assert 0 <= len(target) - len(draft) <= 1


PARENT = textwrap.dedent(
    """
    import multiprocessing, os, signal, sys
    from tests.unit import test_processes
    if __name__ == "__main__":
        ready = multiprocessing.get_context("spawn").Event()
        child = multiprocessing.get_context("spawn").Process(target=getattr(test_processes, sys.argv[1]), args=(ready,))
        child.start()
        ready.wait()
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
)


def sleep_after_asking(ready: object) -> None:
    processes.die_with_parent()
    ready.set()  # type: ignore[attr-defined]
    signal.pause()


def ask_too_late(ready: object) -> None:
    """What SGLang's children do when the launcher dies while they import."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    ready.set()  # type: ignore[attr-defined]
    parent.join()
    while os.getppid() == parent.pid:
        pass
    processes.die_with_parent()
    processes.end_if_orphaned()
    signal.pause()


@pytest.mark.parametrize("behaviour", ["sleep_after_asking", "ask_too_late"])
def test_a_child_ends_when_its_parent_is_killed(behaviour: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen([sys.executable, str(script), behaviour], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        # The child inherits standard output: its end of file is the child's end.
        process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def test_a_process_that_did_not_ask_is_left_alone() -> None:
    processes.end_if_orphaned()


def test_every_process_that_loads_the_plugin_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative import spec_registry

    from sglang_ssd import plugin

    looked = []
    monkeypatch.setattr(processes, "end_if_orphaned", lambda: looked.append(True))
    monkeypatch.setattr(spec_registry, "get_spec", lambda _name: object())  # registered already: nothing else to do
    plugin.activate()
    assert looked == [True]
