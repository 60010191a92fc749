"""Per-request figures on their way to the HTTP process, beside each request's output."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from sglang_ssd.protocol import FIGURES_KEY
from sglang_ssd.scheduler.requests import ATTRIBUTE, RequestState


class SSDOutputStreamer(SchedulerOutputStreamer):  # type: ignore[misc]
    """SGLang's streamer, which asks a subclass for fields that stand beside the emitted requests.

    The totals so far travel with every output: SGLang slices ordinary ``customized_info`` by token, and a round is no
    token. :mod:`sglang_ssd.api.meta_info` keeps the last.
    """

    has_additional_customized_info = True

    def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[list[tuple[int, ...]]]]:
        """One list per request with one tuple in it: (rounds, hits, partial, misses) so far."""
        return {FIGURES_KEY: [[_totals(req)] for req in reqs]}


def _totals(req: Any) -> tuple[int, int, int, int]:  # noqa: ANN401 - sglang's Req
    state: RequestState | None = getattr(req, ATTRIBUTE, None)
    return (0, 0, 0, 0) if state is None else state.figures.totals()
