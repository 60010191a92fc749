"""The radix tree: who owns a slot, what is evicted first, and that its check notices every kind of damage."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from sglang_ssd.draft_server.pool import Pool
from sglang_ssd.draft_server.table import Table
from sglang_ssd.draft_server.tree import ROOT, Tree
from tests.support import FakeEngine, text_of


def grow(tree, parent, *tokens, committed=True):
    """Held nodes for ``tokens`` below ``parent``."""
    nodes = []
    for token in tokens:
        nodes += add(tree, nodes[-1] if nodes else parent, token, committed=committed)
    return nodes


def add(tree, parent, token, committed=True):
    """A held node, if there is a slot for it."""
    return tree.add(np.array([parent]), np.array([token]), np.array([committed])).tolist()


def leave(tree, nodes):
    for node in reversed(nodes):
        tree.release(node)


def texts(tree):
    """Token paths of all leaves."""
    found = set()
    for node in tree.walk():
        if not tree.children[node]:
            found.add(tuple(text_of(tree, node)))
    return found


def test_the_text_left_longest_ago_goes_first_from_its_end():
    tree = Tree(6)
    first = grow(tree, ROOT, 1, 2, 3)
    second = grow(tree, ROOT, 7, 8, 9)
    leave(tree, second)
    leave(tree, first)
    assert tree.free == 0
    for want in ({(1, 2, 3), (7, 8)}, {(1, 2, 3), (7,)}, {(1, 2, 3)}, {(1, 2)}):
        tree.take_scratch(1)
        assert texts(tree) == want
    assert tree.evictions == 4


def test_a_prefix_is_as_fresh_as_its_last_use():
    """[1] was left last, after the deeper text below it: when that is gone, [7] is older than [1]."""
    tree = Tree(4)
    shared = grow(tree, ROOT, 1)
    deep = grow(tree, shared[0], 2)
    other = grow(tree, ROOT, 7)
    leave(tree, deep)
    leave(tree, other)
    leave(tree, shared)
    assert len(tree.take_scratch(2)) == 2
    assert texts(tree) == {(1,), (7,)}
    tree.take_scratch(1)
    assert texts(tree) == {(1,)}


def test_what_is_held_and_what_leads_there_stays():
    tree = Tree(3)
    nodes = grow(tree, ROOT, 1, 2, 3)
    for node in nodes[:2]:
        tree.release(node)
    assert add(tree, ROOT, 9) == []
    assert len(tree.take_scratch(1)) == 0
    tree.release(nodes[2])
    assert len(add(tree, ROOT, 9)) == 1
    assert texts(tree) == {(1, 2), (9,)}


def test_a_guess_is_freed_with_its_last_holder():
    tree = Tree(8)
    text = grow(tree, ROOT, 1)
    guesses = grow(tree, text[0], 5, 6, committed=False)
    tree.hold(guesses[0])  # a second session
    leave(tree, guesses)
    assert texts(tree) == {(1, 5)}
    tree.release(guesses[0])
    assert texts(tree) == {(1,)}
    assert tree.free == 7
    tree.check(Counter(text))


def test_holds_are_undone_all_at_once_as_one_by_one():
    """Two branches share a node, one of them a text that was committed since."""
    trees = [Tree(12), Tree(12)]
    for tree in trees:
        text = grow(tree, ROOT, 1)
        first = grow(tree, text[0], 5, 6, 7, committed=False)
        tree.hold(first[0])
        second = [first[0], *grow(tree, first[0], 8, committed=False)]
        tree.commit(first[1])
        if tree is trees[0]:
            leave(tree, first)
            leave(tree, second)
        else:
            tree.release_many(np.array([*first, *second]))
        assert texts(tree) == {(1, 5, 6)}
        assert tree.free == 9
        tree.check(Counter(text))
        leave(tree, text)
    for tree in trees:
        tree.take_scratch(10)
        assert texts(tree) == {(1, 5)}  # the deepest went first
        tree.check(Counter())


def test_a_committed_guess_stays():
    tree = Tree(8)
    text = grow(tree, ROOT, 1)
    guesses = grow(tree, text[0], 5, 6, committed=False)
    tree.commit(guesses[1])
    leave(tree, guesses)
    leave(tree, text)
    assert texts(tree) == {(1, 5, 6)}
    tree.check(Counter())
    tree.forget()
    assert tree.free == 8


def test_the_heap_does_not_grow_with_use():
    tree = Tree(8)
    nodes = grow(tree, ROOT, 1, 2)
    leave(tree, nodes)
    for _ in range(10_000):
        tree.hold(nodes[1])
        tree.release(nodes[1])
    assert len(tree._evictable) < 200
    tree.check(Counter())


def _lose_a_slot(tree, nodes):
    tree._slots.take()


def _own_a_slot_twice(tree, nodes):
    tree._scratch.add(nodes[1])


def _free_a_slot_in_use(tree, nodes):
    tree._slots.give(nodes[1])


def _forget_a_hold(tree, nodes):
    tree.refs[nodes[1]] += 1


def _leave_a_guess(tree, nodes):
    tree.committed[nodes[3]] = False


def _cut_a_link(tree, nodes):
    tree.parent[nodes[1]] = ROOT


def _miscount_children(tree, nodes):
    tree.children[nodes[0]] += 1


def _lose_a_link(tree, nodes):
    tree.heir[nodes[0]] = 0


def _leave_in_flight(tree, nodes):
    tree.in_flight[nodes[0]] = True


def _hide_from_eviction(tree, nodes):
    tree._evictable.clear()


def _commit_below_a_guess(tree, nodes):
    tree.committed[nodes[0]] = False


def test_the_check_passes_on_a_sound_tree():
    tree, holds, _ = sound()
    tree.check(holds)


@pytest.mark.parametrize(
    "damage",
    [
        _lose_a_slot,
        _own_a_slot_twice,
        _free_a_slot_in_use,
        _forget_a_hold,
        _leave_a_guess,
        _cut_a_link,
        _lose_a_link,
        _miscount_children,
        _leave_in_flight,
        _hide_from_eviction,
        _commit_below_a_guess,
    ],
)
def test_the_check_notices(damage):
    tree, holds, nodes = sound()
    damage(tree, nodes)
    with pytest.raises(AssertionError):
        tree.check(holds)


def sound():
    """A tree with a held path of three, an idle text, free slots and one in scratch."""
    tree = Tree(9)
    nodes = grow(tree, ROOT, 1, 2, 3)
    for node in nodes[:2]:
        tree.release(node)
    idle = grow(tree, ROOT, 7)
    leave(tree, idle)
    tree.take_scratch(1)
    return tree, Counter(nodes[2:3]), [*nodes, *idle]


def test_a_pool_hands_out_each_id_once():
    pool = Pool(3, 4)
    taken = [pool.take() for _ in range(5)]
    assert sorted(taken[:4]) == [3, 4, 5, 6]
    assert taken[4] is None
    pool.give(5)
    assert (len(pool), pool.take()) == (1, 5)


def fork(table, *columns):
    table.fork_many(*(np.array([column]) for column in columns))


def test_a_row_given_back_takes_no_fork_of_its_last_owner():
    """Two forks into one row in one call would have no order."""
    engine = FakeEngine(rows=3)
    engine.table[0], engine.table[1] = 5, 6
    table = Table(engine)
    assert [table.take() for _ in range(3)] == [0, 1, 2]
    fork(table, 0, 10, 2)
    table.give(2)
    row = table.take()
    fork(table, 1, 8, row)
    table.enter(1, 7, 9)
    asked = []
    engine.fork = lambda *columns: (asked.append(columns), FakeEngine.fork(engine, *columns))
    table.flush()
    assert [column.tolist() for column in asked[0]] == [[1], [8], [2]]
    assert engine.table[2, :9].tolist() == [6] * 7 + [9, 0]
