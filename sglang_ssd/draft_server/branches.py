"""The branches of all sessions' trees, as columns: a depth takes one step of every branch at once.

A branch is a guess at an outcome and its continuation: a table row that shares its session's entries up to its start.
Its nodes are the last ``length`` ones on the way to ``node``.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

import numpy as np

from sglang_ssd.draft_server.engine import Ints
from sglang_ssd.draft_server.tree import Tree

NO_ROW = -1
_FREE = 0
_FIRST_CAPACITY = 256


class Branch(NamedTuple):
    """One branch: the bonus candidate ``first``, consumed first, after ``k`` accepted drafts; ``todo`` forwards are
    left, ``row`` is None once nothing is left to run, and ``nodes`` are those that were run or are in flight.
    """

    number: int
    k: int
    first: int
    todo: int
    row: int | None
    nodes: list[int]


class Branches:
    """Each branch is a number; columns are int64 [capacity] by it. A number is used again when its branch is gone."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._births = count(1)
        self._columns = np.zeros((9, _FIRST_CAPACITY), dtype=np.int64)
        self._name_columns()

    def add(self, growth: Ints, seat: Ints, k: Ints, first: Ints, todo: Ints, row: Ints, node: Ints) -> None:
        """New branches, the best first; all [n]."""
        free = np.flatnonzero(self.growth == _FREE)
        while len(free) < len(growth):
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
            self._name_columns()
            free = np.flatnonzero(self.growth == _FREE)
        births = next(self._births)
        self._births = count(births + len(growth))
        numbers = free[: len(growth)]
        born = births + np.arange(len(growth))
        self._columns[:, numbers] = [growth, seat, k, first, todo, row, node, np.zeros_like(node), born]

    def of(self, growths: Iterable[int]) -> Ints:
        """The branches of some growths, in the order in which they began."""
        wanted = list(growths)
        mine = self.growth == wanted[0] if len(wanted) == 1 else np.isin(self.growth, wanted)
        return self.in_order(np.flatnonzero(mine)) if wanted else np.zeros(0, dtype=np.int64)

    def in_order(self, numbers: Ints) -> Ints:
        """Branches in the order in which they began."""
        return numbers[np.argsort(self.born[numbers], kind="stable")]

    def nodes(self, numbers: Ints) -> Ints:
        """All nodes of some branches, a node once for every branch that holds it."""
        found, at, left = [np.zeros(0, dtype=np.int64)], self.node[numbers], self.length[numbers]
        while (more := left > 0).any():
            at, left = at[more], left[more] - 1
            found.append(at)
            at = self._tree.parent[at]
        return np.concatenate(found)

    def forget(self, numbers: Ints) -> None:
        """They are gone."""
        self.growth[numbers] = _FREE
        self.todo[numbers] = 0

    def listed(self, growth: int) -> list[Branch]:
        """The branches of one growth."""
        numbers = self.of([growth])
        k, first, todo, row = (self._columns[i, numbers].tolist() for i in (2, 3, 4, 5))
        nodes = [self.nodes(np.array([number]))[::-1].tolist() for number in numbers]
        rows = [None if each == NO_ROW else each for each in row]
        return [Branch(*each) for each in zip(numbers.tolist(), k, first, todo, rows, nodes, strict=True)]

    def _name_columns(self) -> None:
        self.growth, self.seat, self.k, self.first, self.todo, self.row, self.node, self.length, self.born = (
            self._columns
        )
