"""The speculation cache: sessions as paths in the tree, and the walk that turns an outcome into a speculation.

The in-flight chain and every branch are ordinary children in the tree, so looking up the outcome (k, bonus) is walking
the committed tokens, whatever they are: drafts accepted, a candidate that was prepared, the chain's own next token
after a cut round, or several rounds at once. The speculation is read by following each node's best guess down.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sglang_ssd.draft_server.branches import NO_ROW, Branches
from sglang_ssd.draft_server.engine import DraftEngine, Ints
from sglang_ssd.draft_server.forward import Forward
from sglang_ssd.draft_server.seats import Seats
from sglang_ssd.draft_server.session import Session, row_of
from sglang_ssd.draft_server.table import Table
from sglang_ssd.draft_server.tree import ROOT, Tree


class _Over(NamedTuple):
    """A session's round that is over: its table row then, and the nodes of the chain that it had."""

    session: Session
    row: int
    chain: list[int]


class SpeculationCache:
    """The tree, the table rows and what sessions hold of both."""

    def __init__(self, engine: DraftEngine, now: Callable[[], float] = time.perf_counter) -> None:
        self.engine, self._now = engine, now
        self.tree = Tree(engine.limits.slots)
        self.table = Table(engine)
        self.seats = Seats(engine.limits.rows)
        self.branches = Branches(self.tree)
        self.context_length = engine.limits.context_length
        self.sessions: dict[Session, None] = {}
        """Those that have a row."""
        self._over: list[_Over] = []
        self.extended = 0
        """Tokens run as prefill chunks."""

    def forward(self) -> Forward:
        """An empty forward."""
        return Forward(self.engine, self.tree, self.table, self.seats, self._now)

    def open(self, session: Session) -> bool:
        """Give the session a row and the longest prefix that the tree has; False when no row is left."""
        session.row = self.table.take()
        if session.row is None:
            return False
        self.sessions[session] = None
        session.key = self.tree.key_of(session.terms)
        self.seats.take(session.row, session)
        session.tip = ROOT
        self.tree.hold(session.tip)
        self.descend(session)
        session.prefilling = session.missing > 1
        return True

    def close(self, session: Session) -> None:
        """Let go of everything; the text stays in the tree until its slots are needed."""
        if session.row is None:
            return
        self._drop([session.row], session.chain_nodes)
        session.chain, session.chain_nodes = [], []
        self.tree.release(session.tip)
        self.table.give(session.row)
        self.seats.leave(session.row)
        del self.sessions[session]
        session.row, session.tip, session.growth = None, ROOT, None
        session.own.clear()

    def advance(self, session: Session, tokens: list[int], limit: int) -> list[int]:
        """Commit ``tokens`` and return the speculation that stands behind them: up to ``limit`` tokens, maybe none.

        The speculation becomes the chain in flight. Everything else that was in flight or prepared waits for
        :meth:`sweep`, so that the answer can go out first.
        """
        session.tokens.extend(tokens)
        session.legal = {}
        if session.row is None:
            return []
        old_chain, session.chain, session.chain_nodes = session.chain_nodes, [], []
        self.descend(session)
        if not session.missing:
            self._read(session, limit)
        self._over.append(_Over(session, session.row, old_chain))
        session.growth = None
        return session.chain

    def descend(self, session: Session) -> None:
        """Move the tip down the committed tokens for as long as the tree has them."""
        node, row = session.tip, row_of(session)
        start = self.tree.position_of(node) + 1
        for position in range(start, session.length):
            child = self.tree.child(node, session.tokens[position])
            if not child:
                break
            self.table.enter(row, position, child)
            node = child
        self.move_tip(session, node)

    def move_tip(self, session: Session, node: int) -> None:
        """``node`` is on the session's text: hold it instead of the node above."""
        if node == session.tip:
            return
        self.tree.hold(node)
        self.tree.commit(node)
        self.tree.release(session.tip)
        session.tip = node

    def extend(self, session: Session, count: int) -> bool:
        """Run the next ``count`` missing tokens as one prefill chunk; False when slots sufficed for fewer."""
        self.descend(session)
        start = self.tree.position_of(session.tip) + 1
        chunk = np.array(session.tokens[start : start + count], dtype=np.int64)
        slots = self.tree.add_text(session.tip, chunk)
        if len(slots):
            self.table.flush()
            self.engine.extend(row_of(session), start, chunk[: len(slots)], slots)
            self.move_tip(session, int(slots[-1]))
            self.extended += len(slots)
        return len(slots) == len(chunk)

    def sweep(self) -> None:
        """Free what was prepared for, or in flight in, rounds that are over."""
        if not self._over:
            return
        self._drop([over.row for over in self._over], [node for over in self._over for node in over.chain])
        for session in {over.session for over in self._over if over.session.own}:
            kept = {session.tip, *session.chain_nodes}
            session.own = {node: guesses for node, guesses in session.own.items() if node in kept}
        self._over.clear()

    def drop_branches(self, branches: Ints) -> None:
        """Free what branches hold. A slot that is free means nothing to the sessions that had one there."""
        for seat in set(self.branches.seat[branches].tolist()):
            session = self.seats.session(seat)
            if session.own:
                gone = self.branches.nodes(self.branches.at(branches, [seat])).tolist()
                session.own = {node: guesses for node, guesses in session.own.items() if node not in gone}
        self._free(branches, self.branches.nodes(branches))

    def append(self, session: Session, node: int) -> None:
        """``node``, held for the session, continues its path: text first, then the chain."""
        if self.tree.position_of(node) < session.length:
            self.move_tip(session, node)
            self.tree.release(node)
        else:
            session.chain_nodes.append(node)

    def check(self) -> None:
        """Raises AssertionError unless every slot and row has one owner and every hold is a session's."""
        holds: Counter[int] = Counter()
        rows = 0
        for session in self.sessions:
            branches = self.branches.listed(row_of(session))
            holds.update([session.tip, *session.chain_nodes])
            holds.update(node for branch in branches for node in branch.nodes)
            rows += 1 + sum(branch.row is not None for branch in branches)
        self.tree.check(holds)
        if rows + self.table.free != self.engine.limits.rows:
            raise AssertionError(f"{rows} table rows in use and {self.table.free} free of {self.engine.limits.rows}")

    def _read(self, session: Session, limit: int) -> None:
        """Fill the chain by following best guesses; its last token needs no KV."""
        node, row, chain = session.tip, row_of(session), session.chain
        while node and len(chain) < limit and (best := session.best(node)) is not None:
            chain.append(best)
            node = self.tree.child(node, best)
            if node:
                self.tree.hold(node)
                self.table.enter(row, session.length + len(chain) - 1, node)
                session.chain_nodes.append(node)

    def _drop(self, seats: list[int], chain: list[int]) -> None:
        """Free the branches of the sessions at ``seats``, and nodes of chains."""
        branches = self.branches.of(seats)
        self._free(branches, np.concatenate([self.branches.nodes(branches), np.array(chain, dtype=np.int64)]))

    def _free(self, branches: Ints, nodes: Ints) -> None:
        if len(nodes):
            self.tree.release_many(nodes)
        if len(branches):
            rows = self.branches.row[branches]
            self.table.give_many(rows[rows != NO_ROW])
            self.branches.forget(branches)
