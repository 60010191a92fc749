"""A Grafana dashboard of our metrics: ``python -m sglang_ssd.dashboard > docs/grafana.json``, then import the file."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from sglang_ssd.metrics import PREFIX

_WIDTH, _HEIGHT, _ACROSS = 8, 8, 3
"""Of a panel, in Grafana's grid of 24 columns."""
_SOURCE = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True)
class Panel:
    """``lines`` are pairs of a PromQL expression and its legend; ``unit`` is Grafana's name for it."""

    title: str
    lines: tuple[tuple[str, str], ...]
    unit: str = "short"
    stacked: bool = False


def _of(name: str, **only: str) -> str:
    """A metric of the chosen models, and of those label values alone."""
    chosen = ",".join(['model_name=~"$model"', *(f'{label}="{value}"' for label, value in only.items())])
    return f"{PREFIX}{name}{{{chosen}}}"


def _rate(counter: str, by: str = "", **only: str) -> str:
    """A second, summed over everything but the label ``by``."""
    return f"sum{f' by ({by})' if by else ''} (rate({_of(f'{counter}_total', **only)}[$__rate_interval]))"


def _each(counter: str, label: str) -> tuple[tuple[str, str], ...]:
    return ((_rate(counter, by=label), f"{{{{{label}}}}}"),)


PANELS = (
    Panel("Rounds a second, by answer", _each("rounds", "answer"), "ops", stacked=True),
    Panel("Hit rate", ((f"{_rate('rounds', answer='hit')} / {_rate('rounds')}", "hits of rounds"),), "percentunit"),
    Panel(
        "Drafts a round",
        (
            (f"{_rate('accepted_tokens')} / {_rate('rounds')}", "accepted"),
            (f"{_rate('verified_tokens')} / {_rate('rounds')}", "verified"),
        ),
    ),
    Panel(
        "Acceptance by position",
        ((f"{_rate('accepted_tokens', 'position')} / {_rate('verified_tokens', 'position')}", "{{position}}"),),
        "percentunit",
    ),
    Panel("Where the time of rounds goes", _each("round_seconds", "part"), "s", stacked=True),
    Panel("Forwards a second, by width", _each("forwards", "width"), "ops", stacked=True),
    Panel(
        "The link",
        (
            (_of("draft_up"), "up"),
            (_of("sessions"), "sessions"),
            (_rate("timeouts"), "timeouts a second"),
            (_rate("dropped_frames", "why"), "{{why}} frames a second"),
            (_rate("unsent_messages"), "unsent messages a second"),
            (f"sum ({_of('reconnects_total')})", "reconnects"),
        ),
    ),
    Panel(
        "The draft server",
        (
            (f"{_rate('draft_forward_seconds')}", "busy in forwards"),
            (f"{_rate('draft_forward_seconds')} / {_rate('draft_forwards')}", "seconds a forward"),
        ),
        "s",
    ),
    Panel(
        "Its tokens a second",
        (*_each("draft_rows", "what"), (_rate("draft_prefill_tokens"), "prompts")),
        "ops",
        stacked=True,
    ),
    Panel(
        "Its KV pool", ((f"1 - {_of('draft_slots_free')} / {_of('draft_slots')}", "in use or cached"),), "percentunit"
    ),
    Panel(
        "Given up",
        (
            (_rate("draft_dropped_branches", "why"), "branches: {{why}}"),
            (_rate("draft_evictions"), "cached tokens evicted"),
        ),
        "ops",
    ),
    Panel("Runs", ((_of("info"), "{{version}}, SGLang {{sglang}}, {{mode}}, {{verify}}"),)),
)


def dashboard() -> dict[str, Any]:
    """What Grafana imports."""
    return {
        "title": "SSD",
        "uid": "sglang-ssd",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "model",
                    "label": "Model",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": f"label_values({PREFIX}info, model_name)",
                    "includeAll": True,
                    "multi": True,
                    "refresh": 2,
                },
            ]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, _ACROSS)
    custom = {"fillOpacity": 30 if panel.stacked else 0, "stacking": {"mode": "normal" if panel.stacked else "none"}}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.lines)
        ],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(), indent=1) + "\n")
