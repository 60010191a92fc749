"""Tiny Llama checkpoints for tests, in Hugging Face form: random, a noisy copy, and one that always says the same.

Weights are wide (std 0.2 and more) and the vocabulary is about 1,000, so that a wrong KV entry changes the text:
models of the usual std 0.02 answer nearly the same whatever they attend to, and tests on them cannot fail.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor

PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3
SPECIAL = {PAD: "<pad>", BOS: "<s>", EOS: "</s>", UNKNOWN: "<unk>"}
STRUCTURE = (  # what schemas, tool calls and reasoning are written with: the last words of a vocabulary of 1,000
    "{", "}", "[", "]", ":", ",", "true", "false", '"a"', '"b"', '"name"', '"arguments"', '"parameters"', '"look"',
    "<think>", "</think>", "<tool_call>\n", "\n</tool_call>",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %} {{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} w4{% endif %}"
)


def make_llama(
    path: str | Path,
    *,
    seed: int,
    vocab_size: int = 1000,
    layers: int = 2,
    hidden: int = 64,
    std: float = 0.2,
    context_length: int = 512,
    tied: bool = False,
) -> Path:
    """A random Llama (4 heads, 2 KV heads, float32) with its tokenizer, written to ``path``, which is returned."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = _config(vocab_size, layers, hidden, context_length, tied)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * std
        for name, shape in _shapes(config).items()
    }
    _write(path, config, weights)
    _write_tokenizer(path, vocab_size, context_length)
    return path


def make_noisy_copy(source: str | Path, path: str | Path, *, noise: float, seed: int) -> Path:
    """The checkpoint of ``source`` with Gaussian noise of ``noise`` times each matrix's own std: a fair draft."""
    generator = torch.Generator().manual_seed(seed)

    def disturb(name: str, weight: Tensor) -> Tensor:
        if "norm" in name:
            return weight
        return weight + torch.randn(weight.shape, generator=generator) * weight.std() * noise

    return _rewrite(source, path, disturb)


def make_constant(source: str | Path, path: str | Path, *, token: int) -> Path:
    """A checkpoint with the shapes of ``source`` (untied) that predicts ``token`` whatever it reads.

    Attention and MLP add nothing, every embedding has a large first component, and only ``token``'s output row
    reads it.
    """

    def flatten(name: str, weight: Tensor) -> Tensor:
        weight = weight.clone()
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return weight.zero_()
        if name == "model.embed_tokens.weight":
            weight[:, 0] = 10.0
        if name == "lm_head.weight":
            weight.zero_()[token, 0] = 5.0
        return weight

    return _rewrite(source, path, flatten)


def _config(vocab_size: int, layers: int, hidden: int, context_length: int, tied: bool) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }


def _shapes(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    size = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, inner = size["hidden_size"], size["intermediate_size"]
    query, key = size["num_attention_heads"] * size["head_dim"], size["num_key_value_heads"] * size["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (size["vocab_size"], hidden)}
    for layer in range(size["num_hidden_layers"]):
        block = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (size["vocab_size"], hidden)
    return shapes


def _write(path: Path, config: dict[str, object], weights: dict[str, Tensor]) -> None:
    (path / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def _rewrite(source: str | Path, path: str | Path, change) -> Path:  # change: (name, weight) -> weight
    shutil.copytree(source, path, dirs_exist_ok=True)
    weights = load_file(Path(source) / "model.safetensors")
    changed = {name: change(name, weight).contiguous() for name, weight in weights.items()}
    save_file(changed, Path(path) / "model.safetensors", metadata={"format": "pt"})
    return Path(path)


def _write_tokenizer(path: Path, vocab_size: int, context_length: int) -> None:
    """Words ``w4 w5 ...`` between spaces, one token each; ids 0 to 3 are special, the last are STRUCTURE."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {SPECIAL.get(index, f"w{index}"): index for index in range(vocab_size)}
    if vocab_size >= 1000:
        vocabulary = {word: index for word, index in vocabulary.items() if index < vocab_size - len(STRUCTURE)}
        vocabulary |= {word: vocab_size - len(STRUCTURE) + i for i, word in enumerate(STRUCTURE)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=SPECIAL[UNKNOWN]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        unk_token=SPECIAL[UNKNOWN],
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)
