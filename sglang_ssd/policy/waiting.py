"""Answer now with what is ready, or draft a little more first?"""

from __future__ import annotations

from sglang_ssd.policy.worth import expected_tokens


def best_depth(ready: int, limit: int, acceptance: float, verify_us: float, step_us: float) -> int:
    """The number of draft tokens to answer with, so that expected tokens per second are highest.

    A round with m drafts takes the target's verify plus the draft steps that it waits for: maximise
    :func:`~sglang_ssd.policy.worth.expected_tokens` over ``verify_us + (m - ready) * step_us``.

    Args:
        ready: draft tokens at hand already.
        limit: the most that are useful, at least ``ready``.
        acceptance: a in (0, 1).
        verify_us: the target's forward in microseconds; 0 when unknown, and then the answer is ``limit``.
        step_us: one draft step in microseconds.

    """
    if verify_us <= 0:
        return limit
    return max(
        range(ready, limit + 1),
        key=lambda drafts: expected_tokens(acceptance, drafts) / (verify_us + (drafts - ready) * step_us),
    )
