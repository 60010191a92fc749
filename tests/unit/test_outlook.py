"""From a session's guesses to what planners see, and guesses from a text's own past."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ssd.draft_server.outlook import WIDTH, Ended, learn, outlook
from sglang_ssd.draft_server.suffixes import Suffixes
from sglang_ssd.draft_server.tree import Guesses

FIRST = Guesses([7, 8, 9], [-0.1, -2.0, -3.0])
SECOND = Guesses([4, 5, 6], [-0.5, -1.0, -4.0])


class Notes:
    """A planner that writes down what it is told."""

    def __init__(self):
        self.told = []

    def observe(self, chain, accepted, rank):
        self.told.append((chain.length, accepted, rank))


def test_the_chain_s_own_tokens_are_no_candidates():
    chain = outlook([7, 5], [FIRST, SECOND, None], 0.5, 2)
    assert chain.served.tolist() == [-0.1, -1.0]
    assert chain.others.shape == (3, WIDTH)
    assert chain.others[0, :3].tolist() == [-2.0, -3.0, -np.inf]
    assert chain.others[1, :3].tolist() == [-0.5, -4.0, -np.inf]
    assert np.isnan(chain.others[2]).all()
    assert (chain.temperature, chain.usable, chain.length) == (0.5, 2, 2)


def test_a_sampled_token_may_be_none_of_the_candidates():
    chain = outlook([99], [FIRST, SECOND], 1.0, 9)
    assert chain.served.tolist() == [-np.inf]
    assert chain.others[0, :3].tolist() == [-0.1, -2.0, -3.0]


def test_ranks_are_counted_without_the_chain_s_own_token():
    notes = Notes()
    ends = [(0, 8), (0, 9), (0, 1), (1, 4), (1, 6), (2, 4)]
    guesses = [FIRST, SECOND, None]
    learn(notes, [Ended((7, 5), guesses, 0.0, accepted, bonus) for accepted, bonus in ends])
    assert notes.told == [(2, 0, 0), (2, 0, 1), (2, 0, -1), (2, 1, 0), (2, 1, 1), (2, 2, None)]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 5), st.integers(0, 60))
def test_a_guess_is_what_came_after_the_longest_suffix_that_was_said_before(text, count, known):
    suffixes = Suffixes()
    suffixes.guess(text[:known], count)
    guess = suffixes.guess(text, count)
    expected = []
    for length in (2, 3, 4):
        ends = [end for end in range(length, len(text)) if text[end - length : end] == text[-length:]]
        if ends and length <= len(text):
            expected = text[ends[-1] : ends[-1] + count]
    assert guess == expected
