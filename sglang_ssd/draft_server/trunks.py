"""Trunks: the text and the chain of sessions, run wherever they have no KV yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sglang_ssd.draft_server.cache import SpeculationCache
from sglang_ssd.draft_server.forward import Forward, Steps
from sglang_ssd.draft_server.session import Session, row_of


class Trunks:
    """Adds the trunks' rows to forwards. When slots are short ``make_room`` is asked for some, and says whether there
    are any now; a session that finds none for its text is ``starved``: the server takes it off after the step.
    """

    def __init__(self, cache: SpeculationCache, make_room: Callable[[], bool]) -> None:
        self._cache, self._make_room = cache, make_room
        self.starved: list[Session] = []

    def run(
        self, forward: Forward, sessions: Sequence[Session], guesses_from: Sequence[int], *, drafting: bool
    ) -> list[Session]:
        """Run what has no KV of text and chain, and see to guesses from positions ``guesses_from`` on; returns the
        sessions that are not starved.

        When ``drafting``, the chain is being made now and its rows are not missing path tokens.
        """
        starts = dict(zip(sessions, guesses_from, strict=True))
        self._ask(forward, starts, drafting=drafting)
        pending = list(starts)
        while pending := [session for session in pending if session in starts and session.run < self._end(session)]:
            at = [session.run for session in pending]
            within = np.array([position < session.length for session, position in zip(pending, at, strict=True)])
            steps = _steps(pending, at)
            asks = np.array([position >= starts[session] for session, position in zip(pending, at, strict=True)])
            nodes = forward.visit(steps, asks=asks, committed=within, path=within | (not drafting)).tolist()
            for session, node in zip(pending, nodes, strict=True):
                if node:
                    self._cache.append(session, node)
            if 0 in nodes and not self._make_room():
                self._starve(starts, pending[nodes.index(0)])
        return list(starts)

    def _ask(self, forward: Forward, starts: dict[Session, int], *, drafting: bool) -> None:
        """See to guesses at the nodes that sessions have; those that starve leave ``starts``."""
        asked = self._unknown(starts)
        while asked:
            seats = np.array([row_of(session) for session, _ in asked])
            nodes = np.array([node for _, node in asked])
            lengths = np.array([session.length for session, _ in asked])
            path = (self._cache.tree.position[nodes] < lengths) | (not drafting)
            got = forward.ask(seats, seats, nodes, path)
            asked = [each for each, done in zip(asked, got.tolist(), strict=True) if not done]
            if asked and not self._make_room():
                self._starve(starts, asked[0][0])
                asked = [each for each in asked if each[0] in starts]

    def _unknown(self, starts: dict[Session, int]) -> list[tuple[Session, int]]:
        """The nodes of sessions from the given positions on that they have no guesses at."""
        tree, known = self._cache.tree, self._cache.tree.knows
        return [
            (session, node)
            for session, start in starts.items()
            for node in [session.tip, *session.chain_nodes][max(0, start - tree.position_of(session.tip)) :]
            if not known(node, session.key) and node not in session.own
        ]

    def _end(self, session: Session) -> int:
        """How many tokens of text and chain may have KV."""
        return min(session.length + len(session.chain), self._cache.context_length)

    def _starve(self, starts: dict[Session, int], session: Session) -> None:
        self.starved.append(session)
        del starts[session]


def _steps(sessions: Sequence[Session], positions: Sequence[int]) -> Steps:
    """The next token of each session's trunk."""
    tokens = [session.trunk_token(position) for session, position in zip(sessions, positions, strict=True)]
    seats = np.array([row_of(session) for session in sessions])
    return Steps(seats, seats, np.array([session.last for session in sessions]), np.array(tokens))
