"""What both engines do with their logits: from the terms of rows to tensors, and from what was found to the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_ssd.draft_server.engine import Candidates, Rows, Sample
from sglang_ssd.draft_server.terms import Terms
from sglang_ssd.sampling.candidates import Bias, DraftDraw, Found, Samples
from sglang_ssd.sampling.filters import Filters
from sglang_ssd.sampling.rejection import SupportRule


def draft_draw(batch: Rows) -> DraftDraw:
    """How the rows of a forward draw, on the host."""
    temperatures, seeds, positions = map(torch.from_numpy, (batch.temperatures, batch.seeds, batch.positions))
    terms = batch.terms
    if terms is None:
        return DraftDraw(temperatures, seeds, positions)
    return DraftDraw(
        temperatures,
        seeds,
        positions,
        bias=_bias(terms),
        filters=_filters(terms) if any(row.filters for row in terms) else None,
        samples=_samples(terms),
    )


def to_host(found: Found) -> Candidates:
    """One copy, samples included."""
    tensors = [found.ids, found.scores]
    if found.tokens is not None and found.support is not None:
        tensors += [found.tokens, found.support.ids, found.support.q]
    packed = torch.cat([tensor.double().flatten() for tensor in tensors]).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors])[:-1]
    arrays = [part.reshape(tensor.shape) for part, tensor in zip(np.split(packed, ends), tensors, strict=True)]
    ids, scores, *sampled = arrays
    return Candidates(ids.astype(np.int64), scores.astype(np.float32), tuple(_samples_on_host(*sampled)))


def joined(parts: Sequence[Candidates]) -> Candidates:
    """The candidates of one batch that was run in parts."""
    if len(parts) == 1:
        return parts[0]
    return Candidates(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.scores for part in parts]),
        tuple(sample for part in parts for sample in part.samples),
    )


def _samples_on_host(*sampled: NDArray[np.float64]) -> Iterable[Sample]:
    """From tokens [S], ids and q, both [S, M]; or from nothing."""
    if sampled:
        tokens, ids, q = sampled
        for token, row_ids, row_q in zip(tokens.tolist(), ids.astype("<i4"), q.astype("<f4"), strict=True):
            yield Sample(int(token), row_ids.tobytes(), row_q.tobytes())


def _bias(terms: Sequence[Terms]) -> Bias | None:
    biased = [(row, np.frombuffer(each.bias_ids, "<i4"), each.bias) for row, each in enumerate(terms) if each.bias_ids]
    if not biased:
        return None
    rows = np.concatenate([np.full(len(ids), row) for row, ids, _ in biased])
    ids = np.concatenate([ids for _, ids, _ in biased]).astype(np.int64)
    values = np.concatenate([np.frombuffer(values, "<f4") for _, _, values in biased])
    return Bias(*map(torch.from_numpy, (rows, ids, values)))


def _filters(terms: Sequence[Terms]) -> Filters:
    reals = torch.tensor([(row.top_p, row.min_p) for row in terms], dtype=torch.float32)
    return Filters(torch.tensor([row.top_k for row in terms]), *reals.unbind(1))


def _samples(terms: Sequence[Terms]) -> Samples | None:
    sampled = [(row, each.proposal) for row, each in enumerate(terms) if each.proposal is not None]
    if not sampled:
        return None
    rows = torch.tensor([row for row, _ in sampled])
    sizes = torch.tensor([proposal.vocab_size for _, proposal in sampled])
    return Samples(rows, SupportRule.of([(each.support, each.top_f, each.c) for _, each in sampled]), sizes)
