"""One decode forward under construction: rows of all sessions, each new token a new node."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_ssd.draft_server.engine import DraftEngine, Ints, Rows
from sglang_ssd.draft_server.seats import Seats
from sglang_ssd.draft_server.table import Table
from sglang_ssd.draft_server.tree import Guesses, Tree

Bools: TypeAlias = NDArray[np.bool_]


class Steps(NamedTuple):
    """N tokens to consume, in order of importance: for the sessions at ``seats``, in table ``rows``, each ``tokens``
    behind the node ``parents``; all int64 [n].
    """

    seats: Ints
    rows: Ints
    parents: Ints
    tokens: Ints

    def some(self, which: Ints | Bools) -> Steps:
        """A part of them."""
        return Steps(*(column[which] for column in self))


class Forward:
    """Gathers rows, then runs them together. Between the two, new nodes are ``in_flight``."""

    def __init__(self, engine: DraftEngine, tree: Tree, table: Table, seats: Seats, now: Callable[[], float]) -> None:
        self._engine, self._tree, self._table, self._seats, self._now = engine, tree, table, seats, now
        self._parts: list[Ints] = []
        """[5, n] each: seats, table rows, nodes, slots (their own ones or scratch), and 1 for path rows."""
        self.micros = 0.0

    def __len__(self) -> int:
        return sum(part.shape[1] for part in self._parts)

    def visit(self, steps: Steps, *, asks: Bools, committed: Bools, path: Bools) -> Ints:
        """The node of each step, run by this forward unless it exists, and held; 0, and nothing held, for steps that
        found no slot.

        ``asks`` [n] says where the session's own candidates are wanted, so that a node made under another key is run
        again, into a scratch slot. ``committed`` [n] is for new nodes; ``path`` [n] counts rows as missing path tokens.
        """
        tree = self._tree
        nodes = tree.find(steps.parents, steps.tokens)
        there = nodes > 0
        tree.hold_many(nodes[there])  # before others are evicted for the rest
        if not there.all():
            new = np.flatnonzero(~there)
            first = new[_firsts(steps.parents[new], steps.tokens[new])]
            made = self._make(steps.some(first), committed[first], path[first])
            nodes[first[: len(made)]] = made
            if len(first) < len(new):
                others = np.setdiff1d(new, first)
                nodes[others] = tree.find(steps.parents[others], steps.tokens[others])
                there[others] = nodes[others] > 0
                tree.hold_many(nodes[others[there[others]]])
        if there.any():
            self._table.enter_many(steps.rows[there], tree.position[nodes[there]], nodes[there])
            asking = np.flatnonzero(there & asks)
            refused = asking[~self.ask(steps.seats[asking], steps.rows[asking], nodes[asking], path[asking])]
            tree.release_many(nodes[refused])
            nodes[refused] = 0
        return nodes

    def ask(self, seats: Ints, rows: Ints, nodes: Ints, path: Bools) -> Bools:
        """See that sessions have guesses at ``nodes`` after this forward; False where no slot is left for it."""
        tree = self._tree
        known: Bools = (tree.key[nodes] == self._seats.keys[seats]) & ((tree.best[nodes] >= 0) | tree.in_flight[nodes])
        for i in np.flatnonzero(~known):
            known[i] = int(nodes[i]) in self._seats.session(int(seats[i])).own
        unknown = np.flatnonzero(~known)
        if len(unknown):
            slots = tree.take_scratch(len(unknown))
            unknown = unknown[: len(slots)]
            self._add(seats[unknown], rows[unknown], nodes[unknown], slots, path[unknown])
            known[unknown] = True
        return known

    def run(self) -> None:
        """Run the rows, hand out the guesses, give scratch slots back."""
        if not self._parts:
            return
        self._table.flush()
        seats, rows, nodes, slots, path = np.concatenate(self._parts, axis=1)
        started = self._now()
        found = self._engine.decode(self._rows(seats, rows, nodes, slots))
        self.micros = (self._now() - started) * 1e6
        samples = dict(zip(np.flatnonzero(self._seats.samples[seats]).tolist(), found.samples, strict=True))
        new = nodes == slots
        by_node = {int(nodes[i]): sample for i, sample in samples.items() if new[i]}
        self._tree.learn(nodes[new], found.ids[new], found.scores[new], by_node)
        if not new.all():
            for i in np.flatnonzero(~new).tolist():
                guesses = Guesses(found.ids[i].tolist(), found.scores[i].tolist(), samples.get(i))
                self._seats.session(seats[i]).own[int(nodes[i])] = guesses
            self._tree.give_scratch(slots[~new])
            self._table.enter_many(rows[~new], self._tree.position[nodes[~new]], nodes[~new])
        self._count(seats, path == 1)

    def _make(self, steps: Steps, committed: Bools, path: Bools) -> Ints:
        """New nodes and their rows, as many as there are slots for."""
        nodes = self._tree.add(steps.parents, steps.tokens, committed)
        count = len(nodes)
        self._tree.in_flight[nodes] = True
        self._tree.key[nodes] = self._seats.keys[steps.seats[:count]]
        self._add(steps.seats[:count], steps.rows[:count], nodes, nodes, path[:count])
        return nodes

    def _add(self, seats: Ints, rows: Ints, nodes: Ints, slots: Ints, path: Bools) -> None:
        if len(nodes):
            self._parts.append(np.stack([seats, rows, nodes, slots, path]))

    def _rows(self, seats: Ints, rows: Ints, nodes: Ints, slots: Ints) -> Rows:
        by, tree = self._seats, self._tree
        plain = by.plain[seats].all()
        return Rows(
            rows=rows,
            positions=tree.position[nodes],
            tokens=tree.token[nodes],
            slots=slots,
            temperatures=by.temperatures[seats],
            seeds=by.seeds[seats],
            terms=None if plain else tuple(by.session(seat).terms for seat in seats.tolist()),
        )

    def _count(self, seats: Ints, path: Bools) -> None:
        """Add to the targets' totals."""
        for target, rows in self._seats.by_target(seats).items():
            target.totals.forwards += 1
            target.totals.forward_us += int(self.micros)
            target.totals.rows += rows
        for target, rows in self._seats.by_target(seats[path]).items():
            target.totals.path_rows += rows
            target.totals.rows -= rows


def _firsts(parents: Ints, tokens: Ints) -> Ints:
    """Where each pair occurs first, int64, ascending."""
    if len(parents) == 1:
        return np.zeros(1, dtype=np.int64)
    order = np.lexsort((tokens, parents))
    same = (np.diff(parents[order]) == 0) & (np.diff(tokens[order]) == 0)
    return np.sort(order[np.append(True, ~same)])
