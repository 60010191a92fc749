"""Sessions end when their requests do, however they end."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tests.e2e.conftest import Rig
from tests.e2e.servers import wait_until
from tests.e2e.workload import Case, abandon

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

COUNT = 200


def everywhere(send, count: int = COUNT, at_a_time: int = 16) -> list:
    with ThreadPoolExecutor(at_a_time) as pool:
        return list(pool.map(send, range(count)))


def prompt(index: int, length: int = 12) -> list[int]:
    generator = random.Random(index)
    return [generator.randrange(4, 1000) for _ in range(length)]


def ask(rig: Rig, index: int, **sampling: object) -> dict:
    return rig.server.generate(
        input_ids=prompt(index), sampling_params={"temperature": 0, "max_new_tokens": 12} | sampling
    )


def closed(rig: Rig) -> None:
    """Both sides count no session within a second of the last answer (polled: the figures come by heartbeat)."""
    wait_until(lambda: rig.server.status()["sessions"] == 0, 1, "the scheduler to close its sessions")
    wait_until(lambda: rig.sessions() == (0, 0), 3, "the draft server to close its sessions")


@pytest.fixture(scope="module")
def rig(roomy: Rig) -> Rig:
    roomy.use("noisy")
    return roomy


@pytest.mark.parametrize("most", [0, 1])
def test_requests_that_end_at_prefill(rig: Rig, most: int) -> None:
    answers = everywhere(lambda i: ask(rig, i, max_new_tokens=most))
    assert {answer["meta_info"]["completion_tokens"] for answer in answers} == {1} if most else True
    closed(rig)


def test_parallel_samples(rig: Rig) -> None:
    answers = everywhere(lambda i: ask(rig, i, n=4, temperature=1.0))
    assert all(len(answer) == 4 for answer in answers)
    closed(rig)


def test_eos_as_first_token(rig: Rig) -> None:
    answers = everywhere(lambda i: ask(rig, i, logit_bias={"2": 1000.0}))
    assert all(answer["meta_info"]["finish_reason"]["type"] == "stop" for answer in answers)
    closed(rig)


def test_scoring_without_generation(rig: Rig) -> None:
    """What `select` does: prompts whose logprobs are wanted and nothing else."""

    def score(index: int) -> dict:
        sampling = {"max_new_tokens": 0, "temperature": 0}
        return rig.server.generate(
            input_ids=prompt(index), sampling_params=sampling, return_logprob=True, logprob_start_len=3
        )

    answers = everywhere(score)
    assert all(len(answer["meta_info"]["input_token_logprobs"]) == 9 for answer in answers)
    closed(rig)


def test_health_checks(rig: Rig) -> None:
    codes = everywhere(lambda _: requests.get(f"{rig.server.url}/health_generate", timeout=120).status_code)
    assert set(codes) == {200}
    closed(rig)


def test_aborted_while_queued_or_running(rig: Rig) -> None:
    def give_up(index: int) -> None:
        abandon(rig.server, Case(index, 40, 400), after_s=0.05 + 0.01 * (index % 40))

    everywhere(give_up, at_a_time=48)  # twice what may run at once
    wait_until(lambda: ask(rig, 0)["meta_info"]["completion_tokens"] == 12, 60, "the server to answer again")
    wait_until(lambda: rig.sessions() == (0, 0), 60, "every session to close")


def test_flush_empties_the_draft_server_too(rig: Rig) -> None:
    ask(rig, 5, max_new_tokens=20)
    closed(rig)
    rig.server.flush()

    def empty() -> bool:
        figures = rig.server.status()["draft_figures"]
        return figures["slots_cached"] == 0 and figures["slots_free"] == figures["slots"]

    wait_until(empty, 5, "the draft server's tree to empty")
