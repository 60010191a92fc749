"""Our Prometheus metrics on SGLang's ``/metrics``, with its ``--enable-metrics``.

SGLang collects the values of all its processes from a folder that it names before it starts them
(``set_prometheus_multiproc_dir``); ``prometheus_client`` must not be imported before that, so it is imported here late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from sglang_ssd import __version__
from sglang_ssd.metrics import METRICS, PREFIX, Metric, Values, readings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_EVERY_S = 1.0
_MODEL = "model_name"
"""SGLang's own label."""


class Exporter:
    """Publishes a status now and then; a total that shrank began anew (the draft server was restarted)."""

    def __init__(self, model_name: str, registry: CollectorRegistry | None = None) -> None:
        self._model_name = model_name
        self._metrics = {metric.name: _make(metric, registry) for metric in METRICS}
        self._versions = {"version": __version__, "sglang": version("sglang")}
        self._known: dict[str, Values] = {}
        self._published_at = 0.0

    def offer(self, status: Callable[[], Mapping[str, Any]]) -> None:
        """Publish what ``status`` says, unless that was done a moment ago."""
        now = time.monotonic()
        if now - self._published_at >= _EVERY_S:
            self._published_at = now
            self.publish(status())

    def publish(self, status: Mapping[str, Any]) -> None:
        """Bring every metric up to what ``status`` says."""
        present = readings(self._versions | dict(status))
        for metric in METRICS:
            for labels, value in present[metric.name].items():
                self._set(metric, labels, value)
        self._known = present

    def _set(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        child = self._metrics[metric.name].labels(self._model_name, *labels)
        if metric.kind == "gauge":
            child.set(value)
            return
        before = self._known.get(metric.name, {}).get(labels, 0.0)
        child.inc(value - before if value >= before else value)


def _make(metric: Metric, registry: CollectorRegistry | None) -> Any:  # noqa: ANN401 - a Counter or a Gauge
    from prometheus_client import REGISTRY, Counter, Gauge

    name, labels, registry = PREFIX + metric.name, (_MODEL, *metric.labels), registry or REGISTRY
    if metric.kind == "counter":
        return Counter(name, metric.help, labels, registry=registry)
    return Gauge(name, metric.help, labels, multiprocess_mode="mostrecent", registry=registry)
