"""Gumbel noise that both sides can compute: a hash of (seed, position, token id).

The hash is 32-bit MurmurHash3 over four blocks, seed low, seed high, position and token id, bit for bit the one
of SGLang's seeded sampler (``sglang.kernels.ops.sampling.murmur_hash``), so that a seed names the same
noise there and here. Arithmetic is int32 with wrap-around: the same bits as uint32, and torch has it on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_C1, _C2 = 0xCC9E2D51, 0x1B873593
_UINT32_MAX = 2**32 - 1


def _int32(value: int) -> int:
    """The int32 with the bits of the uint32 ``value``."""
    return value - 2**32 if value >= 2**31 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int32."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _rotate_left(x: Tensor, bits: int) -> Tensor:
    return (x << bits).bitwise_or_(_shift_right(x, 32 - bits))


def _scramble(block: Tensor) -> Tensor:
    """The part of one mixing step that depends on the block only, so that token ids can be prepared once."""
    return _rotate_left(block * _int32(_C1), 15).mul_(_int32(_C2))


def _absorb(state: Tensor, scrambled: Tensor) -> Tensor:
    return _rotate_left(state ^ scrambled, 13).mul_(5).add_(_int32(0xE6546B64))


def _finish(state: Tensor) -> Tensor:
    """The last mix, in place."""
    state.bitwise_xor_(16)  # length in bytes of the four blocks
    state.bitwise_xor_(_shift_right(state, 16)).mul_(_int32(0x85EBCA6B))
    state.bitwise_xor_(_shift_right(state, 13)).mul_(_int32(0xC2B2AE35))
    return state.bitwise_xor_(_shift_right(state, 16))


def scrambled_ids(ids: Tensor) -> Tensor:
    """Token ids [...] of any integer dtype, prepared for :func:`noise_bits` (int32, same shape)."""
    return _scramble(ids.to(torch.int32))


def noise_bits(seeds: Tensor, positions: Tensor, prepared: Tensor) -> Tensor:
    """Hash bits of every (seed, position) with every token id.

    Args:
        seeds: int64 [B], the bits of the 64-bit seed.
        positions: integer [B], index of the token whose logits are used.
        prepared: int32 [V] or [B, V] from :func:`scrambled_ids`.

    Returns:
        int32 [B, V], the bits of a uint32 each (:func:`as_unsigned` gives the numbers).

    """
    low = (seeds & _UINT32_MAX).to(torch.int32)
    high = (seeds >> 32).to(torch.int32)
    state = torch.zeros_like(low)
    for block in (low, high, positions.to(torch.int32)):
        state = _absorb(state, _scramble(block))
    return _finish(_absorb(state[:, None], prepared))


def as_unsigned(bits: Tensor) -> Tensor:
    """The uint32 values of int32 ``bits``, int64."""
    return bits.to(torch.int64) & _UINT32_MAX


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise in float64 of hash bits (int32), finite at both ends as SGLang's is."""
    x = as_unsigned(bits).to(torch.float64).div_(_UINT32_MAX)
    exponential = x.log_().clamp_(min=torch.finfo(torch.float64).min, max=-(2.0**-32)).neg_()
    return exponential.log_().neg_()


@dataclass(frozen=True)
class NoiseTable:
    """The hash's part of every token id, computed once by who draws often: int32 [V] on the device of the logits."""

    prepared: Tensor

    @classmethod
    def of(cls, vocab_size: int, device: torch.device | str = "cpu") -> NoiseTable:
        """For the ids 0..``vocab_size`` - 1."""
        return cls(scrambled_ids(torch.arange(vocab_size, device=device)))

    def bits(self, seeds: Tensor, positions: Tensor, width: int) -> Tensor:
        """:func:`noise_bits` of the first ``width`` ids, int32 [B, width]."""
        if width > len(self.prepared):
            raise ValueError(f"logits of {width} tokens, noise of {len(self.prepared)}: this is a bug")
        return noise_bits(seeds, positions, self.prepared[:width])

    def bits_at(self, seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        """:func:`noise_bits` of n triples (seed, position, token id), int32 [n]."""
        return noise_bits(seeds, positions, self.prepared[ids][:, None]).squeeze(-1)
