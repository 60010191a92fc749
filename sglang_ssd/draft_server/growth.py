"""Drafting: the trees of all sessions grow together, one batched forward per depth; missed rounds are drafted alone.

Depth 0 of a session's round runs the tokens of its text and chain that have no KV yet, and starts the candidates of
every position whose guesses are known. Guesses that depth 0 makes, usually those behind the chain's last token,
start theirs one depth later. Branch (k, c) consumes c first and needs as many forwards as it is to draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from sglang_ssd.draft_server.branches import NO_ROW
from sglang_ssd.draft_server.cache import SpeculationCache
from sglang_ssd.draft_server.engine import Ints
from sglang_ssd.draft_server.forward import Forward, Steps
from sglang_ssd.draft_server.planning import Planning
from sglang_ssd.draft_server.session import Growth, Session, row_of
from sglang_ssd.draft_server.starts import Starts
from sglang_ssd.draft_server.trunks import Trunks
from sglang_ssd.policy.clock import StepClock

_NONE: Ints = np.zeros(0, dtype=np.int64)


class Drafter:
    """One step at a time, so that the server can look at its socket in between."""

    def __init__(self, cache: SpeculationCache, now: Callable[[], float]) -> None:
        self._cache, self._branches, self._seats = cache, cache.branches, cache.seats
        self.clock = StepClock()
        self._planning = Planning(self.clock, now)
        self.shed = 0
        """Branches given up because slots were short."""
        self.illegal = 0
        """Branches given up because a grammar forbids them."""
        self._trunks, self._starts = Trunks(cache, self.shed_branch), Starts(cache)
        self.starved = self._trunks.starved
        """Sessions whose text found no slots; the server takes them off after the step."""

    def draft(self, sessions: Sequence[Session]) -> None:
        """One more token on each session's chain, if there is room; missing path tokens run on the way."""
        forward = self._cache.forward()
        ends = [session.length + len(session.chain) for session in sessions]
        self._trunks.run(forward, sessions, [end - 1 for end in ends], drafting=True)
        self._run(forward)
        for session, end in zip(sessions, ends, strict=True):
            best = session.best(session.last) if session.run == end else None
            if best is not None:
                session.chain.append(best)

    def plan(self, sessions: Iterable[Session], budget: int) -> None:
        """Plan the trees of those that have none; ``budget`` is the most branches of a session."""
        unplanned = [session for session in sessions if session.growth is None]
        if unplanned:
            self._planning.plan(unplanned, budget)
        for session in unplanned:
            if session.legal and session.growth is not None:
                self._starts.allot(session, session.growth)

    def grow(self, sessions: Iterable[Session]) -> bool:
        """One depth of every unfinished tree of planned sessions; False when all are complete."""
        growths = [(session, session.growth) for session in sessions if session.growth is not None]
        unfinished = [(session, growth) for session, growth in growths if not growth.complete]
        if not unfinished:
            return False
        forward = self._cache.forward()
        waiting = [session for session, growth in unfinished if growth.waiting]
        if waiting:
            starts = [session.length - 1 for session in waiting]
            self._starts.begin(self._trunks.run(forward, waiting, starts, drafting=False))
        live = self._branches.live([row_of(session) for session, _ in unfinished])
        self._descend(forward, live)
        self._run(forward)
        self._retire(live)
        return True

    def deepen(self, sessions: Iterable[Session]) -> bool:
        """Plan to run the last tokens of finished branches too: one draft token more, or the next tail for free.

        False when the whole trees are as deep as they may be.
        """
        deeper = []
        for session in sessions:
            growth = session.growth
            if growth is not None and growth.complete and not growth.leaves:
                growth.deepened, growth.leaves = True, growth.depth >= session.lookahead
                growth.depth += not growth.leaves
                deeper.append(row_of(session))
        branches = self._branches.of(deeper)
        branches = branches[self._branches.row[branches] != NO_ROW]
        self._branches.todo[branches] = 1
        for growth, count in self._seats.growths(self._branches.seat[branches]):
            growth.live, growth.done = growth.live + count, growth.done - count
        return len(branches) > 0

    def step_s(self, sessions: Iterable[Session]) -> float:
        """What the next depth of these sessions' trees should take."""
        growths = [session.growth for session in sessions if session.growth is not None]
        rows = sum(growth.live or growth.done for growth in growths)
        return self.clock.estimate(max(1, rows)) / 1e6

    def shed_branch(self) -> bool:
        """Give up one branch of the session that has most: text goes before guesses."""
        growing = [(session, session.growth) for session in self._cache.sessions if session.growth is not None]
        session, growth = max(growing, key=lambda each: each[1].done + each[1].live, default=(None, None))
        if session is None or growth is None or not growth.done + growth.live:
            return False
        seats = [row_of(session)]
        self._give_up(growth, (self._branches.live(seats) if growth.live else self._branches.of(seats))[-1:])
        return True

    def restrict(self, session: Session) -> None:
        """What is legal has become known: illegal branches go, and every position looks at its candidates again."""
        growth = session.growth
        if growth is None:
            return
        illegal = [
            number for number, k, first in self._starts.outcomes(session)
            if (legal := session.legal.get(k)) is not None and first not in legal
        ]  # fmt: skip
        self._drop(growth, np.array(illegal, dtype=np.int64))
        self.illegal += len(illegal)
        growth.restricted = True
        self._starts.allot(session, growth)

    def _descend(self, forward: Forward, active: Ints) -> None:
        """One row more of branches, the best first: down the tree as far as it is known, for nodes that others made
        cost nothing, and then one token. Branches that cannot go on have nothing left to do.
        """
        branches, tree = self._branches, self._cache.tree
        while len(active):
            tokens = self._next_tokens(active)
            if np.count_nonzero(stuck := tokens < 0):
                branches.todo[active[stuck]] = 0
                active, tokens = active[~stuck], tokens[~stuck]
            steps = Steps(branches.seat[active], branches.row[active], branches.node[active], tokens)
            no = np.zeros(len(active), dtype=np.bool_)
            nodes = forward.visit(steps, asks=~no, committed=no, path=no)
            if np.count_nonzero(tree.in_flight[nodes]) == len(nodes):
                self._move(active, nodes)
                return
            moved = active[nodes > 0]
            self._move(moved, nodes[nodes > 0])
            further = moved[(branches.todo[moved] > 0) & (self._best(moved) >= 0)]
            active = branches.in_order(np.concatenate([further, self._make_room(active[nodes == 0])]))

    def _move(self, numbers: Ints, nodes: Ints) -> None:
        """Branches have consumed the tokens of ``nodes``."""
        branches = self._branches
        branches.node[numbers] = nodes
        branches.length[numbers] += 1
        branches.todo[numbers] -= 1

    def _next_tokens(self, numbers: Ints) -> Ints:
        """What branches consume next; -1 where the draft cannot go."""
        branches, nodes = self._branches, self._branches.node[numbers]
        tokens = np.where(branches.length[numbers] == 0, branches.first[numbers], self._best(numbers))
        room = self._cache.tree.position[nodes] + 1 < self._cache.context_length
        return np.where(room & (tokens < self._seats.vocab_sizes[branches.seat[numbers]]), tokens, -1)

    def _best(self, numbers: Ints) -> Ints:
        """The best guess behind branches, by their sessions' terms; -1 where it is not known, or not yet."""
        tree, nodes, seats = self._cache.tree, self._branches.node[numbers], self._branches.seat[numbers]
        best = np.where(tree.key[nodes] == self._seats.keys[seats], tree.best[nodes], -1)
        for i in np.flatnonzero((best < 0) & ~tree.in_flight[nodes]).tolist():
            own = self._seats.session(seats[i]).own.get(int(nodes[i]))
            best[i] = -1 if own is None else own.best
        return best

    def _make_room(self, short: Ints) -> Ints:
        """Give up the last of the branches that found no slot, session by session, until the others may find one;
        returns those that may ask again.
        """
        branches, tree = self._branches, self._cache.tree
        asking = [_NONE]
        for seat in dict.fromkeys(branches.seat[short].tolist()):
            its, growth = branches.at(short, [seat]), self._seats.session(seat).growth
            if growth is None or growth.deepened:
                branches.todo[its] = 0
                continue
            kept = self._affordable(its, tree.free - sum(map(len, asking)))
            self._give_up(growth, its[kept:])
            asking.append(its[:kept])
        left = np.concatenate(asking)
        if tree.free or len(left) < len(short):
            return left
        branches.todo[left] = 0
        return _NONE

    def _affordable(self, short: Ints, free: int) -> int:
        """How many of the first branches of a session find a slot when the others are given up; at least one stays."""
        lengths = self._branches.length[short]
        later = lengths.sum() - lengths.cumsum()  # what those behind each hold
        enough = np.flatnonzero(np.arange(1, len(short) + 1) <= free + later)
        return int(enough[-1]) + 1 if len(enough) else 1

    def _retire(self, live: Ints) -> None:
        """Count the branches that have nothing left to run, and give table rows back, but keep those whose leaf may
        still run.
        """
        branches = self._branches
        todo = branches.todo[live]
        if np.count_nonzero(todo) == len(todo):
            return
        over = live[(todo == 0) & (branches.seat[live] >= 0)]
        for growth, count in self._seats.growths(branches.seat[over]):
            growth.live, growth.done = growth.live - count, growth.done + count
        seats = set(branches.seat[over].tolist())
        final = [seat for seat in seats if _is_final(self._seats.session(seat))]
        if len(final) < len(seats):
            over = branches.at(over, final)
        self._cache.table.give_many(branches.row[over])
        branches.row[over] = NO_ROW

    def _give_up(self, growth: Growth, numbers: Ints) -> None:
        if len(numbers):
            self.shed += len(numbers)
            self._drop(growth, numbers)

    def _drop(self, growth: Growth, numbers: Ints) -> None:
        live = int(np.count_nonzero(self._branches.todo[numbers]))
        growth.live, growth.done = growth.live - live, growth.done - (len(numbers) - live)
        self._cache.drop_branches(numbers)

    def _run(self, forward: Forward) -> None:
        forward.run()
        if len(forward):
            self.clock.observe(len(forward), forward.micros)


def _is_final(session: Session) -> bool:
    """Whether the leaves of its finished branches will not run."""
    return session.target.waits or session.growth is None or session.growth.leaves
