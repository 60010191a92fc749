"""What the log says while requests run: a line for each of SGLang's "Decode batch", and when a draft is of no use."""

from __future__ import annotations

import copy
import logging

from sglang_ssd.scheduler.figures import Figures

logger = logging.getLogger(__name__)

_JUDGED = 512
"""First draft tokens by which a draft is judged, again and again."""
_WORTHLESS = 0.02
"""The share of them that even a poor draft has accepted."""


class DecodeLog:
    """Looks at the running totals after every forward; ``every`` so many there is a line."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._logged, self._judged = Figures(), Figures()
        self._worthless = False

    def note(self, figures: Figures, draft_state: str) -> None:
        """A forward is over."""
        if figures.forwards - self._logged.forwards >= self._every:
            if figures.requests.rounds > self._logged.requests.rounds:
                logger.info("%s", _line(self._logged, figures, draft_state))
            self._logged = copy.deepcopy(figures)
        if _first(figures.verified_per_position) - _first(self._judged.verified_per_position) >= _JUDGED:
            self._judge(figures)
            self._judged = copy.deepcopy(figures)

    def _judge(self, figures: Figures) -> None:
        before, was_worthless = self._judged, self._worthless
        verified = _first(figures.verified_per_position) - _first(before.verified_per_position)
        accepted = _first(figures.accepted_per_position) - _first(before.accepted_per_position)
        self._worthless = accepted < _WORTHLESS * verified
        if self._worthless and not was_worthless:
            logger.warning(
                "SSD: of the last %d first draft tokens the target took %d; another draft model would serve it better, "
                "and --speculative-ssd-mode off would free this one's device.",
                verified,
                accepted,
            )


def _line(before: Figures, now: Figures, draft_state: str) -> str:
    rounds = now.requests.rounds - before.requests.rounds
    forwards = now.forwards - before.forwards
    accepted = sum(now.accepted_per_position) - sum(before.accepted_per_position)
    counts = {
        "hit": now.requests.hits - before.requests.hits,
        "partial": now.requests.partial - before.requests.partial,
        **(now.misses - before.misses),
    }
    answers = ", ".join(f"{answer}: {count / rounds:.2f}" for answer, count in counts.items())
    wait_ms = 1e3 * (now.wait_s - before.wait_s) / forwards
    late = now.timeouts - before.timeouts
    return (
        f"SSD rounds, #round: {rounds}, {answers}, accepted drafts: {accepted / rounds:.2f}, wait (ms): {wait_ms:.1f}, "
        f"#timeout: {late}, draft: {draft_state}"
    )


def _first(counts: list[int]) -> int:
    return counts[0] if counts else 0
