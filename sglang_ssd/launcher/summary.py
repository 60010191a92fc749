"""What the log says once the server answers: everything one wants to know, in one block."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from sglang_ssd import __version__
from sglang_ssd.launcher.arguments import Arguments
from sglang_ssd.launcher.placement import Placement


@dataclass(frozen=True)
class Running:
    """The facts of a running server."""

    arguments: Arguments
    placement: Placement
    endpoint: str | None
    draft_state: str
    stand_in: bool
    """The draft is the target itself, for want of a small one."""


def summary(running: Running) -> str:
    """Several lines, without a final newline."""
    rows = [("target", f"{running.arguments.server.model_path} on {running.placement.target_label}")]
    if running.arguments.speculates:
        rows += _speculation_rows(running)
    else:
        rows.append(("mode", "off: SGLang without speculation"))
    rows.append(("versions", f"sglang-ssd {__version__}, SGLang {importlib.metadata.version('sglang')}"))
    rows.append(("URL", running.arguments.server.url()))
    return "\n".join(["The server is ready."] + [f"    {name:<10}{value}" for name, value in rows])


def _speculation_rows(running: Running) -> list[tuple[str, str]]:
    server, config = running.arguments.server, running.arguments.config
    return [
        ("draft", _draft(running)),
        ("server", f"draft server {running.draft_state}, at {running.endpoint}"),
        ("mode", f"{config.mode}, K = {server.speculative_num_steps}, fan-out {config.fan_out}, wait {config.wait}"),
    ]


def _draft(running: Running) -> str:
    if running.arguments.config.endpoint is not None:
        return "chosen by its server"
    note = " (a stand-in: the target drafts for itself, which saves no time)" if running.stand_in else ""
    shared = ", shared with the target" if running.placement.shared_gpu else ""
    model = running.arguments.server.speculative_draft_model_path
    return f"{model} on {running.placement.draft_label}{shared}{note}"
