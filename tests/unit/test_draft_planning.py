"""Trees by the clock: K as the target says, rows and depth as time allows, and no outcome kept waiting."""

from __future__ import annotations

import pytest

from sglang_ssd.draft_server.engine import EngineSettings
from sglang_ssd.draft_server.engine_torch import TorchEngine
from sglang_ssd.draft_server.server import DraftServer, Offer
from sglang_ssd.protocol import Outcomes, Refused, Reset, Speculations
from tests.models import make_llama
from tests.support import BOOT, FakeEngine, FakeMailbox, Harness, guess

PROMPT = [1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
STEP_S = 0.030


class SlowEngine(FakeEngine):
    """Each decode takes 30 ms of the harness's time."""

    clock = None

    def decode(self, batch):
        if self.clock is not None:
            self.clock.now += STEP_S
        return super().decode(batch)


def tokens_of(row):
    return list(memoryview(row.tokens).cast("i"))


def best(text, rank=0):
    return guess(text, None, 6, 4)[rank]


def continuation(text, count):
    text, drafts = list(text), []
    for _ in range(count):
        drafts.append(best([*text, *drafts]))
    return drafts


def a_miss(text):
    return next(token for token in range(6) if token not in guess(text, None, 6, 4))


@pytest.fixture
def harness():
    """wait=auto; its first prompt has been read, and the first round is over."""
    engine = SlowEngine(slots=600, rows=60, context_length=200)
    harness = Harness(engine, wait="auto", num_steps=3, fan_out=4)
    engine.clock = harness.clock
    harness.prefill(1, PROMPT)
    harness.settle()
    return harness


def play(harness, tokens, **message):
    """One round; its one answer."""
    harness.round += 1
    row = harness.outcome(1, tokens)
    terms = {"verify_us": 0, "fallback": ("jit",)} | message
    harness.mailbox.take()
    harness.handle(Outcomes.of(BOOT, harness.round, rows=(row,), **terms))
    for _ in range(50):
        harness.server.turn()
        answers = harness.mailbox.take(Speculations)
        if answers:
            harness.chains[1] = tokens_of(answers[0].rows[0])
            return answers[0].rows[0]
    raise AssertionError("no answer")


def test_with_k_0_nothing_is_drafted_until_it_rises_again(harness):
    decoded = len(harness.engine.decoded)
    for _ in range(4):
        row = play(harness, [best(harness.texts[1])], num_steps=0, verify_us=100_000)
        assert (row.source, tokens_of(row)) == ("none", [])
        harness.settle()
    assert len(harness.engine.decoded) == decoded
    row = play(harness, [best(harness.texts[1])], num_steps=3)
    assert (row.source, tokens_of(row)) == ("jit", continuation(harness.texts[1], 3))


def test_a_smaller_k_is_answered_with_fewer_tokens(harness):
    row = play(harness, [best(harness.texts[1])], num_steps=2)
    assert (row.source, tokens_of(row)) == ("hit", continuation(harness.texts[1], 2))


def depth_after(harness, verify_us):
    """How deep the plan of the tree is when the outcome is expected after ``verify_us``."""
    play(harness, [best(harness.texts[1])], verify_us=verify_us)
    harness.server.turn()
    return harness.session(1).growth.depth


def test_the_tree_is_as_deep_as_there_is_time(harness):
    assert depth_after(harness, 200_000) == 3
    harness.settle()
    assert depth_after(harness, 40_000) == 1


def test_when_there_is_time_a_tree_grows_on(harness):
    """Planned for an outcome after 40 ms; it does not come, so what is prepared becomes as deep as K and deeper."""
    assert depth_after(harness, 40_000) == 1
    for _ in range(20):
        harness.server.turn()
        harness.clock.now += 0.020
    growth = harness.session(1).growth
    assert (growth.depth, growth.leaves, growth.complete) == (3, True, True)
    row = play(harness, [*harness.chains[1], best(harness.texts[1] + harness.chains[1])])
    assert (row.source, tokens_of(row)) == ("hit", continuation(harness.texts[1], 3))


def test_no_step_begins_when_an_outcome_is_about_to_come(harness):
    play(harness, [best(harness.texts[1])], verify_us=200_000)
    harness.settle()
    play(harness, [*harness.chains[1], best(harness.texts[1] + harness.chains[1])], verify_us=200_000)
    decoded = len(harness.engine.decoded)
    harness.clock.now += 0.205  # it should be here
    assert not harness.server.turn()
    assert len(harness.engine.decoded) == decoded
    assert 0 < harness.server.patience() < 0.1
    harness.clock.now += 0.1  # half a verify late: it may be long
    assert harness.server.turn()
    assert len(harness.engine.decoded) == decoded + 1


def test_a_miss_is_drafted_as_far_as_the_rule_says(harness):
    row = play(harness, [a_miss(harness.texts[1])], jit_steps=(1,))
    assert (row.source, tokens_of(row)) == ("jit", continuation(harness.texts[1], 1))


def test_a_rule_that_makes_no_sense_drafts_nothing(harness):
    row = play(harness, [a_miss(harness.texts[1])], jit_steps=(-3,))
    assert (row.source, tokens_of(row)) == ("none", [])


def test_a_miss_is_guessed_from_the_text_where_the_rule_says_so():
    harness = Harness(FakeEngine(slots=600, rows=60, context_length=200), wait="auto", fan_out=1)
    text = [5, 0, 3, 3, 1, 2, 5, 0]
    harness.prefill(1, text)
    harness.settle()
    missing = next(token for token in (3,) if token != best(text))
    row = play(harness, [missing], fallback=("ngram",))
    assert (row.source, tokens_of(row)) == ("ngram", [3, 1, 2])
    harness.settle()  # the guess is the chain now: outcomes behind it are prepared as ever
    chain, target = harness.chains[1], harness.session(1).target
    rate = target.planner.acceptance.rate
    row = play(harness, [chain[0], best(harness.texts[1] + chain[:1])])
    assert (target.planner.acceptance.rate, target.ended) == (rate, [])  # it says nothing about the draft model
    assert row.source in {"hit", "jit", "partial"}
    assert tokens_of(row) == continuation(harness.texts[1], 3)
    harness.server.cache.check()


class Hearsay:
    """Remembers every text, and says what came after the first token of the last two."""

    def __init__(self):
        self.texts = []

    def put(self, tokens):
        self.texts.append(list(tokens))

    def guess(self, tokens, count):
        for text in self.texts:
            for at in range(1, len(text)):
                if text[at - 1 : at + 1] == tokens[-2:]:
                    return text[at + 1 : at + 1 + count]
        return []

    def forget(self):
        self.texts.clear()


def test_what_ended_texts_said_is_guessed_where_the_own_text_never_said_it():
    past = Hearsay()
    server = DraftServer(FakeEngine(slots=600, rows=60), FakeMailbox(), Offer(BOOT, "fake", "", 4, 8), past=past)
    harness = Harness(server.cache.engine, server=server, wait="auto", fan_out=1)
    harness.mailbox = server._mailbox
    harness.prefill(1, [2, 5, 0, 1, 4])
    harness.handle(Reset(BOOT))
    assert past.texts == []  # a flush forgets what it closes, too
    harness.prefill(1, [2, 5, 0, 1, 4], epoch=2)
    harness.close(1)
    assert past.texts == [[2, 5, 0, 1, 4]]
    harness.prefill(1, [3, 3, 2])
    harness.settle()
    missed = best([3, 3, 2]) != 5
    row = play(harness, [5], fallback=("ngram",))
    assert missed
    assert (row.source, tokens_of(row)) == ("ngram", [0, 1, 4])


def test_an_unknown_planner_is_refused():
    harness = Harness(planner="clairvoyant")
    (answer,) = harness.mailbox.take(Refused)
    assert "clairvoyant" in answer.reason


def test_rows_go_where_sessions_need_them():
    """Two sessions, one plan: together they have no more branches than twice the fan-out of one."""
    harness = Harness(FakeEngine(slots=600, rows=60, context_length=200), fan_out=5)
    for session in (1, 2):
        harness.prefill(session, [session, *PROMPT])
    harness.settle()
    harness.send(*(harness.outcome(session, [best(harness.texts[session])]) for session in (1, 2)))
    harness.settle()
    fan_outs = [harness.session(session).growth.fan_out for session in (1, 2)]
    assert sum(map(sum, fan_outs)) == 10
    harness.server.cache.check()


def test_a_pool_too_small_for_the_load_shrinks_the_trees_and_is_full_again_afterwards():
    harness = Harness(FakeEngine(slots=64, rows=60, context_length=60), max_sessions=4, fan_out=12)
    for session in (1, 2, 3):
        harness.prefill(session, [session, *PROMPT])
    harness.settle()
    for _ in range(6):
        for session in (1, 2, 3):
            harness.play(session, [best(harness.texts[session])])
        harness.settle()
    assert harness.server.drafter.shed > 0
    harness.close(1, 2, 3)
    harness.server.cache.tree.forget()
    harness.server.cache.check()
    assert (harness.server.cache.tree.free, harness.server.cache.table.free) == (64, 60)


@pytest.fixture(scope="module")
def long_engine(tmp_path_factory):
    """A tiny model that reads 24,000 tokens."""
    model = make_llama(tmp_path_factory.mktemp("long"), seed=1, layers=1, context_length=24_000)
    return TorchEngine(EngineSettings(str(model), slots=26_000, rows=40))


def test_a_prompt_of_20_000_tokens_delays_nobody_by_more_than_one_chunk(long_engine):
    """Between an outcome of another session and its answer there is at most one chunk of the long prompt."""
    harness = Harness(long_engine, num_steps=3, fan_out=4, wait="auto", prefill_chunk=256)
    vocabulary = long_engine.limits.vocab_size
    extend, chunks = long_engine.extend, []
    long_engine.extend = lambda *arguments: (chunks.append(len(arguments[2])), extend(*arguments))[1]
    harness.prefill(1, PROMPT)
    harness.settle()
    harness.prefill(2, [(i * i + 7 * i) % vocabulary for i in range(20_000)])
    rounds = 0
    while harness.session(2).prefilling:
        before = len(chunks)
        harness.play(1, [*harness.chains[1], 5])
        assert len(chunks) - before <= 1
        harness.server.turn()
        harness.server.turn()
        rounds += 1
    assert rounds > 20
    assert sum(chunks) >= 20_000
    assert max(chunks) <= 256
