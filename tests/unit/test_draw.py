"""The draw pipeline against a dense reference in NumPy, written from DESIGN section 5 and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ssd.sampling.accept import accepted_lengths
from sglang_ssd.sampling.contest import contenders, contest
from sglang_ssd.sampling.draw import DrawParameters, draw, sample
from sglang_ssd.sampling.filters import TOP_K_ALL, Filters, filter_mask
from sglang_ssd.sampling.noise import NoiseTable, as_unsigned, gumbel
from sglang_ssd.sampling.penalties import PenaltyRow, apply_penalties
from sglang_ssd.sampling.rough_noise import RoughNoise, finished
from sglang_ssd.sampling.seeds import derive_seed
from tests.unit.reference_draw import reference_mask, reference_scores
from tests.unit.test_noise import MASK, murmur3_reference

CI = settings(derandomize=True, deadline=None, max_examples=200)


NOISE = NoiseTable.of(50_000)


def filters(rows: int, top_k: int = TOP_K_ALL, top_p: float = 1.0, min_p: float = 0.0) -> Filters:
    return Filters(torch.full((rows,), top_k), torch.full((rows,), top_p), torch.full((rows,), min_p))


def parameters(seeds: list[int], positions: list[int], t: float, cut: Filters | None = None) -> DrawParameters:
    """All rows sample at temperature ``t``."""
    rows = len(seeds)
    return DrawParameters(torch.arange(rows), torch.full((rows,), t), torch.tensor(seeds), torch.tensor(positions), cut)


def reference_draw(logits: np.ndarray, t: float, top_k: int, top_p: float, min_p: float, seed: int, pos: int) -> int:
    scaled = logits.astype(np.float32) / np.float32(t)
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    before, kept = 0.0, set()
    for rank, token in enumerate(order):
        if rank == 0 or (rank < top_k and before <= top_p and p[token] >= p[order[0]] * min_p):
            kept.add(token)
        before += p[token]

    def score(token: int) -> float:
        u = murmur3_reference([seed & MASK, (seed >> 32) & MASK, pos, token]) / MASK
        return float(np.log(p[token]) - np.log(-np.log(u)))

    return max(sorted(kept), key=score)


@CI
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([2, 5, TOP_K_ALL]),
    st.sampled_from([0.35, 0.8, 1.0]),
    st.sampled_from([0.0, 0.07, 0.4]),
)
def test_draw_equals_the_dense_reference(seed: int, t: float, top_k: int, top_p: float, min_p: float) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 2, size=(3, 40)).astype(np.float32)
    seeds, positions = [seed, -seed, seed + 1], [0, 7, 500]
    cut = filters(3, top_k, top_p, min_p)
    drawn = draw(torch.from_numpy(logits), parameters(seeds, positions, t, cut), NOISE)
    expected = [
        reference_draw(row, t, top_k, top_p, min_p, s, p) for row, s, p in zip(logits, seeds, positions, strict=True)
    ]
    assert drawn.tolist() == expected


def test_many_rows_are_drawn_as_each_alone() -> None:
    """Eleven rows, each with a temperature, a seed, a position and filters of its own, among three greedy ones."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(14, 3000, generator=generator) * 3
    rows = torch.tensor([0, 1, 3, 4, 5, 6, 8, 9, 10, 11, 13])
    count = len(rows)
    cut = Filters(
        torch.randint(1, 60, (count,), generator=generator),
        torch.rand(count, generator=generator) * 0.5 + 0.5,
        torch.rand(count, generator=generator) * 0.05,
    )
    temperatures, seeds = torch.rand(count, generator=generator) + 0.3, torch.arange(count) * 71 - 5
    positions = torch.arange(count) * 13
    for filters_of_rows in (None, cut):
        everyone = DrawParameters(rows, temperatures, seeds, positions, filters_of_rows)
        drawn = draw(logits, everyone, NOISE)
        greedy = logits.argmax(-1)
        for i, row in enumerate(rows.tolist()):
            one = slice(i, i + 1)
            its = None if filters_of_rows is None else Filters(cut.top_ks[one], cut.top_ps[one], cut.min_ps[one])
            alone = DrawParameters(torch.tensor([0]), temperatures[one], seeds[one], positions[one], its)
            assert drawn[row] == draw(logits[row : row + 1], alone, NOISE)[0]
        assert [drawn[row] == greedy[row] for row in (2, 7, 12)] == [True] * 3


@st.composite
def logit_rows(draw_value: st.DrawFn) -> torch.Tensor:
    """Rows of every kind: wide, flat, full of ties, mostly impossible, and with one token that takes all."""
    vocab_size = draw_value(st.sampled_from([2, 9, 300, 5000]))
    seed, spread = draw_value(st.integers(0, 10_000)), draw_value(st.sampled_from([0.0, 0.01, 1.0, 3.0, 40.0]))
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    if draw_value(st.booleans()):
        logits = logits.round()  # ties
    if draw_value(st.booleans()):
        logits[1, 1::2] = -torch.inf
        logits[2, 1:] = -torch.inf
    return logits


@CI
@given(
    logits=logit_rows(),
    t=st.sampled_from([1e-3, 0.2, 1.0, 5.0, 1e4]),
    top_k=st.sampled_from([2, 3, 50, 1500, TOP_K_ALL]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.3, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 4),
)
def test_draws_and_masks_are_those_of_the_simple_form(
    logits: torch.Tensor, t: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    cut, rows = filters(4, top_k, top_p, min_p), len(logits)
    seeds, positions = [seed + i for i in range(rows)], [3, 0, 7, 2**31 - 1]
    p = torch.softmax(logits / t, dim=-1)
    assert torch.equal(filter_mask(p, cut), reference_mask(p, cut))
    expected = reference_scores(logits, torch.full((rows,), t), cut, (torch.tensor(seeds), torch.tensor(positions)))
    drawn = draw(logits, parameters(seeds, positions, t, cut), NOISE)
    assert torch.equal(drawn, expected.argmax(-1))


def test_draws_over_a_large_vocabulary_are_those_of_the_simple_form() -> None:
    logits = torch.randn(8, 49_152, generator=torch.Generator().manual_seed(5)) * 2
    seeds, positions = list(range(8)), list(range(8))
    for cut in (filters(8), filters(8, top_p=0.95), filters(8, top_k=40), filters(8, min_p=0.02)):
        key = (torch.tensor(seeds), torch.tensor(positions))
        expected = reference_scores(logits, torch.full((8,), 0.9), cut, key).argmax(-1)
        assert torch.equal(draw(logits, parameters(seeds, positions, 0.9, cut), NOISE), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_for_the_possible_tokens_only_gives_the_same_draw(dtype: torch.dtype) -> None:
    """Few tokens with a weight, one, none, and all in one batch."""
    generator = torch.Generator().manual_seed(3)
    log_weights = torch.randn(400, 300, generator=generator, dtype=dtype)
    log_weights[torch.rand(400, 300, generator=generator) < 0.9] = -torch.inf
    log_weights[5, 1:], log_weights[6], log_weights[7] = -torch.inf, -torch.inf, 0.0
    seeds, positions = torch.arange(400) - 200, torch.arange(400) % 7
    dense = gumbel(NOISE.bits(seeds, positions, 300)) + log_weights
    assert torch.equal(sample(log_weights, seeds, positions, NOISE), dense.argmax(-1))
    assert int(sample(torch.full((1, 300), -torch.inf), seeds[:1], positions[:1], NOISE)) == 0


def test_the_contest_of_a_large_vocabulary_is_won_by_the_best_score() -> None:
    """Rows from flat to certain; contenders are all that may win, and few where p is not flat: that is the gain."""
    generator = torch.Generator().manual_seed(9)
    spread = torch.linspace(0, 12, 64)[:, None]
    p = torch.softmax(torch.randn(64, 49_152, generator=generator) * spread, dim=-1)
    p[5, ::2], p[6, :40_000] = 0.0, 0.0
    seeds, positions = torch.arange(64) * 7919 - 100, torch.arange(64) * 31
    scores = gumbel(NOISE.bits(seeds, positions, 49_152)) + p.log()
    assert torch.equal(contest(p, seeds, positions, NOISE.rough), scores.argmax(-1))
    room = np.empty((2, 49_152), dtype=np.float32)
    for row, state in enumerate(NOISE.rough.states(seeds, positions)):
        favourite = int(p[row].argmax())
        passed = contenders(p[row].numpy(), favourite, NOISE.rough.row(state, 49_152), tuple(room))
        able = (scores[row] >= scores[row, favourite]).nonzero().squeeze(-1)
        assert set(able.tolist()) <= set(passed.tolist())
        assert row < 8 or len(passed) < 1.2 * len(able) + 8


@pytest.mark.parametrize("bits", [0, 2**16, 2**31, 2**32 - 1])
def test_the_lowest_id_wins_a_tie_of_the_contest(bits: int) -> None:
    """Every token has the same noise, at either end of it too; the likeliest two are equal."""
    p = torch.full((1, 300), 1e-4)
    p[0, [250, 3, 7]] = torch.tensor([0.4, 0.1, 0.4])

    class SameNoise(RoughNoise):
        def row(self, _: np.uint32, width: int) -> np.ndarray:
            return np.full(width, bits ^ (bits >> 16), dtype=np.uint32)

    assert int(contest(p, torch.tensor([1]), torch.tensor([2]), SameNoise(NOISE.prepared))) == 7


@pytest.mark.parametrize("favourite_s", [0, 1, 2**20, 2**32 - 2, 2**32 - 1])
def test_a_favourite_at_either_end_of_the_noise_has_the_rivals_that_it_should(favourite_s: int) -> None:
    """The likeliest token has the least or the most noise there is; the others have the usual."""
    p = torch.softmax(torch.randn(300, generator=torch.Generator().manual_seed(2)) * 2, dim=-1)[None]
    favourite = int(p.argmax())

    class Rigged(RoughNoise):
        def row(self, state: np.uint32, width: int) -> np.ndarray:
            bits = super().row(state, width)
            bits[favourite] = favourite_s ^ (favourite_s >> 16)
            return bits

    noise = Rigged(NOISE.prepared)
    for seed in range(50):
        key = torch.tensor([seed]), torch.tensor([3])
        bits = finished(noise.row(noise.states(*key)[0], 300))
        expected = (gumbel(bits) + p[0].log()).argmax()
        assert int(contest(p, *key, noise)) == int(expected)


def test_rough_bits_become_the_noise_s_own() -> None:
    seeds, positions = torch.tensor([3, -(2**63), 2**62 + 11]), torch.tensor([0, 2**31 - 1, 77])
    exact = NOISE.bits(seeds, positions, 5000)
    for state, bits in zip(NOISE.rough.states(seeds, positions), exact, strict=True):
        rough = NOISE.rough.row(state, 5000)
        assert torch.equal(finished(rough), bits)
        assert np.array_equal(rough >> 16, as_unsigned(bits).numpy() >> 16)


def test_the_lowest_id_wins_a_tie_among_few_possible_tokens() -> None:
    log_weights = torch.full((1, 300), -torch.inf)
    log_weights[0, [250, 3, 7]] = 0.0
    same_noise = NoiseTable(torch.zeros(300, dtype=torch.int32))
    assert int(sample(log_weights, torch.tensor([1]), torch.tensor([2]), same_noise)) == 3


def test_greedy_rows_are_argmax_in_a_mixed_batch() -> None:
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(1))
    logits[3, [4, 9]] = 30.0
    mixed = DrawParameters(torch.tensor([0, 2]), torch.full((2,), 2.0), torch.tensor([8, 9]), torch.tensor([1, 1]))
    together = draw(logits, mixed, NOISE)
    assert torch.equal(together[[1, 3, 4]], logits[[1, 3, 4]].argmax(-1))
    assert together[3] == 4
    assert torch.equal(together[[0, 2]], draw(logits[[0, 2]], parameters([8, 9], [1, 1], 2.0), NOISE))
    assert torch.equal(draw(logits, None, NOISE), logits.argmax(-1))


def test_filters_cut_equal_probabilities_at_the_lowest_id() -> None:
    p = torch.tensor([[0.25, 0.25, 0.25, 0.25]])
    assert filter_mask(p, filters(1, top_k=2)).tolist() == [[True, True, False, False]]
    assert filter_mask(p, filters(1, top_p=0.0)).tolist() == [[True, False, False, False]]
    assert filter_mask(p, filters(1, top_p=0.5)).tolist() == [[True, True, True, False]]


def test_top_p_of_one_keeps_what_rounding_would_cut() -> None:
    p = torch.full((1, 30_000), 1 / 30_000)
    assert p.double().sum() > 1
    assert filter_mask(p, filters(1, top_k=29_999)).sum() == 29_999


@CI
@given(st.data())
def test_accepted_is_the_agreeing_prefix_within_verified_len(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 6))
    token = st.integers(0, 2)
    drafts = data.draw(st.lists(token, min_size=width - 1, max_size=width - 1))
    draws = data.draw(st.lists(token, min_size=width, max_size=width))
    verified = data.draw(st.integers(0, width - 1))
    expected = 0
    while expected < verified and drafts[expected] == draws[expected]:
        expected += 1
    found = accepted_lengths(torch.tensor([drafts]).view(1, -1).long(), torch.tensor([draws]), torch.tensor([verified]))
    assert found.tolist() == [expected]


def reference_penalties(logits: np.ndarray, emitted: list[int], row: PenaltyRow) -> np.ndarray:
    out = logits.copy()
    for token in set(emitted):
        out[token] -= row.frequency * emitted.count(token) + row.presence
    if len(emitted) < row.min_new_tokens:
        out[row.stop_ids] = -np.inf
    for token in set(emitted):
        out[token] = out[token] * row.repetition if out[token] < 0 else out[token] / row.repetition
    return out


@CI
@given(st.data())
def test_every_window_position_counts_the_drafts_before_it(data: st.DataObject) -> None:
    generator = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    emitted = data.draw(st.lists(st.integers(0, 9), max_size=8))
    drafts = data.draw(st.lists(st.integers(0, 9), min_size=3, max_size=3))
    row = PenaltyRow(
        row=1,
        output_ids=emitted,
        frequency=data.draw(st.sampled_from([0.0, 0.7, -0.4])),
        presence=data.draw(st.sampled_from([0.0, 1.1])),
        repetition=data.draw(st.sampled_from([1.0, 1.6])),
        min_new_tokens=data.draw(st.integers(0, 10)),
        stop_ids=[2, 5],
    )
    logits = generator.normal(0, 2, size=(2, 4, 10)).astype(np.float32)
    processed = torch.from_numpy(logits.copy())
    apply_penalties(processed, torch.tensor([[0, 0, 0], drafts]), [row])
    assert np.array_equal(processed[0].numpy(), logits[0])  # the other request is untouched
    for position in range(4):
        expected = reference_penalties(logits[1, position], emitted + drafts[:position], row)
        np.testing.assert_allclose(processed[1, position].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_derived_seeds_differ_and_fit_into_64_bits() -> None:
    seeds = {derive_seed(1, index) for index in range(10_000)} | {derive_seed(2, index) for index in range(10_000)}
    assert len(seeds) == 20_000
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
