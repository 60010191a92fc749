"""The torch engine against Hugging Face, token by token, in every way that the draft server uses it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from sglang_ssd.draft_server.engine import EngineSettings, Rows
from sglang_ssd.draft_server.engine_torch import TorchEngine, UnsupportedModel
from sglang_ssd.draft_server.rope import UnknownRope
from tests.models import make_llama

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def ints(*values):
    return np.array(values, dtype=np.int64)


def rows_of(rows, positions, tokens, slots):
    count = len(tokens)
    return Rows(
        ints(*rows),
        ints(*positions),
        ints(*tokens),
        ints(*slots),
        np.zeros(count, np.float32),
        np.zeros(count, np.int64),
    )


def hugging_face(path, tokens):
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return model(torch.tensor([tokens])).logits[0]


def amend(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(4, 1000, (60,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("variant", ["untied", "tied", "llama3", "linear"])
def test_logits_equal_hugging_face(tmp_path, prompt, variant):
    path = make_llama(tmp_path, seed=1, tied=variant == "tied")
    if variant == "llama3":
        amend(path, rope_parameters=LLAMA3)
    if variant == "linear":
        amend(path, rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 2.0})
    engine = TorchEngine(EngineSettings(str(path), slots=200, rows=4))
    want = hugging_face(path, prompt)
    engine.extend(0, 0, ints(*prompt[:20]), np.arange(101, 121))
    engine.extend(0, 20, ints(*prompt[20:33]), np.arange(40, 53))
    alone = engine.logits(rows_of([0], [33], [prompt[33]], [7]))
    rest = range(34, 60)  # many tokens of one sequence in one forward
    together = engine.logits(rows_of([0] * 26, rest, prompt[34:], range(60, 86)))
    torch.testing.assert_close(torch.cat([alone, together]), want[33:], atol=1e-4, rtol=0)


def test_branches_share_a_prefix_and_do_not_see_each_other(tmp_path, prompt):
    path = make_llama(tmp_path, seed=2)
    engine = TorchEngine(EngineSettings(str(path), slots=200, rows=4))
    engine.extend(0, 0, ints(*prompt[:30]), np.arange(1, 31))
    engine.fork(ints(0, 0), ints(30, 12), ints(1, 2))
    engine.decode(rows_of([1, 2], [30, 12], [11, 12], [31, 32]))
    got = engine.logits(rows_of([1, 2], [31, 13], [21, 22], [33, 34]))
    for row, text in enumerate([[*prompt[:30], 11, 21], [*prompt[:12], 12, 22]]):
        torch.testing.assert_close(got[row], hugging_face(path, text)[-1], atol=1e-4, rtol=0)


def test_a_wrong_slot_shows(tmp_path, prompt):
    """The weights are wide enough for one wrong KV entry to move the logits far beyond the tolerance."""
    path = make_llama(tmp_path, seed=2)
    engine = TorchEngine(EngineSettings(str(path), slots=200, rows=4))
    engine.extend(0, 0, ints(*prompt[:30]), np.arange(1, 31))
    right = engine.logits(rows_of([0], [30], [11], [40]))
    engine.write(ints(0), ints(17), ints(18 + 1))
    assert (engine.logits(rows_of([0], [30], [11], [40])) - right).abs().max() > 1e-2


def test_candidates_are_the_best_tokens(tmp_path, prompt):
    path = make_llama(tmp_path, seed=2)
    engine = TorchEngine(EngineSettings(str(path), slots=200, rows=4, candidates=5))
    engine.extend(0, 0, ints(*prompt[:30]), np.arange(1, 31))
    batch = rows_of([0], [30], [11], [40])
    found = engine.decode(batch)
    best = engine.logits(batch).log_softmax(-1).topk(5)
    assert found.ids.tolist() == best.indices.tolist()
    assert found.scores == pytest.approx(best.values.numpy(), abs=1e-5)


def test_bfloat16_stays_close(tmp_path, prompt):
    path = make_llama(tmp_path, seed=1, std=0.05)
    engine = TorchEngine(EngineSettings(str(path), dtype="bfloat16", slots=200, rows=4))
    engine.extend(0, 0, ints(*prompt[:59]), np.arange(1, 60))
    got = engine.logits(rows_of([0], [59], [prompt[59]], [60]))
    torch.testing.assert_close(got[0], hugging_face(path, prompt)[-1], atol=0.05, rtol=0)


def test_the_context_is_the_smaller_of_asked_and_trained(tmp_path):
    path = make_llama(tmp_path, seed=1, context_length=64)
    assert TorchEngine(EngineSettings(str(path), slots=9, rows=1)).limits.context_length == 64
    assert TorchEngine(EngineSettings(str(path), slots=9, rows=1, context_length=32)).limits.context_length == 32
    assert TorchEngine(EngineSettings(str(path), slots=9, rows=1, context_length=99)).limits.context_length == 64


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, UnsupportedModel),
        ({"attention_bias": True}, UnsupportedModel),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, UnknownRope),
    ],
)
def test_what_it_cannot_run_it_refuses(tmp_path, changes, error):
    path = make_llama(tmp_path, seed=1)
    amend(path, **changes)
    with pytest.raises(error, match="--engine sglang"):
        TorchEngine(EngineSettings(str(path), slots=9, rows=1))
