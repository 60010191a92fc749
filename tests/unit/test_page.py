"""The page of ``/ssd``: it asks for what the status has, and counts what happened between two of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import sglang_ssd.api
from sglang_ssd.config import SSDConfig
from sglang_ssd.scheduler.collector import Collector
from sglang_ssd.scheduler.figures import Figures
from sglang_ssd.scheduler.link import SchedulerOptions

PAGE = (Path(sglang_ssd.api.__file__).parent / "page.html").read_text()
SCRIPT = PAGE.partition("<script>")[2].partition("</script>")[0]
NODE = shutil.which("node")
LINK = {"draft": "small", "draft_state": "up", "refusal": None, "sessions": 3}
DRAFT = {"forwards": 10, "rows": 60, "path_rows": 4, "forward_us": 20000, "slots": 100, "slots_free": 40}


def status_of(figures: Figures, draft: dict[str, int] = DRAFT) -> dict[str, Any]:
    options = SchedulerOptions(SSDConfig(), None, "large")
    policy = options.policy(4)
    policy.forwarded(2, 5, 0.1)
    collector = Collector(None, policy, options.deadline(), figures, 4)
    collector.plan_round(2)
    about = {"version": "1", "sglang": "2", "num_steps": 4}
    return about | options.describe() | figures.as_dict() | collector.describe() | LINK | {"draft_figures": draft}


def figures(hits: int, forwards: int, verify_s: float) -> Figures:
    figures = Figures(accepted_per_position=[0] * 4, verified_per_position=[0] * 4)
    for source in ["hit"] * hits + ["jit"]:
        figures.count_round(source)
    figures.count_outcome(2, 4)
    figures.forwards, figures.verify_s = forwards, verify_s
    return figures


def run(script: str, *values: object) -> Any:
    """What ``script`` returns of ``values``, which it knows as ``given``."""
    assert NODE is not None
    program = f"{SCRIPT}\nconst given = {json.dumps(values)};\nconsole.log(JSON.stringify((() => {{ {script} }})()));"
    done = subprocess.run([NODE, "-e", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed here, so the page's script cannot run")


def test_it_asks_for_nothing_that_the_status_lacks() -> None:
    status = status_of(figures(1, 1, 0.1))
    asked = set(re.findall(r"\b(?:now|before|status)\.(\w+)", SCRIPT)) | set(re.findall(r'since\("(\w+)"\)', SCRIPT))
    assert len(asked) > 15
    assert asked <= status.keys()
    assert set(re.findall(r'\bdraft\("(\w+)"\)', SCRIPT)) | set(re.findall(r"figures\.(\w+)", SCRIPT)) <= DRAFT.keys()


def test_it_needs_nothing_from_elsewhere() -> None:
    assert not re.search(r"https?://|\bsrc=|@import|<link", PAGE)
    places = set(re.findall(r'\bid="(\w+)"', PAGE))
    assert set(re.findall(r'(?:draw|getElementById)\("(\w+)"', SCRIPT)) == places


@needs_node
def test_what_happened_between_two_statuses() -> None:
    before, now = figures(hits=3, forwards=10, verify_s=2.0), figures(hits=8, forwards=20, verify_s=5.0)
    now.count_round("ngram")
    now.count_outcome(1, 2)
    found = run("return between(given[0], given[1])", status_of(before), status_of(now, DRAFT | {"rows": 90}))
    assert found["count"] == {"hit": 5, "partial": 0, "jit": 0, "ngram": 1, "none": 0}
    assert (found["rounds"], found["forwards"]) == (6, 10)
    assert found["time"]["verify"] == pytest.approx(3000)
    assert (found["accepted"], found["verified"]) == ([1, 0, 0, 0], [1, 1, 0, 0])
    assert found["draft"] == {"forwards": 0, "rows": 30, "ms": 0}


@needs_node
def test_what_is_drawn() -> None:
    """With a document that only remembers what is written into it."""
    script = """
        const places = {};
        globalThis.document = {getElementById: id => places[id] ??= {}};
        const step = between(given[0], given[1]);
        render([step, step], given[1]);
        about(given[1]);
        return Object.fromEntries(Object.entries(places).map(([id, place]) => [id, place.innerHTML]));
    """
    now = figures(hits=8, forwards=20, verify_s=5.0)
    drawn = run(script, status_of(figures(hits=3, forwards=10, verify_s=2.0)), status_of(now))
    assert "hit 100 %" in drawn["answers"]
    assert "verify 300.0 ms" in drawn["time"]
    assert "large" in drawn["about"]
    assert drawn["decisions"].count("<tr>") == 2
    assert not re.search(r"NaN|undefined|Infinity", json.dumps(drawn)), drawn
