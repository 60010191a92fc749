"""The command line: SGLang's flags and ours, and what the two become together."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_ssd.config import DEFAULT_NUM_STEPS, PREFIX, ConfigError, SSDConfig, check_num_steps

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

PROGRAM = "sglang-ssd"
ALGORITHM = "SSD"
CPU_MAX_TOTAL_TOKENS = 32768
CPU_MAX_RUNNING_REQUESTS = 32
_MODEL_FLAGS = ("--model-path", "--model")


@dataclass(frozen=True)
class Arguments:
    """A parsed command line. ``server`` is SGLang's own record, not yet resolved."""

    config: SSDConfig
    server: ServerArgs
    port_given: bool

    @property
    def speculates(self) -> bool:
        """Whether there is a draft at all."""
        return self.config.mode != "off"


def help_text() -> str:
    """One help for SGLang's flags and ours."""
    return _whole_parser().format_help()


def wants_help(argv: list[str]) -> bool:
    """Whether ``argv`` asks for help."""
    return "-h" in argv or "--help" in argv


def names_model(argv: list[str]) -> bool:
    """Whether ``argv``, or the configuration file that it names, says which model to serve."""
    return _has_flag(_with_config_file(argv), *_MODEL_FLAGS)


def parse(argv: list[str]) -> Arguments:
    """Both parts of ``argv``. Raises ConfigError; SGLang's own parser exits with its usage."""
    from sglang.srt.server_args import prepare_server_args

    merged = _with_config_file(argv)
    ours, rest = _own_parser().parse_known_args(merged)
    config = SSDConfig.from_arguments(ours)
    unknown = [part.partition("=")[0] for part in rest if part.startswith(PREFIX)]
    if unknown:
        raise ConfigError(f"There is no option {unknown[0]}: --help lists those of SSD at its end.")
    return Arguments(config, prepare_server_args(rest), port_given=_has_flag(rest, "--port"))


def complete(arguments: Arguments, *, on_cpu: bool) -> Arguments:
    """``arguments`` with our defaults where the command line says nothing. Raises ConfigError.

    Changes ``arguments.server`` in place, which SGLang allows until it resolves the record.
    """
    if on_cpu:
        _complete_for_cpu(arguments.server)
    _set_speculation(arguments)
    config = arguments.config
    if on_cpu and config.draft_max_total_tokens is None:
        config = config.replace(draft_max_total_tokens=CPU_MAX_TOTAL_TOKENS)
    return dataclasses.replace(arguments, config=config)


def attach(arguments: Arguments, endpoint: str | None) -> None:
    """Put our settings where the plugin finds them in the scheduler process: private attributes are pickled too."""
    arguments.server._ssd = {
        "config": dataclasses.asdict(arguments.config),
        "endpoint": endpoint,
        "target": arguments.server.model_path,
    }


def _complete_for_cpu(server: ServerArgs) -> None:
    server.device = server.device or "cpu"
    server.attention_backend = server.attention_backend or "torch_native"
    server.sleep_on_idle = True  # an idle SGLang polls, and the draft needs the core
    # Of either, SGLang's default is sized to the machine's whole memory.
    server.max_total_tokens = server.max_total_tokens or CPU_MAX_TOTAL_TOKENS
    server.max_running_requests = server.max_running_requests or CPU_MAX_RUNNING_REQUESTS


def _set_speculation(arguments: Arguments) -> None:
    server = arguments.server
    if not arguments.speculates:
        server.speculative_algorithm = server.speculative_draft_model_path = None
        server.speculative_num_steps = server.speculative_num_draft_tokens = None
        return
    num_steps = DEFAULT_NUM_STEPS if server.speculative_num_steps is None else server.speculative_num_steps
    check_num_steps(num_steps)
    if server.speculative_num_draft_tokens not in (None, num_steps + 1):
        raise ConfigError(
            f"--speculative-num-draft-tokens is always --speculative-num-steps + 1 (here {num_steps + 1}): leave it "
            "away or change one of the two."
        )
    server.speculative_algorithm = ALGORITHM
    server.speculative_num_steps, server.speculative_num_draft_tokens = num_steps, num_steps + 1
    server.speculative_eagle_topk = 1  # a chain


def _with_config_file(argv: list[str]) -> list[str]:
    """``argv`` with the file of ``--config`` written out, so that it may hold our options too."""
    if "--config" not in argv:
        return argv
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    merged: list[str] = ConfigArgumentMerger(_whole_parser()).merge_config_with_args(argv)
    return merged


def _own_parser() -> argparse.ArgumentParser:
    # Without abbreviations, which could swallow SGLang's flags.
    parser = argparse.ArgumentParser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    SSDConfig.add_arguments(parser)
    return parser


def _whole_parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Serve a model with Speculative Speculative Decoding. Without --model-path: a demo pair. "
        f"The lookahead K is --speculative-num-steps (default: {DEFAULT_NUM_STEPS}), the draft model "
        "--speculative-draft-model-path.",
    )
    ServerArgs.add_cli_args(parser)
    with contextlib.suppress(argparse.ArgumentError):  # the plugin may have added ours to SGLang's already
        SSDConfig.add_arguments(parser)
    return parser


def _has_flag(argv: list[str], *flags: str) -> bool:
    given: set[Any] = {part.partition("=")[0] for part in argv}
    return not given.isdisjoint(flags)
