"""The q that comes over the wire: read when it can be the tokens' own, else the tokens are a deterministic proposal."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_ssd.sampling.draw import DrawParameters, draw
from sglang_ssd.sampling.noise import NoiseTable
from sglang_ssd.sampling.verdict import judge
from sglang_ssd.sampling.window import Support, Window
from sglang_ssd.scheduler.supports import NOTHING, Proposed, read_q, window_support

VOCAB = 50
TOKENS = np.array([7, 9], dtype=np.int32)
IDS, Q = [7, 3, 1, 2, 9, 4], [0.5, 0.25, 0.25, 0.2, 1.8, 0.0]  # the second is not normalised


def row(ids: list[int], q: list[float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(ids, dtype=np.int32), np.array(q, dtype=np.float32)


def test_a_q_is_read_token_by_token() -> None:
    found = read_q(*row(IDS, Q), TOKENS, VOCAB)
    assert found is not None
    assert found.ids.tolist() == [IDS[:3], IDS[3:]]
    assert found.q.tolist() == np.float32([Q[:3], Q[3:]]).tolist()


@pytest.mark.parametrize(
    ("ids", "q"),
    [
        ([], []),
        (IDS, Q[:-1]),
        (IDS[:5], Q[:5]),
        ([*IDS[:5], VOCAB], Q),
        ([*IDS[:5], -1], Q),
        (IDS, [0.0, *Q[1:]]),
        (IDS, [*Q[:5], -0.1]),
        (IDS, [*Q[:5], float("nan")]),
        (IDS, [*Q[:5], float("inf")]),
        ([8, *IDS[1:]], Q),
    ],
)
def test_what_cannot_be_the_q_of_the_tokens_is_dropped(ids: list[int], q: list[float]) -> None:
    assert read_q(*row(ids, q), TOKENS, VOCAB) is None


def test_a_window_has_a_q_for_every_draft() -> None:
    q = read_q(*row(IDS, Q), TOKENS, VOCAB)
    support = window_support([Proposed([7, 9], q), Proposed([4, 5, 6]), NOTHING], columns=3)
    drafts = torch.tensor([[7, 9, 0], [4, 5, 6], [0, 0, 0]])
    assert support.ids.shape == (3, 3, 3)
    assert support.of(drafts)[0].tolist() == pytest.approx([0.5, 0.9, 1.0])
    assert support.of(drafts)[1:].tolist() == [[1.0] * 3] * 2
    torch.testing.assert_close(support.dense(VOCAB).sum(-1), torch.ones(3, 3, dtype=torch.float64))
    assert support.dense(VOCAB)[0, 0, [7, 3, 1]].tolist() == pytest.approx([0.5, 0.25, 0.25])


def test_greedy_rows_beside_sampled_ones_go_by_agreement() -> None:
    """Rows 0 and 2 are greedy; row 1 samples, and its certain draft passes, its impossible one does not."""
    logits = torch.randn(3, 3, 6, generator=torch.Generator().manual_seed(0))
    logits[1] = -torch.inf
    logits[1, 0, 2] = logits[1, 1, 4] = logits[1, 2, 5] = 0.0
    best = logits.argmax(-1)
    drafts = torch.stack([best[0, :2], torch.tensor([2, 3]), torch.stack([best[2, 0], 5 - best[2, 1]])])
    q = torch.zeros(3, 2, 1) + 1.0
    window = Window(drafts, torch.tensor([2, 2, 2]), Support(drafts[..., None], q))
    parameters = DrawParameters(torch.tensor([3, 4, 5]), torch.ones(3), torch.full((3,), 8), torch.arange(3))
    verdict = judge(logits.view(9, 6), window, parameters, NoiseTable.of(6))
    assert verdict.accepted.tolist() == [2, 1, 1]
    assert verdict.bonus.tolist() == [best[0, 2], 4, best[2, 1]]
    assert verdict.committed(drafts).tolist() == [best[0].tolist(), [2, 4, 0], [*best[2, :2].tolist(), 0]]
    without = judge(
        logits.view(9, 6),
        Window(drafts, torch.zeros(3, dtype=torch.int64), window.support),
        parameters,
        NoiseTable.of(6),
    )
    assert without.accepted.tolist() == [0, 0, 0]
    assert without.bonus.tolist() == [best[0, 0], 2, best[2, 0]]


def test_a_round_without_drafts_is_one_draw_of_p() -> None:
    support = window_support([NOTHING, NOTHING], columns=0)
    window = Window(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), support)
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    parameters = DrawParameters(torch.tensor([1]), torch.ones(1), torch.tensor([8]), torch.tensor([5]))
    verdict = judge(logits, window, parameters, NoiseTable.of(6))
    assert verdict.accepted.tolist() == [0, 0]
    assert verdict.bonus.tolist() == draw(logits, parameters, NoiseTable.of(6)).tolist()
