"""The defaults on one server: what the draft server keeps of earlier texts, and what the clock decides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.servers import SGLangServer, start_ssd, wait_until

pytestmark = pytest.mark.server
SHORT = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    log = tmp_path_factory.mktemp("sharing") / "server.log"
    flags = ["--max-total-tokens", "16384", "--max-running-requests", "16", "--context-length", "1024"]
    server = start_ssd(models / "target", models / "copy", log, *flags, "--speculative-ssd-draft-engine", "torch")
    try:
        server.wait_ready()
        wait_until(lambda: server.status()["draft_state"] == "up", 120, "the draft server to be up")
        yield server
    finally:
        server.process.stop()


def text(begin: int, length: int) -> list[int]:
    """Tokens that no other text here has in this order."""
    return [3 + (begin * 7919 + i * i + 31 * i) % 900 for i in range(length)]


def prefilled(server: SGLangServer) -> int:
    """Tokens that the draft server has run as prefill chunks; its figures come twice a second."""
    seen = -1
    while seen != (seen := server.status()["draft_figures"].get("prefill_tokens", 0)):
        time.sleep(2)
    return seen


async def together(server: SGLangServer, prompts: list[list[int]]) -> list[dict]:
    async with aiohttp.ClientSession() as session:

        async def one(prompt: list[int]) -> dict:
            body = {"input_ids": prompt, "sampling_params": SHORT}
            async with session.post(f"{server.url}/generate", json=body) as answer:
                return await answer.json()

        return await asyncio.gather(*map(one, prompts))


def test_a_fork_of_eight_prefills_the_draft_once(server: SGLangServer) -> None:
    before = prefilled(server)
    prefix, ends = text(1, 500), [text(100 + i, 6) for i in range(8)]
    answers = asyncio.run(together(server, [prefix + end for end in ends]))
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1
    assert 450 < prefilled(server) - before < 500 + 8 * 12


def test_a_next_turn_prefills_only_what_is_new(server: SGLangServer) -> None:
    first = text(2, 300)
    answer = server.generate(input_ids=first, sampling_params=SHORT)["output_ids"]
    before = prefilled(server)
    server.generate(input_ids=[*first, *answer, *text(3, 40)], sampling_params=SHORT)
    # And the end of the answer, which needed no draft any more: up to 16 tokens wait for the next forward.
    assert prefilled(server) - before <= 40 + 16 + 8


def test_what_the_clock_decides_changes_no_text(server: SGLangServer) -> None:
    prompts = [text(200 + i, 20) for i in range(6)]
    plain = [
        server.generate(input_ids=each, sampling_params=SHORT | {"custom_params": {"ssd": {"enabled": False}}})
        for each in prompts
    ]
    drafted = asyncio.run(together(server, prompts))
    assert [each["output_ids"] for each in drafted] == [each["output_ids"] for each in plain]


def test_the_status_says_what_was_decided(server: SGLangServer) -> None:
    server.generate(input_ids=text(4, 10), sampling_params=SHORT)
    status = server.status()
    assert status["planner"] == "confidence"
    assert status["lookahead"]
    assert all(0 <= each <= status["num_steps"] for each in status["lookahead"].values())
    assert set(status["fallback_chosen"].values()) <= {"jit", "ngram", "none"}
    assert "switch_point" in status
    assert status["hits"] + status["partial"] + status["misses"]["total"] == status["rounds"]
