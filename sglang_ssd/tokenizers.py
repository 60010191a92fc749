"""Do two tokenizers give every token the same id? The fingerprint answers across processes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """A digest of the whole token-to-id map, equal exactly when the maps are equal.

    The size of the model's (padded) output layer is no part of it: 151,936 rows and 152,064 rows with the same
    151,669 tokens are the same tokenizer.
    """
    digest = hashlib.sha256()
    for token, index in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{index}\0{token}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def load_fingerprint(model_path: str, *, trust_remote_code: bool = False) -> str:
    """The fingerprint of the tokenizer beside a checkpoint; '' when there is none (``--skip-tokenizer-init``)."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return ""
    return fingerprint(tokenizer.get_vocab())
