"""A reduced output vocabulary: the tokens that a draft may propose, in SGLang's own file form.

SGLang reads ``--speculative-token-map`` with ``torch.load``: a list or a one-dimensional tensor of token ids. The draft
computes only those rows of its output layer. A bonus outside the map is a miss; nothing else changes.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from sglang_ssd.config import ConfigError

FILE_NAME = "token_map.pt"


def token_map_of(model_path: str, asked: str | None) -> str | None:
    """The map to use: the one that was asked for, or the one that lies in the draft's own folder."""
    own = Path(model_path) / FILE_NAME
    return asked or (str(own) if own.is_file() else None)


def load_token_map(path: str, vocab_size: int) -> Tensor:
    """The mapped ids, int64 [M], ascending. Raises ConfigError for what is no map of a vocabulary of that size."""
    try:
        ids: Tensor = torch.as_tensor(torch.load(path, weights_only=True, map_location="cpu"))
    except (OSError, RuntimeError, ValueError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(f"The token map {path} cannot be read: {error}") from error
    if ids.dim() != 1 or ids.is_floating_point() or len(ids) == 0:
        raise ConfigError(f"The token map {path} is no list of token ids.")
    ordered = ids.long().sort().values
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise ConfigError(f"The token map {path} names a token twice.")
    if ordered[0] < 0 or ordered[-1] >= vocab_size:
        raise ConfigError(f"The token map {path} goes beyond the draft's {vocab_size} tokens.")
    return ordered
