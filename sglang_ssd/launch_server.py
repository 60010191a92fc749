"""Serve a model with SSD: SGLang's HTTP server, and a draft server as its supervised child.

    python -m sglang_ssd.launch_server [SGLang's flags] [--speculative-ssd-* flags]

Without ``--model-path`` it serves the demo pair. The guard at the end is needed: SGLang spawns its processes, and a
spawned process imports this module again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from sglang_ssd import cpu
from sglang_ssd.config import ConfigError
from sglang_ssd.launcher import arguments as command_line
from sglang_ssd.launcher import checks
from sglang_ssd.launcher.arguments import Arguments
from sglang_ssd.launcher.checkpoint import local_checkpoint
from sglang_ssd.launcher.draft import draft_child, endpoint_in
from sglang_ssd.launcher.placement import Placement, make_room, place
from sglang_ssd.launcher.summary import Running, summary
from sglang_ssd.processes import Port, private_directory
from sglang_ssd.supervisor import Supervisor

logger = logging.getLogger(__name__)

REFUSED, INTERRUPTED = 2, 130


@dataclass(frozen=True)
class Plan:
    """Everything that was decided before the first process starts."""

    arguments: Arguments
    placement: Placement
    stand_in: bool


def main(argv: list[str] | None = None) -> int:
    """Run the server until it is stopped; returns the exit status, 2 for settings that cannot work."""
    argv = sys.argv[1:] if argv is None else argv
    _set_threads()
    try:
        if command_line.wants_help(argv):
            sys.stdout.write(command_line.help_text())
            return 0
        _serve(_plan(argv))
    except ConfigError as error:
        sys.stderr.write(f"{command_line.PROGRAM}: {error}\n")
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _set_threads() -> None:
    """Before torch is imported, and for every child."""
    if not cpu.has_gpu():
        os.environ.setdefault("OMP_NUM_THREADS", str(cpu.threads_per_process()))


def _plan(argv: list[str]) -> Plan:
    """Check and decide everything. Raises ConfigError; nothing is running yet."""
    checks.check_plugin_visible()
    checks.check_sglang_version()
    argv, stand_in = _with_demo_pair(argv)
    arguments = command_line.parse(argv)
    checks.check_supported(arguments)
    checks.check_models(arguments)
    _load_plugin()
    _fetch_draft(arguments)
    arguments = command_line.complete(arguments, on_cpu=not cpu.has_gpu())
    placement = place(arguments.server, arguments.config.draft_device, _count_gpus())
    return Plan(_fit(arguments, placement), placement, stand_in)


def _load_plugin() -> None:
    from sglang.srt.plugins import load_plugins

    from sglang_ssd.plugin import check_compatibility

    checks.check_compatible(check_compatibility())
    load_plugins()
    checks.check_registered()


def _with_demo_pair(argv: list[str]) -> tuple[list[str], bool]:
    """``argv`` naming the demo pair where it names no model, and whether its draft is a stand-in."""
    if command_line.names_model(argv):
        return argv, False
    from sglang_ssd.demo import DemoError, demo_pair

    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    try:
        pair = demo_pair()
    except DemoError as error:
        raise ConfigError(str(error)) from error
    models = ["--model-path", str(pair.target), "--speculative-draft-model-path", str(pair.draft)]
    # First, so that what the command line says wins.
    return [*models, *argv], pair.stand_in


def _fetch_draft(arguments: Arguments) -> None:
    """SGLang fetches the target itself; our draft server wants a folder."""
    server = arguments.server
    if arguments.speculates and arguments.config.endpoint is None:
        server.speculative_draft_model_path = local_checkpoint(
            server.speculative_draft_model_path, server.speculative_draft_model_revision
        )


def _count_gpus() -> int:
    if not cpu.has_gpu():
        return 0
    import torch

    return torch.cuda.device_count()


def _fit(arguments: Arguments, placement: Placement) -> Arguments:
    if not (arguments.speculates and arguments.config.endpoint is None):
        return arguments
    limit = make_room(arguments.server, placement)
    if limit is None or arguments.config.draft_max_total_tokens is not None:
        return arguments
    return dataclasses.replace(arguments, config=arguments.config.replace(draft_max_total_tokens=limit))


def _serve(plan: Plan) -> None:
    """Start both processes at once, serve, and leave nothing running."""
    port = _reserve_port(plan.arguments)
    signal.signal(signal.SIGTERM, _exit_on_signal)  # until SGLang, which drains requests first, takes over
    with contextlib.ExitStack() as stack:
        stack.callback(port.release)
        stack.callback(_end_children)
        endpoint, supervisor = _start_draft(plan, stack)
        command_line.attach(plan.arguments, endpoint)
        if supervisor is not None and plan.placement.target_cores is not None:
            os.sched_setaffinity(0, plan.placement.target_cores)  # SGLang's processes inherit it
        _run_sglang(plan, lambda: _report(plan, endpoint, supervisor))


def _reserve_port(arguments: Arguments) -> Port:
    server = arguments.server
    port = Port.reserve(server.host, server.port)
    if port is not None:
        return port
    if arguments.port_given:
        raise ConfigError(f"Port {server.port} is in use: choose another with --port, or leave it away.")
    port = Port.reserve_from(server.host, server.port + 1)
    logger.info("Port %d is in use; serving on port %d.", server.port, port.number)
    server.port = port.number
    return port


def _start_draft(plan: Plan, stack: contextlib.ExitStack) -> tuple[str | None, Supervisor | None]:
    """The endpoint of the draft server, and its supervisor when it is our child."""
    config = plan.arguments.config
    if not plan.arguments.speculates:
        return None, None
    if config.endpoint is not None:
        return config.endpoint, None
    directory: Path = stack.enter_context(private_directory())
    if plan.placement.shared_gpu:
        logger.info("There is one GPU for both models: the draft shares %s.", plan.placement.draft_label)
    supervisor = Supervisor(draft_child(plan.arguments, plan.placement, directory))
    stack.enter_context(supervisor)
    return endpoint_in(directory), supervisor


def _run_sglang(plan: Plan, when_ready: Callable[[], None]) -> None:
    from sglang.srt.entrypoints.http_server import launch_server

    from sglang_ssd.api.status import install_routes

    install_routes()
    launch_server(plan.arguments.server, launch_callback=when_ready)


def _report(plan: Plan, endpoint: str | None, supervisor: Supervisor | None) -> None:
    state = "running elsewhere" if supervisor is None else supervisor.state.value
    logger.info("%s", summary(Running(plan.arguments, plan.placement, endpoint, state, plan.stand_in)))


def _end_children() -> None:
    """What SGLang itself does when its server ends in order; here also when it did not."""
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid(), include_parent=False)


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
