"""Rounds of the draft server against a fake model that reads its text back from the slots."""

from __future__ import annotations

import pytest

from sglang_ssd.protocol import Close, Outcomes, Prefill, Refused, Reset, Sampling, Speculations, Welcome, pack_tokens
from tests.support import BOOT, FakeEngine, Harness, guess, hello

PROMPT = [1, 2, 3, 4, 5, 0, 1, 2, 3, 4]


def continuation(text, count, *, key=None, vocab_size=6, candidates=4):
    """What the fake model drafts after ``text``."""
    text, drafts = list(text), []
    for _ in range(count):
        drafts.append(guess([*text, *drafts], key, vocab_size, candidates)[0])
    return drafts


def tokens_of(row):
    return list(memoryview(row.tokens).cast("i"))


def best(text, rank=0):
    return guess(text, None, 6, 4)[rank]


def rows_run(harness):
    """(path rows, grown rows) since the last call."""
    (target,) = harness.server.sessions.targets.values()
    totals = target.totals
    counted = totals.path_rows, totals.rows
    before = getattr(harness, "counted", (0, 0))
    harness.counted = counted
    assert sum(counted) == sum(harness.engine.decoded)
    return counted[0] - before[0], counted[1] - before[1]


@pytest.fixture
def harness():
    return Harness(FakeEngine(slots=400, rows=40))


def start(harness, **options):
    harness.prefill(1, PROMPT, **options)
    harness.settle()


def test_a_copy_draft_hits_every_round(harness):
    start(harness)
    text = list(PROMPT)
    news = [best(text)]  # the first token, from the target's prefill
    for _ in range(8):
        row = harness.play(1, news)
        text += news
        assert row.source == "hit"
        assert tokens_of(row) == continuation(text, 3)
        news = continuation(text, 4)  # all accepted, and the bonus
    harness.server.cache.check()


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_any_prepared_outcome_hits(accepted, rank):
    """Enough rows for three candidates everywhere: the walk finds each of them, after several rounds."""
    harness = Harness(FakeEngine(slots=900, rows=64, context_length=128), fan_out=24)
    start(harness)
    news = [best(PROMPT)]
    for _ in range(4):
        row = harness.play(1, news)
        assert row.source == "hit"
        text, chain = harness.texts[1], tokens_of(row)
        assert chain == continuation(text, 3)
        kept = chain[:accepted]
        others = [t for t in guess([*text, *kept], None, 6, 4) if t not in chain[accepted : accepted + 1]]
        news = [*kept, others[rank]]


def test_what_was_not_prepared_is_drafted_or_left(harness):
    start(harness)
    harness.play(1, [best(PROMPT)])
    miss = next(t for t in range(6) if t not in guess(harness.texts[1], None, 6, 4))
    row = harness.play(1, [miss], fallback=("none",))
    assert (row.source, tokens_of(row), row.base) == ("none", [], len(harness.texts[1]))
    miss = next(t for t in range(6) if t not in guess(harness.texts[1], None, 6, 4))
    row = harness.play(1, [miss], fallback=("jit", "none"))
    assert (row.source, tokens_of(row)) == ("jit", continuation(harness.texts[1], 3))


def test_the_rule_depends_on_how_many_rows_missed():
    harness = Harness(FakeEngine(slots=400, rows=40))
    for session in (1, 2):
        harness.prefill(session, [session, *PROMPT])
    harness.settle()
    harness.mailbox.take()
    misses = [next(t for t in range(6) if t not in guess(harness.texts[s], None, 6, 4)) for s in (1, 2)]
    harness.send(*(harness.outcome(s, [t]) for s, t in zip((1, 2), misses, strict=True)), fallback=("jit", "none"))
    harness.settle()
    (answer,) = harness.mailbox.take(Speculations)
    assert [row.source for row in answer.rows] == ["none", "none"]


def test_hits_are_answered_before_misses_are_drafted():
    harness = Harness(FakeEngine(slots=400, rows=40))
    for session in (1, 2):
        harness.prefill(session, [session, *PROMPT])
    harness.settle()
    harness.mailbox.take()
    miss = next(t for t in range(6) if t not in guess(harness.texts[2], None, 6, 4))
    harness.send(harness.outcome(1, [best(harness.texts[1])]), harness.outcome(2, [miss]))
    before = len(harness.engine.decoded)
    harness.settle()
    first, second = harness.mailbox.take(Speculations)
    assert [(row.session, row.source) for row in first.rows] == [(1, "hit")]
    assert [(row.session, row.source) for row in second.rows] == [(2, "jit")]
    assert first.round == second.round
    assert harness.engine.decoded[before : before + 3] == [1, 1, 1]  # the missed row alone, K tokens


def test_no_token_of_the_trunk_runs_twice(harness):
    """Rows are exactly the branches' tokens; a round's only path row is the chain's last token."""
    start(harness)
    assert harness.engine.extended == [8, 1]  # the prompt but its last token
    assert rows_run(harness) == (1, 4 * 3)  # that token, and 4 candidates of K tokens
    harness.play(1, [best(PROMPT)])
    harness.settle()
    counts = harness.session(1).growth.fan_out
    assert sum(counts) == 6
    assert harness.server.cache.table.free == 40 - 1  # branches that are done need no row
    assert rows_run(harness) == (1, 6 * 3)
    for _ in range(3):
        harness.play(1, continuation(harness.texts[1], 4))
        harness.settle()
        assert rows_run(harness) == (1, 6 * 3)
    assert harness.engine.extended == [8, 1]


def test_a_round_near_the_end_grows_no_deeper_than_it_can_be_used(harness):
    start(harness)
    rows_run(harness)
    harness.play(1, [best(PROMPT)], remaining=3)  # two drafts are of use, then at most one more
    harness.settle()
    assert len(harness.chains[1]) == 2
    counts = harness.session(1).growth.fan_out
    assert rows_run(harness) == (0, counts[0])  # k=0: remaining 2, one draft; behind k=1 nothing can follow
    row = harness.play(1, [*harness.chains[1][:1], best(harness.texts[1] + harness.chains[1][:1], 1)], remaining=1)
    assert row.source == "none"


def test_the_chain_s_own_next_token_is_found_after_a_cut_round(harness):
    """verified_len 1 of 3: the draw at position 1 may equal the draft that was never verified."""
    start(harness)
    row = harness.play(1, [best(PROMPT)])
    chain = tokens_of(row)
    row = harness.play(1, chain[:2], verified=1)
    assert row.source in {"hit", "partial"}
    assert tokens_of(row)[0] == chain[2]
    assert tokens_of(row) == continuation(harness.texts[1], len(tokens_of(row)))


def test_a_coalesced_outcome_is_answered_once(harness):
    start(harness)
    harness.mailbox.take()
    base = len(PROMPT)
    first = best(PROMPT)
    harness.send(harness.outcome(1, [first]))
    harness.send(harness.outcome(1, [best([*PROMPT, first])], base=base, verified=0))
    harness.settle()
    (answer,) = harness.mailbox.take(Speculations)
    assert answer.round == 2
    assert answer.rows[0].base == base + 2
    assert tokens_of(answer.rows[0]) == continuation(harness.texts[1], len(tokens_of(answer.rows[0])))


def test_an_outcome_may_repeat_what_was_answered_before(harness):
    """The answer was late, so the target still counts from the base before."""
    start(harness)
    harness.play(1, [best(PROMPT)])
    row = harness.play(1, [best(harness.texts[1])], base=len(PROMPT), verified=0)
    assert row.base == len(PROMPT) + 2
    assert tokens_of(row) == continuation(harness.texts[1], 3)


def test_auto_answers_with_what_is_there():
    """The outcome comes after one depth: one token is ready, and a slow draft makes that the best answer."""
    harness = Harness(FakeEngine(slots=400, rows=40), wait="auto")
    harness.prefill(1, PROMPT)
    while not (branches := harness.branches(1)) or branches[0].todo != 2:
        harness.server.turn()
    harness.server.drafter.clock.estimate = lambda rows: 1e9
    harness.send(harness.outcome(1, [best(PROMPT)]), verify_us=10)
    harness.server.turn()
    (answer,) = harness.mailbox.take(Speculations)
    assert answer.rows[0].source == "partial"
    assert tokens_of(answer.rows[0]) == continuation(harness.texts[1], 1)


def test_auto_finishes_the_branch_when_that_is_worth_more():
    harness = Harness(FakeEngine(slots=400, rows=40), wait="auto")
    harness.prefill(1, PROMPT)
    while not (branches := harness.branches(1)) or branches[0].todo != 2:
        harness.server.turn()
    row = harness.play(1, [best(PROMPT)])
    assert row.source == "partial"
    assert tokens_of(row) == continuation(harness.texts[1], 3)


def test_with_time_left_the_leaves_run_and_the_next_tail_is_free():
    harness = Harness(FakeEngine(slots=400, rows=40), wait="auto")
    start(harness)
    harness.play(1, [best(PROMPT)])
    harness.settle()
    rows_run(harness)
    harness.play(1, continuation(harness.texts[1], 4))
    harness.settle()
    assert rows_run(harness) == (0, 6 * (3 + 1))
    assert harness.server.cache.table.free == 40 - 1


def test_sync_drafts_only_after_the_outcome():
    harness = Harness(FakeEngine(slots=400, rows=40), mode="sync", wait="auto")
    start(harness)
    assert harness.engine.decoded == []
    for _ in range(3):
        row = harness.play(1, continuation(harness.texts[1], 4)[: 4 if harness.round else 1], fallback=("none",))
        assert (row.source, tokens_of(row)) == ("jit", continuation(harness.texts[1], 3))
    assert sum(harness.engine.decoded) == (1 + 1 + 2) + 2 * (2 + 2)  # last prompt token, bonus; later tail and bonus


def test_sync_keeps_nothing_of_rounds_that_are_over():
    harness = Harness(FakeEngine(slots=400, rows=40), mode="sync", wait="auto")
    start(harness)
    for _ in range(5):
        harness.play(1, continuation(harness.texts[1], 4)[: 4 if harness.round else 1])
    target = harness.session(1).target
    assert target.ended == []
    assert target.planner.acceptance.rate > 0.7  # but what is accepted counts


def test_nothing_is_kept_of_rounds_of_a_session_that_is_not_drafted_for():
    harness = Harness(FakeEngine(slots=400, rows=40, context_length=16), wait="auto")
    harness.prefill(1, PROMPT * 2)  # longer than the draft can read
    for _ in range(5):
        assert harness.play(1, [3]).source == "none"
    assert harness.session(1).target.ended == []


def test_sync_answers_nothing_from_the_cache():
    """Another session has drafted the same text already; the baseline still counts its own drafting."""
    harness = Harness(FakeEngine(slots=400, rows=40), mode="sync", wait="auto")
    for session in (1, 2):
        harness.prefill(session, PROMPT)
        harness.settle()
        row = harness.play(session, [best(PROMPT)])
        assert (row.source, tokens_of(row)) == ("jit", continuation(harness.texts[1], 3))


def test_a_seed_of_64_bits_is_the_same_noise_on_both_sides():
    harness = Harness(FakeEngine(slots=400, rows=60))
    start(harness, temperature=0.5, seed=2**64 - 3)
    row = harness.play(1, [guess(PROMPT, (0.5, -3), 6, 4)[0]])
    assert (row.source, tokens_of(row)) == ("hit", continuation(harness.texts[1], 3, key=(0.5, -3)))


def test_the_planner_learns_from_verified_rounds_only(harness):
    start(harness)
    acceptance = harness.session(1).target.planner.acceptance
    harness.play(1, [best(PROMPT)])
    before = acceptance.rate
    harness.play(1, continuation(harness.texts[1], 4))
    assert acceptance.rate > before
    before = acceptance.rate
    harness.play(1, continuation(harness.texts[1], 1), verified=0)
    assert acceptance.rate == before
    harness.play(1, [best(harness.texts[1], 1)])
    assert acceptance.rate < before


def test_the_same_noise_key_or_a_run_of_its_own():
    """Two sessions share a text but not a seed: each drafts with its own noise, over shared nodes."""
    harness = Harness(FakeEngine(slots=400, rows=60))
    harness.prefill(1, PROMPT, temperature=0.5, seed=1)
    harness.settle()
    used = harness.server.cache.tree.nodes
    harness.prefill(2, PROMPT, temperature=0.5, seed=2)
    harness.settle()
    assert harness.server.cache.tree.nodes < 2 * used - len(PROMPT) + 1
    rows_run(harness)
    for session, seed in ((1, 1), (2, 2)):
        key = (0.5, seed)
        row = harness.play(session, [guess(PROMPT, key, 6, 4)[0]])
        assert row.source == "hit"
        assert tokens_of(row) == continuation(harness.texts[session], 3, key=key)
    harness.settle()
    assert rows_run(harness)[0] == 2  # each chain's last token: what was drawn before is kept
    harness.server.cache.check()


def test_greedy_sessions_of_one_text_share_every_row():
    harness = Harness(FakeEngine(slots=400, rows=60))
    start(harness)
    rows_run(harness)
    harness.prefill(2, PROMPT)
    harness.settle()
    assert rows_run(harness) == (0, 0)
    assert harness.play(2, [best(PROMPT)]).source == "hit"


def test_a_fully_cached_prompt_runs_its_last_token_into_a_scratch_slot(harness):
    start(harness)
    harness.close(1)
    rows_run(harness)
    nodes = harness.server.cache.tree.nodes
    assert nodes == len(PROMPT)
    text = harness.server.cache.tree.walk()
    harness.prefill(2, PROMPT, temperature=1.0, seed=5)
    harness.settle()
    assert rows_run(harness)[0] == 1
    assert harness.server.cache.tree.walk()[: len(text)] == text
    assert harness.session(2).tip == text[-1]
    assert harness.play(2, [guess(PROMPT, (1.0, 5), 6, 4)[0]]).source == "hit"


def test_a_prompt_in_chunks_does_not_hold_up_others():
    harness = Harness(FakeEngine(slots=400, rows=40, context_length=200), prefill_chunk=4, wait="auto")
    start(harness)
    harness.prefill(2, PROMPT * 8)
    harness.server.turn()
    assert harness.session(2).prefilling
    harness.mailbox.take()
    harness.send(harness.outcome(1, [best(PROMPT)]), harness.outcome(2, [3]))
    harness.server.turn()
    (answer,) = harness.mailbox.take(Speculations)
    assert [(row.session, row.source) for row in answer.rows] == [(1, "hit"), (2, "none")]
    harness.settle()
    row = harness.play(2, [best(harness.texts[2])])
    assert row.source == "hit"


def test_two_long_prompts_take_turns():
    harness = Harness(FakeEngine(slots=400, rows=40, context_length=200), prefill_chunk=10)
    harness.prefill(1, [1, *PROMPT * 4])
    harness.prefill(2, [2, *PROMPT * 4])
    done = []
    for _ in range(6):
        harness.server.turn()
        done.append((harness.session(1).missing, harness.session(2).missing))
    assert done == [(31, 41), (31, 31), (21, 31), (21, 21), (11, 21), (11, 11)]


@pytest.mark.parametrize(
    "tokens", [[], [1, 2, 99], [1, 2, -1], [1] * 65], ids=["empty", "beyond the vocabulary", "negative", "too long"]
)
def test_a_session_that_cannot_be_drafted_for_is_answered_with_nothing(tokens):
    harness = Harness(FakeEngine(slots=400, rows=40))
    harness.prefill(1, tokens)
    harness.settle()
    if tokens:
        row = harness.play(1, [3])
        assert (row.source, row.base) == ("none", len(tokens) + 1)
    assert harness.engine.decoded == []
    harness.prefill(1, PROMPT, epoch=2)
    harness.settle()
    assert harness.play(1, [best(PROMPT)]).source == "hit"


@pytest.mark.parametrize("wait", ["auto", "full"])
def test_nothing_is_forwarded_at_or_beyond_the_context_length(wait):
    harness = Harness(FakeEngine(slots=400, rows=40, context_length=16), wait=wait)
    start(harness)
    lengths = []
    news = [best(PROMPT)]
    while len(harness.texts[1]) < 18:
        row = harness.play(1, news, fallback=("jit",))
        harness.settle()
        lengths.append((row.base, len(row.tokens) // 4))
        news = [best(harness.texts[1])]
    assert lengths == [(11, 3), (12, 3), (13, 3), (14, 2), (15, 1), (16, 0), (17, 0), (18, 0)]
    assert harness.session(1).row is None  # it has outgrown the draft
    harness.play(1, [1] * 30)
    harness.settle()


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 99},
        {"vocab_size": 5000},
        {"vocab_size": 0},
        {"mode": "off"},
        {"wait": "never"},
        {"verify": "greedy"},
        {"verify": "rejection", "support": 0},
        {"verify": "rejection", "support": 5000},
        {"verify": "rejection", "saguaro_c": 1.5},
        {"num_steps": 0},
        {"num_steps": 65},
        {"fan_out": 0},
    ],
)
def test_terms_that_cannot_be_met_are_refused_in_words(harness, changes):
    harness.mailbox.take()
    harness.server.handle(b"other", hello(**changes))
    (refused,) = harness.mailbox.take()
    assert isinstance(refused, Refused)
    assert refused.reason
    assert not refused.hello_again
    assert b"other" not in harness.server.sessions.targets


def test_a_padded_vocabulary_is_welcome_and_only_common_ids_are_drafted():
    harness = Harness(FakeEngine(slots=400, rows=40), vocab_size=4)
    (welcome,) = harness.mailbox.take()
    assert isinstance(welcome, Welcome)
    prompt = [1, 2, 3, 0, 1, 2]
    harness.prefill(1, prompt)
    harness.settle()
    for _ in range(5):
        row = harness.play(1, [next(t for t in guess(harness.texts[1], None, 6, 4) if t < 4)])
        assert all(token < 4 for token in tokens_of(row))
        harness.settle()
        assert all(branch.first < 4 for branch in harness.branches(1))


def test_strays_are_counted_and_told_to_say_hello(harness):
    harness.mailbox.take()
    stale = Prefill(BOOT + 1, 1, 1, pack_tokens(PROMPT), Sampling())
    harness.server.handle(b"one", stale)
    harness.server.handle(b"stranger", Close(BOOT, (1,)))
    for _ in range(50):
        harness.server.handle(b"stranger", Close(BOOT, (1,)))
    answers = harness.mailbox.take()
    assert len(answers) == 2  # one each, the rest within the same ten seconds
    assert all(answer.hello_again for answer in answers)
    assert harness.server.figures()["stale_frames"] == 52


def test_what_does_not_continue_our_text_gets_base_zero(harness):
    start(harness)
    before = harness.server.figures()["stale_frames"]
    gap = harness.outcome(1, [1])
    harness.send(type(gap)(1, 1, gap.base + 5, 0, 10, gap.tokens))
    harness.settle()
    (answer,) = harness.mailbox.take(Speculations)
    assert [(row.base, row.source, row.epoch) for row in answer.rows] == [(0, "none", 1)]
    assert harness.session(1) is None
    harness.send(type(gap)(9, 4, 5, 0, 10, gap.tokens))
    harness.settle()
    (answer,) = harness.mailbox.take(Speculations)
    assert [(row.session, row.base, row.epoch) for row in answer.rows] == [(9, 0, 4)]
    assert harness.server.figures()["stale_frames"] == before + 2


def test_what_contradicts_our_text_gets_base_zero(harness):
    """The outcome overlaps with what was confirmed, but says something else."""
    start(harness)
    harness.play(1, [1])
    harness.texts[1][-1] = 2
    harness.send(harness.outcome(1, [3], base=len(PROMPT), verified=0))
    harness.settle()
    (answer,) = harness.mailbox.take(Speculations)
    assert [(row.base, row.source) for row in answer.rows] == [(0, "none")]


def test_an_older_epoch_is_dropped(harness):
    start(harness, epoch=5)
    harness.mailbox.take()
    harness.send(harness.outcome(1, [1], epoch=4))
    harness.handle(Prefill(BOOT, 1, 5, pack_tokens([1, 1, 1]), Sampling()))
    harness.settle()
    assert harness.mailbox.take(Speculations) == []
    assert harness.session(1).tokens == PROMPT
    assert harness.server.figures()["stale_frames"] == 2


def test_a_session_that_ends_while_its_answer_is_drafted_is_let_go(harness):
    start(harness)
    harness.mailbox.take()
    miss = next(t for t in range(6) if t not in guess(harness.texts[1], None, 6, 4))
    harness.send(harness.outcome(1, [miss]))
    harness.server.turn()
    assert harness.server.rounds.drafting
    harness.close(1)
    harness.settle()
    assert harness.mailbox.take(Speculations) == []
    assert not harness.server.rounds.drafting
    harness.server.cache.check()


def test_a_draft_that_was_superseded_is_not_answered(harness):
    start(harness)
    harness.mailbox.take()
    base = len(PROMPT)
    miss = next(t for t in range(6) if t not in guess(PROMPT, None, 6, 4))
    harness.send(harness.outcome(1, [miss]))
    harness.server.turn()
    harness.send(harness.outcome(1, [5], base=base, verified=0), fallback=("none",), verify_us=1)
    harness.settle()
    (answer,) = harness.mailbox.take(Speculations)
    assert (answer.round, answer.rows[0].base) == (2, base + 2)


def test_a_branch_goes_on_when_the_session_that_began_it_ends():
    harness = Harness(FakeEngine(slots=400, rows=60), wait="auto")
    harness.prefill(1, PROMPT)
    harness.prefill(2, PROMPT)
    while not any(branch.nodes for branch in harness.branches(2)):
        harness.server.turn()
    harness.close(1)
    harness.settle()
    row = harness.play(2, [best(PROMPT)])
    assert (row.source, tokens_of(row)) == ("hit", continuation(harness.texts[2], 3))
    harness.server.cache.check()


def test_when_rows_are_short_the_fan_out_shrinks():
    harness = Harness(FakeEngine(slots=400, rows=10), max_sessions=4)
    for session in (1, 2, 3):
        harness.prefill(session, [session, *PROMPT])
    harness.settle()
    assert [sum(s.growth.fan_out) for s in harness.server.cache.sessions] == [2, 2, 2]
    assert harness.play(1, [best(harness.texts[1])]).source == "hit"


def test_when_slots_are_short_branches_go_first_and_text_last():
    harness = Harness(FakeEngine(slots=22, rows=40), max_sessions=4)
    start(harness)
    assert harness.server.drafter.shed == 0  # 10 + 4 * 3 fit exactly
    harness.prefill(2, [2, *PROMPT[:6]])
    harness.settle()
    assert harness.server.drafter.shed > 0
    assert harness.play(1, [best(PROMPT)]).source in {"hit", "partial", "jit"}
    harness.server.cache.check()
    assert harness.session(1).row is not None


@pytest.mark.parametrize(("slots", "finished"), [(10, 3), (6, 2), (4, 1)])
def test_when_slots_are_short_the_best_branches_are_finished(slots, finished):
    """Of four branches no more are given up than must be."""
    harness = Harness(FakeEngine(slots=len(PROMPT) + slots, rows=40))
    start(harness)
    branches = harness.branches(1)
    assert harness.server.drafter.shed == 4 - finished
    assert [branch.first for branch in branches] == guess(PROMPT, None, 6, 4)[:finished]
    assert [len(branch.nodes) for branch in branches] == [3] * finished
    harness.server.cache.check()


def test_a_growing_text_takes_the_slots_of_guesses():
    harness = Harness(FakeEngine(slots=46, rows=60))
    start(harness)
    harness.prefill(2, [2, *PROMPT])
    harness.settle()
    for _ in range(16):  # text of 10 + 16 and 11, and hardly a slot for a branch
        harness.play(1, [next(t for t in range(6) if t not in guess(harness.texts[1], None, 6, 4))])
        assert harness.session(1).row is not None
        harness.settle()
    assert harness.server.drafter.shed > 0
    harness.server.cache.check()


def test_a_text_that_finds_no_slots_waits_until_another_ends():
    harness = Harness(FakeEngine(slots=20, rows=40), max_sessions=4)
    start(harness)
    harness.prefill(2, [2, *PROMPT, 1, 2])
    harness.settle()
    assert harness.session(2).row is None
    assert harness.play(2, [3]).source == "none"
    harness.close(1)
    harness.settle()
    assert harness.play(2, [best(harness.texts[2])]).source in {"hit", "partial"}
    harness.server.cache.check()


def test_more_sessions_than_rows_wait_their_turn():
    harness = Harness(FakeEngine(slots=400, rows=40), max_sessions=1)
    start(harness)
    harness.prefill(2, [2, *PROMPT])
    harness.settle()
    assert harness.play(2, [3]).source == "none"
    harness.close(1)
    harness.settle()
    assert harness.play(2, [best(harness.texts[2])]).source == "hit"


def test_when_all_sessions_are_gone_every_slot_is_free_or_cached(harness):
    start(harness)
    for _ in range(3):
        harness.play(1, [best(harness.texts[1], 1)])
    harness.close(1)
    tree = harness.server.cache.tree
    harness.server.cache.check()
    assert all(tree.committed[node] and not tree.refs[node] for node in tree.walk())
    harness.handle(Reset(BOOT))
    assert (tree.nodes, tree.free) == (0, tree.capacity)


def test_the_silent_are_forgotten(harness):
    start(harness)
    harness.mailbox.heard[b"one"] = harness.clock.now
    harness.clock.now += 599
    harness.mailbox.heard[b"one"] = harness.clock.now
    harness.server.look_after()
    assert harness.session(1) is not None
    harness.clock.now += 2
    harness.server.look_after()
    assert harness.session(1) is None
    harness.clock.now += 61
    harness.server.look_after()
    assert harness.server.sessions.targets == {}
    assert harness.mailbox.heard == {}


def test_two_targets_do_not_meet():
    """Same session numbers, other terms: each has its own text, K and figures."""
    one = Harness(FakeEngine(slots=600, rows=60))
    two = Harness(one.engine, server=one.server, identity=b"two", num_steps=2, wait="auto")
    two.mailbox, two.clock = one.mailbox, one.clock
    one.prefill(1, PROMPT)
    two.prefill(1, PROMPT[::-1])
    one.settle()
    one.mailbox.take()
    row = one.play(1, [best(PROMPT)])
    assert tokens_of(row) == continuation(one.texts[1], 3)
    one.settle()
    row = two.play(1, [best(PROMPT[::-1])])
    assert tokens_of(row) == continuation(two.texts[1], 2)
    one.server.handle(b"two", hello(num_steps=2))  # it restarts
    assert two.session(1) is None
    assert one.session(1) is not None
    one.settle()
    one.server.cache.check()


def test_an_answer_never_goes_to_a_target_that_was_dismissed(harness):
    start(harness)
    harness.mailbox.take()
    harness.send(harness.outcome(1, [best(PROMPT)]))
    harness.server.sessions.dismiss(b"one")
    harness.settle()
    assert harness.mailbox.take(Outcomes) == []
    assert harness.mailbox.take() == []


def test_a_requests_own_lookahead_limits_what_is_drafted_for_it():
    """With K = 3 on the server, a request that takes one draft a round gets one, at the price of one."""
    harness = Harness(mode="sync")
    harness.texts[1], harness.epochs[1], harness.chains[1] = list(PROMPT), 1, []
    harness.handle(Prefill(BOOT, 1, 1, pack_tokens(PROMPT), Sampling(), 1))
    harness.settle()
    text = [*PROMPT, 2]
    row = harness.play(1, [2])
    assert tokens_of(row) == continuation(text, 1)
    before = len(harness.engine.decoded)
    row = harness.play(1, [*harness.chains[1], 4])
    assert len(tokens_of(row)) == 1
    assert len(harness.engine.decoded) - before == 1


def test_a_requests_own_lookahead_limits_its_tree():
    trees = []
    for limit in (0, 1):
        harness = Harness()
        harness.texts[1], harness.epochs[1], harness.chains[1] = list(PROMPT), 1, []
        harness.handle(Prefill(BOOT, 1, 1, pack_tokens(PROMPT), Sampling(), limit))
        harness.settle()
        harness.play(1, [2])
        harness.settle()
        trees.append(sum(harness.engine.decoded))
    assert trees[1] < trees[0]
