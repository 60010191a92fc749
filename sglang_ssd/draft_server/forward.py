"""One decode forward under construction: rows of all sessions, each new token a new node."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_ssd.draft_server.engine import Candidates, DraftEngine, Ints, Rows, Sample
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


class Part(NamedTuple):
    """N rows: the tokens of ``nodes`` into ``slots``, which are their own ones or scratch, in table ``rows``, by the
    terms of the sessions at ``seats``; all int64 [n]. ``path`` says which are missing path tokens.
    """

    seats: Ints
    rows: Ints
    nodes: Ints
    slots: Ints
    path: Bools


class Forward:
    """Gathers rows, then runs them together. Between the two, new nodes are ``in_flight``."""

    def __init__(self, engine: DraftEngine, tree: Tree, table: Table, seats: Seats, now: Callable[[], float]) -> None:
        self._engine, self._tree, self._table, self._seats, self._now = engine, tree, table, seats, now
        self._parts: list[Part] = []
        self.micros = 0.0

    def __len__(self) -> int:
        return sum(len(part.nodes) for part in self._parts)

    def visit(self, steps: Steps, *, asks: Bools, committed: Bools, path: Bools) -> Ints:
        """The node of each step, run by this forward unless it exists, and held; 0, and nothing held, for steps that
        found no slot.

        ``asks`` [n] says where the session's own candidates are wanted, so that a node made under another key is run
        again, into a scratch slot. ``committed`` [n] is for new nodes; ``path`` [n] counts rows as missing path tokens.
        """
        tree = self._tree
        nodes = tree.find(steps.parents, steps.tokens)
        there = nodes > 0
        found = np.count_nonzero(there)
        if found:
            tree.hold_many(nodes[there])  # before others are evicted for the rest
        if found < len(nodes):
            new = np.flatnonzero(~there)
            first = new[tree.firsts(steps.parents[new], steps.tokens[new])]
            if len(first) == len(nodes):
                made = self._make(steps, committed, path)
            else:
                made = self._make(Steps(*(column[first] for column in steps)), committed[first], path[first])
            nodes[first[: len(made)]] = made
            if len(first) < len(new):
                others = np.setdiff1d(new, first)
                nodes[others] = tree.find(steps.parents[others], steps.tokens[others])
                there[others] = nodes[others] > 0
                tree.hold_many(nodes[others[there[others]]])
                found = np.count_nonzero(there)
        if found:
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
        for i in np.flatnonzero(~known).tolist():
            known[i] = int(nodes[i]) in self._seats.session(int(seats[i])).own
        unknown = np.flatnonzero(~known)
        if len(unknown):
            slots = tree.take_scratch(len(unknown))
            unknown = unknown[: len(slots)]
            self._add(Part(seats[unknown], rows[unknown], nodes[unknown], slots, path[unknown]))
            known[unknown] = True
        return known

    def run(self) -> None:
        """Run the rows, hand out the guesses, give scratch slots back."""
        if not self._parts:
            return
        self._table.flush()
        whole = self._parts[0] if len(self._parts) == 1 else Part(*map(np.concatenate, zip(*self._parts, strict=True)))
        started = self._now()
        found = self._engine.decode(self._rows(whole))
        self.micros = (self._now() - started) * 1e6
        sampling = np.flatnonzero(self._seats.samples[whole.seats]).tolist()
        samples = dict(zip(sampling, found.samples, strict=True))
        new = whole.nodes == whole.slots
        if np.count_nonzero(new) == len(new):
            by_node = {int(whole.nodes[i]): sample for i, sample in samples.items()}
            self._tree.learn(whole.nodes, found.ids, found.scores, by_node)
        else:
            by_node = {int(whole.nodes[i]): sample for i, sample in samples.items() if new[i]}
            self._tree.learn(whole.nodes[new], found.ids[new], found.scores[new], by_node)
            self._put_back(whole, np.flatnonzero(~new), found, samples)
        self._count(whole)

    def _put_back(self, whole: Part, reruns: Ints, found: Candidates, samples: dict[int, Sample]) -> None:
        """Give the guesses of ``reruns`` to their sessions alone, and scratch slots back."""
        for i in reruns.tolist():
            guesses = Guesses(found.ids[i].tolist(), found.scores[i].tolist(), samples.get(i))
            self._seats.session(int(whole.seats[i])).own[int(whole.nodes[i])] = guesses
        nodes = whole.nodes[reruns]
        self._tree.give_scratch(whole.slots[reruns])
        self._table.enter_many(whole.rows[reruns], self._tree.position[nodes], nodes)

    def _make(self, steps: Steps, committed: Bools, path: Bools) -> Ints:
        """New nodes and their rows, as many as there are slots for."""
        nodes = self._tree.add(steps.parents, steps.tokens, committed)
        count = len(nodes)
        self._tree.in_flight[nodes] = True
        self._tree.key[nodes] = self._seats.keys[steps.seats[:count]]
        self._add(Part(steps.seats[:count], steps.rows[:count], nodes, nodes, path[:count]))
        return nodes

    def _add(self, part: Part) -> None:
        if len(part.nodes):
            self._parts.append(part)

    def _rows(self, whole: Part) -> Rows:
        by, seats = self._seats, whole.seats
        plain = np.count_nonzero(by.plain[seats]) == len(seats)
        return Rows(
            rows=whole.rows,
            positions=self._tree.position[whole.nodes],
            tokens=self._tree.token[whole.nodes],
            slots=whole.slots,
            temperatures=by.temperatures[seats],
            seeds=by.seeds[seats],
            terms=None if plain else tuple(by.session(seat).terms for seat in seats.tolist()),
        )

    def _count(self, whole: Part) -> None:
        """Add to the targets' totals."""
        for target, rows in self._seats.by_target(whole.seats).items():
            target.totals.forwards += 1
            target.totals.forward_us += int(self.micros)
            target.totals.rows += rows
        for target, rows in self._seats.by_target(whole.seats[whole.path]).items():
            target.totals.path_rows += rows
            target.totals.rows -= rows
