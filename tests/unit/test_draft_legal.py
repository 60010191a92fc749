"""What a grammar allows, told to the draft server: no branch for anything else, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_ssd.draft_server.engine import Candidates
from sglang_ssd.draft_server.legal import ranked, spread
from sglang_ssd.protocol import MAX_LEGAL, Legal, LegalRow, pack_tokens
from tests.support import BOOT, FakeEngine, Harness, guess, legal_row
from tests.unit.test_draft_rounds import PROMPT, best, continuation, tokens_of


@pytest.fixture
def harness():
    harness = Harness(FakeEngine(slots=400, rows=40))
    harness.prefill(1, PROMPT)
    harness.settle()
    harness.play(1, [best(PROMPT)])
    return harness


def growing(harness, session=1):
    """The outcomes that branches are grown for, (k, bonus)."""
    return {(branch.k, branch.first) for branch in harness.branches(session)}


def at(outcomes, k):
    return [token for position, token in outcomes if position == k]


def free_slots(harness):
    return harness.server.cache.tree.free


def unlikely(harness):
    """A legal bonus that the draft does not even list."""
    return next(t for t in range(6) if t not in guess(harness.texts[1], None, 6, 4))


def test_an_illegal_branch_is_not_grown_and_without_the_message_it_is(harness):
    text, chain = harness.texts[1], harness.chains[1]
    liked = next(t for t in guess(text, None, 6, 4) if t != chain[0])
    legal = unlikely(harness)
    other = Harness(FakeEngine(slots=400, rows=40))
    other.prefill(1, PROMPT)
    other.settle()
    other.play(1, [best(PROMPT)])
    other.settle()
    assert (0, liked) in growing(other)
    assert (0, legal) not in growing(other)
    harness.restrict(1, [legal, chain[0]], None, None)
    harness.settle()
    assert at(growing(harness), 0) == [legal]
    row = harness.play(1, [legal])
    assert (row.source, tokens_of(row)) == ("hit", continuation(harness.texts[1], 3))
    assert other.play(1, [legal]).source == "jit"


@pytest.mark.parametrize("turns", range(8))
def test_it_may_come_at_any_time_of_the_growth(harness, turns):
    """In the end the same outcomes are prepared, and what was begun for others is free again."""
    before = Harness(FakeEngine(slots=400, rows=40))
    before.prefill(1, PROMPT)
    before.settle()
    before.play(1, [best(PROMPT)])
    chain, legal = harness.chains[1], [0, 1]
    before.restrict(1, legal, None, [chain[2]])
    before.settle()
    for _ in range(turns):
        harness.server.turn()
    harness.restrict(1, legal, None, [chain[2]])
    harness.server.cache.check()
    harness.settle()
    assert growing(harness) == growing(before)
    assert len(growing(harness)) == 6
    assert at(growing(harness), 2) == []  # the only legal token is the chain's own
    assert free_slots(harness) == free_slots(before)
    assert harness.server.cache.table.free == before.server.cache.table.free
    harness.server.cache.check()


def test_nothing_is_grown_behind_a_draft_that_is_illegal(harness):
    harness.settle()
    assert {k for k, _ in growing(harness)} > {0}
    only = next(t for t in range(6) if t != harness.chains[1][0])
    harness.restrict(1, [only], [], [], [])
    harness.settle()
    assert growing(harness) == {(0, only)}
    assert harness.server.figures()["branches_illegal"] > 0


class SureEngine(FakeEngine):
    """Says 1, 2, 3, 4 after everything, and is sure of the 1."""

    def decode(self, batch):
        super().decode(batch)
        ids, scores = np.array([1, 2, 3, 4]), np.array([0.0, -40.0, -41.0, -42.0], dtype=np.float32)
        return Candidates(np.tile(ids, (len(batch), 1)), np.tile(scores, (len(batch), 1)))


def test_a_draft_that_sees_no_chance_for_what_is_legal_prepares_it_all_the_same():
    """Its planner puts every row behind its own chain, which turns out to be illegal."""
    harness = Harness(SureEngine(slots=400, rows=40))
    harness.prefill(1, PROMPT)
    harness.settle()
    for _ in range(12):  # it has always been right
        harness.play(1, [*harness.chains[1], 1])
        harness.settle()
    assert at(growing(harness), 0) == []
    harness.restrict(1, [0, 3, 5], [], [], [])
    harness.settle()
    assert sorted(growing(harness)) == [(0, 0), (0, 3), (0, 5)]
    assert harness.play(1, [5]).source == "hit"


def test_it_ends_with_its_round(harness):
    harness.restrict(1, [unlikely(harness)], [], [], [])
    harness.settle()
    harness.play(1, [best(harness.texts[1])])
    harness.settle()
    assert len(growing(harness)) == 6


def test_the_first_token_is_guessed_among_the_legal_ones():
    harness = Harness(FakeEngine(slots=400, rows=40), wait="auto")
    harness.prefill(1, PROMPT)
    legal = next(t for t in range(6) if t not in guess(PROMPT, None, 6, 4))
    harness.restrict(1, [legal])
    harness.settle()
    assert growing(harness) == {(0, legal)}
    assert harness.play(1, [legal]).source == "hit"


def test_what_is_stale_or_unknown_is_counted_and_dropped(harness):
    harness.settle()
    before, stale = growing(harness), harness.server.figures()["stale_frames"]
    harness.restrict(1, [5], base=len(harness.texts[1]) - 1)
    harness.restrict(1, [5], epoch=7)
    harness.handle(Legal(BOOT, (legal_row(99, 1, 3, [[5]]),)))
    harness.handle(Legal(BOOT + 1, (legal_row(1, 1, len(harness.texts[1]), [[5]]),)))
    harness.settle()
    assert harness.server.figures()["stale_frames"] == stale + 4
    assert harness.server.figures()["legal_rows"] == 0
    assert growing(harness) == before


@pytest.mark.parametrize(
    ("counts", "tokens"),
    [
        ((1, 1), pack_tokens([1])),
        ((1,), pack_tokens([1, 2])),
        ((), pack_tokens([1])),
        ((1,), b"abc"),
        ((1,), pack_tokens([-1])),
        ((-2,), b""),
        ((MAX_LEGAL + 1,), pack_tokens([0] * (MAX_LEGAL + 1))),
        ((0,) * 5, b""),  # a chain of K = 3 has four positions
        ((10**12,), b""),
    ],
)
def test_what_makes_no_sense_is_counted_and_dropped(harness, counts, tokens):
    harness.settle()
    before = growing(harness)
    harness.handle(Legal(BOOT, (LegalRow(1, 1, len(harness.texts[1]), counts, tokens),)))
    harness.settle()
    assert harness.server.figures()["bad_blocks"] == 1
    assert growing(harness) == before
    assert harness.play(1, [best(harness.texts[1])]).source == "hit"


def test_tokens_that_the_draft_lacks_are_left_out():
    harness = Harness(FakeEngine(slots=400, rows=40))
    harness.prefill(1, PROMPT)
    harness.restrict(1, [2, 6, 100_000])
    harness.settle()
    assert growing(harness) == {(0, 2)}


def test_a_lie_costs_a_hit_and_nothing_else(harness):
    truth = best(harness.texts[1])
    harness.restrict(1, [t for t in range(6) if t != truth], [], [], [])
    harness.settle()
    news = [*harness.chains[1], best([*harness.texts[1], *harness.chains[1]])]
    row = harness.play(1, news)
    assert (row.source, tokens_of(row)) == ("jit", continuation(harness.texts[1], 3))
    harness.server.cache.check()


def test_candidates_are_the_legal_ones_in_the_drafts_order():
    assert ranked([5, 3, 1], None) == [5, 3, 1]
    assert ranked([5, 3, 1], [1, 2, 4, 5]) == [5, 1, 2, 4]
    assert ranked([5, 3, 1], []) == []


def test_rows_go_where_they_are_of_use():
    assert spread([4, 3, 2], {}) == [4, 3, 2]
    assert spread([4, 3, 2], {0: 1}) == [1, 5, 3]
    assert spread([4, 3, 2], {1: 9}) == [4, 3, 2]
    assert spread([4, 0, 2], {0: 0, 2: 1}) == [0, 0, 1]
    assert spread([0, 5, 2], {0: 3, 1: 0, 2: 0}) == [3, 0, 0]
    assert spread([0, 5, 2], {0: 3, 1: 0}) == [2, 0, 5]
