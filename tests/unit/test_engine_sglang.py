"""The engine on SGLang's ModelRunner against full prefills in Hugging Face transformers.

The engine keeps every token as a candidate, so its candidates are the whole log-probability row. It lives in a
child process: SGLang's runtime context is global, and nothing of it may leak into other tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from sglang_ssd.draft_server.drawing import draft_draw, to_host
from sglang_ssd.draft_server.engine import Candidates, EngineLimits, EngineSettings, Rows
from sglang_ssd.draft_server.engine_sglang import (
    UnsupportedModel,
    _check_pools,
    _server_arguments,
    graph_batch_sizes,
)
from sglang_ssd.draft_server.engine_torch import TorchEngine
from sglang_ssd.draft_server.terms import Proposal, Terms
from sglang_ssd.protocol import pack_floats, pack_tokens, unpack_floats
from sglang_ssd.sampling.candidates import DraftDraw, find_candidates
from tests.models import make_llama
from tests.remote_engine import RemoteEngine, engine_process, ints
from tests.support import rows_by

pytestmark = pytest.mark.server

VOCAB, CONTEXT, SLOTS, ROWS = 1000, 128, 300, 8
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("models") / "draft", seed=3, vocab_size=VOCAB, context_length=CONTEXT)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[RemoteEngine]:
    with engine_process() as pool:
        yield RemoteEngine(pool, _settings(model))


@pytest.fixture(scope="module")
def reference(model: Path):
    """Log-probabilities float32 [n, V] after every token of a sequence, from one full prefill."""
    from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    @torch.no_grad()
    def run(tokens: Sequence[int]) -> torch.Tensor:
        return llama(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)

    return run


def _settings(model: Path, **changes) -> EngineSettings:
    sizes = {"dtype": "float32", "slots": SLOTS, "rows": ROWS, "context_length": CONTEXT, "candidates": VOCAB}
    return EngineSettings(str(model), "cpu", **(sizes | changes))


def _rows(rows, positions, tokens, slots, temperature: float = 0.0, seed: int = 0) -> Rows:
    count = len(tokens)
    return Rows(
        *map(ints, (rows, positions, tokens, slots)),
        temperatures=np.full(count, temperature, dtype=np.float32),
        seeds=np.full(count, seed, dtype=np.int64),
    )


def _log_probs(candidates: Candidates) -> torch.Tensor:
    """[B, V] from candidates that hold the whole vocabulary."""
    ids = torch.from_numpy(candidates.ids)
    assert torch.equal(ids.sort(-1).values, torch.arange(VOCAB).expand_as(ids))
    return torch.zeros(ids.shape).scatter(1, ids, torch.from_numpy(candidates.scores))


def _tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCAB, count).tolist()


def _assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)


def test_prefill_in_chunks_then_decode(engine: RemoteEngine, reference) -> None:
    tokens = _tokens(30, seed=1)
    engine.extend(0, 0, tokens[:1], [1])
    engine.extend(0, 1, tokens[1:20], range(2, 21))
    engine.extend(0, 20, tokens[20:29], range(21, 30))
    ours = _log_probs(engine.decode(_rows([0], [29], tokens[29:], [30])))
    _assert_close(ours[0], reference(tokens)[-1])


def test_branches_that_share_a_prefix(engine: RemoteEngine, reference) -> None:
    prompt, branches = _tokens(25, seed=2), [_tokens(4, seed=20 + b) for b in range(5)]
    engine.extend(0, 0, prompt, range(1, 26))
    engine.fork([0] * 5, [25] * 5, range(1, 6))
    for depth in range(4):
        slots = range(100 + 5 * depth, 105 + 5 * depth)
        batch = _rows(range(1, 6), [25 + depth] * 5, [b[depth] for b in branches], slots)
        ours = _log_probs(engine.decode(batch))
        for row, branch in enumerate(branches):
            _assert_close(ours[row], reference(prompt + branch[: depth + 1])[-1])


def test_branches_of_two_sequences_at_different_depths(engine: RemoteEngine, reference) -> None:
    first, second = _tokens(20, seed=4), _tokens(11, seed=5)
    engine.extend(0, 0, first, range(1, 21))
    engine.extend(1, 0, second, range(21, 32))
    engine.fork([0, 1, 0], [20, 11, 7], [2, 3, 4])
    ours = _log_probs(engine.decode(_rows([2, 3, 4], [20, 11, 7], [50, 51, 52], [40, 41, 42])))
    for row, tokens in enumerate(([*first, 50], [*second, 51], [*first[:7], 52])):
        _assert_close(ours[row], reference(tokens)[-1])


def test_several_tokens_of_one_sequence_in_one_forward(engine: RemoteEngine, reference) -> None:
    """Depth 0: the missing tokens of a path beside a branch of that path, whose prefix other rows are writing."""
    tokens, other = _tokens(15, seed=6), 77
    new = [211, 207, 219, 203, 215]
    engine.extend(0, 0, tokens[:10], range(1, 11))
    engine.write([0] * 5, range(10, 15), new)
    engine.fork([0], [13], [1])
    batch = _rows(
        rows=[0, 0, 1, 0, 0, 0],
        positions=[10, 11, 13, 12, 13, 14],
        tokens=[*tokens[10:12], other, *tokens[12:]],
        slots=[*new[:2], 90, *new[2:]],
    )
    ours, expected = _log_probs(engine.decode(batch)), reference(tokens)
    _assert_close(ours[[0, 1, 3, 4, 5]], expected[10:])
    _assert_close(ours[2], reference([*tokens[:13], other])[-1])


def test_a_batch_larger_than_the_table(engine: RemoteEngine, reference) -> None:
    tokens = _tokens(3 * ROWS + 1, seed=7)
    count = len(tokens)
    ours = _log_probs(engine.decode(_rows([5] * count, range(count), tokens, range(1, count + 1))))
    _assert_close(ours, reference(tokens))


def test_extend_on_a_shared_prefix(engine: RemoteEngine, reference) -> None:
    prompt, tail = _tokens(18, seed=8), _tokens(9, seed=9)
    engine.extend(0, 0, prompt, range(1, 19))
    engine.fork([0], [12], [6])
    engine.extend(6, 12, tail[:8], range(50, 58))
    ours = _log_probs(engine.decode(_rows([6, 0], [20, 18], [tail[8], 33], [58, 59])))
    _assert_close(ours[0], reference(prompt[:12] + tail)[-1])
    _assert_close(ours[1], reference([*prompt, 33])[-1])


def test_slots_and_rows_are_reused(engine: RemoteEngine, reference) -> None:
    """A longer sequence used the row and the slots before; their old content must not be seen."""
    engine.extend(0, 0, _tokens(60, seed=10), range(1, 61))
    engine.fork([0], [60], [1])
    tokens = _tokens(12, seed=11)
    engine.extend(1, 0, tokens[:9], [7, 5, 3, 1, 60, 59, 2, 4, 6])
    engine.fork([1], [9], [0])
    ours = _log_probs(engine.decode(_rows([0] * 3, range(9, 12), tokens[9:], [20, 40, 30])))
    _assert_close(ours, reference(tokens)[9:])


def test_the_last_slot_row_and_position(engine: RemoteEngine, reference) -> None:
    tokens = _tokens(CONTEXT, seed=12)
    slots = range(SLOTS - CONTEXT + 1, SLOTS + 1)
    assert engine.limits == EngineLimits(slots=SLOTS, rows=ROWS, context_length=CONTEXT, vocab_size=VOCAB)
    engine.extend(ROWS - 1, 0, tokens[:-1], slots[:-1])
    ours = _log_probs(engine.decode(_rows([ROWS - 1], [CONTEXT - 1], tokens[-1:], slots[-1:])))
    _assert_close(ours[0], reference(tokens)[-1])


def test_a_wrong_slot_shows(engine: RemoteEngine, reference) -> None:
    """These tests can fail: one entry of the table off by one changes the row by far more than the tolerance."""
    tokens = _tokens(20, seed=13)
    engine.extend(0, 0, tokens[:19], range(1, 20))
    engine.write([0], [5], [7])
    ours = _log_probs(engine.decode(_rows([0], [19], tokens[19:], [20])))
    assert (ours[0] - reference(tokens)[-1]).abs().max() > 100 * TOLERANCE


def test_sampled_rows_rank_by_the_shared_noise(engine: RemoteEngine, reference) -> None:
    tokens = _tokens(10, seed=14)
    engine.extend(0, 0, tokens[:9], range(1, 10))
    candidates = engine.decode(_rows([0], [9], tokens[9:], [10], temperature=0.8, seed=-5))
    draw = DraftDraw(torch.tensor([0.8]), torch.tensor([-5]), torch.tensor([9]))
    expected = find_candidates(reference(tokens)[-1:], draw, VOCAB)
    assert candidates.ids[0, :8].tolist() == expected.ids[0, :8].tolist()
    np.testing.assert_allclose(candidates.scores[0, :8], expected.scores[0, :8], atol=10 * TOLERANCE)


def test_rows_of_a_forward_go_each_by_its_own_terms(engine: RemoteEngine, reference) -> None:
    """Greedy with a bias, filtered, and sampled from a q; more rows than one forward takes."""
    tokens = _tokens(10, seed=14)
    terms = [
        Terms(bias_ids=pack_tokens([77]), bias=pack_floats([500.0])),
        Terms(0.8, 5, top_k=3),
        Terms(0.8, 5, proposal=Proposal(support=12, top_f=2, c=0.5, vocab_size=VOCAB)),
    ]
    count = 3 * ROWS
    for row in range(ROWS):
        engine.extend(row, 0, tokens[:9], range(1, 10))
    each = [terms[i % 3] for i in range(count)]
    batch = Rows(
        *map(ints, ([i % ROWS for i in range(count)], [9] * count, [tokens[9]] * count, range(20, 20 + count))),
        temperatures=np.array([row.temperature for row in each], dtype=np.float32),
        seeds=ints([row.seed for row in each]),
        terms=tuple(each),
    )
    found = engine.decode(batch)
    logits = reference(tokens)[-1:].expand(3, -1)
    draw = draft_draw(rows_by(terms, np.full(3, 9)))
    expected = to_host(find_candidates(logits, draw, VOCAB))
    assert expected.ids[0, 0] == 77
    assert len(found.samples) == ROWS
    for i in range(count):
        assert found.ids[i, :3].tolist() == expected.ids[i % 3, :3].tolist()
    for sample in found.samples:
        assert (sample.token, sample.ids) == expected.samples[0][:2]
        np.testing.assert_allclose(unpack_floats(sample.q), unpack_floats(expected.samples[0].q), atol=TOLERANCE)


@pytest.mark.parametrize("seed", range(3))
def test_it_agrees_with_the_torch_engine(engine: RemoteEngine, model: Path, seed: int) -> None:
    """The same random life of a tree in both: forks of forks, rows of one sequence, slots reused."""
    other = TorchEngine(_settings(model))
    rng = np.random.default_rng(seed)
    prompt = _tokens(12, seed)
    length, free = [12] + [0] * (ROWS - 1), rng.permutation(np.arange(13, SLOTS + 1)).tolist()
    for each in (engine, other):
        each.extend(0, 0, ints(prompt), np.arange(1, 13))
    for _ in range(12):
        source, target = rng.choice(np.flatnonzero(length)), rng.integers(1, ROWS)
        kept = int(rng.integers(1, length[source] + 1))
        if source != target:
            for each in (engine, other):
                each.fork(ints([source]), ints([kept]), ints([target]))
            length[target] = kept
        grown = int(rng.integers(1, 5))
        positions = range(length[target], length[target] + grown)
        batch = _rows([target] * grown, positions, rng.integers(4, VOCAB, grown), [free.pop() for _ in positions])
        length[target] += grown
        _assert_close(_log_probs(engine.decode(batch)), _log_probs(other.decode(batch)))


def test_bfloat16_with_a_shorter_context(model: Path, reference) -> None:
    tokens = _tokens(20, seed=15)
    with engine_process() as pool:
        engine = RemoteEngine(pool, _settings(model, dtype="bfloat16", context_length=64, candidates=4))
        assert engine.limits.context_length == 64
        engine.extend(0, 0, tokens[:19], range(1, 20))
        candidates = engine.decode(_rows([0], [19], tokens[19:], [20]))
    expected = reference(tokens)[-1][torch.from_numpy(candidates.ids[0])]
    np.testing.assert_allclose(candidates.scores[0], expected, atol=0.15)


def test_it_asks_for_no_more_than_the_checkpoint_has(model: Path) -> None:
    arguments = _server_arguments(_settings(model, dtype="auto", context_length=10 * CONTEXT), torch.device("cpu"))
    assert (arguments.dtype, arguments.context_length) == ("float32", CONTEXT)
    arguments = _server_arguments(_settings(model, dtype="bfloat16", context_length=None), torch.device("cpu"))
    assert (arguments.dtype, arguments.context_length) == ("bfloat16", CONTEXT)
    assert arguments.speculative_algorithm is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"page_size": 64}, "needs pages of 64"),
        ({"req_to_token_pool": SimpleNamespace(size=ROWS)}, "a state per sequence"),
        ({"is_hybrid_swa": True}, "does not lie in one pool"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "does not lie in one pool"),
        ({"req_to_token_pool": ReqToTokenPool(ROWS - 1, 16, "cpu", False)}, "gets 7 rows of the 8"),
    ],
)
def test_models_whose_slots_cannot_be_owned_are_refused(model: Path, changes: dict, reason: str) -> None:
    fitting = {
        "page_size": 1,
        "req_to_token_pool": ReqToTokenPool(ROWS, 16, "cpu", False),
        "is_hybrid_swa": False,
        "model_config": SimpleNamespace(is_encoder_decoder=False),
    }
    _check_pools(SimpleNamespace(**fitting), _settings(model))
    with pytest.raises(UnsupportedModel, match=reason):
        _check_pools(SimpleNamespace(**(fitting | changes)), _settings(model))


@pytest.mark.parametrize("rows", [1, 3, 8, 64, 100, 1000])
def test_graphs_cover_every_batch_size(rows: int) -> None:
    sizes = graph_batch_sizes(rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == rows
    for batch in range(1, rows + 1):
        padded = next(size for size in sizes if size >= batch)
        assert padded - batch <= max(3, batch / 4)


def test_packed_weights_change_no_candidate(model: Path) -> None:
    """In bfloat16 the same ids and scores, with a map and without, whatever the number of rows."""
    found = []
    for packed in (True, False):
        with engine_process() as pool:
            engine = RemoteEngine(pool, _settings(model, dtype="bfloat16", packed=packed))
            engine.extend(0, 0, ints(range(5, 45)), ints(range(1, 41)))
            engine.fork(ints([0, 0, 0]), ints([40, 40, 40]), ints([1, 2, 3]))
            one = engine.decode(_rows([1], [40], [7], [41]))
            three = engine.decode(_rows([1, 2, 3], [41, 40, 40], [8, 9, 10], [42, 43, 44]))
            found.append((one, three))
    for ours, plain in zip(*found, strict=True):
        np.testing.assert_array_equal(ours.ids, plain.ids)
        np.testing.assert_array_equal(ours.scores, plain.scores)
