"""The draft server's own options: declared once, checked before anything heavy is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from sglang_ssd.config import ConfigError, check_endpoint
from sglang_ssd.draft_server.engine import EngineSettings

_CANDIDATES = 16
"""Best next tokens kept per node: the most candidates that one outcome can have."""


def _option(help_text: str, default: Any = MISSING, choices: tuple[str, ...] = ()) -> Any:  # noqa: ANN401
    return field(default=default, metadata={"help": help_text, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """``python -m sglang_ssd.draft_server``. Raises ConfigError."""

    model_path: str = _option("Folder of the draft model's checkpoint.")
    endpoint: str = _option("Where to listen: ipc:///path or tcp://127.0.0.1:PORT.")
    engine: str = _option(
        "What runs the model: any that SGLang loads, or Llama in plain torch.", "sglang", ("sglang", "torch")
    )
    device: str = _option("Device of the model, as torch names it.", "cpu")
    dtype: str = _option("Weights and KV; auto is the checkpoint's.", "auto", ("auto", "float32", "bfloat16"))
    max_total_tokens: int = _option("KV slots, in tokens.", 32768)
    max_sessions: int = _option("Requests drafted for at the same time.", 64)
    max_rows: int | None = _option(
        "Block table rows: one for each session, the rest for branches. Default: 16 for each session, at most 1024.",
        None,
    )
    context_length: int | None = _option("Longest text drafted for. Default: the checkpoint's.", None)
    token_map: str | None = _option(
        "File of the only tokens to propose, as SGLang's --speculative-token-map. "
        "Default: token_map.pt of the model's folder, if there is one.",
        None,
    )
    parent_pipe: int | None = _option("File descriptor whose end means that the process that started us is gone.", None)

    def __post_init__(self) -> None:
        for option in fields(self):
            choices, value = option.metadata["choices"], getattr(self, option.name)
            if choices and value not in choices:
                raise ConfigError(f"{_flag(option.name)} must be one of {', '.join(choices)}; got {value!r}.")
        check_endpoint(self.endpoint)
        if not (Path(self.model_path) / "config.json").is_file():
            raise ConfigError(f"--model-path {self.model_path} is no checkpoint: it has no config.json.")
        if self.token_map is not None and not Path(self.token_map).is_file():
            raise ConfigError(f"--token-map {self.token_map} is no file.")
        for name, least in (("max_total_tokens", 256), ("max_sessions", 1), ("max_rows", 2), ("context_length", 8)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{_flag(name)} must be at least {least}; got {value}.")

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> DraftSettings:
        """The settings of a command line; argparse exits on what it cannot read."""
        parser = argparse.ArgumentParser(
            prog="python -m sglang_ssd.draft_server", description="Draft for SGLang servers that run with SSD."
        )
        for option in fields(cls):
            parser.add_argument(
                _flag(option.name),
                required=option.default is MISSING,
                default=None if option.default is MISSING else option.default,
                type=int if "int" in str(option.type) else str,
                choices=option.metadata["choices"] or None,
                help=f"{option.metadata['help']} (default: %(default)s)",
            )
        return cls(**vars(parser.parse_args(arguments)))

    def for_engine(self) -> EngineSettings:
        """What the engine is made of."""
        from sglang_ssd.draft_server.token_map import token_map_of  # torch: not before the settings are checked

        return EngineSettings(
            model_path=self.model_path,
            device=self.device,
            dtype=self.dtype,
            slots=self.max_total_tokens,
            rows=self.max_rows or min(1024, 16 * self.max_sessions),
            context_length=self.context_length,
            candidates=_CANDIDATES,
            token_map=token_map_of(self.model_path, self.token_map),
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
