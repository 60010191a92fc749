"""What drafts are worth: the arithmetic that every decision shares."""

from __future__ import annotations


def expected_tokens(acceptance: float, drafts: float) -> float:
    """Tokens that a round yields with so many drafts, the bonus included: (1 - a**(m+1)) / (1 - a), a in (0, 1)."""
    return float((1 - acceptance ** (drafts + 1)) / (1 - acceptance))
