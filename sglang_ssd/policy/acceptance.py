"""A running estimate of the chance that the target accepts one more draft token."""

from __future__ import annotations

LOWEST, HIGHEST = 0.05, 0.95
MEMORY = 0.99
"""Weight of the past at each outcome: about the last hundred count."""
_PRIOR_ACCEPTED, _PRIOR_TRIED = 7.0, 10.0


class Acceptance:
    """Accepted over tried draft tokens, older outcomes fading, kept inside [0.05, 0.95]."""

    def __init__(self) -> None:
        self._accepted, self._tried = _PRIOR_ACCEPTED, _PRIOR_TRIED

    @property
    def rate(self) -> float:
        """The estimate, never so sure that a position gets no row or all of them."""
        return min(HIGHEST, max(LOWEST, self._accepted / self._tried))

    def observe(self, accepted: int, verified: int, memory: float = MEMORY) -> None:
        """Count one outcome: of ``verified`` drafts the first ``accepted`` were right; the next, if any, was not.

        ``memory`` is the weight that the past keeps.
        """
        if verified <= 0:
            return
        self._accepted = self._accepted * memory + accepted
        self._tried = self._tried * memory + min(accepted + 1, verified)
