"""The draft's candidates against the target's draw: same bias, same filters, same noise. And samples of a known q."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_ssd.draft_server.drawing import draft_draw, joined, to_host
from sglang_ssd.draft_server.terms import Proposal, Terms, terms_of
from sglang_ssd.protocol import Sampling, pack_floats, pack_tokens
from sglang_ssd.sampling.candidates import Found, find_candidates
from sglang_ssd.sampling.draw import DrawParameters, draw
from sglang_ssd.sampling.filters import Filters
from sglang_ssd.sampling.noise import NoiseTable
from tests.support import rows_by

ROWS, VOCAB = 200, 1000
POSITIONS = torch.arange(ROWS) + 3
SURFACE = [
    {},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"bias": {7: 6.0, 9: -50.0, 900: 4.0}},
    {"top_p": 0.6, "bias": {3: 8.0}},
]


def some_logits(seed: int = 3) -> torch.Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def sampling(temperature: float, seed: int, bias: dict[int, float] | None = None, **filters: float) -> Sampling:
    bias = bias or {}
    blocks = {"bias_ids": pack_tokens(list(bias)), "bias": pack_floats(list(bias.values()))}
    return Sampling(temperature, seed, **filters, **blocks)


def find(logits: torch.Tensor, terms: list[Terms], count: int = 8, token_map: torch.Tensor | None = None) -> Found:
    return find_candidates(logits, draft_draw(rows_by(terms, POSITIONS.numpy())), count, token_map)


def targets_draw(logits: torch.Tensor, terms: list[Terms]) -> torch.Tensor:
    """The target's own pipeline: bias, then the draw."""
    logits = logits.clone()
    for row, each in enumerate(terms):
        ids = torch.from_numpy(np.frombuffer(each.bias_ids, "<i4").astype(np.int64))
        logits[row, ids] += torch.from_numpy(np.frombuffer(each.bias, "<f4").copy())
    if not terms[0].temperature:
        return draw(logits, None, NoiseTable.of(VOCAB))
    columns = {name: torch.tensor([getattr(each, name) for each in terms]) for name in Terms._fields[:5]}
    filters = Filters(columns["top_k"], columns["top_p"], columns["min_p"])
    parameters = DrawParameters(torch.arange(ROWS), columns["temperature"], columns["seed"], POSITIONS, filters)
    return draw(logits, parameters, NoiseTable.of(VOCAB))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("parameters", SURFACE)
def test_the_first_candidate_is_the_targets_draw(parameters: dict, temperature: float) -> None:
    logits = some_logits()
    terms = [terms_of(sampling(temperature, 10**15 * row, **parameters), None, VOCAB) for row in range(ROWS)]
    found = find(logits, terms)
    agreed = (found.ids[:, 0] == targets_draw(logits, terms)).float().mean()
    assert agreed > 0.97  # only a noise maximum outside the shortlist may differ
    assert bool((found.scores.diff(dim=1) <= 0).all())
    assert all(len(set(row)) == len(row) for row in found.ids.tolist())


def test_rows_of_all_kinds_in_one_forward_are_as_they_are_alone() -> None:
    logits = some_logits()
    kinds = [terms_of(sampling(t, 99, **parameters), None, VOCAB) for parameters in SURFACE for t in (0.0, 0.8)]
    terms = [kinds[row % len(kinds)] for row in range(ROWS)]
    together = find(logits, terms)
    for kind in kinds:
        rows = [row for row in range(ROWS) if terms[row] is kind]
        assert torch.equal(together.ids[rows], find(logits, [kind] * ROWS).ids[rows])


def test_bias_goes_by_token_also_where_the_draft_proposes_a_few_only() -> None:
    token_map = torch.arange(0, VOCAB, 4)
    logits = some_logits()[:, : len(token_map)]
    terms = terms_of(sampling(0.0, 0, bias={8: 100.0, 9: 200.0, 999: 50.0}), None, VOCAB)
    assert find(logits, [terms] * ROWS, token_map=token_map).ids[:, 0].tolist() == [8] * ROWS
    assert logits.max() < 50  # the engine's own buffer is left as it was


def test_greedy_terms_do_not_depend_on_what_greedy_ignores() -> None:
    assert terms_of(sampling(0.0, 5, top_k=3, top_p=0.5), None, VOCAB) == terms_of(sampling(0.0, 6), None, VOCAB)
    assert terms_of(sampling(0.0, 5), None, VOCAB).plain
    assert not terms_of(sampling(0.0, 5, bias={1: 1.0}), None, VOCAB).plain


@pytest.mark.parametrize(
    "bad",
    [
        Sampling(-1.0),
        Sampling(float("nan")),
        Sampling(1.0, top_p=float("inf")),
        Sampling(1.0, bias_ids=b"abc"),
        Sampling(1.0, bias_ids=pack_tokens([1, 2]), bias=pack_floats([1.0])),
        Sampling(1.0, bias_ids=pack_tokens([-1]), bias=pack_floats([1.0])),
        Sampling(1.0, bias_ids=pack_tokens([1]), bias=pack_floats([float("nan")])),
    ],
)
def test_terms_that_make_no_sense_are_none(bad: Sampling) -> None:
    assert terms_of(bad, None, VOCAB) is None


PROPOSAL = Proposal(support=16, top_f=3, c=0.3, vocab_size=990)


def test_samples_come_from_the_q_that_is_told() -> None:
    logits = some_logits()
    logits[:, 990:] = -50.0  # tokens that the target does not have
    logits[:, 995] = 100.0
    terms = [terms_of(sampling(1.0, row, top_k=40), PROPOSAL, VOCAB) for row in range(ROWS)]
    found = find(logits, terms)
    assert found.tokens is not None
    assert found.support is not None
    assert found.support.ids.shape == (ROWS, 16)
    assert bool((found.support.of(found.tokens) > 0).all())
    torch.testing.assert_close(found.support.q.sum(-1), torch.ones(ROWS))
    told = found.support.q.masked_select(found.support.ids == 995)
    assert not told.any()
    expected = torch.softmax(logits[:, :990].topk(39).values, dim=-1)  # the lost token is one of the 40
    expected[:, :2] *= 0.3  # and one of the F = 3
    largest = expected.sort(dim=-1, descending=True).values[:, :16]
    torch.testing.assert_close(found.support.q, largest / largest.sum(-1, keepdim=True), rtol=1e-4, atol=1e-6)


def test_bonus_candidates_of_rows_that_sample_are_ranked_without_noise() -> None:
    logits = some_logits()
    found = find(logits, [terms_of(sampling(1.3, 5), PROPOSAL, VOCAB)] * ROWS)
    assert torch.equal(found.ids, logits.topk(8).indices)


def test_samples_reach_the_host_in_the_order_of_their_rows() -> None:
    coupled, sampled = (terms_of(sampling(1.0, 5), proposal, VOCAB) for proposal in (None, PROPOSAL))
    terms = [sampled if row % 3 == 1 else coupled for row in range(ROWS)]
    found = find(some_logits(), terms)
    host = joined([to_host(found), to_host(found)])
    assert len(host.ids) == 2 * ROWS
    count = sum(row is sampled for row in terms)
    assert len(host.samples) == 2 * count
    for index, sample in enumerate(host.samples[:count]):
        assert sample.token == found.tokens[index]
        assert np.frombuffer(sample.ids, "<i4").tolist() == found.support.ids[index].tolist()
        assert np.frombuffer(sample.q, "<f4").tolist() == found.support.q[index].tolist()


def test_samples_are_of_what_the_filters_left() -> None:
    logits = some_logits()
    logits[:, PROPOSAL.vocab_size :] = -50.0
    found = find(logits, [terms_of(sampling(1.0, 5, top_k=4), PROPOSAL, VOCAB)] * ROWS)
    assert found.support is not None
    assert (found.support.q > 0).sum(-1).tolist() == [4] * ROWS
