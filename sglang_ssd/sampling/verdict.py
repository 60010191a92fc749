"""From a window's processed logits to its verdict, by agreement or by the rejection rule."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ssd.sampling.accept import accepted_lengths
from sglang_ssd.sampling.draw import DrawParameters, draw, log_distribution
from sglang_ssd.sampling.noise import NoiseTable
from sglang_ssd.sampling.rejection import reject
from sglang_ssd.sampling.window import Verdict, Window


def judge(logits: Tensor, window: Window, parameters: DrawParameters | None, noise: NoiseTable) -> Verdict:
    """The verdict on B windows. Where a q came with the drafts, rows that sample go by the rejection rule.

    Args:
        logits: [B * W, V], processed, row-major by request.
        window: of the B requests.
        parameters: of the rows that sample, all W of a request together; None: all are greedy.
        noise: for at least V tokens.

    """
    if parameters is None:
        return _agreement(logits.argmax(-1), window)
    if window.support is None:
        # A GPU draws all rows at once; a CPU pays for every row and can look at what it drew.
        if logits.device.type == "cpu":
            return _agreement_by_columns(logits, window, parameters, noise)
        return _agreement(draw(logits, parameters, noise), window)
    verdict = _agreement(logits.argmax(-1), window)
    width = window.width
    requests, seeds, positions = (
        each.view(-1, width)[:, 0] for each in (parameters.rows // width, parameters.seeds, parameters.positions)
    )
    log_p = log_distribution(logits[parameters.rows], parameters).view(len(requests), width, -1)
    sampled = reject(log_p, window.select(requests), seeds, positions, noise)
    return Verdict(
        verdict.accepted.index_copy(0, requests, sampled.accepted),
        verdict.bonus.index_copy(0, requests, sampled.bonus),
    )


def _agreement(draws: Tensor, window: Window) -> Verdict:
    draws = draws.view(-1, window.width)
    accepted = accepted_lengths(window.drafts, draws, window.verified_lens)
    return Verdict(accepted, draws.gather(1, accepted[:, None]).squeeze(1))


def _agreement_by_columns(logits: Tensor, window: Window, parameters: DrawParameters, noise: NoiseTable) -> Verdict:
    """The same verdict, but a position is drawn only behind an accepted draft."""
    agreeing = torch.arange(len(window.drafts))
    accepted, bonus = torch.zeros_like(agreeing), torch.zeros_like(agreeing)
    for column in range(window.width):
        rows = agreeing * window.width + column
        accepted[agreeing] = column
        bonus[agreeing] = draws = draw(logits[rows], parameters.of(rows), noise)
        if column == window.width - 1:
            break
        agreed = (draws == window.drafts[agreeing, column]) & (column < window.verified_lens[agreeing])
        agreeing = agreeing[agreed]
        if not len(agreeing):
            break
    return Verdict(accepted, bonus)
