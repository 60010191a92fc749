"""The wire: one round's messages of 1 to 256 rows, encoded and decoded."""

from __future__ import annotations

import pytest

from sglang_ssd.protocol import (
    Build,
    Outcome,
    Outcomes,
    Prefill,
    Sampling,
    Speculation,
    Speculations,
    decode_at_draft,
    decode_at_target,
    encode,
    pack_tokens,
    unpack_tokens,
)

SESSION = 1 << 40


@pytest.mark.parametrize("rows", [1, 32, 256])
def test_outcomes(benchmark, rows):
    block = pack_tokens([11, 12, 13])
    outcomes = tuple(Outcome(SESSION + i, 1, 1000 + i, 4, 500, block) for i in range(rows))
    message = Outcomes.of(1 << 50, 123_456, 90_000, ("jit",), outcomes)
    assert benchmark(lambda: decode_at_draft(encode(message))) == message


@pytest.mark.parametrize("rows", [1, 32, 256])
def test_speculations(benchmark, rows):
    block = pack_tokens([11, 12, 13, 14])
    answers = tuple(Speculation(SESSION + i, 1, 1000 + i, "hit", block) for i in range(rows))
    message = Speculations.of(1 << 50, 123_456, answers, Build(1, 2, 3, 4))
    assert benchmark(lambda: decode_at_target(encode(message))) == message


@pytest.mark.parametrize("rows", [1, 32])
def test_speculations_with_the_distributions_of_their_tokens(benchmark, rows):
    """Rejection mode: 64 ids and probabilities for each of four tokens."""
    q = bytes(4 * 64 * 4)
    answers = tuple(Speculation(SESSION + i, 1, 1000, "hit", pack_tokens([1, 2, 3, 4]), q, q) for i in range(rows))
    message = Speculations.of(1 << 50, 123_456, answers, Build(1, 2, 3, 4))
    assert benchmark(lambda: decode_at_target(encode(message))) == message


@pytest.mark.parametrize("tokens", [100, 20_000])
def test_prefill(benchmark, tokens):
    text = list(range(tokens))

    def both_ways():
        message = decode_at_draft(encode(Prefill(1, SESSION, 1, pack_tokens(text), Sampling())))
        return unpack_tokens(message.tokens, 49_152)

    assert len(benchmark(both_ways)) == tokens
