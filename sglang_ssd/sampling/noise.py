"""Gumbel noise that both sides can compute: a hash of (seed, position, token id).

The hash is 32-bit MurmurHash3 over four blocks, seed low, seed high, position and token id, bit for bit the one
of SGLang's seeded sampler (``sglang.kernels.ops.sampling.murmur_hash``), so that a seed names the same
noise there and here. Arithmetic is int32 with wrap-around: the same bits as uint32, and torch has it on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sglang_ssd.sampling.murmur import UINT32_MAX, absorb, finish, scramble, state_of
from sglang_ssd.sampling.rough_noise import RoughNoise


def scrambled_ids(ids: Tensor) -> Tensor:
    """Token ids [...] of any integer dtype, prepared for :func:`noise_bits` (int32, same shape)."""
    return scramble(ids.to(torch.int32))


def noise_bits(seeds: Tensor, positions: Tensor, prepared: Tensor) -> Tensor:
    """Hash bits of every (seed, position) with every token id.

    Args:
        seeds: int64 [B], the bits of the 64-bit seed.
        positions: integer [B], index of the token whose logits are used.
        prepared: int32 [V] or [B, V] from :func:`scrambled_ids`.

    Returns:
        int32 [B, V], the bits of a uint32 each (:func:`as_unsigned` gives the numbers).

    """
    return finish(absorb(state_of(seeds, positions)[:, None], prepared))


def as_unsigned(bits: Tensor) -> Tensor:
    """The uint32 values of int32 ``bits``, int64."""
    return bits.to(torch.int64) & UINT32_MAX


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise in float64 of hash bits (int32), finite at both ends as SGLang's is."""
    x = as_unsigned(bits).to(torch.float64).div_(UINT32_MAX)
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

    @cached_property
    def rough(self) -> RoughNoise:
        """Its bits row by row, nearly, at a fraction of the cost; the table must be on a CPU."""
        return RoughNoise(self.prepared)
