"""Changes of a block table, one by one against loops."""

from __future__ import annotations

import numpy as np
import torch

from sglang_ssd.draft_server.edits import Entries, Forks


def test_a_fork_copies_its_own_length_only_beside_a_longer_one() -> None:
    """What was entered behind a short fork stays: a branch may go on along nodes that are there already."""
    generator = np.random.default_rng(3)
    table = torch.from_numpy(generator.integers(1, 99, size=(8, 12)).astype(np.int32))
    expected = table.numpy().copy()
    rows, positions, slots = np.array([3, 3, 5]), np.array([2, 4, 11]), np.array([100, 101, 102])
    sources, lengths, targets = np.array([0, 1, 1]), np.array([2, 11, 0]), np.array([3, 4, 5])
    Entries.of(rows, positions, slots).apply(table)
    Forks.of(sources, lengths, targets).apply(table)
    expected[rows, positions] = slots
    for source, length, target in zip(sources, lengths, targets, strict=True):
        expected[target, :length] = expected[source, :length]
    assert table.tolist() == expected.tolist()
    assert table[3, 2:5:2].tolist() == [100, 101]
