"""Whatever rounds came before, a cached guess is the model's own after a full prefill of the same text."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_ssd.draft_server.engine import EngineSettings
from sglang_ssd.draft_server.engine_torch import TorchEngine
from sglang_ssd.draft_server.tree import ROOT
from sglang_ssd.protocol import Speculations
from tests.models import make_llama
from tests.remote_engine import RemoteEngine, engine_process
from tests.support import Harness, text_of

K = 3
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("draft"), seed=11)


@pytest.fixture(scope="module")
def reference(checkpoint):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(4, 1000, (24,), generator=torch.Generator().manual_seed(5)).tolist()


def engine_on(checkpoint):
    return TorchEngine(EngineSettings(str(checkpoint), slots=1500, rows=60))


@pytest.fixture(params=["torch", pytest.param("sglang", marks=pytest.mark.server)])
def engine(request, checkpoint):
    """Both engines must keep the promise."""
    if request.param == "torch":
        yield engine_on(checkpoint)
        return
    with engine_process() as pool:
        yield RemoteEngine(pool, EngineSettings(str(checkpoint), "cpu", dtype="float32", slots=1500, rows=60))


@torch.inference_mode()
def compare(tree, reference):
    """(nodes compared, largest error) of every guess kept in the tree, against one full prefill per leaf."""
    count, worst = 0, 0.0
    for leaf in [node for node in tree.walk() if not tree.children[node]]:
        log_q = reference(torch.tensor([text_of(tree, leaf)])).logits[0].log_softmax(-1)
        node = leaf
        while node != ROOT:
            if tree.best_of(node) >= 0:
                guesses, want = tree.guesses(node), log_q[tree.position_of(node)]
                error = want[guesses.ids].numpy() - guesses.scores
                best = want.topk(len(guesses.ids)).values.numpy() - guesses.scores
                worst = max(worst, float(np.abs(error).max()), float(np.abs(best).max()))
                count += 1
            node = int(tree.parent[node])
    return count, worst


def draw(reference, text):
    """The greedy target: a copy of the draft."""
    with torch.inference_mode():
        return int(reference(torch.tensor([text])).logits[0, -1].argmax())


def other(harness, session, kept):
    """A prepared bonus token after ``kept`` accepted drafts that is not the chain's own next token."""
    one = harness.session(session)
    chain = harness.chains[session]
    return next(t for t in one.guesses(one.trunk_node(kept)).ids if t not in chain[kept : kept + 1])


def play_all(harness, prompt, reference):
    """Rounds of every kind; returns what they were answered with."""
    sources = []

    def play(tokens, **options):
        sources.append(harness.play(1, tokens, **options).source)
        harness.settle()

    def late(tokens):
        """Two outcomes come before the first was answered."""
        base = len(harness.texts[1])
        harness.send(harness.outcome(1, tokens[:1]))
        harness.send(harness.outcome(1, tokens[1:], base=base, verified=0))
        harness.settle()
        (answer,) = harness.mailbox.take(Speculations)
        harness.chains[1] = memoryview(answer.rows[0].tokens).cast("i").tolist()
        sources.append(answer.rows[0].source)

    harness.prefill(1, prompt)
    harness.settle()
    play([draw(reference, prompt)])
    for _ in range(3):  # everything accepted
        chain = harness.chains[1]
        play([*chain, draw(reference, harness.texts[1] + chain)])
    for _ in range(2):  # nothing accepted
        play([other(harness, 1, 0)])
    play([*harness.chains[1][:1], other(harness, 1, 1)])
    play([999], fallback=("none",))
    play([draw(reference, harness.texts[1])])
    play([998])  # a miss, drafted
    play([*harness.chains[1][:2]], verified=1)  # cut: the bonus is the chain's own next token
    first = draw(reference, harness.texts[1])
    late([first, draw(reference, [*harness.texts[1], first])])
    chain = harness.chains[1]
    play([*chain, draw(reference, harness.texts[1] + chain)])
    play([other(harness, 1, 0)])
    return sources


def test_after_every_kind_of_round(engine, reference, prompt):
    harness = Harness(engine, num_steps=K, fan_out=8, prefill_chunk=10)
    sources = play_all(harness, prompt, reference)
    assert {"hit", "jit", "none"} <= set(sources)
    count, worst = compare(harness.server.cache.tree, reference)
    assert count > 40
    assert worst < TOLERANCE
    harness.server.cache.check()


def test_after_a_partial_hit(engine, reference, prompt):
    """With wait=auto the outcomes come while trees are half grown; what is finished on demand is exact too."""
    harness = Harness(engine, num_steps=K, fan_out=8, wait="auto")
    harness.prefill(1, prompt)
    sources, news = [], [draw(reference, prompt)]
    for turns in (3, 2, 2, 3, 2, 2, 4, 3):
        for _ in range(turns):
            harness.server.turn()
        row = harness.play(1, news)
        sources.append(row.source)
        chain = harness.chains[1]
        news = [*chain, draw(reference, harness.texts[1] + chain)]
    assert "partial" in sources
    harness.settle()
    count, worst = compare(harness.server.cache.tree, reference)
    assert count > 20
    assert worst < TOLERANCE


def test_a_shared_prefix_with_other_noise_is_exact(checkpoint, reference, prompt):
    """Every session's own text continues as if it were alone, whatever nodes it shares."""
    harness = Harness(engine_on(checkpoint), num_steps=K, fan_out=6)
    alone = Harness(engine_on(checkpoint), num_steps=K, fan_out=6)
    for session, seed in ((1, 4), (2, 5), (3, 4)):
        harness.prefill(session, prompt, temperature=0.8, seed=seed)
    harness.settle()
    for session, seed in ((1, 4), (2, 5), (3, 4)):
        alone.prefill(session, prompt, temperature=0.8, seed=seed)
        alone.settle()
        for _ in range(3):
            chain, first = harness.chains[session], harness.session(session).trunk_node(0)
            news = [*chain, 7 + seed] if chain else [harness.session(session).guesses(first).best]
            together, single = harness.play(session, news), alone.play(session, news)
            assert len(together.tokens) == 4 * K
            assert together.tokens == single.tokens
            harness.settle()
            alone.settle()
        alone.close(session)
    harness.server.cache.check()


class Mutant:
    """The engine with one fault."""

    def __init__(self, engine):
        self.engine, self.limits = engine, engine.limits
        self.calls = 0

    def __getattr__(self, name):
        return getattr(self.engine, name)


class ShiftedSlot(Mutant):
    """One entry of one row points to its neighbour's slot."""

    def fork(self, sources, lengths, targets):
        self.engine.fork(sources, lengths, targets)
        self.calls += 1
        if self.calls == 3:
            row, at = int(targets[0]), int(lengths[0]) - 5
            neighbour = self.engine._table[row, at + 1]
            self.engine._table[row, at] = neighbour


class ShiftedWrite(Mutant):
    """From some forward on, the first row's KV goes into another slot than the tree thinks."""

    def decode(self, batch):
        self.calls += 1
        if self.calls >= 6:
            slots = batch.slots.copy()
            slots[0] = self.limits.slots
            found = self.engine.decode(type(batch)(**{**vars(batch), "slots": slots}))
            self.engine.write(batch.rows[:1], batch.positions[:1], batch.slots[:1])
            return found
        return self.engine.decode(batch)


class LostWrite(Mutant):
    """Entries that the session's row should get on a hit are not written."""

    def write(self, rows, positions, slots):
        self.calls += 1
        if self.calls != 2:
            self.engine.write(rows, positions, slots)


@pytest.mark.parametrize("mutant", [ShiftedSlot, ShiftedWrite, LostWrite])
def test_a_mutant_is_caught(checkpoint, reference, prompt, mutant):
    terms = {"num_steps": K, "fan_out": 8, "planner": "geometric"}  # its trees are known
    harness = Harness(mutant(engine_on(checkpoint)), prefill_chunk=10, **terms)
    harness.prefill(1, prompt)
    harness.settle()
    harness.play(1, [draw(reference, prompt)])
    for _ in range(2):
        harness.settle()
        chain = harness.chains[1]
        harness.play(1, [*chain, draw(reference, harness.texts[1] + chain)])
    harness.settle()
    count, worst = compare(harness.server.cache.tree, reference)
    assert count > 20
    assert worst > 100 * TOLERANCE
