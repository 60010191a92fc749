"""GGUF to Hugging Face: a tiny Llama written the way llama.cpp writes it must come back bit by bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_ssd.demo import DemoError, pair
from sglang_ssd.demo.cache import find_problem
from sglang_ssd.demo.checkpoint import hf_name, unpermute, write_checkpoint
from sglang_ssd.demo.draft import content_id, join_draft, shipped_weights
from tests.models import make_llama

HEADS, KV_HEADS = 4, 2
TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"

GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    outside = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not name.startswith("model.layers."):
        return outside.get(name, "output.weight")
    layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{GGUF_PARTS[part]}.weight"


def _interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of Q and K rows, one row at a time: half ``p`` of pair ``i`` goes to ``2 * i + p``."""
    half = len(weight) // heads // 2
    result = np.empty_like(weight)
    for head in range(heads):
        for p in range(2):
            for i in range(half):
                result[(head * half + i) * 2 + p] = weight[(head * 2 + p) * half + i]
    return result


def _vocabulary() -> tuple[list[str], list[str], list[int]]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["Ċ Ċ", "Ġ Ġ", "h i", "Ġ hi"]
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<file_sep>",
        *alphabet,
        *(merge.replace(" ", "") for merge in merges),
    ]
    return tokens, merges, [3] * 4 + [1] * (len(tokens) - 4)


def _write_gguf(path: Path, source: Path, *, tokenizer: str = "smollm", architecture: str = "llama") -> Path:
    config, weights = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    tokens, merges, kinds = _vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, weight in weights.items():
        values = weight.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = _interleave(values, HEADS if "q_proj" in name else KV_HEADS)
        writer.add_tensor(_gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _rounded_llama(path: Path, *, tied: bool, **sizes: int) -> Path:
    """A tiny Llama whose float32 weights are bfloat16 numbers, so that a correct round trip changes nothing."""
    vocab_size = len(_vocabulary()[0])
    make_llama(path, seed=5, vocab_size=vocab_size, context_length=64, tied=tied, **sizes)
    weights = {name: weight.bfloat16().float() for name, weight in load_file(path / "model.safetensors").items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _logits(path: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(40)[None]).logits


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    source = _rounded_llama(tmp_path / "source", tied=True)
    (tmp_path / "converted").mkdir()
    write_checkpoint(_write_gguf(tmp_path / "a.gguf", source), tmp_path / "converted", progress=False)
    return tmp_path / "converted"


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_comes_back(tmp_path: Path, tied: bool) -> None:
    source, converted = _rounded_llama(tmp_path / "source", tied=tied), tmp_path / "converted"
    converted.mkdir()
    write_checkpoint(_write_gguf(tmp_path / "a.gguf", source), converted, progress=False)
    expected, weights = load_file(source / "model.safetensors"), load_file(converted / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(weight.dtype == torch.bfloat16 for weight in weights.values())
    assert all(torch.equal(weights[name].float(), expected[name]) for name in expected)
    assert torch.equal(_logits(converted), _logits(source))


def test_without_the_permutation_it_would_not(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
    assert np.array_equal(unpermute(_interleave(weight, HEADS), HEADS), weight)
    assert not np.array_equal(_interleave(weight, HEADS), weight)
    assert not np.array_equal(unpermute(_interleave(weight, HEADS), KV_HEADS), weight)


def test_quantised_blocks_are_de_quantised(tmp_path: Path) -> None:
    source, path = _rounded_llama(tmp_path / "source", tied=True), tmp_path / "a.gguf"
    original = gguf.GGUFWriter.add_tensor

    def quantise(writer: gguf.GGUFWriter, name: str, values: np.ndarray) -> None:
        kind = gguf.GGMLQuantizationType.Q4_1 if "ffn_up" in name else gguf.GGMLQuantizationType.F32
        original(writer, name, gguf.quantize(values, kind), raw_dtype=kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", quantise)
        _write_gguf(path, source)
    (tmp_path / "converted").mkdir()
    write_checkpoint(path, tmp_path / "converted", progress=False)
    name = "model.layers.0.mlp.up_proj.weight"
    ours, expected = (load_file(tmp_path / place / "model.safetensors")[name] for place in ("converted", "source"))
    error = (ours.float() - expected).abs()
    assert 0 < error.max() < 0.1
    assert error.mean() < 0.03


def test_the_tokenizer_splits_digits_and_knows_its_special_tokens(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    encoded = tokenizer.encode("<|im_start|>hi hi\n\n25  7<file_sep><|im_end|>")
    pieces = ["<|im_start|>", "hi", "Ġhi", "ĊĊ", "2", "5", "ĠĠ", "7", "<file_sep>", "<|im_end|>"]
    assert tokenizer.convert_ids_to_tokens(encoded) == pieces
    assert tokenizer.decode(encoded) == "<|im_start|>hi hi\n\n25  7<file_sep><|im_end|>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.apply_chat_template([{"content": "hi"}], tokenize=False) == "<|im_start|>hi<|im_end|>"


def test_generation_stops_at_the_end_of_a_turn(converted: Path) -> None:
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] == 2


def test_other_files_are_refused(tmp_path: Path) -> None:
    source = _rounded_llama(tmp_path / "source", tied=True)
    with pytest.raises(ValueError, match="holds a gpt2, not a llama"):
        write_checkpoint(_write_gguf(tmp_path / "a.gguf", source, architecture="gpt2"), tmp_path, progress=False)
    with pytest.raises(ValueError, match="is not SmolLM2's"):
        write_checkpoint(_write_gguf(tmp_path / "b.gguf", source, tokenizer="llama-bpe"), tmp_path, progress=False)
    with pytest.raises(ValueError, match=r"'blk\.0\.ffn_gate_exps\.weight' is no tensor of a Llama"):
        hf_name("blk.0.ffn_gate_exps.weight")


def test_a_draft_is_joined_with_the_targets_embedding(converted: Path, tmp_path: Path) -> None:
    weights = load_file(_rounded_llama(tmp_path / "draft", tied=True, layers=1) / "model.safetensors")
    embedding = load_file(converted / "model.safetensors")["model.embed_tokens.weight"]
    del weights["model.embed_tokens.weight"]
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, tmp_path / "draft.safetensors")
    joined = tmp_path / "joined"
    joined.mkdir()
    join_draft(tmp_path / "draft.safetensors", converted, joined)
    model = AutoModelForCausalLM.from_pretrained(joined)
    assert model.config.num_hidden_layers == 1
    assert torch.equal(model.lm_head.weight.bfloat16(), embedding)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight.float(), weights["model.layers.0.mlp.up_proj.weight"])
    assert AutoTokenizer.from_pretrained(joined).get_vocab() == AutoTokenizer.from_pretrained(converted).get_vocab()


def test_shipped_weights_are_found_and_named_by_content(tmp_path: Path) -> None:
    assert shipped_weights(tmp_path) is None
    (tmp_path / "layers.safetensors").write_bytes(b"a")
    found = shipped_weights(tmp_path)
    assert found == tmp_path / "layers.safetensors"
    first = content_id(found)
    (tmp_path / "token_map.pt").write_bytes(b"a")
    mapped = content_id(found)
    found.write_bytes(b"b")
    assert len({first, mapped, content_id(found)}) == 3


def test_without_shipped_weights_the_target_stands_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(pair, "shipped_weights", lambda: None)
    monkeypatch.setattr(pair, "_write_target", lambda directory, progress: (directory / "config.json").write_text("{}"))
    made = pair.demo_pair(progress=False)
    assert made.stand_in
    assert made.draft == made.target
    assert made.target.is_relative_to(tmp_path)
    assert "SmolLM2-135M-Instruct drafts for itself" in caplog.text


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sglang-ssd").write_text("a file is in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(
        DemoError,
        match=f"could not be made in {tmp_path}/sglang-ssd/demo .*(File exists|Not a directory).*XDG_CACHE_HOME",
    ):
        pair.demo_pair(progress=False)


def test_shipped_weights_become_the_draft(
    converted: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = tmp_path / "layers.safetensors"
    full = load_file(converted / "model.safetensors")
    save_file({name: weight for name, weight in full.items() if "layers.0" in name or "norm" in name}, weights)
    torch.save(torch.tensor([4, 9]), tmp_path / "token_map.pt")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(pair, "shipped_weights", lambda: weights)
    monkeypatch.setattr(
        pair, "_write_target", lambda directory, progress: shutil.copytree(converted, directory, dirs_exist_ok=True)
    )
    with caplog.at_level("INFO"):
        made = pair.demo_pair(progress=False)
    assert "distilled from SmolLM2-135M-Instruct" in caplog.text
    assert torch.load(made.draft / "token_map.pt").tolist() == [4, 9]
    assert not made.stand_in
    assert made.draft != made.target
    assert content_id(weights) in made.draft.name
    assert find_problem(made.draft) is None
