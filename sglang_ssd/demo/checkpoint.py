"""A Llama in a GGUF file as a Hugging Face checkpoint in bfloat16: weights, config and tokenizer.

transformers reads GGUF files too, but only with ``accelerate`` installed, and its tokenizer ignores the
pre-tokenizer that SmolLM2 names (digits one by one), which changes ids after spaces and newlines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_ssd.demo.tokenizer import write_tokenizer

_OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_checkpoint(gguf_file: Path, directory: Path, *, progress: bool) -> None:
    """Fill ``directory`` with the checkpoint of a ``llama`` GGUF file, de-quantised to bfloat16.

    Raises ValueError for another architecture or a tensor that a Llama does not have.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    if metadata["general.architecture"] != "llama":
        raise ValueError(f"{gguf_file.name} holds a {metadata['general.architecture']}, not a llama")
    weights = dict(_tensors(reader, metadata, progress=progress))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", _config(metadata, tied="lm_head.weight" not in weights))
    _write_json(directory / "generation_config.json", _special_ids(metadata))
    write_tokenizer(metadata, directory)


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor of a Llama. Raises ValueError."""
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _INSIDE_LAYER:
            return f"model.layers.{layer}.{_INSIDE_LAYER[part]}.weight"
    raise ValueError(f"{name!r} is no tensor of a Llama")


def unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Q or K rows [heads * head_dim, in] from GGUF's order to Hugging Face's.

    GGUF keeps the two halves of each rotary pair next to each other (x0 y0 x1 y1 ...), Hugging Face keeps all first
    halves and then all second halves of a head (x0 x1 ... y0 y1 ...).
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _tensors(reader: Any, metadata: dict[str, Any], *, progress: bool) -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401
    from gguf import dequantize
    from tqdm import tqdm

    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    for tensor in tqdm(reader.tensors, desc="De-quantising the demo model", unit="tensor", disable=not progress):
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = unpermute(values, heads[part])
        yield hf_name(tensor.name), torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)


def _config(metadata: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads = metadata["llama.attention.head_count"]
    hidden = metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "rms_norm_eps": float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"]))),
        "tie_word_embeddings": tied,
        **_special_ids(metadata),
    }


def _special_ids(metadata: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
