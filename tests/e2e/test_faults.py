"""The draft server dies, stalls and comes back under the launcher; requests never notice, operators do."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.servers import SGLangServer, start_ssd, wait_until

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
LONG = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    """Our launcher with its own draft server on SGLang's engine."""
    log = tmp_path_factory.mktemp("launched") / "server.log"
    flags = ["--max-total-tokens", "8192", "--max-running-requests", "8", "--context-length", "1024"]
    flags += ["--speculative-ssd-lookahead", "fixed", "--speculative-ssd-fallback", "jit", "--enable-metrics"]
    server = start_ssd(models / "target", models / "copy", log, *flags)
    try:
        server.wait_ready()
        wait_until(lambda: server.status()["draft_state"] == "up", 120, "the draft server to be up")
        yield server
    finally:
        server.process.stop()


def launcher(server: SGLangServer) -> psutil.Process:
    assert server.process.child is not None
    return psutil.Process(server.process.child.pid)


def draft_process(server: SGLangServer) -> psutil.Process:
    for child in launcher(server).children(recursive=True):
        if child.status() != psutil.STATUS_ZOMBIE and any("sglang-ssd::draft" in part for part in child.cmdline()):
            return child
    raise AssertionError("there is no draft server")


def stream(server: SGLangServer, **extra: object) -> Iterator[dict]:
    body = {"input_ids": list(range(40, 90)), "sampling_params": LONG | extra, "stream": True}
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith(b"data: {"):
                yield json.loads(line[len(b"data: ") :])


def plain(server: SGLangServer) -> dict:
    off = LONG | {"custom_params": {"ssd": {"enabled": False}}}
    return server.generate(input_ids=list(range(40, 90)), sampling_params=off)


def served(server: SGLangServer) -> int:
    """Rounds that found drafts prepared, in whole or in part."""
    status = server.status()
    return status["hits"] + status["partial"]


def scraped(server: SGLangServer) -> dict[tuple[str, str], float]:
    """Our metrics by name and the value of their own label, if they have one."""
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    ours = [sample for sample in samples if sample.name.startswith("sglang_ssd_")]
    assert ours
    return {(s.name, next((v for k, v in s.labels.items() if k != "model_name"), "")): s.value for s in ours}


def test_the_status_says_what_runs(server: SGLangServer) -> None:
    server.generate(input_ids=[5, 6, 7], sampling_params=LONG)
    status = server.status()
    assert status["mode"] == "ssd"
    assert status["draft_state"] == "up"
    assert status["num_steps"] == 4
    for key in ("version", "sglang", "target", "draft", "timeouts", "stale_frames", "bad_frames"):
        assert status[key] is not None
    assert status["hits"] + status["partial"] + status["misses"]["total"] == status["rounds"] > 0
    assert len(status["accepted_per_position"]) == 4
    assert set(status["round_ms"]) == {"verify", "wait", "hit_wait", "other"}
    state = requests.get(f"{server.url}/server_info", timeout=30).json()["internal_states"][0]
    assert state["ssd"]["rounds"] >= status["rounds"]


def test_the_metrics_say_what_the_status_says(server: SGLangServer) -> None:
    server.generate(input_ids=[5, 6, 8], sampling_params=LONG)
    status = server.status()
    answers = {"hit": status["hits"], "partial": status["partial"], **status["misses"]}

    def caught_up() -> bool:
        found = scraped(server)
        return all(
            found["sglang_ssd_rounds_total", answer] == answers.get(answer, 0) for answer in ("hit", "jit", "none")
        )

    wait_until(caught_up, 10, "the metrics to catch up")
    found = scraped(server)
    assert found["sglang_ssd_draft_up", ""] == 1
    assert found["sglang_ssd_accepted_tokens_total", "4"] == status["accepted_per_position"][3]
    assert found["sglang_ssd_draft_slots", ""] == status["draft_figures"]["slots"]


def test_the_page_comes_from_the_same_port(server: SGLangServer) -> None:
    answer = requests.get(f"{server.url}/ssd", timeout=30)
    assert answer.headers["content-type"].startswith("text/html")
    assert "ssd/status" in answer.text


def test_figures_in_a_stream_are_integers_and_rise(server: SGLangServer) -> None:
    seen = [chunk["meta_info"] for chunk in stream(server)]
    rounds = [meta["ssd_rounds"] for meta in seen]
    assert rounds == sorted(rounds)
    assert rounds[-1] > 10
    last = seen[-1]
    assert last["ssd_hits"] + last["ssd_partial"] + last["ssd_misses"] == last["ssd_rounds"]
    assert last["spec_verify_ct"] - last["ssd_rounds"] in (0, 1)  # a last single token needs no speculation
    assert "ssd" not in last


def test_sigkill_in_the_middle_of_a_stream(server: SGLangServer) -> None:
    expected = plain(server)
    victim = draft_process(server)
    chunks = stream(server)
    for _ in range(5):
        last = next(chunks)
    victim.kill()
    for chunk in chunks:
        last = chunk
    assert last["output_ids"] == expected["output_ids"]
    assert last["text"] == expected["text"]
    wait_until(lambda: server.status()["draft_state"] == "up", 120, "the draft server to come back")
    assert draft_process(server).pid != victim.pid
    before = served(server)
    assert server.generate(input_ids=list(range(40, 90)), sampling_params=LONG)["output_ids"] == expected["output_ids"]
    assert served(server) > before


def test_a_stalled_draft_server_is_not_waited_for_every_round(server: SGLangServer) -> None:
    expected = plain(server)
    victim = draft_process(server)
    timeouts = server.status()["timeouts"]
    chunks = stream(server)
    last = next(chunks)
    victim.send_signal(signal.SIGSTOP)
    try:
        for chunk in chunks:
            last = chunk
        assert last["output_ids"] == expected["output_ids"]
        rounds = last["meta_info"]["ssd_rounds"]
        assert 0 < server.status()["timeouts"] - timeouts <= 24 < rounds  # each wait in vain doubles a pause
        assert requests.get(f"{server.url}/health_generate", timeout=60).status_code == 200
    finally:
        victim.send_signal(signal.SIGCONT)
    wait_until(lambda: server.status()["draft_state"] == "up", 60, "the draft server to answer again")
    before = served(server)

    def hit_again() -> bool:
        server.generate(input_ids=list(range(40, 90)), sampling_params=LONG)
        return served(server) > before

    wait_until(hit_again, 60, "hits to resume")


@pytest.mark.parametrize("name", ["openai_client.py", "frontend_program.py"])
def test_python_examples(server: SGLangServer, name: str) -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), server.url], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_curl_example(server: SGLangServer) -> None:
    import subprocess

    done = subprocess.run(
        ["bash", str(EXAMPLES / "curl.sh"), server.url], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "choices" in done.stdout


def test_nothing_is_left_after_sigterm(server: SGLangServer) -> None:
    """Last, because it ends the server."""
    family = [launcher(server), *launcher(server).children(recursive=True)]
    assert len(family) >= 4  # launcher, scheduler, detokenizer, draft server
    server.process.kill(signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
