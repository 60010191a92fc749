"""The trained demo draft: its layers are package data, its embedding and its output layer are the target's."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_TOKEN_MAP = "token_map.pt"  # noqa: S105 - a file's name
_PACKAGE_DATA = Path(__file__).parent / "draft"
_EMBEDDING = "model.embed_tokens.weight"


def shipped_weights(folder: Path = _PACKAGE_DATA) -> Path | None:
    """The draft's weights (one safetensors file without the embedding) that this package carries, if any."""
    return next(iter(sorted(folder.glob("*.safetensors"))), None)


def content_id(weights: Path) -> str:
    """A short name of what is shipped, so that other weights or another map never meet an old cached checkpoint."""
    digest = hashlib.sha256(weights.read_bytes())
    if (token_map := weights.with_name(_TOKEN_MAP)).is_file():
        digest.update(token_map.read_bytes())
    return digest.hexdigest()[:12]


def join_draft(weights: Path, target: Path, directory: Path) -> None:
    """Fill ``directory`` with a checkpoint: the layers of ``weights``, all else from the checkpoint ``target``.

    The draft's config is the target's with another number of layers; both tie embedding and output layer. A token map
    beside ``weights`` comes along: the draft server finds it in ``directory``.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    tensors = load_file(weights)
    with safe_open(target / "model.safetensors", framework="pt") as source:
        tensors[_EMBEDDING] = source.get_tensor(_EMBEDDING)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["num_hidden_layers"] = len({name.split(".")[2] for name in tensors if name.startswith("model.layers.")})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in TOKENIZER_FILES:
        shutil.copyfile(target / name, directory / name)
    if (token_map := weights.with_name(_TOKEN_MAP)).is_file():
        shutil.copyfile(token_map, directory / _TOKEN_MAP)
