"""What the scheduler side counts: running totals, so that any window can be computed from two readings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class RequestFigures:
    """Totals of one request; ``hits + partial + misses == rounds``."""

    rounds: int = 0
    hits: int = 0
    partial: int = 0
    misses: int = 0

    def count(self, source: str) -> None:
        """One more round, answered by ``source``."""
        self.rounds += 1
        self.hits += source == "hit"
        self.partial += source == "partial"
        self.misses += source not in ("hit", "partial")

    @property
    def not_hits(self) -> int:
        """Partial hits and misses."""
        return self.rounds - self.hits

    def totals(self) -> tuple[int, int, int, int]:
        """(rounds, hits, partial, misses)."""
        return self.rounds, self.hits, self.partial, self.misses


@dataclass
class Figures:
    """Totals of the server since its start. Times are seconds."""

    requests: RequestFigures = field(default_factory=RequestFigures)
    misses: Counter[str] = field(default_factory=Counter)
    accepted_per_position: list[int] = field(default_factory=list)
    verified_per_position: list[int] = field(default_factory=list)
    forwards: int = 0
    narrow_forwards: int = 0
    timeouts: int = 0
    verify_s: float = 0.0
    wait_s: float = 0.0
    hit_wait_s: float = 0.0
    """The part of ``wait_s`` in forwards whose rows were all hits: round trips and late trees, no drafting."""
    other_s: float = 0.0

    def count_round(self, source: str) -> None:
        """One request's round, answered by ``source`` (``hit``, ``partial``, or what answered a miss)."""
        self.requests.count(source)
        if source not in ("hit", "partial"):
            self.misses[source] += 1

    def count_outcome(self, accepted: int, verified: int) -> None:
        """One request's outcome: ``accepted`` of ``verified`` draft tokens."""
        for position in range(verified):
            self.verified_per_position[position] += 1
            self.accepted_per_position[position] += position < accepted

    def as_dict(self) -> dict[str, object]:
        """The JSON part of ``/ssd/status`` that belongs to the scheduler."""
        rounds, hits, partial, misses = self.requests.totals()
        per_forward = 1e3 / max(1, self.forwards)
        return {
            "rounds": rounds,
            "hits": hits,
            "partial": partial,
            "misses": dict(self.misses) | {"total": misses},
            "accepted_per_position": list(self.accepted_per_position),
            "verified_per_position": list(self.verified_per_position),
            "forwards": self.forwards,
            "narrow_forwards": self.narrow_forwards,
            "timeouts": self.timeouts,
            "round_ms": {
                "verify": self.verify_s * per_forward,
                "wait": self.wait_s * per_forward,
                "hit_wait": self.hit_wait_s * per_forward,
                "other": self.other_s * per_forward,
            },
        }
