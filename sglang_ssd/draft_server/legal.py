"""Structured output as the draft server sees it: where few tokens are legal, no other is worth a branch.

The target knows its grammars and says, when a forward begins, which tokens may follow each position of the chain in
flight, if they are few. That comes while the tree grows: branches that cannot be are dropped, and others start instead.
A message that is wrong costs hits; the text never depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sglang_ssd.draft_server.session import Session
from sglang_ssd.protocol import MAX_LEGAL, BadFrame, LegalRow, unpack_tokens


def read_legal(row: LegalRow, session: Session) -> dict[int, list[int]]:
    """The legal tokens that ``row`` lists, by position; those that the draft does not know are left out.

    Raises BadFrame when it is not what it should be.
    """
    counts = row.counts
    if len(counts) > session.target.num_steps + 1 or not all(-1 <= count <= MAX_LEGAL for count in counts):
        raise BadFrame(f"{len(counts)} positions of a chain, with counts {min(counts)} to {max(counts)}")
    tokens, ends = unpack_tokens(row.tokens, 2**31), np.cumsum([max(0, count) for count in counts], dtype=np.int64)
    if len(tokens) != (ends[-1] if counts else 0):
        raise BadFrame(f"{len(tokens)} legal tokens do not fit their counts")
    listed = [sorted(set(part.tolist())) for part in np.split(tokens, ends)]
    common = session.target.vocab_size
    return {k: [token for token in listed[k] if token < common] for k, count in enumerate(counts) if count >= 0}


def ranked(ids: list[int], legal: Sequence[int] | None) -> list[int]:
    """The bonus candidates of a position: the draft's, best first, or the few legal ones: in the draft's order, and
    then those that it did not think of.
    """
    if legal is None:
        return ids
    liked = [token for token in ids if token in legal]
    return liked + [token for token in legal if token not in liked]


def spread(fan_out: Sequence[int], room: Mapping[int, int]) -> list[int]:
    """Fan-outs of the same sum, or less, where position k has use for at most ``room[k]``, if it is named there.

    What is left over goes to positions with room, one row each in turn, to those with most first. A position without
    rows gets some only if it is named: then it is known to have few outcomes.
    """
    shares = [min(count, room.get(k, count)) for k, count in enumerate(fan_out)]
    left = sum(fan_out) - sum(shares)
    takers = sorted((k for k, count in enumerate(fan_out) if count or k in room), key=lambda k: (-fan_out[k], k))
    while left and (takers := [k for k in takers if k not in room or shares[k] < room[k]]):
        for k in takers[:left]:
            shares[k] += 1
        left -= min(left, len(takers))
    return shares
