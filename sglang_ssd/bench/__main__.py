"""``python -m sglang_ssd.bench COMMAND``: measure, write it up, predict, look at single parts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

_COMMANDS = {
    "run": ("run", "measure off, sync and ssd on servers started here"),
    "report": ("report", "a page and plots from results"),
    "simulate": ("simulator.command", "a model of target, draft server and policy on recorded step times"),
    "profile": ("simulator.measured", "the machine of a run as a profile for the simulator"),
    "planners": ("simulator.planners", "hit rates of the planners at equal rows, on recorded rounds"),
    "record": ("simulator.record", "traces of the demo pair for the simulator"),
    "micro": ("micro", "the time of single parts, by pytest-benchmark"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of the command; 2 when there is no such command."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in _COMMANDS:
        lines = [f"    {name:<10}{what}" for name, (_, what) in _COMMANDS.items()]
        sys.stderr.write("\n".join(["usage: python -m sglang_ssd.bench COMMAND ...", *lines, ""]))
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    module = importlib.import_module(f"sglang_ssd.bench.{_COMMANDS[argv[0]][0]}")
    status: int = module.main(list(argv[1:]))
    return status


if __name__ == "__main__":
    sys.exit(main())
