"""Every ``--speculative-ssd-*`` option, declared once: the command line, its help and the checks follow from it.

K is SGLang's own ``--speculative-num-steps`` and the draft model its ``--speculative-draft-model-path``; the
options here are what SGLang does not have.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field, fields
from typing import Any

from sglang_ssd.policy.planners import PLANNERS

PREFIX = "--speculative-ssd-"
DEFAULT_NUM_STEPS = 4
MAX_NUM_STEPS = 64
MAX_SUPPORT = 1024


class ConfigError(ValueError):
    """A setting that cannot work; the message is one sentence that says what to do."""


def _option(default: Any, help_text: str, *, choices: tuple[str, ...] = ()) -> Any:  # noqa: ANN401
    return field(default=default, metadata={"help": help_text, "choices": choices})


@dataclass(frozen=True)
class SSDConfig:
    """The options of one server, checked when made. Raises ConfigError."""

    mode: str = _option(
        "ssd",
        "ssd: prepare speculations while the target verifies. sync: draft only after the outcome, which is "
        "ordinary speculative decoding on the same two devices. off: SGLang without speculation.",
        choices=("ssd", "sync", "off"),
    )
    wait: str = _option(
        "auto",
        "auto: answer an outcome with what is ready or finish the branch, whichever is worth more. full: answer "
        "only when the whole tree stands, as the paper does (repeatable, for tests).",
        choices=("auto", "full"),
    )
    fallback: str = _option(
        "auto",
        "What answers an outcome that was not prepared. auto: what gives most tokens per second for so many missed "
        "rows. jit: draft it now. ngram: what the text said last time after the same tokens. none: no drafts.",
        choices=("auto", "jit", "ngram", "none"),
    )
    lookahead: str = _option(
        "auto",
        "auto: verify as many draft tokens, at most --speculative-num-steps, as give most tokens per second at the "
        "present batch size (none, if that is faster). fixed: always --speculative-num-steps.",
        choices=("auto", "fixed"),
    )
    planner: str = _option(
        "confidence",
        "Which outcomes are prepared. confidence: by the draft's own probabilities. measured: by counts. geometric: by "
        "the paper's theorem. Baselines: uniform, and full (full acceptance only).",
        choices=tuple(PLANNERS),
    )
    verify: str = _option(
        "coupled",
        "coupled: the target draws every token from noise that the draft shares, and accepts what agrees. rejection: "
        "the paper's rule, draft tokens sampled from q and accepted with probability min(1, p/q). Both are exact.",
        choices=("coupled", "rejection"),
    )
    rejection_support: int = _option(
        64, "Tokens that a draft token is sampled from at most, in rejection mode; their probabilities travel with it."
    )
    saguaro_c: float = _option(
        1.0,
        "Weight, 0 to 1, of the draft's likeliest tokens in rejection mode: less lowers acceptance and raises hits.",
    )
    fan_out: int = _option(12, "Branches prepared per request and round, spread over the outcomes.")
    endpoint: str | None = _option(
        None,
        "ZeroMQ endpoint of a draft server that runs already (ipc:// or loopback tcp://). Default: start one.",
    )
    draft_engine: str = _option(
        "sglang",
        "What runs the draft model. sglang: any model that SGLang loads. torch: a plain Llama in torch.",
        choices=("sglang", "torch"),
    )
    draft_device: str | None = _option(
        None, "Device of the draft server. Default: the GPU after the target's last one, else cpu."
    )
    draft_max_total_tokens: int | None = _option(
        None, "Tokens of KV that the draft server may hold. Default: sized from memory, 32768 on a CPU."
    )
    deadline_ms: float | None = _option(
        None, "Longest wait for a speculation, in milliseconds. Default: follows the measured round trips."
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            choices, value = option.metadata["choices"], getattr(self, option.name)
            if choices and value not in choices:
                raise ConfigError(f"{_flag(option.name)} must be one of {', '.join(choices)}; got {value!r}.")
        if self.fan_out < 1:
            raise ConfigError(f"{_flag('fan_out')} must be at least 1; got {self.fan_out}.")
        if not 0.0 <= self.saguaro_c <= 1.0:
            raise ConfigError(f"{_flag('saguaro_c')} must be between 0 and 1; got {self.saguaro_c}.")
        if not 1 <= self.rejection_support <= MAX_SUPPORT:
            raise ConfigError(
                f"{_flag('rejection_support')} must be between 1 and {MAX_SUPPORT}; got {self.rejection_support}."
            )
        if self.deadline_ms is not None and self.deadline_ms <= 0:
            raise ConfigError(f"{_flag('deadline_ms')} must be positive; got {self.deadline_ms}.")
        if self.draft_max_total_tokens is not None and self.draft_max_total_tokens < 256:
            raise ConfigError(f"{_flag('draft_max_total_tokens')} must be at least 256.")
        if self.endpoint is not None:
            check_endpoint(self.endpoint)

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add every option to ``parser`` under the heading SSD."""
        group = parser.add_argument_group("SSD")
        for option in fields(SSDConfig):
            group.add_argument(
                _flag(option.name),
                dest=_destination(option.name),
                type=_value_type(option),
                default=option.default,
                choices=option.metadata["choices"] or None,
                help=option.metadata["help"] + _default_note(option.default),
            )

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> SSDConfig:
        """The config of parsed arguments. Raises ConfigError."""
        return cls(**{option.name: getattr(arguments, _destination(option.name)) for option in fields(cls)})

    def to_arguments(self) -> list[str]:
        """The command line that makes this config again; defaults are left out."""
        given = ((o.name, getattr(self, o.name)) for o in fields(self) if getattr(self, o.name) != o.default)
        return [part for name, value in given for part in (_flag(name), str(value))]

    def replace(self, **changes: object) -> SSDConfig:
        """A copy with ``changes``, checked again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def check_num_steps(num_steps: int) -> None:
    """Raises ConfigError unless ``num_steps`` (K) is one that we serve."""
    if not 1 <= num_steps <= MAX_NUM_STEPS:
        raise ConfigError(f"--speculative-num-steps must be between 1 and {MAX_NUM_STEPS}; got {num_steps}.")


def check_endpoint(endpoint: str) -> None:
    """Raises ConfigError unless ``endpoint`` is ``ipc://`` or ``tcp://`` on loopback."""
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    if endpoint.startswith("tcp://") and host in {"127.0.0.1", "localhost", "[::1]"}:
        return
    raise ConfigError(f"{endpoint!r} is not an endpoint we may use: give ipc:///path or tcp://127.0.0.1:PORT.")


def _flag(name: str) -> str:
    return PREFIX + name.replace("_", "-")


def _default_note(default: object) -> str:
    """Nothing for None: the help says then what happens instead."""
    return "" if default is None else f" (default: {default})"


def _destination(name: str) -> str:
    return f"speculative_ssd_{name}"


def _value_type(option: dataclasses.Field[Any]) -> type:
    by_annotation = {"int": int, "int | None": int, "float": float, "float | None": float}
    return by_annotation.get(str(option.type), str)
