"""Rotary position embedding of Llama checkpoints: plain, linearly scaled, and Llama 3's by-part scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class UnknownRope(ValueError):
    """The checkpoint scales its rotary embedding in a way that this engine does not have."""


def rope_tables(config: Mapping[str, Any], head_dim: int, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine, float32 [length, head_dim], of positions 0..length-1. Raises UnknownRope.

    Reads both forms of ``config.json``: ``rope_theta`` with ``rope_scaling``, and transformers 5's ``rope_parameters``.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10000.0)
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), _scaled(frequencies, given))
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """``x`` [B, heads, head_dim] turned by the tables' rows [B, head_dim] of its positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine[:, None] + torch.cat([-second, first], dim=-1) * sine[:, None]


def _scaled(frequencies: Tensor, given: Mapping[str, Any]) -> Tensor:
    kind = given.get("rope_type") or given.get("type") or "default"
    match kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / float(given["factor"])
        case "llama3":
            return _llama3(frequencies, given)
    raise UnknownRope(f"rotary embedding of kind {kind!r} is not one that the torch engine has; use --engine sglang")


def _llama3(frequencies: Tensor, given: Mapping[str, Any]) -> Tensor:
    """Long waves are stretched by ``factor``, short ones stay, those between are blended."""
    low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
    turns = float(given["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / float(given["factor"]))
