"""The verifier's draw and the noise hash, on one thread."""

from __future__ import annotations

import pytest
import torch

from sglang_ssd.sampling.draw import DrawParameters
from sglang_ssd.sampling.noise import NoiseTable
from sglang_ssd.sampling.verdict import judge
from sglang_ssd.sampling.window import Window

STEPS = 4
VOCABULARIES = [49_152, 151_936]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def window(batch):
    return Window(torch.zeros(batch, STEPS, dtype=torch.int64), torch.full((batch,), STEPS), None)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_verifier(benchmark, batch, vocab_size, temperature):
    """From processed logits of K + 1 = 5 positions for each request to accepted lengths and bonus tokens."""
    rows = batch * (STEPS + 1)
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0))
    every = torch.arange(rows)
    sampled = DrawParameters(every, torch.full((rows,), temperature), every + 17, every + 100)
    noise = NoiseTable.of(vocab_size)
    verdict = benchmark.pedantic(
        judge, (logits, window(batch), sampled if temperature else None, noise), rounds=5, warmup_rounds=1
    )
    assert verdict.accepted.shape == (batch,)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_noise_hash(benchmark, rows, vocab_size):
    noise = NoiseTable.of(vocab_size)
    every = torch.arange(rows)
    bits = benchmark(noise.bits, every, every + 100, vocab_size)
    assert bits.shape == (rows, vocab_size)
