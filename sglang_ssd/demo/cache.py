"""Directories that are made once: whole or not there, also when two processes make one at the same time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_UNFINISHED = ".making-"

Build: TypeAlias = Callable[[Path], None]


def cache_home() -> Path:
    """Where this user's caches of ours are: ``$XDG_CACHE_HOME/sglang-ssd``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "sglang-ssd"


def make_once(directory: Path, build: Build) -> Path:
    """``directory``, made by ``build(path)`` unless it stands already and is what its manifest says.

    ``build`` fills an empty directory beside it, which is renamed when it is complete, so that no process ever sees
    half of it. Only one process builds at a time; the others wait and use the result. What a killed process
    left is removed. An error of ``build`` passes through and leaves nothing behind.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_name(f".{directory.name}.lock")):
        problem = find_problem(directory)
        if problem is None:
            return directory
        if directory.exists():
            logger.warning("%s is damaged (%s) and is made again.", directory, problem)
        for leftover in directory.parent.glob(f"{_UNFINISHED}{directory.name}-*"):
            shutil.rmtree(leftover)
        _build_and_rename(directory, build)
    return directory


def find_problem(directory: Path) -> str | None:
    """Why ``directory`` cannot be used; None when every file has the size and the SHA-256 of the manifest."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        for name, expected in manifest.items():
            if _describe(directory / name) != expected:
                return f"{name} has changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return None


def _build_and_rename(directory: Path, build: Build) -> None:
    unfinished = Path(tempfile.mkdtemp(prefix=f"{_UNFINISHED}{directory.name}-", dir=directory.parent))
    try:
        build(unfinished)
        described = {str(file.relative_to(unfinished)): _describe(file) for file in sorted(_files(unfinished))}
        (unfinished / MANIFEST).write_text(json.dumps(described, indent=2) + "\n")
        unfinished.chmod(0o755)  # mkdtemp makes it private
        if directory.exists():
            # A model that is being served from it keeps its mapped files.
            shutil.rmtree(directory)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file())


def _describe(file: Path) -> dict[str, int | str]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the kernel drops it when the process dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
