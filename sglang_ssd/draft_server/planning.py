"""What the trees of the coming round look like: one plan for all sessions of a target that have none yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from sglang_ssd.draft_server.outlook import learn, outlook
from sglang_ssd.draft_server.session import Growth, Session
from sglang_ssd.draft_server.target import Target
from sglang_ssd.policy.clock import StepClock
from sglang_ssd.policy.planner import Chain, expected_hits
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
        views = [_view(session) for session in sessions]
        chances = target.planner.chances(views)
        shape = self._shape(target, sessions, expected_hits(chances, most))
        fan_outs = target.planner.plan(chances, views, shape.rows)
        for session, fan_out in zip(sessions, fan_outs, strict=True):
            waiting = {k for k, count in enumerate(fan_out) if count and depth_of(session, k, shape.depth) > 0}
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
        )
        return best_shape(hits, setting)


def depth_of(session: Session, k: int, depth: int) -> int:
    """Draft tokens of use after k accepted drafts and a bonus token, at most ``depth``."""
    return min(depth, session.lookahead, session.remaining - k - 2)


def _view(session: Session) -> Chain:
    guesses = session.chain_guesses()
    usable = sum(depth_of(session, k, session.lookahead) > 0 for k in range(len(guesses)))
    return outlook(session.chain, guesses, session.temperature, usable)
