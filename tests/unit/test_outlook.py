"""From a session's guesses to what planners see, and guesses from a text's own past."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ssd.draft_server.outlook import WIDTH, Ended, Known, learn, outlook
from sglang_ssd.draft_server.suffixes import Suffixes

FIRST = [7, 8, 9], [-0.1, -2.0, -3.0]
SECOND = [4, 5, 6], [-0.5, -1.0, -4.0]
UNKNOWN = [7, 5, 4], [-1.0, -1.0, -1.0]
"""What lies where nothing is known."""


def seen(*chains):
    """What is known of chains, each a list of FIRST, SECOND and UNKNOWN."""
    ids, scores = (np.array([[each[i] for each in chain] for chain in chains]) for i in (0, 1))
    known = np.array([[each is not UNKNOWN for each in chain] for chain in chains])
    return Known(ids.astype(np.int32), scores.astype(np.float32), known)


class Notes:
    """A planner that writes down what it is told."""

    def __init__(self):
        self.told = []

    def observe(self, chain, accepted, rank):
        self.told.append((chain.length, accepted, rank))


def test_the_chain_s_own_tokens_are_no_candidates():
    known = seen([FIRST, SECOND, UNKNOWN], [FIRST, UNKNOWN, UNKNOWN])
    chains = outlook([[7, 5], [8]], known, np.array([0.5, 1.0]), np.array([2, 9]))
    chain, shorter = chains
    assert np.allclose(chain.served, [-0.1, -1.0])
    assert chain.others.shape == (3, WIDTH)
    assert np.allclose(chain.others[0, :3], [-2.0, -3.0, -np.inf])
    assert np.allclose(chain.others[1, :3], [-0.5, -4.0, -np.inf])
    assert np.isnan(chain.others[2]).all()
    assert (chain.temperature, chain.usable, chain.length) == (0.5, 2, 2)
    assert np.allclose(shorter.served, [-2.0])
    assert np.allclose(shorter.others[0, :3], [-0.1, -3.0, -np.inf])
    assert np.isnan(shorter.others[1]).all()
    assert (chains.others[1, 2] == -np.inf).all()  # beyond its end


def test_a_sampled_token_may_be_none_of_the_candidates():
    (chain,) = outlook([[99]], seen([FIRST, SECOND]), np.array([1.0]), np.array([9]))
    assert chain.served.tolist() == [-np.inf]
    assert np.allclose(chain.others[0, :3], [-0.1, -2.0, -3.0])


def test_ranks_are_counted_without_the_chain_s_own_token():
    notes = Notes()
    ends = [(0, 8), (0, 9), (0, 1), (1, 4), (1, 6), (2, 4)]
    known = seen(*([[FIRST, SECOND, UNKNOWN]] * len(ends)))
    accepted, bonus = np.array(ends).T
    learn(notes, [Ended([[7, 5]] * len(ends), known, np.zeros(len(ends)), accepted, bonus)])
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
