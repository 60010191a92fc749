"""What a session's guesses are made by: plain values that all its rows share. In the tree they are its guesses' key."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from sglang_ssd.protocol import BadFrame, Sampling, unpack_floats, unpack_tokens

ALL = 1 << 30
"""A top-k that keeps the whole vocabulary."""


class Proposal(NamedTuple):
    """How draft tokens are sampled for a target in rejection mode: M, F and C of the rule, and what it can take."""

    support: int
    top_f: int
    c: float
    vocab_size: int


class Terms(NamedTuple):
    """Temperature 0 is greedy, and then all greedy terms with the same bias are equal."""

    temperature: float = 0.0
    seed: int = 0
    top_k: int = ALL
    top_p: float = 1.0
    min_p: float = 0.0
    bias_ids: bytes = b""
    bias: bytes = b""
    proposal: Proposal | None = None

    @property
    def plain(self) -> bool:
        """Whether temperature and seed say all."""
        return not (self.filters or self.bias_ids or self.proposal)

    @property
    def filters(self) -> bool:
        """Whether a filter can cut."""
        return self.top_k < ALL or self.top_p < 1.0 or self.min_p > 0.0


def terms_of(sampling: Sampling, proposal: Proposal | None, vocab_size: int) -> Terms | None:
    """The terms of a request, None when they make no sense. A bias of tokens that the draft lacks is left out.

    ``proposal`` is how its target wants draft tokens sampled, None for the coupled draw.
    """
    if not all(map(math.isfinite, (sampling.temperature, sampling.top_p, sampling.min_p))) or sampling.temperature < 0:
        return None
    try:
        ids, values = unpack_tokens(sampling.bias_ids, 2**31), unpack_floats(sampling.bias)
    except BadFrame:
        return None
    if len(ids) != len(values):
        return None
    ids, values = ids[ids < vocab_size], values[ids < vocab_size]
    bias = ids.astype(np.int32).tobytes(), values.astype(np.float32).tobytes()
    if sampling.temperature == 0:
        return Terms(bias_ids=bias[0], bias=bias[1])
    return Terms(
        temperature=sampling.temperature,
        seed=(sampling.seed + 2**63) % 2**64 - 2**63,  # the bits of a 64-bit seed, as int64
        top_k=min(max(1, sampling.top_k), ALL),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        bias_ids=bias[0],
        bias=bias[1],
        proposal=proposal,
    )
