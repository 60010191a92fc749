"""The speculation cache: sessions as paths in the tree, and the walk that turns an outcome into a speculation.

The in-flight chain and every branch are ordinary children in the tree, so looking up the outcome (k, bonus) is walking
the committed tokens, whatever they are: drafts accepted, a candidate that was prepared, the chain's own next token
after a cut round, or several rounds at once. The speculation is read by following each node's best guess down.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from sglang_ssd.draft_server.engine import DraftEngine
from sglang_ssd.draft_server.forward import Forward
from sglang_ssd.draft_server.session import Branch, Growth, Session, row_of
from sglang_ssd.draft_server.table import Table
from sglang_ssd.draft_server.tree import Node, Tree


class SpeculationCache:
    """The tree, the table rows and what sessions hold of both."""

    def __init__(self, engine: DraftEngine, now: Callable[[], float] = time.perf_counter) -> None:
        self.engine, self._now = engine, now
        self.tree = Tree(engine.limits.slots)
        self.table = Table(engine)
        self.context_length = engine.limits.context_length
        self.sessions: dict[Session, None] = {}
        """Those that have a row."""
        self._over: list[tuple[Growth | None, list[Node]]] = []
        self.extended = 0
        """Tokens run as prefill chunks."""

    def forward(self) -> Forward:
        """An empty forward."""
        return Forward(self.engine, self.tree, self.table, self._now)

    def open(self, session: Session) -> bool:
        """Give the session a row and the longest prefix that the tree has; False when no row is left."""
        session.row = self.table.take()
        if session.row is None:
            return False
        self.sessions[session] = None
        session.tip = self.tree.root
        self.tree.hold(session.tip)
        self.descend(session)
        session.prefilling = session.missing > 1
        return True

    def close(self, session: Session) -> None:
        """Let go of everything; the text stays in the tree until its slots are needed."""
        if session.row is None:
            return
        self._drop_growth(session.growth)
        self._release_all(session.chain_nodes)
        session.chain, session.chain_nodes = [], []
        self.tree.release(session.tip)
        self.table.give(session.row)
        del self.sessions[session]
        session.row, session.tip, session.growth = None, self.tree.root, None
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
        self._over.append((session.growth, old_chain))
        session.growth = None
        session.own = {node: session.own[node] for node in (session.tip, *session.chain_nodes) if node in session.own}
        return session.chain

    def descend(self, session: Session) -> None:
        """Move the tip down the committed tokens for as long as the tree has them."""
        node, row = session.tip, row_of(session)
        while session.length > node.position + 1:
            child = node.children.get(session.tokens[node.position + 1])
            if child is None:
                break
            self.table.enter(row, child.position, child.slot)
            node = child
        self.move_tip(session, node)

    def move_tip(self, session: Session, node: Node) -> None:
        """``node`` is on the session's text: hold it instead of the node above."""
        if node is session.tip:
            return
        self.tree.hold(node)
        self.tree.commit(node)
        self.tree.release(session.tip)
        session.tip = node

    def extend(self, session: Session, count: int) -> bool:
        """Run the next ``count`` missing tokens as one prefill chunk; False when slots sufficed for fewer."""
        self.descend(session)
        start = session.tip.position + 1
        chunk = session.tokens[start : start + count]
        nodes = self._new_path(session.tip, chunk)
        if nodes:
            slots = np.array([node.slot for node in nodes], dtype=np.int64)
            self.table.flush()
            self.engine.extend(row_of(session), start, np.array(chunk[: len(nodes)], dtype=np.int64), slots)
            self.move_tip(session, nodes[-1])
            self.extended += len(nodes)
        return len(nodes) == len(chunk)

    def sweep(self) -> None:
        """Free what was prepared for, or in flight in, rounds that are over."""
        for growth, chain in self._over:
            self._drop_growth(growth)
            self._release_all(chain)
        self._over.clear()

    def drop_branch(self, branch: Branch) -> None:
        """Free what one branch holds."""
        self._release_all(branch.nodes)
        if branch.row is not None:
            self.table.give(branch.row)
            branch.row = None

    def append(self, session: Session, node: Node) -> None:
        """``node``, held for the session, continues its path: text first, then the chain."""
        if node.position < session.length:
            self.move_tip(session, node)
            self.tree.release(node)
        else:
            session.chain_nodes.append(node)

    def check(self) -> None:
        """Raises AssertionError unless every slot and row has one owner and every hold is a session's."""
        holds: Counter[Node] = Counter()
        rows = 0
        for session in self.sessions:
            branches = session.growth.branches() if session.growth else []
            holds.update([session.tip, *session.chain_nodes])
            holds.update(node for branch in branches for node in branch.nodes)
            rows += 1 + sum(branch.row is not None for branch in branches)
        self.tree.check(holds)
        if rows + self.table.free != self.engine.limits.rows:
            raise AssertionError(f"{rows} table rows in use and {self.table.free} free of {self.engine.limits.rows}")

    def _read(self, session: Session, limit: int) -> None:
        """Fill the chain by following best guesses; its last token needs no KV."""
        node: Node | None = session.tip
        while node is not None and len(session.chain) < limit:
            guesses = session.guesses(node)
            if guesses is None or guesses.best >= session.target.vocab_size:
                return
            session.chain.append(guesses.best)
            node = node.children.get(guesses.best)
            if node is not None:
                self.tree.hold(node)
                self.table.enter(row_of(session), node.position, node.slot)
                session.chain_nodes.append(node)

    def _new_path(self, parent: Node, tokens: list[int]) -> list[Node]:
        """New committed nodes for ``tokens`` below ``parent``, as many as there are slots for; hold the last next."""
        nodes: list[Node] = []
        for token in tokens:
            node = self.tree.add(nodes[-1] if nodes else parent, token, committed=True)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def _drop_growth(self, growth: Growth | None) -> None:
        for branch in growth.branches() if growth is not None else ():
            self.drop_branch(branch)

    def _release_all(self, nodes: list[Node]) -> None:
        """Release nodes that lie below one another, deepest first."""
        for node in reversed(nodes):
            self.tree.release(node)
