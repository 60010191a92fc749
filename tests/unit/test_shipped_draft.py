"""The draft that this package carries: its files, and that they join with a target of SmolLM2's shape and speak."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_ssd.demo.draft import TOKENIZER_FILES, join_draft, shipped_weights
from sglang_ssd.draft_server.engine import Rows
from sglang_ssd.draft_server.engine_torch import TorchEngine
from sglang_ssd.draft_server.settings import DraftSettings
from sglang_ssd.draft_server.token_map import load_token_map

VOCAB, HIDDEN = 49152, 576
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "head_dim": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def weights():
    found = shipped_weights()
    assert found is not None, "the package carries no draft"
    return found


def test_what_is_shipped(weights):
    folder = weights.parent
    assert sum(file.stat().st_size for file in folder.iterdir()) < 32 * 2**20
    tensors = load_file(weights)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert not any("embed" in name or "lm_head" in name for name in tensors)
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert len(load_token_map(str(folder / "token_map.pt"), VOCAB)) == 16384
    card = (folder / "MODEL_CARD.md").read_text()
    assert "Apache-2.0" in card
    assert "SmolLM2-135M-Instruct" in card


def test_it_joins_with_a_target_and_speaks(weights, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(CONFIG))
    for name in TOKENIZER_FILES:
        (target / name).write_text("{}")
    embedding = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1)).mul(0.1).bfloat16()
    save_file({"model.embed_tokens.weight": embedding}, target / "model.safetensors")
    joined = tmp_path / "joined"
    joined.mkdir()
    join_draft(weights, target, joined)

    settings = DraftSettings(model_path=str(joined), endpoint="tcp://127.0.0.1:5555", max_total_tokens=256)
    engine = TorchEngine(settings.for_engine())
    three = np.arange(3)
    found = engine.decode(
        Rows(three, 0 * three, 100 + three, 1 + three, np.zeros(3, np.float32), np.zeros(3, np.int64))
    )
    mapped = set(load_token_map(str(weights.with_name("token_map.pt")), VOCAB).tolist())
    assert set(found.ids.flatten().tolist()) <= mapped
    assert np.isfinite(found.scores).all()
    assert len(mapped) == 16384
