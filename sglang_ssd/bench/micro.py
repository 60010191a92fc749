"""``python -m sglang_ssd.bench micro``: tests/bench of a checkout, by pytest-benchmark; arguments go to pytest."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "bench"
_SHOWN = (
    "--benchmark-only",
    "--benchmark-columns=min,median,rounds",
    "--benchmark-time-unit=us",
    "--benchmark-group-by=func",
    "--benchmark-sort=fullname",
)


def main(argv: Sequence[str]) -> int:
    """The exit status; 2 without a checkout or without pytest-benchmark."""
    try:
        import pytest
        import pytest_benchmark  # noqa: F401 - the plugin must be there
    except ImportError:
        sys.stderr.write("micro needs pytest and pytest-benchmark: install the extras bench and dev.\n")
        return 2
    if not FOLDER.is_dir():
        sys.stderr.write("micro runs from a checkout: the installed package has no tests/bench.\n")
        return 2
    return int(pytest.main([str(FOLDER), *_SHOWN, "--timeout=600", *argv]))
