"""How a draft is measured: rounds replayed by hand, and the whole program on a tiny pair."""

from __future__ import annotations

import json

import pytest
import torch

from sglang_ssd.demo import evaluate as program
from sglang_ssd.demo.agreement import TOP, Round, histogram, replay, report
from sglang_ssd.demo.distill.student import load_target
from sglang_ssd.demo.distill.texts import read_texts
from sglang_ssd.demo.economy import Costs, break_even, speed_ordinary, speed_ssd
from tests.models import make_llama, make_noisy_copy


def test_rounds_are_replayed():
    """K=2: both accepted and the bonus third; one accepted; none accepted, twice; then too little for a round."""
    ranks = [0, 0, 2, 0, 3, 1, TOP, 0, 0]
    assert replay(ranks, 2) == [Round(2, 2), Round(1, 2), Round(0, 0), Round(0, TOP)]


def test_a_draft_that_is_always_right_gives_whole_rounds():
    assert replay([0] * 15, 4) == [Round(4, 0)] * 3
    assert report([[0] * 15], 4, (1,) * 5).tokens_per_round == 5


def test_the_report_counts_by_hand():
    made = report([[0, 0, 2, 0, 3, 1, TOP, 0, 0], [1, 0, 0]], 2, (1, 3, 2))
    rounds = [Round(2, 2), Round(1, 2), Round(0, 0), Round(0, TOP), Round(0, 0)]
    assert made.texts == 2
    assert made.positions == 12
    assert made.agreement == 7 / 12
    assert made.tokens_per_round == sum(each.accepted + 1 for each in rounds) / 5
    assert made.in_top_4 == 4 / 5
    assert made.hit_rate == 3 / 5  # the first has two candidates for three that are needed, the fourth is far away
    assert made.rejected_ranks == {"0": 2, "1": 0, "2": 1, "3": 0, "4-7": 0, "8-15": 0, "beyond": 1}


def test_a_report_needs_a_fan_out_and_a_round():
    with pytest.raises(ValueError, match="5 numbers"):
        report([[0] * 9], 4, (1, 2))
    with pytest.raises(ValueError, match="long enough"):
        report([[0] * 4], 4, (1,) * 5)


def test_the_histogram_has_every_rank_once():
    assert sum(histogram(range(40)).values()) == 40
    assert histogram([0, 3, 4, 7, 8, 15, 16]) == {"0": 1, "1": 0, "2": 0, "3": 1, "4-7": 2, "8-15": 2, "beyond": 1}


def test_predicted_speed():
    """Verify 120 ms, decode 93 ms, a step of 18 ms, 70 % hits: worked out by hand."""
    costs = Costs(decode=93, verify=120, step=18)
    assert speed_ssd(costs, 4, 2.2, 0.7) == pytest.approx(2.2 * 93 / (120 + 0.3 * 72))
    assert speed_ssd(costs, 4, 2.2, 0.7) / speed_ordinary(costs, 4, 2.2) == pytest.approx(1.356, abs=1e-3)
    assert speed_ssd(costs, 4, break_even(costs, 4, 0.7), 0.7) == pytest.approx(1)
    slow = Costs(decode=93, verify=120, step=30)
    assert speed_ssd(slow, 4, 2.2, 1.0) == pytest.approx(2.2 * 93 / 150)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = make_llama(folder / "target", seed=7, tied=True)
    return target, make_noisy_copy(target, folder / "draft", noise=0.1, seed=1)


@pytest.fixture
def data(tmp_path):
    lines = [json.dumps({"question": " ".join(f"w{4 + 7 * i + j}" for j in range(5 + i))}) for i in range(9)]
    (tmp_path / "gsm8k_test.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def command(target, draft, data, *more):
    paths = ["--target", target, "--draft", draft, "--data", data, "--cache", data / "cache", "--json", data / "r.json"]
    return [*map(str, paths), "--prompts", "4", "--tokens", "30", *more]


def result(data):
    return json.loads((data / "r.json").read_text())["results"]


def test_the_program_on_a_tiny_pair(pair, data, capsys, caplog):
    target, draft = pair
    assert program.main(command(target, draft, data)) == 0
    assert "HumanEval is not evaluated" in caplog.text
    shown, first = capsys.readouterr().out, result(data)
    assert set(first) == {"GSM8K test", "all"}
    assert first["all"]["texts"] == 4
    assert 0.05 < first["all"]["agreement"] < 0.95
    assert f"{first['all']['agreement']:.3f}" in shown
    program.main(command(target, draft, data))
    assert result(data) == first


def test_the_target_agrees_with_itself(pair, data):
    target, _ = pair
    program.main(command(target, target, data))
    made = result(data)["all"]
    assert made["agreement"] > 0.95  # a batch and a text alone differ where bfloat16 has ties
    assert made["tokens_per_round"] > 4.5


def test_ranks_against_hugging_face(pair, data):
    from transformers import AutoModelForCausalLM

    target, draft = pair
    program.main(command(target, draft, data))
    texts = read_texts(list((data / "cache").glob("*.jsonl")), 1000)
    reference = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.bfloat16).float()
    model = load_target(str(draft), "cpu").float()
    for text in texts:
        with torch.inference_mode():
            logits = reference(torch.tensor([text.ids])).logits[0, text.prompt : -1].float()
        said = torch.tensor(text.ids[text.prompt + 1 :])[:, None]
        places = (logits > logits.gather(1, said)).sum(-1).clamp_max(TOP).tolist()
        ranks = program.ranks_in(model, None, text)
        assert len(ranks) == len(text.ids) - text.prompt - 1
        assert ranks == places


def test_a_token_map_leaves_mapped_tokens_only(pair, data):
    target, _ = pair
    torch.save(torch.arange(0, 1000, 2), data / "map.pt")
    program.main(command(target, target, data, "--token-map", str(data / "map.pt")))
    texts = read_texts(list((data / "cache").glob("*.jsonl")), 1000)
    said = [token for text in texts for token in text.ids[text.prompt + 1 :]]
    assert result(data)["all"]["agreement"] == pytest.approx(
        sum(token % 2 == 0 for token in said) / len(said), abs=0.05
    )


def test_without_prompts_there_is_nothing_to_do(pair, tmp_path, caplog):
    target, draft = pair
    assert program.main(command(target, draft, tmp_path)) == 2
    assert caplog.text.count("is not evaluated") == 3
    assert program.main(["--target", str(target), "--data", str(tmp_path)]) == 2
