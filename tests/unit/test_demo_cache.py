"""A cached directory is whole or it is not there, whatever happens to the process that makes it."""

from __future__ import annotations

import fcntl
import multiprocessing
import shutil
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from sglang_ssd.demo.cache import MANIFEST, cache_home, find_problem, make_once


class Builder:
    """Counts its runs; what it writes tells which run it was."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, directory: Path) -> None:
        self.runs += 1
        (directory / "weights").write_text(f"run {self.runs}")
        (directory / "sub").mkdir()
        (directory / "sub" / "config").write_text("x")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "model"


def _entries(place: Path) -> list[str]:
    return sorted(path.name for path in place.parent.iterdir() if not path.name.endswith(".lock"))


def test_it_is_built_once(place: Path) -> None:
    builder = Builder()
    assert make_once(place, builder) == place
    assert make_once(place, builder) == place
    assert builder.runs == 1
    assert (place / "weights").read_text() == "run 1"
    assert _entries(place) == ["model"]


def test_nobody_sees_it_half_made_and_others_wait(place: Path) -> None:
    def build(directory: Path) -> None:
        assert directory != place
        assert not place.exists()
        with (place.parent / ".model.lock").open() as handle, pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (directory / "weights").write_text("x")

    make_once(place, build)
    assert find_problem(place) is None


def test_a_failed_build_leaves_nothing(place: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "weights").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_once(place, fail)
    assert _entries(place) == []
    make_once(place, Builder())
    assert find_problem(place) is None


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda place: (place / "weights").write_text("run 2"), "weights has changed"),
        (lambda place: (place / "weights").write_text("longer than before"), "weights has changed"),
        (lambda place: (place / "sub" / "config").unlink(), "config is missing"),
        (lambda place: (place / MANIFEST).unlink(), "manifest.json is missing"),
        (lambda place: (place / MANIFEST).write_text("{"), "manifest.json cannot be read"),
        (lambda place: (place / MANIFEST).write_text("[]"), "manifest.json cannot be read"),
        (shutil.rmtree, "manifest.json is missing"),
    ],
)
def test_a_damaged_directory_is_made_again(place: Path, damage, problem: str) -> None:
    builder = Builder()
    make_once(place, builder)
    damage(place)
    assert find_problem(place) == problem
    make_once(place, builder)
    assert builder.runs == 2
    assert find_problem(place) is None
    assert _entries(place) == ["model"]


def _stall(place: Path, started: Connection) -> None:
    def build(directory: Path) -> None:
        (directory / "weights").write_text("half")
        started.send("started")
        started.recv()  # for ever

    make_once(place, build)


def test_a_killed_process_leaves_neither_a_lock_nor_a_directory(place: Path) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_stall, args=(place, there))
    process.start()
    assert here.recv() == "started"
    assert len(_entries(place)) == 1
    process.kill()
    process.join()
    make_once(place, Builder())
    assert find_problem(place) is None
    assert _entries(place) == ["model"]


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_home() == tmp_path / "sglang-ssd"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_home() == tmp_path / ".cache" / "sglang-ssd"
