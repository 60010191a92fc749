"""Seeds: every request has one, also those that did not ask for it."""

from __future__ import annotations

_MASK64 = 2**64 - 1


def derive_seed(seed: int, index: int) -> int:
    """A well-mixed signed 64-bit seed for the ``index``-th request of a server (splitmix64 over both words)."""
    state = _mix(_mix(seed & _MASK64) ^ (index & _MASK64))
    return state - 2**64 if state >= 2**63 else state


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
