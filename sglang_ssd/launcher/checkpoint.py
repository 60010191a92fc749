"""A model's name becomes a folder: the draft server reads folders only."""

from __future__ import annotations

from pathlib import Path

from sglang_ssd.config import ConfigError

_WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]


def local_checkpoint(model: str, revision: str | None) -> str:
    """The folder of ``model``, fetched (or found in the user's cache) when it is a Hugging Face name.

    Raises ConfigError when it is neither a folder nor can be fetched.
    """
    folder = Path(model).expanduser()
    if folder.exists():
        return str(folder)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(model, revision=revision, allow_patterns=_WANTED))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"The draft model {model} is no folder and cannot be fetched: {reason}") from error
