"""Recorded traces say what the models say, and the virtual engine says what the traces say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sglang_ssd.bench.in_process import Ask, Draft, Rule, Target, play
from sglang_ssd.bench.simulator.clock import VirtualClock
from sglang_ssd.bench.simulator.engine import Language, VirtualEngine
from sglang_ssd.bench.simulator.profile import load_profile
from sglang_ssd.bench.simulator.reader import Reader, Shape
from sglang_ssd.bench.simulator.synthetic import synthetic_trace
from sglang_ssd.bench.simulator.texts import Author, Writing
from sglang_ssd.bench.simulator.trace import Trace, shipped_trace
from sglang_ssd.draft_server.engine import EngineLimits, EngineSettings, Rows
from sglang_ssd.draft_server.engine_torch import TorchEngine
from sglang_ssd.protocol import Outcome, Sampling, pack_tokens
from tests.models import make_llama, make_noisy_copy

NEW_TOKENS, LOOKAHEAD = 40, 4
TEMPERATURES = (0.0, 1.0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    make_llama(root / "target", seed=1)
    return root / "target", make_noisy_copy(root / "target", root / "draft", noise=0.1, seed=2)


@pytest.fixture(scope="module")
def texts(pair) -> list[Writing]:
    """Three prompts at each temperature, written side by side."""
    prompts = [[5, 9, 100 + index, *range(index)] for index in range(3)]
    requests = [Writing(list(p), len(p), t, seed) for t in TEMPERATURES for seed, p in enumerate(prompts)]
    Author(pair[0], len(requests), 60).write(requests, NEW_TOKENS)
    return requests


@pytest.fixture(scope="module")
def traces(pair, texts) -> dict[float, Trace]:
    reader = Reader(pair[1], Shape(candidates=8, depth=LOOKAHEAD, longest=60))
    return {t: reader.trace([text for text in texts if text.temperature == t], t) for t in TEMPERATURES}


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_trace_replays_what_the_draft_server_plays(pair, texts, traces, temperature):
    mine = [text for text in texts if text.temperature == temperature]
    asks = [Ask(text.tokens[: text.prompt], NEW_TOKENS, temperature, text.seed) for text in mine]
    engine = TorchEngine(EngineSettings(str(pair[1]), dtype="float32", slots=4000, rows=60))
    tally = play(Target(pair[0], 200), engine, Rule(LOOKAHEAD, 10), asks)
    assert tally.texts == [text.answer for text in mine]
    rounds, accepted = 0, 0
    for length, end in zip(traces[temperature].lengths, np.cumsum(traces[temperature].lengths), strict=True):
        at = end - length
        while at < end:
            window = traces[temperature].ranks[at : min(at + LOOKAHEAD, end - 1)]
            right = int(np.argmax(window != 0)) if (window != 0).any() else len(window)
            rounds, accepted, at = rounds + 1, accepted + right, at + right + 1
    assert (rounds, accepted) == (tally.rounds, tally.accepted)
    assert 0.1 < traces[temperature].acceptance < 0.9  # else this proves little


def test_what_lies_beyond_a_wrong_guess_is_what_the_draft_says_there(pair, texts, traces):
    """Run the draft on the text, the wrong guess and what it says after that, as one plain sequence."""
    trace = traces[0.0]
    text = next(text for text in texts if text.temperature == 0.0)
    wrong = int(np.flatnonzero(trace.ranks[: trace.lengths[0]])[0])
    engine = TorchEngine(EngineSettings(str(pair[1]), dtype="float32", slots=100, rows=1, candidates=8))
    tokens = text.tokens[: text.prompt + 1 + wrong]

    def guess() -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(len(tokens))
        zeros = np.zeros_like(positions)
        found = engine.decode(Rows(zeros, positions, np.array(tokens), positions + 1, zeros.astype("f4"), zeros))
        return found.ids[-1], found.scores[-1]

    ids, scores = guess()
    assert np.allclose(scores, trace.scores[wrong], atol=1e-4)
    for depth in range(LOOKAHEAD):
        tokens = [*tokens, int(ids[0])]
        ids, scores = guess()
        assert np.allclose(scores, trace.beyond[0, depth], atol=1e-4)


def test_a_trace_survives_its_file(traces, tmp_path):
    traces[1.0].save(tmp_path / "trace.npz")
    again = Trace.load(tmp_path / "trace.npz")
    assert (again.ranks == traces[1.0].ranks).all()
    assert np.allclose(again.beyond, traces[1.0].beyond, rtol=1e-3)
    assert again.temperature == 1.0


def test_the_first_texts_of_a_trace_are_a_trace(traces):
    trace = traces[0.0]
    part = trace.first(2)
    assert len(part) == trace.lengths[:2].sum() < len(trace)
    assert np.array_equal(part.ranks, trace.ranks[: len(part)])
    assert np.array_equal(part.beyond, trace.beyond[: np.count_nonzero(part.ranks)])
    assert trace.first(10**6).lengths.tolist() == trace.lengths.tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_shipped_traces_have_rounds_of_every_lookahead(temperature):
    trace = shipped_trace("demo", temperature)
    for lookahead in (1, 4, 6):
        rounds = list(trace.rounds(lookahead))
        assert len(rounds) > 100
        for each in rounds:
            assert each.scores.shape == (lookahead + 1, 16)
            assert (np.diff(each.scores, axis=1) <= 0).all()
            assert each.rank != 0 or each.accepted == lookahead


@pytest.mark.parametrize("name", ["recorded", "synthetic"])
def test_the_virtual_engine_leads_along_the_trace(name):
    """The real draft server on it, whole trees awaited: every answer is the recorded chain."""
    synthetic = load_profile("h100-llama-70b-1b").synthetic
    trace = shipped_trace("demo", 0.7) if name == "recorded" else synthetic_trace(synthetic, 0.0)
    language = Language.of(trace)
    limits = EngineLimits(slots=1000, rows=64, context_length=400, vocab_size=language.vocab_size)
    clock = VirtualClock()
    engine = VirtualEngine(language, load_profile("demo-two-cores").times, clock, limits)
    draft = Draft(engine, Rule(LOOKAHEAD, 14).hello(language.vocab_size))
    at, hits, rounds = 50, 0, 0
    length, tokens = 1, [int(language.truth[at - 1])]
    draft.open(1, [language.prompt(at - 1, 1)], Sampling(trace.temperature, 3))
    while at + LOOKAHEAD + 1 < 250:
        answer = draft.answer(Outcome(1, 1, length, LOOKAHEAD if rounds else 0, 1000, pack_tokens(tokens)))
        chain = np.frombuffer(answer.tokens, "<i4").tolist()
        truth = language.truth[at : at + LOOKAHEAD + 1].tolist()
        expected = trace.round_at(at, LOOKAHEAD)
        assert len(chain) == LOOKAHEAD
        assert chain[: expected.accepted] == truth[: expected.accepted]
        assert expected.accepted == LOOKAHEAD or chain[expected.accepted] != truth[expected.accepted]
        rounds, hits, length = rounds + 1, hits + (answer.source == "hit"), length + len(tokens)
        tokens, at = truth[: expected.accepted + 1], at + expected.accepted + 1
    assert 0.2 < hits / rounds < 1.0
    assert clock.time > 0
