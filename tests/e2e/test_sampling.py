"""T > 0: the text is the request's seed's, whatever the draft says, and the seed's noise is the documented one."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import Rig
from tests.e2e.workload import differences, run_staggered
from tests.unit.test_noise import MASK, murmur3_reference

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

SURFACE = [
    {"temperature": 0.7},
    {"temperature": 1.3},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.5, "min_p": 0.2},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "frequency_penalty": 0.6},
    {"temperature": 0, "frequency_penalty": 0.9, "presence_penalty": 0.4},
    {"temperature": 0, "repetition_penalty": 1.7, "min_new_tokens": 9},
    {"temperature": 0.9, "logit_bias": {"17": 4.0, "5": -100.0}},
]


def body(index: int, parameters: dict, *, enabled: bool) -> dict:
    generator = random.Random(index)
    sampling = {"max_new_tokens": 40, "sampling_seed": 1000 + index, "ignore_eos": True} | parameters
    if not enabled:
        sampling["custom_params"] = {"ssd": {"enabled": False}}
    prompt = [generator.randrange(4, 1000) for _ in range(5 + index)]
    return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}


@pytest.fixture(params=["tight", "roomy"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return request.getfixturevalue(request.param)


def test_each_parameter_alone(rig: Rig) -> None:
    """With a perfect draft. (Whole requests, with every draft: test_surface.)"""
    rig.use("copy")
    plain = run_staggered(rig.server, [body(i, p, enabled=False) for i, p in enumerate(SURFACE)])
    drafted = run_staggered(rig.server, [body(i, p, enabled=True) for i, p in enumerate(SURFACE)])
    for parameters, expected, answer in zip(SURFACE, plain, drafted, strict=True):
        assert differences(answer, expected) == [], parameters
        assert expected["meta_info"]["ssd_rounds"] == 0
        assert answer["meta_info"]["ssd_rounds"] > 0
    if rig.patient:  # the coupling: a perfect draft draws the target's own tokens
        assert sum(answer["meta_info"].get("spec_num_correct_drafts", 0) for answer in drafted[:2]) > 40


def test_seeded_draws_are_those_of_a_dense_reference(roomy: Rig) -> None:
    """Hugging Face logits, NumPy noise. Positions whose two best scores are near are screened on the reference."""
    model = AutoModelForCausalLM.from_pretrained(roomy.models / "target", dtype=torch.float32).eval()
    checked = 0
    for index, temperature in ((3, 0.7), (4, 1.3)):
        request = body(index, {"temperature": temperature}, enabled=True)
        tokens = request["input_ids"] + roomy.server.generate(**request)["output_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0].numpy()
        for position in range(len(request["input_ids"]) - 1, len(tokens) - 1):
            scores = _scores(logits[position], temperature, 1000 + index, position)
            second, best = np.sort(scores)[-2:]
            if best - second > 1e-3:
                assert int(scores.argmax()) == tokens[position + 1]
                checked += 1
    assert checked > 70


def _scores(logits: np.ndarray, temperature: float, seed: int, position: int) -> np.ndarray:
    scaled = logits / np.float32(temperature)
    log_p = scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
    bits = [murmur3_reference([seed & MASK, seed >> 32, position, token]) for token in range(len(logits))]
    return log_p - np.log(-np.log(np.array(bits, dtype=np.float64) / MASK))


def test_requests_without_a_seed_differ(roomy: Rig) -> None:
    request = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 1.5, "max_new_tokens": 8}}
    assert len({tuple(roomy.server.generate(**request)["output_ids"]) for _ in range(6)}) == 6


def test_bad_options_are_refused_with_a_sentence(roomy: Rig) -> None:
    import requests

    for given in ({"enabled": "no"}, {"num_steps": -1}, {"steps": 3}, 5):
        sampling = {"max_new_tokens": 4, "custom_params": {"ssd": given}}
        answer = requests.post(
            f"{roomy.server.url}/generate", json={"input_ids": [5], "sampling_params": sampling}, timeout=60
        )
        assert answer.status_code == 400
        assert "custom_params" in answer.text
