"""32-bit MurmurHash3 of four blocks, step by step: int32 that wraps around has the bits of uint32 on every device."""

from __future__ import annotations

import torch
from torch import Tensor

_C1, _C2 = 0xCC9E2D51, 0x1B873593
ADDEND, LENGTH, FACTORS = 0xE6546B64, 16, (0x85EBCA6B, 0xC2B2AE35)
"""MurmurHash3's: added with every block; the bytes of four blocks; and of the last mix."""
UINT32_MAX = 2**32 - 1


def _int32(value: int) -> int:
    """The int32 with the bits of the uint32 ``value``."""
    return value - 2**32 if value >= 2**31 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int32."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def rotate_left(x: Tensor, bits: int) -> Tensor:
    """Of int32."""
    return (x << bits).bitwise_or_(_shift_right(x, 32 - bits))


def scramble(block: Tensor) -> Tensor:
    """The part of one mixing step that depends on the block only, so that token ids can be prepared once."""
    return rotate_left(block * _int32(_C1), 15).mul_(_int32(_C2))


def absorb(state: Tensor, scrambled: Tensor) -> Tensor:
    """The state behind one more block."""
    return rotate_left(state ^ scrambled, 13).mul_(5).add_(_int32(ADDEND))


def finish(state: Tensor) -> Tensor:
    """The last mix, in place."""
    state.bitwise_xor_(LENGTH)
    state.bitwise_xor_(_shift_right(state, 16)).mul_(_int32(FACTORS[0]))
    state.bitwise_xor_(_shift_right(state, 13)).mul_(_int32(FACTORS[1]))
    return state.bitwise_xor_(_shift_right(state, 16))


def state_of(seeds: Tensor, positions: Tensor) -> Tensor:
    """The state behind three blocks, seed low, seed high and position, of int64 [B] each: int32 [B]."""
    low = (seeds & UINT32_MAX).to(torch.int32)
    high = (seeds >> 32).to(torch.int32)
    state = torch.zeros_like(low)
    for block in (low, high, positions.to(torch.int32)):
        state = absorb(state, scramble(block))
    return state
