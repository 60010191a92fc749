"""How a draft fares on a text that the target wrote greedily: speculative rounds replayed from ranks alone.

A draft token is accepted as long as it is the target's own, so a round needs only the draft's candidates after the
true text: one forward gives every round of every lookahead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TOP = 16
"""Candidates that are looked at; a rank of ``TOP`` means that the token is not among them."""

_EDGES = (1, 2, 3, 4, 8, TOP)


@dataclass(frozen=True)
class Round:
    """``accepted`` draft tokens, then the bonus: its place among the candidates that are prepared for that outcome."""

    accepted: int
    bonus_rank: int


@dataclass(frozen=True)
class Report:
    """Means over texts. ``rejected_ranks`` counts bonus ranks where a draft token was rejected: 0, 1, 2, 3, 4 to 7,
    8 to 15, beyond.
    """

    texts: int
    positions: int
    agreement: float
    tokens_per_round: float
    in_top_4: float
    hit_rate: float
    rejected_ranks: dict[str, int]


def replay(ranks: Sequence[int], lookahead: int) -> list[Round]:
    """The whole rounds of one text. ``ranks[i]`` is the place of token ``i`` among the draft's candidates for it.

    Where a draft token was rejected it is no candidate for the bonus (that is what the outcome says), so the rank is
    counted without it.
    """
    rounds, start = [], 0
    while start + lookahead < len(ranks):
        window = ranks[start : start + lookahead]
        accepted = next((i for i, rank in enumerate(window) if rank > 0), lookahead)
        rank = ranks[start + accepted]
        rejected = accepted < lookahead and rank < TOP
        rounds.append(Round(accepted, rank - 1 if rejected else rank))
        start += accepted + 1
    return rounds


def report(texts: Iterable[Sequence[int]], lookahead: int, fan_out: Sequence[int]) -> Report:
    """Of the ranks of every text. ``fan_out[k]`` bonus candidates are prepared for k accepted tokens.

    Raises ValueError when that is not ``lookahead + 1`` numbers, or when there is no whole round.
    """
    if len(fan_out) != lookahead + 1:
        raise ValueError(f"a fan-out for lookahead {lookahead} is {lookahead + 1} numbers, not {len(fan_out)}")
    texts = list(texts)
    rounds = [each for ranks in texts for each in replay(ranks, lookahead)]
    if not rounds:
        raise ValueError("no text is long enough for one round")
    rejected = [each.bonus_rank for each in rounds if each.accepted < lookahead]
    flat = [rank for ranks in texts for rank in ranks]
    return Report(
        texts=len(texts),
        positions=len(flat),
        agreement=_share(rank == 0 for rank in flat),
        tokens_per_round=sum(each.accepted + 1 for each in rounds) / len(rounds),
        in_top_4=_share(each.bonus_rank < 4 for each in rounds),
        hit_rate=_share(each.bonus_rank < fan_out[each.accepted] for each in rounds),
        rejected_ranks=histogram(rejected),
    )


def histogram(ranks: Iterable[int]) -> dict[str, int]:
    """Counts by rank: single places first, then ranges, then what is beyond the candidates."""
    counts = Counter(next((edge for edge in _EDGES if rank < edge), None) for rank in ranks)
    names = ["0", "1", "2", "3", "4-7", f"8-{TOP - 1}", "beyond"]
    return {name: counts[edge] for name, edge in zip(names, (*_EDGES, None), strict=True)}


def _share(flags: Iterable[bool]) -> float:
    flags = list(flags)
    return sum(flags) / len(flags)
