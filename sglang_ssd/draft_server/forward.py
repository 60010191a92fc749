"""One decode forward under construction: rows of all sessions, each new token a new node."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sglang_ssd.draft_server.engine import DraftEngine, Rows
from sglang_ssd.draft_server.session import Session
from sglang_ssd.draft_server.table import Table
from sglang_ssd.draft_server.tree import Guesses, Node, Tree


class _Entry(NamedTuple):
    """One row: ``node``'s token into ``slot``, its own one or a scratch slot."""

    session: Session
    node: Node
    row: int
    slot: int


class Forward:
    """Gathers rows, then runs them together. Between the two, new nodes are ``in_flight``."""

    def __init__(self, engine: DraftEngine, tree: Tree, table: Table, now: Callable[[], float]) -> None:
        self._engine, self._tree, self._table, self._now = engine, tree, table, now
        self._entries: list[_Entry] = []
        self.micros = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def visit(self, session: Session, row: int, parent: Node, token: int, *, path: bool, guess: bool) -> Node | None:
        """The child ``token`` of ``parent`` in table row ``row``, run by this forward unless it exists, and held.

        ``guess`` asks for the session's own candidates after it, so a node made under another key is run again, into
        a scratch slot; ``path`` counts the row as a missing path token. None, and nothing held, when slots are short.
        """
        child = parent.children.get(token)
        if child is None:
            child = self._tree.add(parent, token, committed=parent.position + 1 < session.length)
            if child is None:
                return None
            self._tree.hold(child)
            child.in_flight, child.key = True, session.terms
            self._add(session, child, row, child.slot, path=path)
            return child
        self._tree.hold(child)
        self._table.enter(row, child.position, child.slot)
        if guess and not self.ask(session, row, child, path=path):
            self._tree.release(child)
            return None
        return child

    def ask(self, session: Session, row: int, node: Node, *, path: bool) -> bool:
        """See that the session has guesses at ``node`` after this forward; False when no slot is left for it."""
        if session.guesses(node) is not None or (node.in_flight and node.key == session.terms):
            return True
        slot = self._tree.take_scratch()
        if slot is None:
            return False
        self._add(session, node, row, slot, path=path)
        return True

    def run(self) -> None:
        """Run the rows, hand out the guesses, give scratch slots back."""
        if not self._entries:
            return
        self._table.flush()
        started = self._now()
        found = self._engine.decode(self._rows())
        self.micros = (self._now() - started) * 1e6
        samples = iter(found.samples)
        for entry, ids, scores in zip(self._entries, found.ids.tolist(), found.scores.tolist(), strict=True):
            sample = next(samples) if entry.session.terms.proposal is not None else None
            self._settle(entry, Guesses(ids, scores, sample))
        for totals in {id(entry.session.target): entry.session.target.totals for entry in self._entries}.values():
            totals.forwards += 1
            totals.forward_us += int(self.micros)

    def _add(self, session: Session, node: Node, row: int, slot: int, *, path: bool) -> None:
        self._entries.append(_Entry(session, node, row, slot))
        if path:
            session.target.totals.path_rows += 1
        else:
            session.target.totals.rows += 1

    def _settle(self, entry: _Entry, guesses: Guesses) -> None:
        node = entry.node
        if entry.slot == node.slot:
            node.guesses, node.in_flight = guesses, False
            return
        entry.session.own[node] = guesses
        self._tree.give_scratch(entry.slot)
        self._table.enter(entry.row, node.position, node.slot)

    def _rows(self) -> Rows:
        entries = self._entries
        terms = tuple(entry.session.terms for entry in entries)
        return Rows(
            rows=np.array([entry.row for entry in entries], dtype=np.int64),
            positions=np.array([entry.node.position for entry in entries], dtype=np.int64),
            tokens=np.array([entry.node.token for entry in entries], dtype=np.int64),
            slots=np.array([entry.slot for entry in entries], dtype=np.int64),
            temperatures=np.array([entry.session.temperature for entry in entries], dtype=np.float32),
            seeds=np.array([entry.session.seed for entry in entries], dtype=np.int64),
            terms=None if all(each.plain for each in terms) else terms,
        )
