"""The branches of all sessions' trees, as columns: a depth takes one step of every branch at once.

A branch is a guess at an outcome and its continuation: a table row that shares its session's entries up to its start.
Its nodes are the last ``length`` ones on the way to ``node``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_ssd.draft_server.engine import Ints
from sglang_ssd.draft_server.tree import Tree

NO_ROW = -1
_GONE = -1
"""The seat of a number that no branch has."""
_FIRST_CAPACITY = 256
_NO_NODES: Ints = np.zeros(0, dtype=np.int64)


class Branch(NamedTuple):
    """One branch: the bonus candidate ``first``, consumed first, after ``k`` accepted drafts; ``todo`` forwards are
    left, ``row`` is None once nothing is left to run, and ``nodes`` are those that were run or are in flight.
    """

    k: int
    first: int
    todo: int
    row: int | None
    nodes: list[int]


class Branches:
    """Each branch is a number; columns are int64 [capacity] by it. A number is used again when its branch is gone.

    ``seat`` is the table row of the branch's session, ``row`` its own.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._births = 0
        self._columns = np.zeros((8, 0), dtype=np.int64)
        self._widen()

    def add(self, seat: Ints, k: Ints, first: Ints, todo: Ints, row: Ints, node: Ints) -> None:
        """New branches behind ``node``, the best first; all [n]."""
        while len(free := np.flatnonzero(self.seat == _GONE)) < len(seat):
            self._widen()
        free = free[: len(seat)]
        self.seat[free], self.k[free], self.first[free] = seat, k, first
        self.todo[free], self.row[free], self.node[free], self.length[free] = todo, row, node, 0
        self._born[free] = np.arange(self._births, self._births + len(seat))
        self._births += len(seat)

    def of(self, seats: list[int]) -> Ints:
        """The branches of the sessions at ``seats``, in the order in which they began."""
        return self.in_order(np.flatnonzero(self._are_at(seats)))

    def live(self, seats: list[int]) -> Ints:
        """Those that have something left to run."""
        return self.in_order(np.flatnonzero((self.todo > 0) & self._are_at(seats)))

    def at(self, numbers: Ints, seats: list[int]) -> Ints:
        """Those of some branches that are of the sessions at ``seats``."""
        return numbers[self._are_at(seats)[numbers]]

    def nodes(self, numbers: Ints) -> Ints:
        """All nodes of some branches, a node once for every branch that holds it."""
        found, at, left = [_NO_NODES], self.node[numbers], self.length[numbers]
        while np.count_nonzero(more := left > 0):
            at, left = at[more], left[more] - 1
            found.append(at)
            at = self._tree.parent[at]
        return np.concatenate(found)

    def forget(self, numbers: Ints) -> None:
        """They are gone."""
        self.seat[numbers] = _GONE
        self.todo[numbers] = 0

    def listed(self, seat: int) -> list[Branch]:
        """The branches of one session."""
        numbers = self.of([seat])
        columns = (column[numbers].tolist() for column in (self.k, self.first, self.todo, self.row))
        nodes = [self.nodes(numbers[i : i + 1])[::-1].tolist() for i in range(len(numbers))]
        return [
            Branch(k, first, todo, None if row == NO_ROW else row, its)
            for k, first, todo, row, its in zip(*columns, nodes, strict=True)
        ]

    def in_order(self, numbers: Ints) -> Ints:
        """Branches in the order in which they began."""
        order: Ints = self._born[numbers].argsort()
        return numbers[order]

    def _are_at(self, seats: list[int]) -> NDArray[np.bool_]:
        """[capacity]: which branches are of the sessions at ``seats``."""
        there: NDArray[np.bool_]
        if len(seats) == 1:
            there = self.seat == seats[0]
            return there
        wanted = np.zeros(max(seats, default=0) + 2, dtype=np.bool_)
        wanted[seats] = True
        wanted[-1] = False
        there = wanted[np.minimum(self.seat, len(wanted) - 1)]
        return there

    def _widen(self) -> None:
        """Room for twice as many."""
        more = np.zeros((len(self._columns), self._columns.shape[1] or _FIRST_CAPACITY), dtype=np.int64)
        more[0] = _GONE
        self._columns = np.concatenate([self._columns, more], axis=1)
        self.seat, self.k, self.first, self.todo, self.row, self.node, self.length, self._born = self._columns
