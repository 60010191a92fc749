"""Refusals: what cannot work is said in one sentence, before anything heavy starts."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ssd import tokenizers
from sglang_ssd.config import ConfigError
from sglang_ssd.launcher.arguments import ALGORITHM, Arguments
from sglang_ssd.support import check_settings

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

DISTRIBUTION = "sglang-ssd"
PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_NAME = "sglang_ssd"
WHITELIST_VARIABLE = "SGLANG_PLUGINS"


def check_plugin_visible() -> None:
    """Raises ConfigError unless SGLang's processes will find and load our plugin."""
    names = {entry.name for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP)}
    if PLUGIN_NAME not in names:
        raise ConfigError("SGLang cannot see this plugin: install the package (pip install -e . in its checkout).")
    allowed = {name.strip() for name in os.environ.get(WHITELIST_VARIABLE, "").split(",")} - {""}
    if allowed and PLUGIN_NAME not in allowed:
        raise ConfigError(f"{WHITELIST_VARIABLE} leaves this plugin out: add {PLUGIN_NAME} to it, or unset it.")


def check_sglang_version() -> None:
    """Raises ConfigError unless the installed SGLang is the one that this package is made for."""
    pinned, installed = pinned_sglang(), importlib.metadata.version("sglang")
    if pinned != installed:
        raise ConfigError(f"This package is made for SGLang {pinned}, not {installed}: pip install sglang=={pinned}.")


def pinned_sglang() -> str:
    """The SGLang version that our own metadata asks for."""
    for requirement in importlib.metadata.requires(DISTRIBUTION) or ():
        found = re.match(r"sglang\s*==\s*([\w.]+)", requirement)
        if found:
            return found.group(1)
    raise ConfigError(f"The metadata of {DISTRIBUTION} pins no SGLang version: install the package again.")


def check_compatible(problems: list[str]) -> None:
    """Raises ConfigError when the compatibility check found ``problems``."""
    if problems:
        raise ConfigError(f"This SGLang cannot carry the plugin: {' '.join(problems)}")


def check_registered() -> None:
    """Raises ConfigError unless the loaded plugin registered its algorithm: SGLang only logs a plugin that raises."""
    from sglang.srt.speculative.spec_registry import get_spec

    if get_spec(ALGORITHM) is None:
        raise ConfigError("The plugin did not load; the log above says why.")


def check_supported(arguments: Arguments) -> None:
    """Raises ConfigError for settings that speculation does not support yet. Mode ``off`` supports all of SGLang's."""
    if not arguments.speculates:
        return
    server = arguments.server
    if server.speculative_algorithm not in (None, ALGORITHM):
        raise ConfigError(
            f"--speculative-algorithm {server.speculative_algorithm} is not ours: leave it away, or use `sglang serve`."
        )
    check_settings(server)


def check_models(arguments: Arguments) -> None:
    """Raises ConfigError unless both models are there and speak the same tokens."""
    server = arguments.server
    _check_path("--model-path", server.model_path)
    if not arguments.speculates:
        return
    draft = server.speculative_draft_model_path
    if draft is None and arguments.config.endpoint is not None:
        return  # the draft server that runs already has a model; the handshake compares the tokens
    if draft is None:
        raise ConfigError(
            "Name the draft model with --speculative-draft-model-path, or turn SSD off with --speculative-ssd-mode off."
        )
    _check_path("--speculative-draft-model-path", draft)
    if not server.skip_tokenizer_init:
        _check_tokenizers(server)


def _check_path(flag: str, model: str) -> None:
    looks_local = model.startswith(("/", "./", "../", "~"))
    path = Path(model).expanduser()
    if looks_local and not path.exists():
        raise ConfigError(f"{flag}: there is nothing at {model}.")
    if path.is_dir() and not (path / "config.json").exists() and not any(path.glob("*.gguf")):
        raise ConfigError(f"{flag}: {model} is not a model directory, it has no config.json.")


def _check_tokenizers(server: ServerArgs) -> None:
    """Compares the token-to-id maps; padded output layers do not matter."""
    target, draft = (
        tokenizers.load_fingerprint(path, trust_remote_code=server.trust_remote_code)
        for path in (server.tokenizer_path or server.model_path, server.speculative_draft_model_path)
    )
    if target and draft and target != draft:
        raise ConfigError(
            f"The draft {server.speculative_draft_model_path} has another tokenizer than the target: choose a draft "
            "of the target's family, whose tokens have the same ids."
        )
