"""The Prometheus metrics ``sglang_ssd_*``: what there is, and what of ``/ssd/status`` each of them tells.

Running totals, so that any window can be computed. :mod:`~sglang_ssd.scheduler.exporter` publishes them beside SGLang's
own; :mod:`~sglang_ssd.dashboard` draws them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

PREFIX = "sglang_ssd_"
ANSWERS = ("hit", "partial", "jit", "ngram", "none")

Values: TypeAlias = dict[tuple[str, ...], float]
"""By the values of a metric's labels."""


@dataclass(frozen=True)
class Metric:
    """``name`` comes behind ``PREFIX``; that of a counter is exposed with ``_total`` behind it."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: Literal["counter", "gauge"] = "counter"

    @property
    def exposed(self) -> str:
        """As Prometheus knows it."""
        return f"{PREFIX}{self.name}" + ("_total" if self.kind == "counter" else "")


METRICS = (
    Metric("rounds", "Rounds of requests, by what answered them (a miss: jit, ngram or none).", ("answer",)),
    Metric("verified_tokens", "Draft tokens that the target looked at, by position in the window.", ("position",)),
    Metric("accepted_tokens", "Draft tokens that it accepted, by position in the window.", ("position",)),
    Metric("forwards", "Forwards of decode batches.", ("width",)),
    Metric("round_seconds", "Where the time of rounds went: the forward, waiting for drafts, the rest.", ("part",)),
    Metric("timeouts", "Rounds that went without drafts because these were late."),
    Metric("dropped_frames", "Messages of the draft server that were stale or no messages of ours.", ("why",)),
    Metric("unsent_messages", "Messages that the draft server was too far behind to take."),
    Metric("reconnects", "Times that the draft server was met again."),
    Metric("sessions", "Requests that are drafted for.", kind="gauge"),
    Metric("draft_up", "1 while the draft server answers.", kind="gauge"),
    Metric("draft_forwards", "The draft server's forwards."),
    Metric("draft_forward_seconds", "Their time."),
    Metric("draft_rows", "Tokens in them: of trees, or of texts and chains that lacked KV.", ("what",)),
    Metric("draft_prefill_tokens", "Tokens of prompts that the draft server ran."),
    Metric("draft_dropped_branches", "Branches given up for want of slots, or because of a grammar.", ("why",)),
    Metric("draft_evictions", "Tokens of old texts that made room for others."),
    Metric("draft_slots", "Tokens that fit into the draft server's KV pool.", kind="gauge"),
    Metric("draft_slots_free", "Those that nobody has.", kind="gauge"),
    Metric("info", "1; the labels say what runs.", ("version", "sglang", "mode", "verify"), "gauge"),
)


def readings(status: Mapping[str, Any]) -> dict[str, Values]:
    """The value of every metric, by its name, as a ``status`` of the scheduler tells it."""
    draft: Mapping[str, int] = status.get("draft_figures") or {}
    seconds = status["forwards"] / 1e3
    answers = {"hit": status["hits"], "partial": status["partial"], **status["misses"]}

    def of_draft(name: str) -> Values:
        return {(): draft.get(name, 0)}

    return {
        "rounds": {(answer,): answers.get(answer, 0) for answer in ANSWERS},
        "verified_tokens": _by_position(status["verified_per_position"]),
        "accepted_tokens": _by_position(status["accepted_per_position"]),
        "forwards": {
            ("1",): status["narrow_forwards"],
            ("more",): status["forwards"] - status["narrow_forwards"],
        },
        "round_seconds": {(part,): status["round_ms"][part] * seconds for part in ("verify", "wait", "other")},
        "timeouts": {(): status["timeouts"]},
        "dropped_frames": {("stale",): status.get("stale_frames", 0), ("bad",): status.get("bad_frames", 0)},
        "unsent_messages": {(): status.get("draft_behind", 0)},
        "reconnects": {(): status.get("reconnects", 0)},
        "sessions": {(): status.get("sessions", 0)},
        "draft_up": {(): float(status["draft_state"] == "up")},
        "draft_forwards": of_draft("forwards"),
        "draft_forward_seconds": {(): draft.get("forward_us", 0) / 1e6},
        "draft_rows": {("tree",): draft.get("rows", 0), ("path",): draft.get("path_rows", 0)},
        "draft_prefill_tokens": of_draft("prefill_tokens"),
        "draft_dropped_branches": {
            ("slots",): draft.get("branches_shed", 0),
            ("grammar",): draft.get("branches_illegal", 0),
        },
        "draft_evictions": of_draft("evictions"),
        "draft_slots": of_draft("slots"),
        "draft_slots_free": of_draft("slots_free"),
        "info": {(status["version"], status["sglang"], status["mode"], status["verify"]): 1.0},
    }


def _by_position(counts: list[int]) -> Values:
    """From 1: the first draft token of a window."""
    return {(str(position),): count for position, count in enumerate(counts, start=1)}
