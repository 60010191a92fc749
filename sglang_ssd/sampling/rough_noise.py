"""The noise's hash bits of a whole vocabulary on a CPU, without the hash's last step.

The same arithmetic as in ``murmur.py``, in NumPy, which shifts unsigned integers and works in place, on buffers that
stay in a core's cache: it takes a fourth of the time.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_ssd.sampling.murmur import ADDEND, FACTORS, LENGTH, rotate_left, state_of

_SHIFTS = (16, 13)


class RoughNoise:
    """Rows of bits, one at a time. Not for several threads: a row is good until the next is asked for."""

    def __init__(self, prepared: Tensor) -> None:
        """``prepared`` as in NoiseTable."""
        # A rotation goes into an exclusive or, so that the token's part of it is done once.
        self._rotated = _unsigned(rotate_left(prepared, 13))
        self._bits, self._shifted = np.empty_like(self._rotated), np.empty_like(self._rotated)

    def states(self, seeds: Tensor, positions: Tensor) -> NDArray[np.uint32]:
        """The hash before the token's id, for int64 [S] each: [S], for :meth:`row`."""
        return _unsigned(rotate_left(state_of(seeds, positions), 13))

    def row(self, state: np.uint32, width: int) -> NDArray[np.uint32]:
        """Bits of the first ``width`` ids; :func:`finished` makes the noise's own of them, and keeps the upper 16."""
        bits, shifted = self._bits[:width], self._shifted[:width]
        np.bitwise_xor(self._rotated[:width], state, out=bits)
        bits *= np.uint32(5)
        bits += np.uint32(ADDEND)
        bits ^= np.uint32(LENGTH)
        for shift, factor in zip(_SHIFTS, FACTORS, strict=True):
            np.right_shift(bits, np.uint32(shift), out=shifted)
            bits ^= shifted
            bits *= np.uint32(factor)
        return bits


def finished(rough: NDArray[np.uint32]) -> Tensor:
    """The hash bits of rough ones: int32 of the same shape."""
    return torch.from_numpy((rough ^ (rough >> np.uint32(16))).view(np.int32))


def _unsigned(bits: Tensor) -> NDArray[np.uint32]:
    unsigned: NDArray[np.uint32] = bits.numpy().view(np.uint32)
    return unsigned
