"""The draft server as the launcher runs it: its command line, environment and cores."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sglang_ssd import cpu
from sglang_ssd.launcher.arguments import Arguments
from sglang_ssd.launcher.placement import Placement
from sglang_ssd.supervisor import PIPE, Child

SOCKET_NAME = "draft.sock"
_DTYPES = {"float": "float32", "float32": "float32", "bfloat16": "bfloat16"}
"""SGLang's names for what the draft server can do too; with any other it keeps the checkpoint's own."""


def draft_child(arguments: Arguments, placement: Placement, directory: Path) -> Child:
    """The child that serves the draft model at ``directory``/draft.sock."""
    environment = placement.draft_environment(os.environ)
    environment["PYTHONUNBUFFERED"] = "1"
    if placement.draft_device == "cpu":
        environment.setdefault("OMP_NUM_THREADS", str(cpu.threads_per_process()))
    return Child(
        name="draft server",
        command=(sys.executable, "-m", "sglang_ssd.draft_server", *_options(arguments, placement, directory)),
        environment=environment,
        ready_path=directory / SOCKET_NAME,
        cores=placement.draft_cores,
    )


def endpoint_in(directory: Path) -> str:
    """The ZeroMQ endpoint of that child."""
    return f"ipc://{directory / SOCKET_NAME}"


def _options(arguments: Arguments, placement: Placement, directory: Path) -> list[str]:
    server, config = arguments.server, arguments.config
    options = {
        "--model-path": server.speculative_draft_model_path,
        "--endpoint": endpoint_in(directory),
        "--engine": config.draft_engine,
        "--device": placement.draft_device,
        "--dtype": _DTYPES.get(server.dtype),
        "--max-total-tokens": config.draft_max_total_tokens,
        "--max-sessions": server.max_running_requests,
        "--context-length": server.context_length,
        "--token-map": server.speculative_token_map,
        "--parent-pipe": PIPE,
    }
    return [part for flag, value in options.items() if value is not None for part in (flag, str(value))]
