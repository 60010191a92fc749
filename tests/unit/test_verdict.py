"""The verdict on windows whose positions are drawn one by one, against all of them drawn at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ssd.sampling import verdict as module
from sglang_ssd.sampling.accept import accepted_lengths
from sglang_ssd.sampling.draw import DrawParameters, draw
from sglang_ssd.sampling.filters import TOP_K_ALL, Filters
from sglang_ssd.sampling.noise import NoiseTable
from sglang_ssd.sampling.verdict import judge
from sglang_ssd.sampling.window import Window

VOCAB = 3
NOISE = NoiseTable.of(VOCAB)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.data())
def test_it_is_the_verdict_of_all_draws(data: st.DataObject) -> None:
    """Greedy requests among sampling ones, with filters or none, windows of every width and verified length."""
    count, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    logits = torch.randn(count * width, VOCAB, generator=generator)
    drafts = torch.randint(0, VOCAB, (count, width - 1), generator=generator)
    verified = torch.randint(0, width, (count,), generator=generator)
    sampling = [i for i in range(count) if data.draw(st.booleans())] or [data.draw(st.integers(0, count - 1))]
    parameters = some_parameters(sampling, width, filtered=data.draw(st.booleans()))
    draws = draw(logits, parameters, NOISE).view(count, width)
    accepted = accepted_lengths(drafts, draws, verified)
    found = judge(logits, Window(drafts, verified), parameters, NOISE)
    assert torch.equal(found.accepted, accepted)
    assert torch.equal(found.bonus, draws.gather(1, accepted[:, None]).squeeze(1))


def test_nothing_is_drawn_behind_a_rejected_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(8, VOCAB)
    logits[torch.arange(8), torch.tensor([0, 1, 2, 0, 0, 1, 2, 0])] = 100.0
    drawn = []
    monkeypatch.setattr(module, "draw", lambda rows, *rest: (drawn.append(len(rows)), draw(rows, *rest))[1])
    window = Window(torch.tensor([[0, 0, 0], [0, 1, 2]]), torch.tensor([3, 3]))
    verdict = judge(logits, window, some_parameters([0, 1], 4, filtered=False), NOISE)
    assert (verdict.accepted.tolist(), verdict.bonus.tolist()) == ([1, 3], [1, 0])
    assert drawn == [2, 2, 1, 1]


def some_parameters(requests: list[int], width: int, *, filtered: bool) -> DrawParameters:
    rows = torch.cat([torch.arange(width) + request * width for request in requests])
    seeds = torch.tensor(requests).repeat_interleave(width)
    temperatures = (1 + seeds % 3) / 2
    cut = Filters(2 + seeds % 2, torch.full(seeds.shape, 0.9), torch.zeros(seeds.shape)) if filtered else None
    if cut is not None:
        cut.top_ks[::2] = TOP_K_ALL
    return DrawParameters(rows, temperatures, seeds, rows % width + 5, cut)
