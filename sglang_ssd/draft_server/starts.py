"""Where branches begin: behind each position of a chain whose guesses are known, with as many candidates as it was
given rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sglang_ssd.draft_server.cache import SpeculationCache
from sglang_ssd.draft_server.engine import Ints
from sglang_ssd.draft_server.legal import ranked, spread
from sglang_ssd.draft_server.planning import depth_of
from sglang_ssd.draft_server.session import Growth, Session, row_of


class Starts:
    """Makes new branches of sessions whose trees are planned."""

    def __init__(self, cache: SpeculationCache) -> None:
        self._cache, self._branches, self._seats = cache, cache.branches, cache.seats

    def begin(self, sessions: Iterable[Session]) -> None:
        """Branches for the positions whose guesses are known, best ranks first; fewer when table rows are short."""
        fresh: list[tuple[int, ...]] = []
        listed: list[tuple[int, ...]] = []
        for order, session in enumerate(sessions):
            growth = session.growth
            if growth is None:
                continue
            ready = [(order, *place) for place in _ready(session, growth)]
            if growth.restricted or session.legal or session.own:
                listed += self._listed(session, growth, ready)
            else:
                served = [*session.chain, -1]
                fresh += [(*place, served[place[1]], growth.fan_out[place[1]]) for place in ready]
        starts = [self._ranked(_columns(fresh))] if fresh else []
        starts += [_columns(listed)] if listed else []
        if starts:
            self._fork(starts[0] if len(starts) == 1 else np.concatenate(starts, axis=1))

    def outcomes(self, session: Session) -> list[tuple[int, int, int]]:
        """The number, k and first token of a session's branches."""
        numbers = self._branches.of([row_of(session)])
        columns = (numbers, self._branches.k[numbers], self._branches.first[numbers])
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def allot(self, session: Session, growth: Growth) -> None:
        """Leave no rows where a grammar has no use for them."""
        useful = {k for k in range(len(growth.fan_out)) if depth_of(session, k, growth.depth) > 0}
        room = {k: len(self._candidates(session, k, [])) if k in useful else 0 for k in session.legal}
        growth.fan_out = spread(growth.fan_out, room)
        growth.waiting = {k for k in useful if growth.fan_out[k]}

    def _listed(self, session: Session, growth: Growth, ready: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The candidates of places with their ranks, where not all is as the tree has it."""
        found: list[tuple[int, ...]] = []
        growing = {(k, first) for _, k, first in self.outcomes(session)}
        for order, k, node, depth, seat in ready:
            guesses = session.guesses(node)
            tokens = self._candidates(session, k, [] if guesses is None else guesses.ids)[: growth.fan_out[k]]
            fresh = [(rank, token) for rank, token in enumerate(tokens) if (k, token) not in growing]
            found += [(order, k, node, depth, seat, rank, token) for rank, token in fresh]
        return found

    def _ranked(self, places: Ints) -> Ints:
        """The candidates of places [7, n], whose last columns are the token served there and the fan-out: [7, branches]
        with rank and token instead.
        """
        served, fan_out = places[5, :, None], places[6, :, None]
        ids = self._cache.tree.ids[places[2]]
        possible = (ids != served) & (ids < self._seats.vocab_sizes[places[4]][:, None])
        ranks = possible.cumsum(axis=1) - 1
        place, column = (possible & (ranks < fan_out)).nonzero()
        candidates = places[:, place]
        candidates[5:] = ranks[place, column], ids[place, column]
        return candidates

    def _fork(self, starts: Ints) -> None:
        """Begin branches [7, n], session by session, the best ranks first."""
        order, k, _, _, _, rank, _ = starts
        rows = self._cache.table.take_many(len(order))
        _, k, node, todo, seat, _, first = starts[:, np.lexsort((k, rank, order))[: len(rows)]]
        self._cache.table.fork_many(seat, self._cache.tree.position[node] + 1, rows)
        self._branches.add(seat, k, first, todo, rows, node)
        for growth, count in self._seats.growths(seat):
            growth.live += count

    def _candidates(self, session: Session, k: int, ids: list[int]) -> list[int]:
        """Bonus tokens after exactly k accepted: never the chain's next token, which would have been accepted."""
        served = session.chain[k] if k < len(session.chain) else -1
        possible = ranked(ids, session.legal.get(k))
        return [token for token in possible if token != served and token < session.target.vocab_size]


def _ready(session: Session, growth: Growth) -> list[tuple[int, int, int, int]]:
    """Positions whose guesses have become known, which wait no longer: k, node, useful depth and the session's seat."""
    trunk, seat = session.trunk, row_of(session)
    ready = [k for k in growth.waiting if k < len(trunk) and session.knows(trunk[k])]
    growth.waiting.difference_update(ready)
    deepest, left = min(growth.depth, session.lookahead), session.remaining - 2
    return [(k, trunk[k], min(deepest, left - k), seat) for k in ready if min(deepest, left - k) > 0]


def _columns(rows: list[tuple[int, ...]]) -> Ints:
    """int64 [7, n] of n rows."""
    return np.array(rows, dtype=np.int64).reshape(-1, 7).T
