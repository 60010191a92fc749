"""Trees of tensors in one copy."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_ssd.draft_server import transfer
from sglang_ssd.draft_server.transfer import to_device

CPU, META = torch.device("cpu"), torch.device("meta")


@dataclass(frozen=True)
class Inner:
    values: torch.Tensor
    width: int


@dataclass(frozen=True)
class Outer:
    flags: torch.Tensor
    inner: Inner | None
    more: tuple[torch.Tensor, ...]


def outer() -> Outer:
    grid = torch.arange(12).view(3, 4)
    return Outer(
        torch.tensor([True, False, True]),
        Inner(torch.tensor([0.5, -1.0, 2.0], dtype=torch.float32), 7),
        (grid.t()[1:], torch.empty(0, dtype=torch.int64), torch.tensor(-3), torch.ones(5, dtype=torch.uint8)),
    )


def test_a_cpu_gets_the_same_tensors() -> None:
    tree = (outer(), torch.arange(3))
    assert to_device(tree, CPU) is tree


def test_what_is_unpacked_is_what_was_packed() -> None:
    tree = outer()
    leaves = [tree.flags, tree.inner.values, *tree.more]
    packed = transfer._pack(leaves, pin=False)
    assert (packed.dtype, packed.dim()) == (torch.uint8, 1)
    for found, leaf in zip(transfer._unpack(packed, leaves), leaves, strict=True):
        assert (found.dtype, found.shape) == (leaf.dtype, leaf.shape)
        assert torch.equal(found, leaf)


class Copies(TorchDispatchMode):
    """Counts what goes from one device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._to_copy.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("tree", [outer(), (outer(), None, outer()), torch.arange(4)])
def test_a_tree_goes_in_one_copy_and_keeps_its_shape(tree: object) -> None:
    with Copies() as copies:
        moved = to_device(tree, META)
    assert copies.count == 1
    assert type(moved) is type(tree)
    if isinstance(moved, Outer):
        assert (moved.inner.width, moved.inner.values.device.type, moved.more[0].shape) == (7, "meta", (3, 3))
        assert moved.flags.dtype == torch.bool
