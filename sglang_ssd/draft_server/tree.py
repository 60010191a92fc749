"""The radix tree over token ids, one KV slot per node, shared by all sessions: it is also the speculation cache.

Who owns a slot, always exactly one of:

    slots 1 ................................................................ capacity
          [ free list | tree nodes                                | scratch ]
                        committed: some session's text went here    re-runs of the forward now being built
                        speculative: nobody's text yet

and along one session's positions (N committed tokens, j in flight):

    [0, valid_len)          committed nodes; the session holds the last one, which protects its ancestors
    [valid_len, N)          committed tokens without KV: the next forward of the session runs them
    [N, N + j)              the in-flight chain: speculative nodes, each held (its last token may have none yet)
    beyond N + k, k = 0..j  branches: speculative nodes, each held

A node that nobody holds and that has no children is freed at once if it is speculative; if it is committed, it
stays and is evicted, least recently used first, when a slot is needed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count
from typing import NamedTuple, TypeAlias

from sglang_ssd.draft_server.engine import Sample
from sglang_ssd.draft_server.pool import Pool
from sglang_ssd.draft_server.terms import Terms

Key: TypeAlias = Terms | None
"""What candidates were drawn by; None before there are any."""


class Guesses(NamedTuple):
    """The best next tokens after one node, best first, and their scores: M of each. In rejection mode the draft's own
    next token is a ``sample``, drawn when the node was run and kept: see :mod:`sglang_ssd.sampling.rejection`.
    """

    ids: list[int]
    scores: list[float]
    sample: Sample | None = None

    @property
    def best(self) -> int:
        """The draft's own next token."""
        return self.ids[0] if self.sample is None else self.sample.token


class Node:
    """One token at one position behind one prefix, and the slot of its KV."""

    __slots__ = (
        "children",
        "committed",
        "guesses",
        "in_flight",
        "key",
        "parent",
        "position",
        "refs",
        "slot",
        "stamp",
        "token",
    )

    def __init__(self, parent: Node | None, token: int, slot: int, committed: bool) -> None:
        self.parent = parent
        self.token = token
        self.slot = slot
        self.position: int = -1 if parent is None else parent.position + 1
        self.committed = committed
        self.children: dict[int, Node] = {}
        self.refs = 0
        self.stamp = 0
        self.guesses: Guesses | None = None
        self.key: Key = None
        self.in_flight = False
        """Whether the forward now being built writes this node's KV."""


class Tree:
    """All nodes and all slots of one engine."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.root = Node(None, -1, 0, committed=True)
        self.nodes = 0
        self.evictions = 0
        self._slots = Pool(1, capacity)
        self._scratch: set[int] = set()
        self._clock = count(1)
        self._evictable: list[tuple[int, int, Node]] = []
        """Heap of (stamp, tie-break, node); an entry counts only while the node is idle under that stamp."""

    @property
    def free(self) -> int:
        """Slots that nobody owns."""
        return len(self._slots)

    def add(self, parent: Node, token: int, *, committed: bool) -> Node | None:
        """A new child of ``parent`` with a slot of its own, or None when no slot can be had. Hold it next."""
        if token in parent.children:
            raise AssertionError("two nodes for one token: this is a bug")
        slot = self._take()
        if slot is None:
            return None
        node = Node(parent, token, slot, committed)
        parent.children[token] = node
        self.nodes += 1
        return node

    def take_scratch(self) -> int | None:
        """A slot for a re-run within one forward, or None."""
        slot = self._take()
        if slot is not None:
            self._scratch.add(slot)
        return slot

    def give_scratch(self, slot: int) -> None:
        """The forward is done."""
        self._scratch.remove(slot)
        self._slots.give(slot)

    def hold(self, node: Node) -> None:
        """Keep ``node`` and its ancestors."""
        node.refs += 1

    def release(self, node: Node) -> None:
        """Undo one hold. Release a node's held descendants first."""
        node.refs -= 1
        if node.refs:
            return
        if not node.committed:
            self._remove(node)
            return
        node.stamp = next(self._clock)
        if not node.children:
            self._offer(node)

    def commit(self, node: Node) -> None:
        """Some session's text now leads to ``node``."""
        at: Node | None = node
        while at is not None and not at.committed:
            at.committed = True
            at = at.parent

    def forget(self) -> None:
        """Drop every node that no session needs."""
        while self._evict():
            pass

    def walk(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self, holds: Mapping[Node, int]) -> None:
        """Raises AssertionError unless every slot has one owner and ``holds`` are all the references there are."""
        owners = Counter(self._slots.free_ids())
        owners.update(self._scratch)
        offered = {node for stamp, _, node in self._evictable if stamp == node.stamp}
        seen = 0
        for node in self.walk():
            seen += 1
            owners[node.slot] += 1
            parent = node.parent
            _require(parent is not None and parent.children.get(node.token) is node, node, "is not its parent's child")
            _require(node.refs == holds.get(node, 0), node, f"has {node.refs} holds, sessions {holds.get(node, 0)}")
            _require(node.committed or node.refs > 0, node, "is speculative and nobody's")
            _require(not node.committed or (parent is not None and parent.committed), node, "hangs below a guess")
            _require(not node.in_flight, node, "waits for a forward that is over")
            idle = node.refs == 0 and not node.children
            _require(not idle or node in offered, node, "can never be evicted")
        _require(seen == self.nodes, self.root, f"leads to {seen} nodes of {self.nodes}")
        every = len(owners) == self.capacity == owners.total()
        _require(every and min(owners) == 1 and max(owners) == self.capacity, self.root, "does not own each slot once")

    def _take(self) -> int | None:
        slot = self._slots.take()
        while slot is None and self._evict():
            slot = self._slots.take()
        return slot

    def _evict(self) -> bool:
        """Remove the idle node that was left longest ago; False when there is none."""
        while self._evictable:
            stamp, _, node = heapq.heappop(self._evictable)
            if _is_idle(node) and stamp == node.stamp:
                self._remove(node)
                self.evictions += 1
                return True
        return False

    def _remove(self, node: Node) -> None:
        parent = node.parent
        if node.children or parent is None:
            raise AssertionError("a node with children was freed: this is a bug")
        del parent.children[node.token]
        self._slots.give(node.slot)
        node.slot, node.parent, self.nodes = 0, None, self.nodes - 1
        if _is_idle(parent):
            parent.stamp = max(parent.stamp, node.stamp)
            self._offer(parent)

    def _offer(self, node: Node) -> None:
        """Let ``node`` be evicted. Now and then entries that no longer count are swept out of the heap."""
        if node is self.root:
            return
        heapq.heappush(self._evictable, (node.stamp, next(self._clock), node))
        if len(self._evictable) > 2 * self.nodes + 64:
            self._evictable = [entry for entry in self._evictable if _is_idle(entry[2]) and entry[0] == entry[2].stamp]
            heapq.heapify(self._evictable)


def _is_idle(node: Node) -> bool:
    return node.refs == 0 and not node.children and node.slot > 0


def _require(condition: bool, node: Node, what: str) -> None:
    if not condition:
        raise AssertionError(f"tree: node of token {node.token} at position {node.position} {what}")
