"""Answering rounds: look every outcome up, reply with what is there, draft what was missed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sglang_ssd.draft_server.cache import SpeculationCache
from sglang_ssd.draft_server.growth import Drafter
from sglang_ssd.draft_server.outlook import Ended
from sglang_ssd.draft_server.planning import known
from sglang_ssd.draft_server.session import Session
from sglang_ssd.draft_server.sessions import Sessions
from sglang_ssd.draft_server.suffixes import Past, Suffixes
from sglang_ssd.draft_server.target import Target
from sglang_ssd.policy.waiting import best_depth
from sglang_ssd.protocol import BadFrame, Outcome, Outcomes, Speculation, pack_tokens, unpack_tokens

PATH_ROWS = 16
"""More missing tokens than this, or 2(K+1), are run as a prefill chunk instead of decode rows."""


@dataclass(eq=False)
class Round:
    """An Outcomes message, or what is left of it: a row goes when a newer outcome of its session arrives."""

    target: Target
    message: Outcomes
    rows: dict[int, Outcome]

    def rule(self, missed: int) -> tuple[str, int]:
        """How to answer a round with so many missed rows, and how many tokens of a row may be drafted then."""
        if not self.target.grows:
            return "jit", self.target.num_steps
        kinds, steps = self.message.fallback, self.message.jit_steps
        kind = kinds[min(missed, len(kinds)) - 1] if kinds else "none"
        most = steps[min(missed, len(steps)) - 1] if steps else self.target.num_steps
        return kind, max(0, most) if kind == "jit" else 0


@dataclass(eq=False)
class Draft:
    """A session whose answer is being drafted: until its chain has ``goal`` tokens."""

    session: Session
    round: Round
    source: str
    goal: int


class _Ending(NamedTuple):
    """How a session's round ended, and the chain and nodes that it had; the nodes live until the sweep."""

    session: Session
    chain: list[int]
    trunk: list[int]
    accepted: int
    bonus: int


class Rounds:
    """The rounds that wait, and the drafts that run. ``reply`` sends answers of one round."""

    def __init__(
        self,
        sessions: Sessions,
        cache: SpeculationCache,
        drafter: Drafter,
        reply: Callable[[Round, list[Speculation]], None],
        past: Past | None = None,
    ) -> None:
        self._past = past
        self._sessions, self._cache, self._drafter, self._reply = sessions, cache, drafter, reply
        self._waiting: list[Round] = []
        self._drafts: dict[Session, Draft] = {}
        self._ended: list[_Ending] = []
        self.stale = 0
        """Outcomes that belong to nothing we know."""

    @property
    def drafting(self) -> bool:
        """Whether an answer waits for a draft step."""
        return bool(self._drafts)

    def add(self, target: Target, message: Outcomes, now: float) -> None:
        """Take a round in. Older outcomes of the same sessions will never be answered."""
        try:
            rows = {row.session: row for row in message.rows}
        except BadFrame:
            self.stale += 1
            return
        for earlier in self._waiting:
            if earlier.target is target:
                for number in rows:
                    earlier.rows.pop(number, None)
        for number in rows:
            session = self._sessions.find(target, number)
            if session is not None:
                session.seen_at = now
                self._drafts.pop(session, None)
        target.verify_us = message.verify_us or target.verify_us
        round_ = Round(target, message, rows)
        target.jit_steps = round_.rule(1)[1]
        target.lookahead = min(target.num_steps, message.num_steps)
        self._waiting.append(round_)

    def answer(self) -> None:
        """Answer every round that may be answered now."""
        waiting = [round_ for round_ in self._waiting if self._sessions.knows(round_.target)]
        due = [round_ for round_ in waiting if self._is_due(round_)]
        self._waiting = [round_ for round_ in waiting if round_ not in due]
        for round_ in due:
            self._answer(round_)

    def draft(self) -> None:
        """One step of every draft, and the answers that are complete with it."""
        self._drafts = {session: draft for session, draft in self._drafts.items() if session.row is not None}
        before = {session: len(session.chain) for session in self._drafts}
        self._drafter.draft(list(before))
        over = [d for d in self._drafts.values() if len(d.session.chain) in (d.goal, before[d.session])]
        for draft in over:
            del self._drafts[draft.session]
        by_round: dict[Round, list[Speculation]] = defaultdict(list)
        for draft in over:
            by_round[draft.round].append(_speculation(draft.session, draft.source))
        for round_, rows in by_round.items():
            self._reply(round_, rows)

    def growing(self) -> list[Session]:
        """The sessions whose trees may grow now."""
        return [s for s in self._cache.sessions if s.target.grows and not s.prefilling and s not in self._drafts]

    def _is_due(self, round_: Round) -> bool:
        """With wait=full a round is answered when the tree of every session in it stands."""
        if not round_.target.waits:
            return True
        sessions = (self._sessions.find(round_.target, number) for number in round_.rows)
        return all(_is_settled(session) for session in sessions if session is not None)

    def _answer(self, round_: Round) -> None:
        replies, missed = [], []
        for outcome in round_.rows.values():
            found = self._look_up(round_, outcome)
            if isinstance(found, Draft):
                self._drafts[found.session] = found
                if found.source == "jit":
                    missed.append(found)
            elif found is not None:
                replies.append(found)
        replies += self._fall_back(round_, missed)
        if replies:
            self._reply(round_, replies)
        if self._ended:
            round_.target.ended.append(_summary(self._ended))
            self._ended = []
        self._cache.sweep()

    def _fall_back(self, round_: Round, missed: list[Draft]) -> list[Speculation]:
        """Apply the round's rule to the missed rows; answers for those that are not drafted."""
        if not missed:
            return []
        kind, steps = round_.rule(len(missed))
        for draft in missed:
            draft.goal = min(draft.goal, steps)
            if kind == "ngram":
                self._guess(draft.session)
        answered = [draft.session for draft in missed if not draft.goal]
        for session in answered:
            del self._drafts[session]
        return [_speculation(session, kind) for session in answered]

    def _guess(self, session: Session) -> None:
        """A chain from the text's own past, else from others': the next growth runs it like missing text."""
        if session.suffixes is None:
            session.suffixes = Suffixes()
        limit = min(session.lookahead, session.remaining - 1, self._cache.context_length - session.length)
        guess = session.suffixes.guess(session.tokens, max(0, limit))
        if not guess and self._past is not None:
            guess = self._past.guess(session.tokens, limit)
        session.chain = guess if max(guess, default=0) < session.target.vocab_size else []
        session.sampled = False

    def _look_up(self, round_: Round, outcome: Outcome) -> Speculation | Draft | None:
        """The answer to one outcome, or the draft that makes it; None when it is stale."""
        session = self._sessions.find(round_.target, outcome.session)
        if session is None or outcome.epoch > session.epoch:
            return self._unknown(outcome)
        if outcome.epoch < session.epoch:
            self.stale += 1
            return None
        tokens = self._news(session, outcome)
        if tokens is None:
            self._sessions.close(session.target, session.number)
            return self._unknown(outcome)
        self._observe(session, outcome, tokens)
        session.remaining, session.sampled = outcome.remaining, True
        useful = max(0, min(session.lookahead, outcome.remaining - 1))
        room = self._cache.context_length - session.length - len(tokens)
        needed = max(0, min(useful, room))
        chain = self._cache.advance(session, tokens, needed if session.target.grows else 0)
        if room <= 0:
            session.hopeless = True
            self._cache.close(session)
        if session.row is None or not self._has_path(session):
            return _speculation(session, "none")
        if useful and len(chain) == useful:
            return _speculation(session, "hit")
        if chain:
            goal = self._depth(session, len(chain), needed, 1)
            return Draft(session, round_, "partial", goal) if goal > len(chain) else _speculation(session, "partial")
        return Draft(session, round_, "jit", needed) if needed else _speculation(session, "none")

    def _has_path(self, session: Session) -> bool:
        """Whether the session's text has KV but for a few tokens; otherwise it waits for its prefill chunks."""
        session.prefilling = session.missing > max(PATH_ROWS, 2 * (session.num_steps + 1))
        return not session.prefilling

    def _news(self, session: Session, outcome: Outcome) -> list[int] | None:
        """The tokens that we do not have yet, at least one; None when the outcome does not continue our text."""
        behind = session.length - outcome.base
        try:
            vocab_size = 2**31 if session.hopeless else session.target.vocab_size
            tokens: list[int] = unpack_tokens(outcome.tokens, vocab_size).tolist()
        except BadFrame:
            return None
        if outcome.base < 1 or not 0 <= behind < len(tokens) or tokens[:behind] != session.tokens[outcome.base :]:
            return None
        return tokens[behind:]

    def _unknown(self, outcome: Outcome) -> Speculation:
        """Base 0: the target must send its tokens again, under a new epoch."""
        self.stale += 1
        return Speculation(outcome.session, outcome.epoch, 0, "none", b"")

    def _observe(self, session: Session, outcome: Outcome, tokens: list[int]) -> None:
        """Note an outcome of the chain we served, to be learnt from when there is time.

        A late or coalesced round says nothing about it, and one that was cut short little. Sessions without a row
        are not planned for, so nobody would learn from theirs.
        """
        accepted, verified = len(tokens) - 1, min(outcome.verified_len, len(session.chain))
        ours = session.row is not None and session.sampled and outcome.base == session.length
        if not ours or accepted > verified:
            return
        target = session.target
        if verified < len(session.chain) or not target.grows:  # without trees nothing is planned, so nothing learnt
            target.planner.acceptance.observe(accepted, verified)
            return
        self._ended.append(_Ending(session, session.chain, session.trunk, accepted, tokens[-1]))

    def _depth(self, session: Session, ready: int, limit: int, rows: int) -> int:
        """How many tokens to answer with, at least ``ready``."""
        target = session.target
        if target.waits or not target.grows:
            return limit
        rate, step_us = target.planner.acceptance.rate, self._drafter.clock.estimate(rows)
        return best_depth(ready, limit, rate, target.verify_us, step_us)


def _summary(endings: list[_Ending]) -> Ended:
    sessions, chains, trunks, accepted, bonus = zip(*endings, strict=True)
    temperatures = np.array([session.temperature for session in sessions])
    return Ended(chains, known(sessions, chains, trunks), temperatures, np.array(accepted), np.array(bonus))


def _is_settled(session: Session) -> bool:
    if session.row is None:
        return True
    stands = not session.target.grows or (session.growth is not None and session.growth.complete)
    return stands and not session.prefilling


def _speculation(session: Session, source: str) -> Speculation:
    """An answer with the session's chain; an empty one is ``none`` whatever was tried."""
    source = source if session.chain else "none"
    tokens = pack_tokens(session.chain)
    return Speculation(session.number, session.epoch, session.length, source, tokens, *_proposal(session))


def _proposal(session: Session) -> tuple[bytes, bytes]:
    """The q of every chain token, ids and probabilities; nothing where the chain is a deterministic proposal."""
    if session.terms.proposal is None or not session.sampled:
        return b"", b""
    samples = session.chain_samples()
    return b"".join(sample.ids for sample in samples), b"".join(sample.q for sample in samples)
