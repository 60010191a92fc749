"""The table's program on a tiny pair; rounds in one process, against a plain loop of the target."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from sglang_ssd.bench.exactness import BEGIN, END, main, write_between_markers
from sglang_ssd.bench.in_process import Ask, Rule, Tally, Target, play
from sglang_ssd.draft_server.engine import EngineSettings
from sglang_ssd.draft_server.engine_torch import TorchEngine
from sglang_ssd.sampling.draw import DrawParameters, draw
from tests.models import make_llama, make_noisy_copy

NEW_TOKENS = 25


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    make_llama(root / "target", seed=1)
    make_noisy_copy(root / "target", root / "noisy", noise=0.1, seed=2)
    make_llama(root / "other", seed=5)
    return root


@pytest.fixture(scope="module")
def target(models: Path) -> Target:
    return Target(models / "target", 200)


def engine(path: Path) -> TorchEngine:
    return TorchEngine(EngineSettings(str(path), slots=2000, rows=60))


def asks(temperature: float) -> list[Ask]:
    prompts = [[5, 9, 100 + index] for index in range(3)]
    return [Ask(prompt, NEW_TOKENS, temperature, seed) for seed, prompt in enumerate(prompts)]


def alone(target: Target, ask: Ask) -> list[int]:
    """The text without drafts, token by token."""
    text = list(ask.prompt)
    target.read(text[:-1])
    for _ in range(ask.new_tokens):
        logits = target.window(len(text), text[-1:])
        parameters = DrawParameters(
            torch.tensor([0]), torch.tensor([ask.temperature]), torch.tensor([ask.seed]), torch.tensor([len(text) - 1])
        )
        text.append(int(draw(logits, parameters if ask.temperature else None, target.noise)))
    return text[len(ask.prompt) :]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", ["target", "noisy", "other"])
def test_coupled_text_is_the_targets_own(models: Path, target: Target, draft: str, temperature: float) -> None:
    tally = play(target, engine(models / draft), Rule(4, 12), asks(temperature))
    assert tally.texts == [alone(target, ask) for ask in asks(temperature)]
    if draft == "target":
        assert tally.acceptance == 1.0
        assert tally.hit_rate > 0.7  # the first rounds teach the planner that this draft is always right


@pytest.mark.parametrize("draft", ["target", "noisy"])
def test_rejection_accepts_a_perfect_draft_and_some_of_a_fair_one(models: Path, target: Target, draft: str) -> None:
    """A copy's q lacks what is outside its 64 tokens, and no more."""
    tally = play(target, engine(models / draft), Rule(4, 12, "rejection"), asks(0.5))
    assert [len(text) for text in tally.texts] == [NEW_TOKENS] * 3
    assert tally.acceptance > (0.8 if draft == "target" else 0.05)


def test_shared_noise_makes_hits_and_so_does_a_c_of_zero(models: Path, target: Target) -> None:
    """At a temperature where the bonus of the rejection rule is hard to guess."""
    rules = [Rule(4, 12), Rule(4, 12, "rejection", 1.0), Rule(4, 12, "rejection", 0.0)]
    longer = [Ask([5, 9, 100 + seed], 50, 0.6, seed) for seed in range(5)]
    coupled, rejection, saguaro = (play(target, engine(models / "noisy"), rule, longer) for rule in rules)
    assert coupled.hit_rate > rejection.hit_rate + 0.15
    assert saguaro.hit_rate > rejection.hit_rate + 0.05


def test_the_command_writes_its_table_between_the_markers(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "page.md"
    document.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    where = ["--target", str(models / "target"), "--draft", str(models / "noisy"), "--write", str(document)]
    sizes = ["--prompts", "1", "--tokens", "8", "--temperatures", "0", "1", "--saguaro-c", "0.5"]
    assert main([*where, *sizes]) == 0
    text = document.read_text()
    assert text.startswith(f"before\n\n{BEGIN}\ntarget and noisy, K = 4")
    assert text.endswith(f".\n{END}\n\nafter\n")
    winners = next(line for line in text.splitlines() if line.startswith("Most tokens"))
    assert re.fullmatch(
        r"Most tokens .*: T = 0 coupled; T = 1 (coupled|rejection, C = 0.5) \(.*: [+-]\d+ %\)\.", winners
    )
    assert "old" not in text
    assert [line.split(" | ")[1] for line in text.splitlines() if line[:3] in ("| 0", "| 1")] == [
        "coupled",
        "coupled",
        "rejection, C = 0.5",
    ]
    assert "tokens per round" in capsys.readouterr().out


def test_a_miss_costs_the_draft_steps_that_were_waited_for(models: Path, target: Target) -> None:
    tally = Tally(rounds=10, hits=8, accepted=14, late=6)
    assert tally.speed(0.0) == tally.tokens_per_round == 2.4
    assert tally.speed(0.5) == 24 / 13
    perfect = play(target, engine(models / "target"), Rule(4, 12), asks(0.0))
    other = play(target, engine(models / "other"), Rule(4, 12), asks(0.0))
    assert perfect.late <= 4 * (perfect.rounds - perfect.hits)
    assert 3 * (other.rounds - other.hits) < other.late + 6 * len(other.texts)


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match="has no lines"):
        write_between_markers(page, ["| x |"])
    assert page.read_text() == "nothing\n"
