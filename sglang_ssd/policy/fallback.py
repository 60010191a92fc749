"""What answers the rows that missed: drafted on demand, guessed from the text's own past, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_ssd.policy.worth import expected_tokens


@dataclass(frozen=True)
class Fallback:
    """``kind`` is jit, ngram or none; ``steps`` is how many tokens a jit draft may take."""

    kind: str
    steps: int = 0


@dataclass(frozen=True)
class Round:
    """What a missed round would cost and bring, for a batch in which all other rows hit.

    ``limit`` is K; ``hit_tokens``, ``jit_acceptance`` and ``ngram_tokens`` are per row. Times are seconds:
    ``verify_s(width)`` the target's forward, ``step_s(rows)`` a draft step.
    """

    batch: int
    limit: int
    hit_tokens: float
    hit_width: int
    jit_acceptance: float
    ngram_tokens: float
    verify_s: Callable[[int], float]
    step_s: Callable[[int], float]


def best_fallback(missed: int, round_: Round, kinds: frozenset[str]) -> Fallback:
    """The answer, of ``kinds``, with the most expected tokens per second of the round that it begins."""
    options = [Fallback(kind) for kind in ("none", "ngram") if kind in kinds]
    if "jit" in kinds:
        options += [Fallback("jit", steps) for steps in range(1, round_.limit + 1)]
    return max(options, key=lambda option: _rate(option, missed, round_), default=Fallback("none"))


def rule(round_: Round, kinds: frozenset[str], longest: int) -> tuple[Fallback, ...]:
    """The answers for 1, 2, ... missed rows, at most ``longest``; the last one also stands for more."""
    return tuple(best_fallback(missed, round_, kinds) for missed in range(1, min(round_.batch, longest) + 1))


def _rate(option: Fallback, missed: int, round_: Round) -> float:
    hits = round_.batch - missed
    per_miss = {
        "none": 1.0,
        "ngram": round_.ngram_tokens,
        "jit": expected_tokens(round_.jit_acceptance, option.steps),
    }[option.kind]
    width = 1 + {"none": 0, "ngram": round_.limit, "jit": option.steps}[option.kind]
    verify = round_.verify_s(max(width, round_.hit_width) if hits else width)
    tokens = hits * round_.hit_tokens + missed * per_miss
    # Before the first forward nothing is known of times: as many tokens as there may be.
    return tokens / (verify + option.steps * round_.step_s(missed)) if verify > 0 else tokens
