"""A reduced output vocabulary: what a map may be, and that a draft with one proposes mapped tokens, the right ones."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch

from sglang_ssd.config import ConfigError
from sglang_ssd.draft_server.engine import EngineSettings, Rows
from sglang_ssd.draft_server.engine_torch import TorchEngine
from sglang_ssd.draft_server.settings import DraftSettings
from sglang_ssd.draft_server.token_map import load_token_map
from sglang_ssd.sampling.candidates import DraftDraw, find_candidates
from tests.models import make_llama

MAPPED = tuple(range(5, 1000, 7))  # 143 of 1,000


def keep(path, ids=MAPPED):
    torch.save(torch.tensor(ids, dtype=torch.int32), path)
    return str(path)


def rows_of(tokens, temperature):
    count = len(tokens)
    return Rows(
        rows=np.zeros(count, np.int64),
        positions=np.arange(count),
        tokens=np.array(tokens),
        slots=np.arange(1, count + 1),
        temperatures=np.full(count, temperature, np.float32),
        seeds=np.arange(100, 100 + count),
    )


def best_of_mapped(logits, batch, count):
    """All 1,000 tokens in the order of the draft's own score, without those that are not mapped."""
    temperatures, seeds, positions = (torch.from_numpy(x) for x in (batch.temperatures, batch.seeds, batch.positions))
    ids = find_candidates(logits, DraftDraw(temperatures, seeds, positions), logits.shape[1]).ids
    mapped = set(MAPPED)
    return [[token for token in row if token in mapped][:count] for row in ids.tolist()]


@pytest.mark.parametrize("as_list", [True, False])
def test_reads_sglangs_file_forms(tmp_path, as_list):
    ids = [7, 3, 900]
    torch.save(ids if as_list else torch.tensor(ids, dtype=torch.int32), tmp_path / "map.pt")
    read = load_token_map(str(tmp_path / "map.pt"), 1000)
    assert read.dtype == torch.int64
    assert read.tolist() == [3, 7, 900]


@pytest.mark.parametrize(
    ("ids", "said"),
    [([], "no list"), ([[1, 2]], "no list"), ([0.5], "no list"), ([4, 4], "twice"), ([-1, 4], "beyond"),
     ([1000], "beyond"), (["a"], "cannot be read"), ({"a": 1}, "cannot be read")],
)  # fmt: skip
def test_refuses_what_is_no_map(tmp_path, ids, said):
    torch.save(ids, tmp_path / "map.pt")
    with pytest.raises(ConfigError, match=said):
        load_token_map(str(tmp_path / "map.pt"), 1000)


def test_refuses_a_file_of_another_kind(tmp_path):
    (tmp_path / "map.pt").write_text("1 2 3")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_token_map(str(tmp_path / "map.pt"), 1000)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_token_map(str(tmp_path / "absent.pt"), 1000)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_candidates_are_the_best_mapped_tokens(tmp_path, tied, temperature):
    path = str(make_llama(tmp_path / "draft", seed=4, tied=tied))
    prompt = torch.randint(4, 1000, (24,), generator=torch.Generator().manual_seed(5)).tolist()
    batch = rows_of(prompt, temperature)
    whole = TorchEngine(EngineSettings(path, slots=64, rows=2)).logits(batch)
    mapped = TorchEngine(EngineSettings(path, slots=64, rows=2, token_map=keep(tmp_path / "map.pt")))
    got = mapped.decode(batch)
    assert mapped.logits(batch).shape == (24, len(MAPPED))
    if temperature == 0:
        assert got.ids.tolist() == best_of_mapped(whole, batch, 16)
    else:  # the noise of a token is the same with and without a map
        assert got.ids[:, 0].tolist() == [row[0] for row in best_of_mapped(whole, batch, 1)]
    assert len(set(got.ids[:, 0].tolist())) > 12
    assert np.isfinite(got.scores).all()


def test_a_map_smaller_than_the_candidates(tmp_path):
    path = str(make_llama(tmp_path / "draft", seed=4))
    engine = TorchEngine(EngineSettings(path, slots=64, rows=2, token_map=keep(tmp_path / "map.pt", (8, 9, 30))))
    got = engine.decode(rows_of([5, 6, 7], 0.0))
    assert sorted(got.ids[0].tolist()) == [8, 9, 30]
    assert engine.limits.vocab_size == 1000


def test_settings_find_the_map_of_the_drafts_folder(tmp_path):
    path = make_llama(tmp_path / "draft", seed=4)
    given = {"model_path": str(path), "endpoint": "tcp://127.0.0.1:5555"}
    assert DraftSettings(**given).for_engine().token_map is None
    own, other = keep(path / "token_map.pt"), keep(tmp_path / "other.pt")
    assert DraftSettings(**given).for_engine().token_map == own
    assert DraftSettings(**given, token_map=other).for_engine().token_map == other
    with pytest.raises(ConfigError, match="--token-map"):
        DraftSettings(**given, token_map=str(tmp_path / "absent.pt"))


def _decoded_by_sglang(settings: EngineSettings, batch: Rows):
    from sglang_ssd.draft_server.engine_sglang import SGLangEngine

    return SGLangEngine(settings).decode(batch)


@pytest.mark.server
@pytest.mark.parametrize("tied", [True, False])
def test_sglangs_engine_gives_the_same_candidates(tmp_path, tied):
    """In a process of its own, for SGLang's runtime context is global."""
    path = str(make_llama(tmp_path / "draft", seed=4, tied=tied))
    sizes = {"dtype": "float32", "slots": 300, "rows": 32, "context_length": 128}
    settings = EngineSettings(path, token_map=keep(tmp_path / "map.pt"), **sizes)
    batch = rows_of(torch.randint(4, 1000, (24,), generator=torch.Generator().manual_seed(5)).tolist(), 0.7)
    want = TorchEngine(settings).decode(batch)
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        got = pool.submit(_decoded_by_sglang, settings, batch).result()
    assert got.ids.tolist() == want.ids.tolist()
    np.testing.assert_allclose(got.scores, want.scores, atol=1e-3)
    assert set(got.ids.flatten().tolist()) <= set(MAPPED)
