"""Sessions that sample, on the torch engine: what is served was drawn from the q that is told, in every round."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_ssd.draft_server.engine import EngineSettings
from sglang_ssd.draft_server.engine_torch import TorchEngine
from sglang_ssd.protocol import Prefill, Sampling, Speculations, pack_floats, pack_tokens, unpack_floats, unpack_tokens
from sglang_ssd.sampling.filters import Filters, filter_mask
from sglang_ssd.sampling.rejection import SupportRule, sample_from_support
from tests.models import make_llama
from tests.support import BOOT, Harness

K, SUPPORT, C, FAN_OUT = 3, 12, 0.4, 8
TOP_F = FAN_OUT // (K + 1)
VOCAB = 1000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("draft"), seed=11)


@pytest.fixture(scope="module")
def reference(checkpoint):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


@pytest.fixture
def harness(checkpoint):
    engine = TorchEngine(EngineSettings(str(checkpoint), slots=1500, rows=60))
    terms = {"verify": "rejection", "support": SUPPORT, "saguaro_c": C}
    return Harness(engine, num_steps=K, fan_out=FAN_OUT, prefill_chunk=10, **terms)


PROMPT = torch.randint(4, VOCAB, (24,), generator=torch.Generator().manual_seed(5)).tolist()
BIAS = {30: 3.0, 31: 3.0}


def open_session(harness, number, sampling):
    harness.texts[number], harness.epochs[number], harness.chains[number] = list(PROMPT), 1, []
    harness.handle(Prefill(BOOT, number, 1, pack_tokens(PROMPT), sampling))
    harness.settle()


@torch.inference_mode()
def expected(reference, text, sampling):
    """Token and q {id: probability} behind ``text``, from a full prefill."""
    logits = reference(torch.tensor([text])).logits[0, -1]
    logits[torch.from_numpy(unpack_tokens(sampling.bias_ids, VOCAB).astype(np.int64))] += torch.from_numpy(
        unpack_floats(sampling.bias).copy()
    )
    p = torch.softmax(logits / sampling.temperature, -1)[None]
    cut = Filters(*(torch.tensor([x]) for x in (sampling.top_k, sampling.top_p, sampling.min_p)))
    ranked, ids = p.log().masked_fill(~filter_mask(p, cut), -torch.inf).sort(dim=-1, descending=True)
    rule = SupportRule.of([(SUPPORT, TOP_F, C)])
    token, support = sample_from_support(
        ranked, ids, rule, torch.tensor([sampling.seed]), torch.tensor([len(text) - 1])
    )
    return token.item(), {i: q for i, q in zip(support.ids[0].tolist(), support.q[0].tolist(), strict=True) if q}


def check(reference, answer, text, sampling):
    tokens = unpack_tokens(answer.tokens, VOCAB).tolist()
    ids = unpack_tokens(answer.q_ids, VOCAB).reshape(len(tokens) or 1, -1).tolist()
    q = unpack_floats(answer.q).reshape(len(tokens) or 1, -1).tolist()
    for index, token in enumerate(tokens):
        want, want_q = expected(reference, [*text, *tokens[:index]], sampling)
        told = {i: x for i, x in zip(ids[index], q[index], strict=True) if x}
        assert token == want
        assert told == pytest.approx(want_q, abs=1e-4)


SAMPLING = {
    "plain": Sampling(0.9, 7),
    "filtered": Sampling(0.9, 7, top_k=30, top_p=0.9, min_p=0.001),
    "biased": Sampling(1.4, -3, bias_ids=pack_tokens(list(BIAS)), bias=pack_floats(list(BIAS.values()))),
}


@pytest.mark.parametrize("kind", SAMPLING)
def test_what_is_served_was_drawn_from_the_q_that_is_told(harness, reference, kind):
    sampling = SAMPLING[kind]
    open_session(harness, 1, sampling)
    sources = []

    def play(tokens, **options):
        answer = harness.play(1, tokens, **options)
        sources.append(answer.source)
        check(reference, answer, harness.texts[1], sampling)
        harness.settle()

    def prepared(kept):
        """A bonus that was prepared for ``kept`` accepted drafts."""
        chain = harness.chains[1]
        guesses = harness.session(1).guesses(harness.session(1).trunk_node(kept))
        return next(token for token in guesses.ids if token not in chain[kept : kept + 1])

    play([prepared(0)])
    play([prepared(0)])  # the first draft was tested and rejected
    play([*harness.chains[1][:1], prepared(1)])
    play([*harness.chains[1], prepared(K)])
    play([999])  # a miss, drafted
    play([998], fallback=("none",))
    play([*harness.chains[1][:2]], verified=1)  # cut: what was not tested turns out as it was drawn
    play([997])
    assert {"hit", "jit", "none"} <= set(sources)
    harness.server.cache.check()


def test_a_late_round_is_served_from_the_same_draws(harness, reference):
    """The target went on without the answer: its own two tokens, the first of which is what the draft had drawn."""
    sampling = SAMPLING["plain"]
    open_session(harness, 1, sampling)
    harness.play(1, [50])
    harness.settle()
    drawn = harness.chains[1]
    base = len(harness.texts[1])
    harness.send(harness.outcome(1, drawn[:1], verified=0))
    harness.send(harness.outcome(1, [60], base=base, verified=0))
    harness.settle()
    (answer,) = harness.mailbox.take(Speculations)
    check(reference, answer.rows[0], harness.texts[1], sampling)


def test_sessions_of_other_terms_share_the_text_and_nothing_else(harness, reference):
    for number, sampling in enumerate(SAMPLING.values(), start=1):
        open_session(harness, number, sampling)
    for number, sampling in enumerate(SAMPLING.values(), start=1):
        check(reference, harness.play(number, [77]), harness.texts[number], sampling)
        harness.settle()
    nodes = harness.server.cache.tree.nodes
    assert nodes < 2 * len(PROMPT) + 3 * FAN_OUT * (K + 1)


def test_greedy_sessions_propose_without_a_q(harness):
    open_session(harness, 1, Sampling(0.0, 7))
    answer = harness.play(1, [77])
    assert (len(answer.tokens), answer.q_ids, answer.q) == (4 * K, b"", b"")
