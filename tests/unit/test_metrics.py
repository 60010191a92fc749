"""Metrics tell what the status tells; the dashboard draws all of them and nothing else."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from sglang_ssd.dashboard import dashboard
from sglang_ssd.metrics import METRICS, readings
from sglang_ssd.scheduler.exporter import Exporter
from sglang_ssd.scheduler.figures import Figures

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
DRAFT = {
    "forwards": 40, "forward_us": 2_000_000, "rows": 300, "path_rows": 20, "prefill_tokens": 90, "branches_shed": 3,
    "branches_illegal": 4, "evictions": 5, "slots": 1000, "slots_free": 600,
}  # fmt: skip


@pytest.fixture
def figures() -> Figures:
    figures = Figures(accepted_per_position=[0] * 3, verified_per_position=[0] * 3)
    for source in ("hit", "hit", "partial", "jit", "none"):
        figures.count_round(source)
    figures.count_outcome(1, 3)
    figures.forwards, figures.narrow_forwards, figures.timeouts = 10, 2, 1
    figures.verify_s, figures.wait_s, figures.other_s = 4.0, 0.5, 0.25
    return figures


def status_of(figures: Figures, **link: Any) -> dict[str, Any]:
    about = {"version": "1", "sglang": "2", "mode": "ssd", "verify": "coupled"}
    return about | figures.as_dict() | {"draft_state": "up", "sessions": 7, "draft_figures": DRAFT} | link


def scraped(registry: CollectorRegistry) -> dict[str, float]:
    """Samples by name and labels, the model's left out."""
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    found = [re.fullmatch(r'(\w+)\{(.*?),?model_name="the model",?(.*)\} (\S+)', line) for line in lines]
    return {
        f"{m[1]}{{{','.join(filter(None, m.group(2, 3)))}}}": float(m[4]) for m in found if m and "_created" not in m[1]
    }


def test_what_is_scraped_is_what_the_status_says(figures: Figures) -> None:
    registry = CollectorRegistry()
    exporter = Exporter("the model", registry)
    exporter.publish(status_of(figures, stale_frames=2))
    found = scraped(registry)
    expected = {
        'sglang_ssd_rounds_total{answer="hit"}': 2, 'sglang_ssd_rounds_total{answer="none"}': 1,
        'sglang_ssd_accepted_tokens_total{position="1"}': 1, 'sglang_ssd_accepted_tokens_total{position="2"}': 0,
        'sglang_ssd_verified_tokens_total{position="3"}': 1, 'sglang_ssd_forwards_total{width="more"}': 8,
        'sglang_ssd_round_seconds_total{part="verify"}': 4, 'sglang_ssd_round_seconds_total{part="wait"}': 0.5,
        'sglang_ssd_dropped_frames_total{why="stale"}': 2, "sglang_ssd_draft_up{}": 1, "sglang_ssd_sessions{}": 7,
        "sglang_ssd_draft_forward_seconds_total{}": 2, 'sglang_ssd_draft_rows_total{what="path"}': 20,
        'sglang_ssd_info{mode="ssd",sglang="2",verify="coupled",version="1"}': 1,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert sum(value for name, value in found.items() if name.startswith("sglang_ssd_rounds")) == 5


def test_totals_rise_by_what_is_new_and_begin_anew_with_a_new_draft_server(figures: Figures) -> None:
    registry = CollectorRegistry()
    exporter = Exporter("the model", registry)
    exporter.publish(status_of(figures))
    figures.count_round("hit")
    exporter.publish(status_of(figures, draft_figures=DRAFT | {"forwards": 55}))
    exporter.publish(status_of(figures, draft_state="down", draft_figures=DRAFT | {"forwards": 6}))
    found = scraped(registry)
    assert found['sglang_ssd_rounds_total{answer="hit"}'] == 3
    assert found["sglang_ssd_draft_forwards_total{}"] == 55 + 6
    assert found["sglang_ssd_draft_up{}"] == 0


def test_without_a_draft_server_everything_can_be_read(figures: Figures) -> None:
    status = status_of(figures, draft_state="none")
    del status["draft_figures"], status["sessions"]
    assert readings(status)["draft_up"] == {(): 0.0}


def test_it_is_not_published_at_every_round(figures: Figures) -> None:
    asked: Counter[str] = Counter()

    def status() -> dict[str, Any]:
        asked["status"] += 1
        return status_of(figures)

    exporter = Exporter("the model", CollectorRegistry())
    for _ in range(20):
        exporter.offer(status)
    assert asked["status"] == 1


def test_every_metric_has_its_reading(figures: Figures) -> None:
    found = readings(status_of(figures))
    assert set(found) == {metric.name for metric in METRICS}
    for metric in METRICS:
        assert {len(labels) for labels in found[metric.name]} == {len(metric.labels)}, metric.name


def test_the_dashboard_draws_every_metric_and_no_other() -> None:
    expressions = " ".join(target["expr"] for panel in dashboard()["panels"] for target in panel["targets"])
    assert set(re.findall(r"sglang_ssd_\w+", expressions)) == {metric.exposed for metric in METRICS}
    labels = {metric.exposed: {*metric.labels, "model_name"} for metric in METRICS}
    for name, chosen in re.findall(r"(sglang_ssd_\w+)\{(.*?)\}", expressions):
        assert set(re.findall(r"(\w+)=", chosen)) <= labels[name]
    assert expressions.count("(") == expressions.count(")")


def test_the_dashboard_in_the_docs_is_the_generated_one() -> None:
    assert json.loads(DASHBOARD.read_text()) == dashboard(), "python -m sglang_ssd.dashboard > docs/grafana.json"
