"""Nothing outlives its parent, and no two servers meet: deaths, ports, cores and private directories.

Plain Python, so that every process may import it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2  # linux/prctl.h
DIRECTORY_PREFIX = "sglang-ssd-"
LONGEST_DIRECTORY = 64
PORTS_TO_TRY = 1000


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies. First thing in a child; no-op outside Linux.

    The parent is the thread that started the child: a thread that ends takes its children with it.
    """
    if _on_linux() and _prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def end_if_orphaned() -> None:
    """End a spawned process that asked to die with its parent when the parent had died already.

    SGLang's children ask (``kill_itself_when_parent_died``), but only after seconds of imports, and the kernel
    signals deaths to come, not past ones. Called where SGLang loads plugins, which is right after they asked. Does
    nothing in a process that did not ask, such as the launcher or a program of the user's.
    """
    parent = multiprocessing.parent_process()
    if not _on_linux() or parent is None:
        return
    asked = ctypes.c_int(0)
    _prctl(PR_GET_PDEATHSIG, ctypes.byref(asked))
    if asked.value == signal.SIGKILL and os.getppid() != parent.pid:
        os.kill(os.getpid(), signal.SIGKILL)


def _on_linux() -> bool:
    return sys.platform.startswith("linux")


def _prctl(option: int, argument: object) -> int:
    return int(ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0))


@contextmanager
def private_directory() -> Iterator[Path]:
    """A directory that only this user may enter (0700), for sockets; removed afterwards.

    Its name carries our pid, so that what a killed server left behind is recognised and removed by the next one.
    """
    parent = _directory_for_sockets()
    _remove_abandoned_directories(parent)
    path = Path(tempfile.mkdtemp(prefix=f"{DIRECTORY_PREFIX}{os.getpid()}-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _directory_for_sockets() -> Path:
    """The temporary directory, or /tmp where that one's name is too long for a Unix socket's address (107 bytes)."""
    usual = Path(tempfile.gettempdir())
    return usual if len(os.fsencode(usual)) <= LONGEST_DIRECTORY else Path("/tmp")  # noqa: S108 - mkdtemp inside it


def _remove_abandoned_directories(parent: Path) -> None:
    for path in parent.glob(f"{DIRECTORY_PREFIX}[0-9]*-*"):
        pid = path.name.removeprefix(DIRECTORY_PREFIX).partition("-")[0]
        if pid.isdecimal() and not _exists(int(pid)) and path.lstat().st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)  # follows no link


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class Port:
    """A TCP port that no other launcher takes while this object lives, although nobody listens on it yet.

    SGLang binds its port after the models have loaded. Until then another launcher would find it free; an abstract
    Unix socket of the same number marks it as taken. The kernel drops the mark with the process.
    """

    def __init__(self, number: int, mark: socket.socket) -> None:
        self.number = number
        self._mark = mark

    @classmethod
    def reserve(cls, host: str, number: int) -> Port | None:
        """Port ``number`` on ``host``; None when a server listens there or another launcher has reserved it."""
        mark = socket.socket(socket.AF_UNIX)
        try:
            mark.bind(f"\0{DIRECTORY_PREFIX}port-{number}")
            _check_bindable(host, number)
        except OSError:
            mark.close()
            return None
        return cls(number, mark)

    @classmethod
    def reserve_from(cls, host: str, first: int) -> Port:
        """The first port from ``first`` on that can be reserved. Raises OSError when there is none."""
        for number in range(first, first + PORTS_TO_TRY):
            port = cls.reserve(host, number)
            if port is not None:
                return port
        raise OSError(f"no free port between {first} and {first + PORTS_TO_TRY - 1} on {host}")

    def release(self) -> None:
        """Give the port back; safe to call twice."""
        self._mark.close()


def _check_bindable(host: str, number: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # As the HTTP server binds: connections of an earlier server that linger do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def split_cores(cores: set[int]) -> tuple[set[int], set[int]]:
    """The target's and the draft's share of ``cores``: disjoint halves, or the same single core for both."""
    ordered = sorted(cores)
    if len(ordered) < 2:
        return set(cores), set(cores)
    middle = (len(ordered) + 1) // 2
    return set(ordered[:middle]), set(ordered[middle:])
