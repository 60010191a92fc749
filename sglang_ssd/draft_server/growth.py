"""Drafting: the trees of all sessions grow together, one batched forward per depth; missed rounds are drafted alone.

Depth 0 of a session's round runs the tokens of its text and chain that have no KV yet, and starts the candidates of
every position whose guesses are known. Guesses that depth 0 makes, usually those behind the chain's last token,
start theirs one depth later. Branch (k, c) consumes c first and needs as many forwards as it is to draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sglang_ssd.draft_server.cache import SpeculationCache
from sglang_ssd.draft_server.forward import Forward
from sglang_ssd.draft_server.legal import is_illegal, position_of, ranked, spread
from sglang_ssd.draft_server.planning import Planning, depth_of
from sglang_ssd.draft_server.session import Branch, Growth, Session, branch_row, row_of
from sglang_ssd.draft_server.tree import Node
from sglang_ssd.policy.clock import StepClock


class Drafter:
    """One step at a time, so that the server can look at its socket in between."""

    def __init__(self, cache: SpeculationCache, now: Callable[[], float]) -> None:
        self._cache = cache
        self.clock = StepClock()
        self._planning = Planning(self.clock, now)
        self.shed = 0
        """Branches given up because slots were short."""
        self.illegal = 0
        """Branches given up because a grammar forbids them."""
        self.starved: list[Session] = []
        """Sessions whose text found no slots; the server takes them off after the step."""

    def draft(self, sessions: Sequence[Session]) -> None:
        """One more token on each session's chain, if there is room; missing path tokens run on the way."""
        forward = self._cache.forward()
        for session in sessions:
            self._trunk(forward, session, session.length + len(session.chain) - 1, drafting=True)
        self._run(forward)
        for session in sessions:
            guesses = session.guesses(session.last)
            complete = session.last.position == session.length + len(session.chain) - 1
            if complete and guesses is not None and guesses.best < session.target.vocab_size:
                session.chain.append(guesses.best)

    def plan(self, sessions: Iterable[Session], budget: int) -> None:
        """Plan the trees of those that have none; ``budget`` is the most branches of a session."""
        unplanned = [session for session in sessions if session.growth is None]
        if unplanned:
            self._planning.plan(unplanned, budget)
        for session in unplanned:
            if session.legal and session.growth is not None:
                self._allot(session, session.growth)

    def grow(self, sessions: Iterable[Session]) -> bool:
        """One depth of every unfinished tree of planned sessions; False when all are complete."""
        forward = self._cache.forward()
        growths = [(session, session.growth) for session in sessions if session.growth is not None]
        unfinished = [(session, growth) for session, growth in growths if not growth.complete]
        for session, growth in unfinished:
            if growth.waiting and self._trunk(forward, session, session.length - 1, drafting=False):
                self._start(session, growth)
        finished = [branch for _, growth in unfinished for branch in self._descend(forward, growth)]
        self._run(forward)
        self._retire(finished)
        return bool(unfinished)

    def deepen(self, session: Session) -> bool:
        """Plan to run the last tokens of finished branches too: one draft token more, or the next tail for free.

        False when the whole tree is as deep as it may be.
        """
        growth = session.growth
        if growth is None or growth.leaves or not growth.complete:
            return False
        growth.deepened, growth.leaves = True, growth.depth >= session.lookahead
        growth.depth += not growth.leaves
        growth.live = [branch for branch in growth.done if branch.row is not None]
        growth.done = [branch for branch in growth.done if branch.row is None]
        for branch in growth.live:
            branch.todo = 1
        return bool(growth.live)

    def step_s(self, sessions: Iterable[Session]) -> float:
        """What the next depth of these sessions' trees should take."""
        growths = [session.growth for session in sessions if session.growth is not None]
        rows = sum(len(growth.live or growth.done) for growth in growths)
        return self.clock.estimate(max(1, rows)) / 1e6

    def shed_branch(self) -> bool:
        """Give up one branch of the session that has most: text goes before guesses."""
        growths = [session.growth for session in self._cache.sessions if session.growth is not None]
        largest = max(growths, key=lambda growth: len(growth.done) + len(growth.live), default=None)
        if largest is None or not largest.branches():
            return False
        self._give_up((largest.live or largest.done).pop())
        return True

    def restrict(self, session: Session) -> None:
        """What is legal has become known: illegal branches go, and every position looks at its candidates again."""
        growth = session.growth
        if growth is None:
            return
        illegal = [branch for branch in growth.branches() if is_illegal(branch)]
        for branch in illegal:
            self._cache.drop_branch(branch)
        self.illegal += len(illegal)
        growth.live = [branch for branch in growth.live if branch not in illegal]
        growth.done = [branch for branch in growth.done if branch not in illegal]
        self._allot(session, growth)

    def _allot(self, session: Session, growth: Growth) -> None:
        """Leave no rows where a grammar has no use for them."""
        useful = {k for k in range(len(growth.fan_out)) if depth_of(session, k, growth.depth) > 0}
        room = {k: len(self._candidates(session, k, [])) if k in useful else 0 for k in session.legal}
        growth.fan_out = spread(growth.fan_out, room)
        growth.waiting = {k for k in useful if growth.fan_out[k]}

    def _trunk(self, forward: Forward, session: Session, guesses_from: int, *, drafting: bool) -> bool:
        """Run what has no KV of text and chain, and see to guesses from position ``guesses_from`` on; False: starved.

        When ``drafting``, the chain is being made now and its rows are not missing path tokens.
        """
        text = session.length
        for node in (session.tip, *session.chain_nodes):
            path = not drafting or node.position < text
            if node.position >= guesses_from and not self._ask(forward, session, node, path=path):
                return self._starve(session)
        for position in range(session.last.position + 1, min(text + len(session.chain), self._cache.context_length)):
            token, path = session.trunk_token(position), not drafting or position < text
            child = self._visit(forward, session, token, path=path, guess=position >= guesses_from)
            if child is None:
                return self._starve(session)
            self._cache.append(session, child)
        return True

    def _visit(self, forward: Forward, session: Session, token: int, *, path: bool, guess: bool) -> Node | None:
        """Forward.visit on the session's own row; branches go when slots are short."""
        while True:
            child = forward.visit(session, row_of(session), session.last, token, path=path, guess=guess)
            if child is not None or not self.shed_branch():
                return child

    def _ask(self, forward: Forward, session: Session, node: Node, *, path: bool) -> bool:
        while not forward.ask(session, row_of(session), node, path=path):
            if not self.shed_branch():
                return False
        return True

    def _start(self, session: Session, growth: Growth) -> None:
        """Branches for the positions whose guesses are known, best ranks first; fewer when table rows are short."""
        found: list[tuple[int, int, int]] = []
        growing = {(position_of(branch), branch.first) for branch in growth.branches()}
        for k in sorted(growth.waiting):
            node = session.trunk_node(k)
            guesses = session.guesses(node) if node is not None else None
            if guesses is not None:
                growth.waiting.remove(k)
                found += [(rank, k, token) for rank, token in enumerate(self._candidates(session, k, guesses.ids))]
        for rank, k, token in sorted(found):
            start = session.trunk_node(k)
            if start is None or rank >= growth.fan_out[k] or (k, token) in growing:
                continue
            row = self._cache.table.take()
            if row is None:
                return
            self._cache.table.fork(row_of(session), session.length + k, row)
            growth.live.append(Branch(session, start, token, depth_of(session, k, growth.depth), row))

    def _candidates(self, session: Session, k: int, ids: list[int]) -> list[int]:
        """Bonus tokens after exactly k accepted: never the chain's next token, which would have been accepted."""
        served = session.chain[k] if k < len(session.chain) else -1
        possible = ranked(ids, session.legal.get(k))
        return [token for token in possible if token != served and token < session.target.vocab_size]

    def _descend(self, forward: Forward, growth: Growth) -> list[Branch]:
        """One token more of every live branch; returns those that need no further forward."""
        at = 0
        while at < len(growth.live):  # shedding takes from the end
            self._step(forward, growth, growth.live[at])
            at += 1
        finished = [branch for branch in growth.live if not branch.todo]
        growth.live = [branch for branch in growth.live if branch.todo]
        growth.done += finished
        return finished

    def _step(self, forward: Forward, growth: Growth, branch: Branch) -> None:
        """Down the tree as far as it is known, then one row; nodes that others made cost nothing."""
        session = branch.session
        while branch.todo:
            token = self._next_token(branch)
            if token is None:
                branch.todo = 0
                return
            node = forward.visit(session, branch_row(branch), branch.node, token, path=False, guess=True)
            if node is None:
                if not self._shed_last(growth, branch):
                    branch.todo = 0
                    return
                continue
            branch.nodes.append(node)
            branch.node, branch.todo = node, branch.todo - 1
            if session.guesses(node) is None:
                return

    def _next_token(self, branch: Branch) -> int | None:
        """What the branch consumes next; None when the draft cannot go there."""
        if branch.node.position + 1 >= self._cache.context_length:
            return None
        if not branch.nodes:
            return branch.first
        guesses = branch.session.guesses(branch.node)
        return guesses.best if guesses is not None and guesses.best < branch.session.target.vocab_size else None

    def _retire(self, finished: list[Branch]) -> None:
        """Give table rows back, but keep those whose leaf may still run."""
        for branch in finished:
            growth = branch.session.growth
            if branch.row is not None and (branch.session.target.waits or growth is None or growth.leaves):
                self._cache.table.give(branch.row)
                branch.row = None

    def _shed_last(self, growth: Growth, asking: Branch) -> bool:
        """Give up the session's last branch, unless that is the one that asks (or the plan is done)."""
        if growth.deepened or growth.live[-1] is asking:
            return False
        self._give_up(growth.live.pop())
        return True

    def _give_up(self, branch: Branch) -> None:
        self.shed += 1
        self._cache.drop_branch(branch)

    def _starve(self, session: Session) -> bool:
        self.starved.append(session)
        return False

    def _run(self, forward: Forward) -> None:
        forward.run()
        if len(forward):
            self.clock.observe(len(forward), forward.micros)
