"""SmolLM2's byte-level BPE tokenizer, rebuilt from the metadata of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_CONTROL = 3  # gguf.TokenType.CONTROL


def write_tokenizer(metadata: dict[str, Any], directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises ValueError for another kind."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"a tokenizer of kind {kind} is not SmolLM2's")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # Digits first: "\n\n2" is a double newline and a digit, while the plain GPT-2 rule makes it two newlines.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[metadata["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[metadata["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[metadata["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        chat_template=metadata["tokenizer.chat_template"],
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
