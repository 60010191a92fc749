"""Targets and their sessions: who is known, who has a table row, who has been silent too long."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sglang_ssd.draft_server.cache import SpeculationCache
from sglang_ssd.draft_server.session import Session
from sglang_ssd.draft_server.suffixes import Past
from sglang_ssd.draft_server.target import Target
from sglang_ssd.draft_server.terms import Terms, terms_of
from sglang_ssd.protocol import BadFrame, Prefill, unpack_tokens

SESSION_SILENCE_S = 600.0
TARGET_SILENCE_S = 60.0
"""A target pings twice a second, so a minute without a word means that it is gone."""


class Sessions:
    """Sessions by target and number. At most ``limit`` have a table row; others are known but not drafted for."""

    def __init__(self, cache: SpeculationCache, limit: int, past: Past | None = None) -> None:
        self._cache, self._past = cache, past
        self._limit = limit
        self.targets: dict[bytes, Target] = {}
        self._of: dict[Target, dict[int, Session]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __iter__(self) -> Iterator[Session]:
        for sessions in self._of.values():
            yield from sessions.values()

    def welcome(self, target: Target) -> None:
        """A target that said Hello; what was known under its identity is gone."""
        self.dismiss(target.identity)
        self.targets[target.identity] = target
        self._of[target] = {}

    def knows(self, target: Target) -> bool:
        """Whether this is still the target under its identity."""
        return target in self._of

    def dismiss(self, identity: bytes) -> None:
        """Forget a target and all its sessions."""
        target = self.targets.pop(identity, None)
        if target is not None:
            self.clear(target)
            del self._of[target]

    def clear(self, target: Target) -> None:
        """Close every session of a target."""
        self.close(target, *self._of[target])

    def find(self, target: Target, number: int) -> Session | None:
        """The session, if it is known."""
        return self._of[target].get(number)

    def open(self, target: Target, message: Prefill, now: float) -> Session | None:
        """The session of a Prefill, which replaces an older epoch; None when this one is old. Raises BadFrame."""
        known = self.find(target, message.session)
        if known is not None and known.epoch >= message.epoch:
            return None
        session = _session(target, message, now, self._cache)
        self.close(target, message.session)
        self._of[target][message.session] = session
        self._room(session)
        return session

    def close(self, target: Target, *numbers: int) -> None:
        """End sessions. Those that found no room may find it now."""
        ended = [self._of[target].pop(number, None) for number in numbers]
        for session in ended:
            if session is None:
                continue
            self._cache.close(session)
            if self._past is not None and not session.hopeless:
                self._past.put(session.tokens)
        for other in self if any(ended) and len(self) > len(self._cache.sessions) else ():
            if other.row is None:
                self._room(other)

    def expire(self, now: float, heard: dict[bytes, float]) -> None:
        """Close what has been silent for too long; ``heard`` says when each target last spoke."""
        for identity, at in list(heard.items()):  # the I/O thread adds to it meanwhile
            if now - at > TARGET_SILENCE_S:
                self.dismiss(identity)
                heard.pop(identity, None)
        for session in [session for session in self if now - session.seen_at > SESSION_SILENCE_S]:
            self.close(session.target, session.number)

    def _room(self, session: Session) -> None:
        """A table row for a session that can be drafted for, if there is one."""
        if not session.hopeless and len(self._cache.sessions) < self._limit:
            self._cache.open(session)


def _session(target: Target, message: Prefill, now: float, cache: SpeculationCache) -> Session:
    if len(message.tokens) % 4:
        raise BadFrame(f"a token block of {len(message.tokens)} bytes is no whole number of int32")
    tokens: list[int] = np.frombuffer(message.tokens, dtype="<i4").tolist()
    terms = terms_of(message.sampling, target.proposal, target.vocab_size)
    session = Session(
        target=target,
        number=message.session,
        epoch=message.epoch,
        tokens=tokens,
        terms=terms or Terms(),
        tree=cache.tree,
        seen_at=now,
        limit=max(0, message.num_steps),
    )
    fits = 0 < len(tokens) <= min(cache.context_length, cache.tree.capacity - 1)
    session.hopeless = not (fits and terms is not None and _known(message.tokens, target))
    return session


def _known(block: bytes, target: Target) -> bool:
    try:
        unpack_tokens(block, target.vocab_size)
    except BadFrame:
        return False
    return True
