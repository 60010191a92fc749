"""From the host to a device in one copy, however many tensors there are: every copy costs a launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_ALIGNMENT = 8
"""Bytes; no dtype here is wider."""


def to_device(tree: T, device: torch.device) -> T:
    """``tree`` with its tensors on ``device``.

    Args:
        tree: a CPU tensor, or a dataclass or tuple of trees; what is nothing of these is left alone.
        device: a CPU gets the same tensors.

    """
    if device.type == "cpu":
        return tree
    leaves: list[Tensor] = []

    def keep(leaf: Tensor) -> Tensor:
        leaves.append(leaf)
        return leaf

    _map(tree, keep)
    parts = iter(_unpack(_pack(leaves, pin=device.type == "cuda").to(device, non_blocking=True), leaves))
    moved: T = _map(tree, lambda _: next(parts))
    return moved


def _map(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401 - any dataclass
    """``tree`` with every tensor changed, in one order always."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        return tuple(_map(each, change) for each in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{field.name: _map(getattr(tree, field.name), change) for field in fields(tree)})
    return tree


def _pack(leaves: list[Tensor], *, pin: bool) -> Tensor:
    """The bytes of all, each aligned: uint8 [n]."""
    packed = torch.empty(sum(map(_room, leaves)), dtype=torch.uint8, pin_memory=pin)
    for leaf, place in zip(leaves, torch.split(packed, [*map(_room, leaves)]), strict=True):
        place[: leaf.nbytes] = leaf.contiguous().view(-1).view(torch.uint8)
    return packed


def _unpack(packed: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Views of ``packed`` that look like ``leaves``."""
    places = torch.split(packed, [*map(_room, leaves)])
    return [place[: leaf.nbytes].view(leaf.dtype).view(leaf.shape) for leaf, place in zip(leaves, places, strict=True)]


def _room(leaf: Tensor) -> int:
    return -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
