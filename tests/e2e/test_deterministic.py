"""On a GPU: SGLang's own seeded sampler, made deterministic, draws what we draw with speculation on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import CONTEXT
from tests.e2e.servers import SGLangServer, start_ssd, start_stock, wait_until
from tests.e2e.workload import Case, run_staggered

pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="SGLang's seeded sampler is a Triton kernel: needs a GPU"),
]

FLAGS = [
    "--device", "cuda", "--attention-backend", "triton", "--enable-deterministic-inference",
    "--context-length", str(CONTEXT), "--max-total-tokens", "16384", "--mem-fraction-static", "0.3",
]  # fmt: skip


@pytest.fixture(scope="module")
def stock(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    server = start_stock(models / "target", tmp_path_factory.mktemp("stock") / "log", *FLAGS)
    try:
        server.wait_ready()
        yield server
    finally:
        server.process.stop()


@pytest.fixture(scope="module")
def ours(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    server = start_ssd(models / "target", models / "noisy", tmp_path_factory.mktemp("ours") / "log", *FLAGS)
    try:
        server.wait_ready()
        wait_until(lambda: server.status()["draft_state"] == "up", 240, "the draft server to be up")
        yield server
    finally:
        server.process.stop()


def test_a_seed_names_the_same_text_with_and_without_us(stock: SGLangServer, ours: SGLangServer) -> None:
    """Temperature only: SGLang keys the noise of filtered draws by rank, not by token."""
    bodies = [
        {
            "input_ids": Case(800 + i, 20 + i, 0).prompt,
            "sampling_params": {
                "temperature": temperature, "sampling_seed": 90 + i, "max_new_tokens": 48, "ignore_eos": True,
            },
        }
        for i, temperature in enumerate((0.0, 0.5, 0.7, 1.0, 1.3, 1.5))
    ]  # fmt: skip
    expected = [stock.generate(**body)["output_ids"] for body in bodies]
    answers = run_staggered(ours, bodies)
    assert [answer["output_ids"] for answer in answers] == expected
    assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers) > 20
