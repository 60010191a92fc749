"""``python -m sglang_ssd.doctor``: is this machine ready to serve? Exit status 1, with the reasons, if it is not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sglang_ssd import __version__, cpu
from sglang_ssd.config import ConfigError
from sglang_ssd.launcher import checks


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ``problem``: why it keeps the server from starting, or None."""

    topic: str
    fact: str
    problem: str | None = None


def examine() -> list[Finding]:
    """Look at everything; a problem in one place does not hide the others."""
    return [
        Finding("python", platform.python_version()),
        Finding("sglang-ssd", __version__),
        _checked("sglang", _version("sglang"), checks.check_sglang_version),
        Finding("torch", _version("torch")),
        Finding("host", _host()),
        _checked("plugin", f"entry point {checks.PLUGIN_NAME}", checks.check_plugin_visible),
        _checked("hooks", "every SGLang symbol that we use is there", _check_symbols),
    ]


def report(findings: Iterable[Finding]) -> str:
    """One line a finding, then the verdict."""
    findings = list(findings)
    lines = [f"{finding.topic:<12}{finding.problem or finding.fact}" for finding in findings]
    problems = sum(finding.problem is not None for finding in findings)
    lines.append("ready" if problems == 0 else f"not ready: {problems} problem(s)")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the report to standard output; returns 1 when there is a problem."""
    findings = examine()
    sys.stdout.write(report(findings))
    return int(any(finding.problem is not None for finding in findings))


def _checked(topic: str, fact: str, check: Callable[[], None]) -> Finding:
    try:
        check()
    except (ConfigError, ImportError) as error:
        return Finding(topic, fact, f"{fact}: {error}")
    return Finding(topic, fact)


def _check_symbols() -> None:
    from sglang_ssd.plugin import check_compatibility

    checks.check_compatible(check_compatibility())


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _host() -> str:
    if not cpu.has_gpu():
        return f"CPU, {len(os.sched_getaffinity(0))} cores for us (SGLang runs with our kernel stand-in)"
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{len(names)} GPU(s): {', '.join(names)}"


if __name__ == "__main__":
    sys.exit(main())
