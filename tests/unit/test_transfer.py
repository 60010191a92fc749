"""Trees of tensors in one copy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_ssd.draft_server import transfer
from sglang_ssd.draft_server.drawing import to_host
from sglang_ssd.draft_server.transfer import to_device
from sglang_ssd.sampling.candidates import Found
from sglang_ssd.sampling.window import Support

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
    """Counts what goes from one device to another, or another operation."""

    def __init__(self, counted: object = torch.ops.aten._to_copy.default) -> None:
        super().__init__()
        self.counted, self.count = counted, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is self.counted
        return function(*args, **(kwargs or {}))


def test_what_a_forward_found_comes_back_in_one_copy() -> None:
    """With samples too; ids stay exact beyond what float32 holds."""
    ids, scores = torch.tensor([[5, 2**24 + 1, 3], [1, 0, 2]]), torch.randn(2, 3)
    tokens, support = torch.tensor([7]), Support(torch.tensor([[7, 2**24 + 3]]), torch.tensor([[0.75, 0.25]]))
    for found, samples in ((Found(ids, scores), 0), (Found(ids, scores, tokens, support), 1)):
        with Copies(torch.ops.aten.cat.default) as joins:
            host = to_host(found)
        assert joins.count == 1  # on a CPU the copy itself is none
        assert (host.ids.tolist(), host.scores.tolist()) == (ids.tolist(), scores.tolist())
        assert len(host.samples) == samples
    assert host.samples[0].token == 7
    assert np.frombuffer(host.samples[0].ids, "<i4").tolist() == [7, 2**24 + 3]
    assert np.frombuffer(host.samples[0].q, "<f4").tolist() == [0.75, 0.25]


@pytest.mark.parametrize("tree", [outer(), (outer(), None, outer()), torch.arange(4)])
def test_a_tree_goes_in_one_copy_and_keeps_its_shape(tree: object) -> None:
    with Copies() as copies:
        moved = to_device(tree, META)
    assert copies.count == 1
    assert type(moved) is type(tree)
    if isinstance(moved, Outer):
        assert (moved.inner.width, moved.inner.values.device.type, moved.more[0].shape) == (7, "meta", (3, 3))
        assert moved.flags.dtype == torch.bool
