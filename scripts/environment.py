"""Make the virtual environment that this checkout needs: once, outside the checkout, shared by all checkouts.

    python3 scripts/environment.py path       where it is
    python3 scripts/environment.py install    make it if it is not there, and point it at this checkout

Its name carries a digest of the dependencies in pyproject.toml, so a change there makes a new one. One environment
takes 11 GB: older ones are deleted. A marker, written last, tells a complete one from one whose installation was
interrupted, and says which checkout it serves. Needs Python 3.11 or newer, and nothing else.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
EXTRAS = "bench,dev"
MARKER = "complete"
DECIDING_FIELDS = ("requires-python", "dependencies", "optional-dependencies")


def cache_root() -> Path:
    """The folder that holds our environments."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang-ssd"


def environment_path(checkout: Path, root: Path) -> Path:
    """Where the environment of ``checkout`` belongs."""
    with (checkout / "pyproject.toml").open("rb") as file:
        pyproject = tomllib.load(file)
    project = pyproject["project"]
    deciding = [sys.version, pyproject["build-system"], [project.get(name) for name in DECIDING_FIELDS]]
    digest = hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()
    return root / f"venv-{digest[:12]}"


def served_by(checkout: Path) -> str:
    """What the marker says of an environment that serves ``checkout`` as its pyproject.toml is now."""
    return f"{checkout} {hashlib.sha256((checkout / 'pyproject.toml').read_bytes()).hexdigest()}"


def others(environment: Path) -> list[Path]:
    """Environments of ours beside ``environment``."""
    return sorted(path for path in environment.parent.glob("venv-*") if path != environment)


def install(checkout: Path, environment: Path) -> None:
    """Make ``environment`` complete and let it run the code of ``checkout``."""
    environment.parent.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(environment.parent):
        for path in others(environment):
            _say(f"Deleting the older environment {path}.")
            shutil.rmtree(path)
        marker = environment / MARKER
        if not marker.exists():
            _create(checkout, environment)
        elif marker.read_text() != served_by(checkout):
            _point_at(checkout, environment)
        marker.write_text(served_by(checkout))


def _create(checkout: Path, environment: Path) -> None:
    _say(f"Making the environment {environment} (about 11 GB, some minutes).")
    shutil.rmtree(environment, ignore_errors=True)
    venv.create(environment, with_pip=True)
    _pip(environment, "--upgrade", "pip")
    # The last two let a later checkout be installed without asking a registry for its build tools.
    _pip(environment, "--editable", f"{checkout}[{EXTRAS}]", "hatchling>=1.27", "editables")


def _point_at(checkout: Path, environment: Path) -> None:
    _pip(environment, "--no-deps", "--no-build-isolation", "--editable", str(checkout))


def _pip(environment: Path, *arguments: str) -> None:
    command = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", *arguments]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)  # noqa: S603 - a fixed command


@contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def main(arguments: list[str]) -> int:
    """Run the command line in the module's docstring; returns the exit status."""
    environment = environment_path(CHECKOUT, cache_root())
    if arguments == ["path"]:
        sys.stdout.write(f"{environment}\n")
    elif arguments == ["install"]:
        install(CHECKOUT, environment)
    else:
        _say("usage: environment.py path | install")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
