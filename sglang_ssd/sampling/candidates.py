"""The draft's side of the draw: its best guesses, ranked as the target will draw, or samples of a q that is known."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_ssd.sampling.filters import Filters, kept_ranks
from sglang_ssd.sampling.noise import gumbel, noise_bits, scrambled_ids
from sglang_ssd.sampling.rejection import SupportRule, sample_from_support
from sglang_ssd.sampling.window import Support

SHORTLIST = 1024
"""At T > 0 the noise is computed for this many likeliest tokens only; it costs speed to be wrong, never text. What the
target draws from outside is never guessed; twelve rows of 49,152 tokens take 2 ms longer than with a list of 256."""

_CUT = 1000.0
"""What a token that the filters cut loses in score: it comes after all that stay, in the order it had."""


@dataclass(frozen=True)
class Bias:
    """Logit bias, sparse: ``values`` float32 [n] for the tokens ``ids`` of ``rows``, both int64 [n]."""

    rows: Tensor
    ids: Tensor
    values: Tensor


@dataclass(frozen=True)
class Samples:
    """The rows whose guess is to be a sample of a known q: ``rows`` int64 [S], their rule, and the size of the
    vocabulary that their target can take, int64 [S].
    """

    rows: Tensor
    rule: SupportRule
    vocab_sizes: Tensor


@dataclass(frozen=True)
class DraftDraw:
    """What B rows guess by: float32 ``temperatures`` [B] (0 is greedy), int64 ``seeds`` and ``positions`` [B]; the
    position is that of the token that was forwarded. The rest is None where no row has it.
    """

    temperatures: Tensor
    seeds: Tensor
    positions: Tensor
    bias: Bias | None = None
    filters: Filters | None = None
    samples: Samples | None = None


@dataclass(frozen=True)
class Found:
    """The best next tokens of B rows, best first: ``ids`` int64 and ``scores`` float32, both [B, count]; for the S
    rows that sample also the ``tokens`` int64 [S] and their q.
    """

    ids: Tensor
    scores: Tensor
    tokens: Tensor | None = None
    support: Support | None = None


def find_candidates(logits: Tensor, by: DraftDraw, count: int, token_map: Tensor | None = None) -> Found:
    """The ``count`` best next tokens of each row, best first: the draft's own draw, then its runners-up.

    A row's score is ``log q / T + g`` with the Gumbel noise ``g`` of (seed, position, token), the same score, after the
    same bias and filters, by which the target draws (DESIGN section 5); at T = 0 it is the log-probability. Rows that
    sample are ranked without noise: their bonus is no function of it, and likely where q is large.

    Args:
        logits: [B, V], any float dtype; with a map [B, M].
        by: of the B rows.
        count: how many, at most the width of ``logits``.
        token_map: int64 [M], ascending, the token of each column; None when that is its number.

    """
    greedy = by.temperatures <= 0
    if by.bias is not None:
        logits = _biased(logits, by.bias, token_map)
    scale = torch.where(greedy, torch.ones_like(by.temperatures), by.temperatures)
    log_q = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    # Asking a GPU would stall its queue, and noise for a shortlist costs it nothing; a CPU saves the longer sort.
    sampling = logits.device.type != "cpu" or not bool(greedy.all())
    reach = max(SHORTLIST, by.samples.rule.reach if by.samples is not None else 0) if sampling else 0
    ranked, ids = log_q.topk(min(max(reach, count), logits.shape[-1]), dim=-1)
    if token_map is not None:
        ids = token_map[ids]  # before the noise, which belongs to tokens
    kept = None if by.filters is None else kept_ranks(ranked.exp(), by.filters)
    scores = ranked if kept is None else torch.where(kept, ranked, ranked - _CUT)
    if sampling:
        scores = torch.where(_noisy(by)[:, None], scores + _noise(by, ids), scores)
    top, order = scores.topk(count, dim=-1)
    return Found(ids.gather(-1, order), top, *_sampled(by, ranked, ids, kept))


def _noise(by: DraftDraw, ids: Tensor) -> Tensor:
    return gumbel(noise_bits(by.seeds, by.positions, scrambled_ids(ids))).float()


def _noisy(by: DraftDraw) -> Tensor:
    noisy = by.temperatures > 0
    return noisy if by.samples is None else noisy.index_fill(0, by.samples.rows, False)


def _biased(logits: Tensor, bias: Bias, token_map: Tensor | None) -> Tensor:
    """A copy with the bias added; tokens that the draft cannot propose are left out."""
    if token_map is None:
        return logits.float().index_put((bias.rows, bias.ids), bias.values, accumulate=True)
    columns = torch.searchsorted(token_map, bias.ids).clamp_(max=len(token_map) - 1)
    values = torch.where(token_map[columns] == bias.ids, bias.values, 0.0)
    return logits.float().index_put((bias.rows, columns), values, accumulate=True)


def _sampled(
    by: DraftDraw, ranked: Tensor, ids: Tensor, kept: Tensor | None
) -> tuple[Tensor, Support] | tuple[None, None]:
    """Samples from what the filters left and the target can take, cut before the draw."""
    if by.samples is None:
        return None, None
    rows = by.samples.rows
    possible = ids[rows] < by.samples.vocab_sizes[:, None]
    if kept is not None:
        possible &= kept[rows]
    ranked = ranked[rows].masked_fill(~possible, -torch.inf)
    return sample_from_support(ranked, ids[rows], by.samples.rule, by.seeds[rows], by.positions[rows])
