"""The draw pipeline against a dense reference in NumPy, written from DESIGN section 5 and nothing else."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ssd.sampling.accept import accepted_lengths
from sglang_ssd.sampling.candidates import best_candidates
from sglang_ssd.sampling.draw import TOP_K_ALL, DrawParameters, draw, filter_mask
from sglang_ssd.sampling.penalties import PenaltyRow, apply_penalties
from sglang_ssd.sampling.seeds import derive_seed
from tests.unit.test_noise import MASK, murmur3_reference

CI = settings(derandomize=True, deadline=None, max_examples=200)


def parameters(rows: int, **values: object) -> DrawParameters:
    defaults = {"temperatures": 1.0, "top_ks": TOP_K_ALL, "top_ps": 1.0, "min_ps": 0.0, "seeds": 0, "positions": 0}
    kinds = {"top_ks": torch.int64, "seeds": torch.int64, "positions": torch.int64}

    def column(name: str) -> torch.Tensor:
        given_value = values.get(name, defaults[name])
        listed = given_value if isinstance(given_value, list) else [given_value] * rows
        return torch.tensor(listed, dtype=kinds.get(name, torch.float32))

    return DrawParameters(**{name: column(name) for name in defaults})


def reference_draw(logits: np.ndarray, t: float, top_k: int, top_p: float, min_p: float, seed: int, pos: int) -> int:
    if t == 0:
        return int(np.argmax(logits))
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
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.sampled_from([2, 5, TOP_K_ALL]),
    st.sampled_from([0.35, 0.8, 1.0]),
    st.sampled_from([0.0, 0.07, 0.4]),
)
def test_draw_equals_the_dense_reference(seed: int, t: float, top_k: int, top_p: float, min_p: float) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 2, size=(3, 40)).astype(np.float32)
    seeds, positions = [seed, -seed, seed + 1], [0, 7, 500]
    drawn = draw(
        torch.from_numpy(logits),
        parameters(3, temperatures=t, top_ks=top_k, top_ps=top_p, min_ps=min_p, seeds=seeds, positions=positions),
        all_greedy=False,
    )
    expected = [
        reference_draw(row, t, top_k, top_p, min_p, s, p) for row, s, p in zip(logits, seeds, positions, strict=True)
    ]
    assert drawn.tolist() == expected


def test_greedy_rows_are_argmax_in_a_mixed_batch() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [0.0, 3.0, 2.9, 1.0]])
    mixed = draw(logits, parameters(2, temperatures=[0.0, 50.0], seeds=5), all_greedy=False)
    assert mixed[0] == 1


def test_filters_cut_equal_probabilities_at_the_lowest_id() -> None:
    p = torch.tensor([[0.25, 0.25, 0.25, 0.25]])
    assert filter_mask(p, parameters(1, top_ks=2)).tolist() == [[True, True, False, False]]
    assert filter_mask(p, parameters(1, top_ps=0.0)).tolist() == [[True, False, False, False]]


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


def test_the_draft_ranks_by_the_scores_that_the_target_draws_by() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(3)) * 2
    seeds, positions = torch.arange(50) * 1_000_003, torch.arange(50)
    for temperature in (0.0, 0.7, 1.3):
        temperatures = torch.full((50,), temperature)
        ids, scores = best_candidates(logits, temperatures, seeds, positions, 5)
        drawn = draw(
            logits,
            DrawParameters(
                temperatures, torch.full((50,), TOP_K_ALL), torch.ones(50), torch.zeros(50), seeds, positions
            ),
            all_greedy=temperature == 0,
        )
        assert (ids[:, 0] == drawn).float().mean() > 0.97  # only a noise maximum outside the shortlist may differ
        assert bool((scores.diff(dim=1) <= 0).all())


def test_derived_seeds_differ_and_fit_into_64_bits() -> None:
    seeds = {derive_seed(1, index) for index in range(10_000)} | {derive_seed(2, index) for index in range(10_000)}
    assert len(seeds) == 20_000
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
