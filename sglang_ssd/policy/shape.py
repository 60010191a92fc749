"""How many branches and how deep: the tree that is worth most by the time the outcome comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_ssd.policy.worth import expected_tokens


@dataclass(frozen=True)
class Shape:
    """``rows`` branches for all sessions together, ``depth`` draft tokens each."""

    rows: int
    depth: int


@dataclass(frozen=True)
class Setting:
    """What a round's tree is made for: S sessions, a K of ``limit``, an outcome in ``available_us`` microseconds.

    ``verify_us`` is the target's whole forward (0 when unknown), ``step_us(rows)`` a draft step's time, ``acceptance``
    the chance of one more accepted token, ``jit_steps`` what a missed row is drafted afterwards. No step was measured
    that had more than ``tried_rows``.
    """

    sessions: int
    limit: int
    available_us: float
    verify_us: float
    step_us: Callable[[int], float]
    acceptance: float
    jit_steps: int
    tried_rows: int


def best_shape(hits: Sequence[float], setting: Setting) -> Shape:
    """The shape with the most expected tokens per second in the coming round.

    ``hits[n]`` is how many sessions are expected to hit with the n best branches, so the most rows are
    ``len(hits) - 1``. A tree of depth d takes d steps of its rows and one before them, for what the text and the chain
    lack of KV. What is not ready when the outcome comes is waited for; missed rows are drafted after it. Without
    measurements it is all rows and the whole depth; afterwards at most twice the rows that were tried, for what larger
    steps take is a guess.
    """
    most = len(hits) - 1
    if setting.verify_us <= 0 or setting.step_us(1) <= 0:
        return Shape(most, setting.limit)
    most = min(most, 2 * setting.tried_rows)
    shapes = [Shape(rows, depth) for rows in _sizes(most) for depth in range(1, setting.limit + 1)]
    return max(shapes, key=lambda shape: _rate(hits[shape.rows], shape, setting), default=Shape(0, 0))


def _sizes(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... and ``most``."""
    sizes, size = [], 1
    while size < most:
        sizes += [size] if size < 2 else [size, size + size // 2]
        size *= 2
    return [size for size in sizes if size < most] + ([most] if most else [])


def _rate(hits: float, shape: Shape, setting: Setting) -> float:
    """Tokens per microsecond."""
    missed = max(0.0, setting.sessions - hits)
    tokens = hits * expected_tokens(setting.acceptance, shape.depth)
    tokens += missed * expected_tokens(setting.acceptance, setting.jit_steps)
    trunk = setting.step_us(max(setting.sessions, shape.rows))
    late = max(0.0, trunk + shape.depth * setting.step_us(shape.rows) - setting.available_us)
    all_hit = (min(hits, setting.sessions) / setting.sessions) ** setting.sessions
    drafting = (1 - all_hit) * setting.jit_steps * setting.step_us(max(1, round(missed)))
    return tokens / (setting.verify_us + late + drafting)
