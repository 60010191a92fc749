"""The speculation cache on an engine that costs nothing: an outcome looked up, nodes made and freed, whole rounds."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_ssd.bench.bookkeeping import Rounds, hello
from sglang_ssd.bench.costless import CostlessEngine
from sglang_ssd.draft_server.cache import SpeculationCache
from sglang_ssd.draft_server.session import Session
from sglang_ssd.draft_server.target import Target
from sglang_ssd.draft_server.terms import Terms
from sglang_ssd.draft_server.tree import Tree

STEPS = 4


def cache_with_a_branch(context):
    """A session of ``context`` tokens whose next outcome, token 1, leads to a branch of STEPS tokens."""
    cache = SpeculationCache(CostlessEngine(slots=context + 64, rows=8, context_length=context + 64))
    target = Target.of(b"bench", hello(8), 49_152)
    session = Session(target, 1, 1, list(range(context)), Terms(), cache.tree, 0.0)
    cache.open(session)
    cache.extend(session, context)
    node = session.tip
    for _ in range(STEPS + 1):
        (node,) = made = cache.tree.add(np.array([node]), np.array([1]), np.array([False]))
        cache.tree.key[made] = session.key
        cache.tree.learn(made, np.array([[1, 2, 3]]), np.array([[0.0, -1.0, -2.0]], dtype=np.float32), {})
    return (cache, session), {}


@pytest.mark.parametrize("context", [100, 20_000])
def test_lookup(benchmark, context):
    """From an outcome's tokens to its speculation: independent of the context's length."""

    def look_up(cache, session):
        return cache.advance(session, [1], STEPS)

    chain = benchmark.pedantic(look_up, setup=lambda: cache_with_a_branch(context), rounds=30)
    assert chain == [1] * STEPS


@pytest.mark.parametrize("nodes", [8, 64, 512, 4096])
def test_tree_growth_and_free(benchmark, nodes):
    """Branches of four nodes each, made, held, and released."""
    tree = Tree(nodes + 8)

    def grow_and_free():
        nodes_of, parents = [], np.zeros(nodes // 4, dtype=np.int64)
        for tokens in (np.arange(nodes // 4), *np.ones((3, nodes // 4), dtype=np.int64)):
            parents = tree.add(parents, tokens, np.zeros(nodes // 4, dtype=np.bool_))
            nodes_of.append(parents)
        tree.release_many(np.concatenate(nodes_of))

    benchmark(grow_and_free)
    assert tree.nodes == 0
    assert tree.free == tree.capacity


@pytest.mark.parametrize(("sessions", "fan_out"), [(1, 8), (8, 8), (8, 64), (64, 8)])
def test_round(benchmark, sessions, fan_out):
    """Lookup, answer, sweep and the whole next tree of every session."""
    rounds = Rounds(sessions, fan_out, context=200, rounds=200)
    benchmark.pedantic(rounds.play, rounds=40, warmup_rounds=2)
    assert rounds.hits > 0.9
