"""What the trees of the coming round look like: one plan for all sessions of a target that have none yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from sglang_ssd.draft_server.outlook import Known, learn, outlook
from sglang_ssd.draft_server.session import Growth, Session
from sglang_ssd.draft_server.target import Target
from sglang_ssd.draft_server.tree import ROOT
from sglang_ssd.policy.clock import StepClock
from sglang_ssd.policy.planner import Chains, expected_hits
from sglang_ssd.policy.shape import Setting, Shape, best_shape


class Planning:
    """Chooses rows and depth by the clock, then which outcomes get the rows."""

    def __init__(self, clock: StepClock, now: Callable[[], float]) -> None:
        self._clock, self._now = clock, now

    def plan(self, sessions: Sequence[Session], budget: int) -> None:
        """Give each of the sessions its Growth; ``budget`` is the most branches for one."""
        by_target: dict[Target, list[Session]] = defaultdict(list)
        for session in sessions:
            by_target[session.target].append(session)
        for target, its in by_target.items():
            self._plan(target, its, min(budget, target.fan_out) * len(its))

    def _plan(self, target: Target, sessions: Sequence[Session], most: int) -> None:
        learn(target.planner, target.ended)
        target.ended.clear()
        views = _views(sessions)
        chances = target.planner.chances(views)
        shape = self._shape(target, sessions, expected_hits(chances, most))
        fan_outs = target.planner.plan(chances, views, shape.rows)
        for session, fan_out in zip(sessions, fan_outs, strict=True):
            usable = _usable(session) if shape.depth > 0 else 0
            waiting = {k for k, count in enumerate(fan_out[:usable]) if count}
            session.growth = Growth(fan_out, shape.depth, waiting)

    def _shape(self, target: Target, sessions: Sequence[Session], hits: list[float]) -> Shape:
        """With wait=full everything is awaited, whatever it takes: runs are to be repeatable."""
        limit = target.lookahead
        if target.waits or target.expected is None:
            return Shape(len(hits) - 1, limit)
        setting = Setting(
            sessions=len(sessions),
            limit=limit,
            available_us=1e6 * max(0.0, target.expected.at_s - self._now()),
            verify_us=target.verify_us,
            step_us=self._clock.estimate,
            acceptance=target.planner.acceptance.rate,
            jit_steps=target.jit_steps,
            tried_rows=self._clock.most_rows,
        )
        return best_shape(hits, setting)


def depth_of(session: Session, k: int, depth: int) -> int:
    """Draft tokens of use after k accepted drafts and a bonus token, at most ``depth``."""
    return min(depth, session.lookahead, session.remaining - k - 2)


def known(sessions: Sequence[Session], chains: Sequence[Sequence[int]], trunks: Sequence[Sequence[int]]) -> Known:
    """What is known by each session's terms behind its ``trunk``, the nodes of its text and of its chain."""
    tree, longest = sessions[0].tree, max(map(len, chains)) + 1
    nodes = np.array([[*trunk, *[ROOT] * (longest - len(trunk))] for trunk in trunks])  # [S, J + 1]
    keys = np.array([session.key for session in sessions])
    found = Known(tree.ids[nodes], tree.scores[nodes], (tree.best[nodes] >= 0) & (tree.key[nodes] == keys[:, None]))
    for i, session in enumerate(sessions):
        for k in np.flatnonzero(~found.known[i]) if session.own else ():
            own = session.own.get(int(nodes[i, k]))
            if own is not None:
                found.ids[i, k], found.scores[i, k], found.known[i, k] = own.ids, own.scores, True
    return found


def _views(sessions: Sequence[Session]) -> Chains:
    chains = [session.chain for session in sessions]
    seen = known(sessions, chains, [session.trunk for session in sessions])
    temperatures = np.array([session.temperature for session in sessions])
    return outlook(chains, seen, temperatures, np.array([_usable(session) for session in sessions]))


def _usable(session: Session) -> int:
    """The positions k that may have branches."""
    return max(0, min(len(session.chain) + 1, session.remaining - 2)) if session.lookahead > 0 else 0
