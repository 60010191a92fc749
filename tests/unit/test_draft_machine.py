"""Random targets against one draft server with too few slots, rows and positions: every answer and slot is checked.

The fake model's next token depends on the whole text, as read back from the slots, so that a speculation with one wrong
slot, a stale branch or another session's noise key is not the continuation that is expected. The vocabulary is tiny, so
that sessions share prefixes and branches all the time.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from sglang_ssd.protocol import Close, Legal, Outcome, Outcomes, Prefill, Reset, Sampling, Speculations, pack_tokens
from tests.support import BOOT, FakeEngine, Harness, guess, hello, key_of, legal_row, text_of

VOCABULARY, CANDIDATES, CONTEXT = 5, 3, 40
TERMS = {
    b"auto": {"wait": "auto", "num_steps": 3, "fan_out": 4},
    b"full": {"wait": "full", "num_steps": 2, "fan_out": 5, "planner": "geometric"},
    b"sync": {"wait": "auto", "num_steps": 2, "mode": "sync"},
}
KEYS = [(0.0, 0), (0.7, 1), (0.7, 2**64 - 3)]

identities = st.sampled_from(sorted(TERMS))
numbers = st.integers(1, 4)
legal_lists = st.none() | st.lists(st.integers(0, VOCABULARY), max_size=3)
token_lists = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12)


class Text:
    """A session as its target sees it: what was committed, what the draft confirmed, what it served last."""

    def __init__(self, epoch, tokens, temperature, seed):
        self.epoch, self.tokens, self.confirmed = epoch, list(tokens), len(tokens)
        self.chain: list[int] = []
        self.temperature, self.seed = temperature, seed

    @property
    def key(self):
        return key_of(self.temperature, self.seed if self.seed < 2**63 else self.seed - 2**64)

    def continues(self, base, count):
        text = self.tokens[:base]
        for _ in range(count):
            text.append(guess(text, self.key, VOCABULARY, CANDIDATES)[0])
        return text[base:]


class DraftServerMachine(RuleBasedStateMachine):
    """Three targets with other terms; each rule is something that a target or time may do."""

    @initialize(slots=st.integers(20, 120), rows=st.integers(8, 40), sessions=st.integers(2, 12))
    def begin(self, slots, rows, sessions):
        engine = FakeEngine(
            slots=slots, rows=rows, context_length=CONTEXT, vocab_size=VOCABULARY, candidates=CANDIDATES
        )
        first = Harness(engine, max_sessions=sessions, prefill_chunk=4, identity=b"auto", **TERMS[b"auto"])
        self.server, self.mailbox = first.server, first.mailbox
        self.texts: dict[tuple[bytes, int], Text] = {}
        self.epoch = self.round = 0
        self.seen: Counter[str] = Counter()
        for identity in (b"full", b"sync"):
            self.greet(identity)

    def greet(self, identity):
        self.server.handle(identity, hello(vocab_size=VOCABULARY, **TERMS[identity]))
        self.texts = {where: text for where, text in self.texts.items() if where[0] != identity}

    @rule(who=identities, number=numbers, tokens=token_lists, key=st.sampled_from(KEYS))
    def prefill(self, who, number, tokens, key):
        """A request starts, or starts again under a new epoch."""
        if (who, number) in self.texts and len(self.texts[who, number].tokens) < CONTEXT:
            return
        self.epoch += 1
        self.texts[who, number] = Text(self.epoch, tokens, *key)
        self.server.handle(who, Prefill(BOOT, number, self.epoch, pack_tokens(tokens), Sampling(*key)))

    @rule(who=identities, data=st.data(), turns=st.integers(0, 12))
    def play(self, who, data, turns):
        """A verify of some of the target's sessions ends; each verified what it has of its last speculation."""
        known = sorted(number for identity, number in self.texts if identity == who)
        if not known:
            return
        batch = data.draw(st.lists(st.sampled_from(known), min_size=1, unique=True))
        rows = tuple(self._outcome(self.texts[who, number], number, data) for number in batch)
        self.round += 1
        fallback = data.draw(st.sampled_from([("jit",), ("jit",), ("jit", "none"), ("jit", "ngram"), ("ngram",), ()]))
        verify_us = data.draw(st.sampled_from([0, 10**7, 10**7, 1]))
        jit_steps = data.draw(st.sampled_from([(), (), (1,), (2, 1)]))
        num_steps = data.draw(st.sampled_from([1 << 30] * 6 + [2, 1, 0]))
        self.server.handle(who, Outcomes.of(BOOT, self.round, verify_us, fallback, rows, jit_steps, num_steps))
        self.work(turns)
        if data.draw(st.sampled_from([False, False, True])):
            self.restrict(who, batch[0], data)

    @rule(data=st.data(), rounds=st.integers(1, 4))
    def play_on(self, data, rounds):
        """Rounds are what happens most."""
        for _ in range(rounds):
            for identity in sorted({identity for identity, _ in self.texts}):
                self.play(identity, data, data.draw(st.integers(1, 12)))

    def restrict(self, who, number, data):
        """The next verify begins, and a grammar forbids tokens; or so somebody says, about this round or another."""
        text = self.texts.get((who, number))
        if text is not None:
            base = len(text.tokens) + data.draw(st.sampled_from([0, 0, 0, -1, 1]))
            row = legal_row(number, text.epoch, base, data.draw(st.lists(legal_lists, max_size=4)))
            self.server.handle(who, Legal(BOOT, (row,)))
            self.check_holds()

    def _outcome(self, text, number, data):
        accepted = data.draw(st.integers(0, len(text.chain)))
        likely = guess([*text.tokens, *text.chain[:accepted]], text.key, VOCABULARY, CANDIDATES)
        bonus = data.draw(st.one_of(st.sampled_from(likely), st.integers(0, VOCABULARY - 1)))
        verified = data.draw(st.integers(accepted, len(text.chain)))
        text.tokens += [*text.chain[:accepted], bonus]
        text.chain = []
        block = pack_tokens(text.tokens[text.confirmed :])
        remaining = data.draw(st.sampled_from([100] * 10 + [4, 3, 2, 1, 0]))
        return Outcome(number, text.epoch, text.confirmed, verified, remaining, block)

    @rule()
    def rest(self):
        for _ in range(300):
            if not self.server.turn():
                break
        else:
            raise AssertionError("the server never rests")
        self._collect()

    @rule(who=identities, number=numbers, how=st.sampled_from(["close", "close", "close", "reset", "restart"]))
    def end(self, who, number, how):
        if how == "close":
            self.texts.pop((who, number), None)
            self.server.handle(who, Close(BOOT, (number,)))
        elif how == "reset":
            self.server.handle(who, Reset(BOOT))
            self.texts = {where: text for where, text in self.texts.items() if where[0] != who}
        else:
            self.greet(who)

    @rule(who=identities, number=numbers, base=st.integers(-2, 40), epoch=st.integers(0, 99), tokens=token_lists)
    def nonsense(self, who, number, base, epoch, tokens):
        """An outcome that fits nothing, or by luck fits: the server may forget the session, and says so."""
        text = self.texts.get((who, number))
        if text is None or (text.epoch, len(text.tokens)) != (epoch, base):
            self.server.handle(
                who, Outcomes.of(BOOT, 0, 0, ("jit",), (Outcome(number, epoch, base, 5, 9, pack_tokens(tokens)),))
            )

    def work(self, turns):
        for _ in range(turns):
            self.server.turn()
            self.check_holds()
        self._collect()

    def _collect(self):
        """File answers as a target does."""
        sent, self.mailbox.sent = self.mailbox.sent, []
        for identity, message in sent:
            if not isinstance(message, Speculations):
                continue
            for row in message.rows:
                self.seen[row.source] += 1
                text = self.texts.get((identity, row.session))
                if text is None or text.epoch != row.epoch:
                    continue
                if row.base == 0:
                    self.texts.pop((identity, row.session))
                    self.server.handle(identity, Close(BOOT, (row.session,)))
                    continue
                chain = memoryview(row.tokens).cast("i").tolist()
                assert text.confirmed <= row.base <= len(text.tokens)
                if row.source == "ngram":
                    assert occurs(text.tokens[row.base - 2 : row.base] + chain, text.tokens), "nobody said that before"
                else:
                    assert chain == text.continues(row.base, len(chain)), f"{row.source} is no continuation"
                assert len(chain) <= TERMS[identity]["num_steps"]
                assert row.base + len(chain) <= CONTEXT or not chain
                assert (row.source == "none") == (not chain)
                text.confirmed = row.base
                if row.base == len(text.tokens):
                    text.chain = chain

    @invariant()
    def check_holds(self):
        """Every slot has one owner; every guess that is kept is the model's after the text that leads to it."""
        if not hasattr(self, "server"):
            return
        self.server.cache.check()
        tree = self.server.cache.tree
        terms_of = {number: terms for terms, number in tree._keys.items()}
        for session in self.server.cache.sessions:
            assert session.tokens[: tree.position_of(session.tip) + 1] == text_of(tree, session.tip)
            for node in (session.tip, *session.chain_nodes):
                found = session.guesses(node)
                key = key_of(session.temperature, session.seed)
                assert found is None or found.ids == guess(text_of(tree, node), key, VOCABULARY, CANDIDATES)
        for node in tree.walk():
            if tree.best_of(node) >= 0:
                key = key_of(*terms_of[tree.key[node]][:2])
                assert tree.guesses(node).ids == guess(text_of(tree, node), key, VOCABULARY, CANDIDATES)

    def teardown(self):
        """All sessions end: nothing is held, and a flush makes every slot free."""
        if not hasattr(self, "server"):
            return
        self.rest()
        for identity in TERMS:
            self.server.handle(identity, Reset(BOOT))
        self.server.cache.check()
        tree, table = self.server.cache.tree, self.server.cache.table
        assert (tree.nodes, tree.free) == (0, tree.capacity)
        assert table.free == self.server.cache.engine.limits.rows
        figures = self.server.figures()
        self.seen.update(
            shed=figures["branches_shed"], illegal=figures["branches_illegal"], evicted=figures["evictions"]
        )
        TOTAL.update(self.seen)


TOTAL: Counter[str] = Counter()


def occurs(part, text):
    return any(text[at : at + len(part)] == part for at in range(len(text) - len(part) + 1))


COMMON, RARE = ("hit", "jit", "none", "shed", "evicted"), ("partial", "ngram", "illegal")


def run(examples, steps, least_rare):
    """Every kind of answer must occur, so that the machine is known to reach them all.

    What hypothesis draws depends on the modules that other tests have loaded, and three are rare: partial hits,
    guesses from a text's own past, and branches that a grammar forbids.
    """
    TOTAL.clear()
    run_state_machine_as_test(
        DraftServerMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert all(TOTAL[what] > 30 for what in COMMON), TOTAL
    assert all(TOTAL[what] >= least_rare for what in RARE), TOTAL


def test_random_targets():
    run(examples=160, steps=40, least_rare=1)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not os.environ.get("SSD_SOAK"), reason="set SSD_SOAK=1 for 100,000 operations")
def test_random_targets_for_long():
    run(examples=1000, steps=100, least_rare=31)
