"""The paper's rule: a draft token is *sampled* from a known q and accepted with probability ``min(1, p / q)``.

Legend: p is the target's distribution, q the draft's, x a draft token sampled from q.

    accept x   iff  u < p(x) / q(x)                              u uniform
    otherwise  the bonus is a sample of norm(max(p - q, 0))
    behind the last draft token the bonus is a sample of p

q has a *support* of at most M tokens and is zero elsewhere, so that all of it travels, in float32, and the rule is
exact with what travelled. A deterministic proposal is a q of one token. (A greedy test at T > 0 is exact for no q.)

Why it is exact when drafts are made ahead of time. Three streams of noise belong to each position of a request, and no
two share bits: D draws the draft token, U tests it, R draws the bonus. The token that a position gets is a function
of D, U and R of that position and of the text before it, and a position gets its token once. So all that is needed is
that p, q and *whether* a draft is tested there depend on nothing of that position's own D, U and R.

* A branch drawn ahead of time, served late, or made again after an eviction holds the token that D draws from q, the
  same whenever it is drawn. Serving it is drawing it now.
* Behind a rejected draft nothing was tested: D, U and R of those positions are as fresh as before. The rejected
  position has its token, and is not drawn again.
* A reply that comes too late is not tested, and the position's token is R's sample of p. What was drafted behind it
  is of use only if its branch begins with that sample, and that is the text before those positions.
* A draft token that is not tested because the window ends before it has no effect; where windows end depends on the
  text, on limits and on clocks.
* So a draft must never be withheld for what was drawn: what the target cannot take must be outside the support before
  the draw, not dropped behind it.

The rule believes the draft server that x was drawn from the q that came with it; `coupled` believes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_ssd.sampling.draw import sample
from sglang_ssd.sampling.noise import NoiseTable, as_unsigned, gumbel, noise_bits, scrambled_ids
from sglang_ssd.sampling.window import Support, Verdict, Window

# What sets the streams apart. R is the coupled draw's own: where nothing is tested both modes draw the same tokens.
_DRAFTING = 0x6A09E667F3BCC908
_ACCEPTING = 0x3C6EF372FE94F82B


@dataclass(frozen=True)
class SupportRule:
    """How S rows make their q: ``sizes`` (M, at least 1) and ``top_fs`` (F) int64 [S], ``cs`` (C) float32 [S].

    ``width`` is the largest M, and of at most ``reach`` of the likeliest tokens, M + F, anything need be known.
    """

    sizes: Tensor
    top_fs: Tensor
    cs: Tensor
    width: int
    reach: int

    @classmethod
    def of(cls, rows: list[tuple[int, int, float]]) -> SupportRule:
        """From M, F and C of every row."""
        sizes, top_fs, cs = zip(*rows, strict=True)
        return cls(
            torch.tensor(sizes),
            torch.tensor(top_fs),
            torch.tensor(cs, dtype=torch.float32),
            width=max(sizes),
            reach=max(size + top_f for size, top_f, _ in rows),
        )


def sample_from_support(
    ranked: Tensor, ids: Tensor, rule: SupportRule, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Support]:
    """The draft side: q as it will travel, and a token drawn from it by the stream D.

    Definition 14 of the paper with a cut: the F likeliest tokens are weighed down by C, and the M heaviest normalised.

    Args:
        ranked: ``log q`` of the likeliest tokens after bias, temperature and filters, float32 [S, n], descending; what
            a filter cut is -inf (and may stand anywhere).
        ids: int64 [S, n], which tokens these are.
        rule: of the S rows; at least min(V, ``reach``) tokens must be ranked.
        seeds: int64 [S].
        positions: int64 [S], position of the token that was forwarded.

    Returns:
        tokens int64 [S] and their q, [S, min(n, largest M)].

    """
    columns = torch.arange(ranked.shape[1], device=ranked.device)
    weights = (ranked - ranked.amax(-1, keepdim=True)).exp()
    scaled = torch.where(columns < rule.top_fs[:, None], weights * rule.cs[:, None], weights)
    weights = torch.where(scaled.sum(-1, keepdim=True) > 0, scaled, weights)  # C = 0 may leave nothing
    weights, order = weights.sort(dim=-1, descending=True, stable=True)
    weights = torch.where(columns < rule.sizes[:, None], weights, 0.0)[:, : rule.width]
    support = Support(ids.gather(-1, order)[:, : weights.shape[1]], weights / weights.sum(-1, keepdim=True))
    noise = gumbel(noise_bits(seeds ^ _DRAFTING, positions, scrambled_ids(support.ids)))
    best = (noise + support.q.log()).argmax(-1, keepdim=True)
    return support.ids.gather(-1, best).squeeze(-1), support


def reject(log_p: Tensor, window: Window, seeds: Tensor, first_positions: Tensor, noise: NoiseTable) -> Verdict:
    """The verify side of the rule.

    Args:
        log_p: float32 [B, W, V]; row i was computed with drafts 0..i-1 before it. Need not be normalised.
        window: of the B requests, with the q of its drafts.
        seeds: int64 [B].
        first_positions: int64 [B], position of each window's first token (the pending bonus).
        noise: for at least V tokens.

    """
    if window.support is None:
        raise ValueError("drafts without q cannot go by the rejection rule: this is a bug")
    rows = torch.arange(len(log_p), device=log_p.device)
    accepted = torch.zeros_like(window.verified_lens)
    weights = _normal(log_p[:, 0])
    if window.width > 1:
        accepted = _accepted_lengths(log_p, window, window.support, (seeds, first_positions))
        q = window.support.select(rows, accepted.clamp(max=window.width - 2)).dense(log_p.shape[-1])
        rejected = accepted < window.verified_lens
        weights = _bonus_weights(_normal(log_p[rows, accepted]), q, rejected)
    return Verdict(accepted, sample(_safe_log(weights), seeds, first_positions + accepted, noise))


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """The stream U, float64 [B], inside (0, 1)."""
    bits = noise_bits(seeds ^ _ACCEPTING, positions, scrambled_ids(torch.zeros_like(positions)[:, None]))
    return (as_unsigned(bits).squeeze(-1).double() + 0.5) / 2**32


def _accepted_lengths(log_p: Tensor, window: Window, support: Support, key: tuple[Tensor, Tensor]) -> Tensor:
    """How many leading drafts pass their test, int64 [B]; ``key`` is (seeds, first positions)."""
    seeds, first_positions = key
    columns = torch.arange(window.width - 1, device=log_p.device)
    total = log_p[:, :-1].exp().sum(-1, dtype=torch.float64)
    p_x = log_p[:, :-1].gather(-1, window.drafts[..., None]).squeeze(-1).double().exp() / total
    positions = first_positions[:, None] + columns
    u = uniform(seeds.repeat_interleave(len(columns)), positions.reshape(-1)).view_as(p_x)
    passed = (u * support.of(window.drafts) < p_x) & (columns < window.verified_lens[:, None])
    return passed.cumprod(dim=1).sum(dim=1)


def _bonus_weights(p: Tensor, q: Tensor, rejected: Tensor) -> Tensor:
    """What the bonus is drawn from, [B, V], not normalised: the residual behind a rejected draft, else p."""
    residual = (p - q).clamp_(min=0)
    # Nothing is left only where p and q are one, and then nothing was rejected but by rounding.
    use = rejected & (residual.sum(-1) > 0)
    return torch.where(use[:, None], residual, p)


def _normal(log_p: Tensor) -> Tensor:
    """Probabilities, float64 [B, V]."""
    p = log_p.double().exp()
    return p.div_(p.sum(-1, keepdim=True))


def _safe_log(weights: Tensor) -> Tensor:
    """Log, -inf at 0; some libraries' vector log is slow at 0."""
    positive = weights > 0
    return torch.where(positive, weights, 1.0).log().masked_fill_(~positive, -torch.inf)
