"""The radix tree over token ids, one KV slot per node, shared by all sessions: it is also the speculation cache.

A node *is* its slot id, and what is known of nodes are columns by slot: a round makes and frees thousands, and numpy
does that all at once. Node 0 is the root; 0 stands for no node where a node below the root is meant.

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
from collections.abc import Mapping
from itertools import count, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_ssd.draft_server.engine import Ints, Sample
from sglang_ssd.draft_server.pool import Pool
from sglang_ssd.draft_server.terms import Terms

ROOT = 0
_NOBODY = -1
"""The parent of the root, and of a slot that is no node."""
_TOKEN_BITS = 32


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


class Tree:
    """All nodes and all slots of one engine."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.evictions = 0
        self.parent = self._column(_NOBODY)
        self.token = self._column(-1)
        self.position = self._column(-1)
        self.refs = self._column(0)
        self.children = self._column(0)
        """How many."""
        self.heir = self._column(0)
        """One of its children, or none: almost all nodes have only one, and are found without a dictionary."""
        self.stamp = self._column(0)
        """When the last holder let go."""
        self.key = self._column(0)
        """By which terms guesses were drawn, or are being drawn: see :meth:`key_of`."""
        self._mark = self._column(0)
        """Scratch paper."""
        self.best = self._column(-1)
        """The draft's own next token; -1 until there are guesses."""
        self.committed: NDArray[np.bool_] = np.zeros(capacity + 1, dtype=np.bool_)
        self.in_flight: NDArray[np.bool_] = np.zeros(capacity + 1, dtype=np.bool_)
        """Whether the forward now being built writes the node's KV."""
        self.ids: NDArray[np.int32] = np.zeros((capacity + 1, 1), dtype=np.int32)
        self.scores: NDArray[np.float32] = np.zeros((capacity + 1, 1), dtype=np.float32)
        """[capacity + 1, M], like ``ids``: the guesses; as wide as the first ones that came."""
        self.committed[ROOT] = True
        # An element of a memoryview is a Python int, in a third of the time that one of an array takes.
        self._parent, self._refs, self._children = _view(self.parent), _view(self.refs), _view(self.children)
        self._stamp, self._best, self._key = _view(self.stamp), _view(self.best), _view(self.key)
        self._position, self._token, self._committed = _view(self.position), _view(self.token), _view(self.committed)
        self._heir = _view(self.heir)
        self._others: dict[int, int] = {}
        """Children that are not their parent's ``heir``, by parent and token: see :func:`_links`."""
        self.nodes = 0
        """How many there are, the root left out."""
        self._samples: dict[int, Sample] = {}
        self._keys: dict[Terms, int] = {}
        self._slots = Pool(1, capacity)
        self._scratch: set[int] = set()
        self._clock = count(1)
        self._key_numbers = count(1)
        self._evictable: list[tuple[int, int]] = []
        """Heap of (stamp, node); an entry counts only while the node is idle under that stamp."""

    @property
    def free(self) -> int:
        """Slots that nobody owns."""
        return len(self._slots)

    def key_of(self, terms: Terms) -> int:
        """The number of these terms in ``key``; equal terms share one as long as there are guesses by it."""
        number = self._keys.get(terms)
        if number is None:
            if len(self._keys) > 2 * self.nodes + 64:
                used = set(np.unique(self.key).tolist())
                self._keys = {known: number for known, number in self._keys.items() if number in used}
            number = self._keys[terms] = next(self._key_numbers)
        return number

    def child(self, parent: int, token: int) -> int:
        """The node of ``token`` below ``parent``; 0 when there is none."""
        heir = self._heir[parent]
        if heir and self._token[heir] == token:
            return heir
        return self._others.get(parent << _TOKEN_BITS | token, 0)

    def find(self, parents: Ints, tokens: Ints) -> Ints:
        """:meth:`child` for every element of two arrays [n]."""
        heirs = self.heir[parents]
        nodes: Ints = heirs * (self.token[heirs] == tokens)  # no token is the root's -1
        others = np.flatnonzero((nodes == 0) & (self.children[parents] > (heirs > 0)))
        if len(others):
            links = _links(parents[others], tokens[others])
            nodes[others] = np.fromiter(map(self._others.get, links, repeat(0)), np.int64, len(links))
        return nodes

    def firsts(self, parents: Ints, tokens: Ints) -> Ints:
        """Of n pairs, where each occurs first, int64, ascending."""
        every = np.arange(len(parents))
        self._mark[parents] = every
        if np.count_nonzero(self._mark[parents] == every) == len(every):
            return every
        links = _links(parents, tokens)
        first = dict(zip(reversed(links), every[::-1].tolist(), strict=True))
        return every if len(first) == len(every) else np.array(sorted(first.values()), dtype=np.int64)

    def add(self, parents: Ints, tokens: Ints, committed: NDArray[np.bool_]) -> Ints:
        """New children of ``parents``, each with a slot of its own and held once; all [n].

        Only as many of the first as there are slots for.
        """
        nodes = self._take(len(parents))
        parents, tokens = parents[: len(nodes)], tokens[: len(nodes)]
        self._link(nodes, parents, tokens, self.position[parents] + 1)
        self.refs[nodes] = 1
        self.committed[nodes] = committed[: len(nodes)]
        return nodes

    def add_text(self, parent: int, tokens: Ints) -> Ints:
        """New committed nodes for ``tokens`` [n] below one another, as many as there are slots for. Hold the last next:
        until then nobody holds any.
        """
        nodes = self._take(len(tokens))
        parents = np.append(np.int64(parent), nodes)[: len(nodes)]
        self._link(nodes, parents, tokens[: len(nodes)], self._position[parent] + 1 + np.arange(len(nodes)))
        self.refs[nodes] = 0
        self.committed[nodes] = True
        return nodes

    def take_scratch(self, wanted: int) -> Ints:
        """Up to ``wanted`` slots for re-runs within one forward."""
        slots = self._take(wanted)
        self._scratch.update(slots.tolist())
        return slots

    def give_scratch(self, slots: Ints) -> None:
        """The forward is done."""
        self._scratch.difference_update(slots.tolist())
        self._slots.give_many(slots)

    def learn(self, nodes: Ints, ids: Ints, scores: NDArray[np.float32], samples: Mapping[int, Sample]) -> None:
        """What may follow ``nodes`` [n]: ``ids`` and ``scores`` [n, M]; ``samples`` by node, where there are any."""
        if self.ids.shape[1] != ids.shape[1]:
            shape = (self.capacity + 1, ids.shape[1])
            self.ids, self.scores = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.float32)
        self.ids[nodes], self.scores[nodes], self.best[nodes] = ids, scores, ids[:, 0]
        self.in_flight[nodes] = False
        for node, sample in samples.items():
            self._samples[node], self._best[node] = sample, sample.token

    def position_of(self, node: int) -> int:
        """Its token's place in the text; -1 for the root."""
        position: int = self._position[node]
        return position

    def knows(self, node: int, key: int) -> bool:
        """Whether there are guesses at ``node`` by terms number ``key``."""
        return self._best[node] >= 0 and self._key[node] == key

    def best_of(self, node: int) -> int:
        """The draft's own next token after ``node``; -1 when it has no guesses."""
        best: int = self._best[node]
        return best

    def guesses(self, node: int) -> Guesses:
        """What may follow ``node``, which has guesses."""
        return Guesses(self.ids[node].tolist(), self.scores[node].tolist(), self._samples.get(node))

    def hold(self, node: int) -> None:
        """Keep ``node`` and its ancestors."""
        self._refs[node] += 1

    def hold_many(self, nodes: Ints) -> None:
        """:meth:`hold` for every element, once for each time that it is there."""
        np.add.at(self.refs, nodes, 1)

    def release(self, node: int) -> None:
        """Undo one hold. Release a node's held descendants first."""
        self._refs[node] -= 1
        if self._refs[node]:
            return
        if not self._committed[node]:
            self._remove_one(node)
            return
        self._stamp[node] = next(self._clock)
        self._offer(node)

    def release_many(self, nodes: Ints) -> None:
        """Undo holds. Whoever holds a descendant of a guess among them, holds the guess or is among them too."""
        np.subtract.at(self.refs, nodes, 1)
        over = nodes[self.refs[nodes] == 0]
        self._mark[over] = np.arange(len(over))
        over = over[self._mark[over] == np.arange(len(over))]  # each once
        committed = self.committed[over]
        self._remove(over[~committed])
        text = over[committed]
        for node in text[np.argsort(-self.position[text])].tolist():
            self._stamp[node] = next(self._clock)
            self._offer(node)

    def commit(self, node: int) -> None:
        """Some session's text now leads to ``node``."""
        while not self._committed[node]:
            self._committed[node] = True
            node = self._parent[node]

    def forget(self) -> None:
        """Drop every node that no session needs."""
        while self._evict():
            pass

    def walk(self) -> list[int]:
        """Every node but the root, parents first."""
        nodes = np.flatnonzero(self.parent != _NOBODY)
        ordered: list[int] = nodes[np.argsort(self.position[nodes], kind="stable")].tolist()
        return ordered

    def check(self, holds: Mapping[int, int]) -> None:
        """Raises AssertionError unless every slot has one owner and ``holds`` are all the references there are."""
        owners = Counter([*self._slots.free_ids(), *self._scratch, *self.walk()])
        offered = {node for stamp, node in self._evictable if stamp == self._stamp[node]}
        for node in self.walk():
            parent, refs, committed = self._parent[node], self._refs[node], bool(self._committed[node])
            self._require(self.child(parent, int(self.token[node])) == node, node, "is not its parent's child")
            self._require(refs == holds.get(node, 0), node, f"has {refs} holds, sessions {holds.get(node, 0)}")
            self._require(committed or refs > 0, node, "is speculative and nobody's")
            self._require(not committed or bool(self._committed[parent]), node, "hangs below a guess")
            self._require(not self.in_flight[node], node, "waits for a forward that is over")
            self._require(not self._is_idle(node) or node in offered, node, "can never be evicted")
        children = np.bincount(self.parent[self.walk()], minlength=self.capacity + 1)
        self._require(np.array_equal(children, self.children), ROOT, "leads to nodes with another number of children")
        self._require(len(self.walk()) == self.nodes, ROOT, f"leads to {len(self.walk())} nodes of {self.nodes}")
        every = len(owners) == self.capacity == owners.total()
        self._require(every and min(owners) == 1 and max(owners) == self.capacity, ROOT, "does not own each slot once")

    def _column(self, value: int) -> Ints:
        return np.full(self.capacity + 1, value, dtype=np.int64)

    def _link(self, nodes: Ints, parents: Ints, tokens: Ints, positions: Ints) -> None:
        without = self.heir[parents] == 0
        self.heir[parents[without]] = nodes[without]
        others = self.heir[parents] != nodes
        if np.count_nonzero(others):
            self._others.update(zip(_links(parents[others], tokens[others]), nodes[others].tolist(), strict=True))
        self.nodes += len(nodes)
        self.parent[nodes], self.token[nodes], self.position[nodes] = parents, tokens, positions
        self.stamp[nodes] = 0
        np.add.at(self.children, parents, 1)

    def _take(self, wanted: int) -> Ints:
        while len(self._slots) < wanted and self._evict():
            pass
        return self._slots.take_many(wanted)

    def _evict(self) -> bool:
        """Remove the idle node that was left longest ago; False when there is none."""
        while self._evictable:
            stamp, node = heapq.heappop(self._evictable)
            if self._is_idle(node) and stamp == self._stamp[node]:
                self._remove_one(node)
                self.evictions += 1
                return True
        return False

    def _remove(self, nodes: Ints) -> None:
        """Free nodes; all below them are among them."""
        if not len(nodes):
            return
        parents = self.parent[nodes]
        heirs = self.heir[parents] == nodes
        self.heir[parents[heirs]] = 0
        for link in _links(parents[~heirs], self.token[nodes[~heirs]]):
            del self._others[link]
        self.nodes -= len(nodes)
        np.subtract.at(self.children, parents, 1)
        if np.count_nonzero(self.children[nodes]) or np.count_nonzero(parents == _NOBODY):
            raise AssertionError("a node with children was freed: this is a bug")
        self.parent[nodes], self.best[nodes], self.key[nodes] = _NOBODY, -1, 0
        if self._samples:
            for node in nodes.tolist():
                self._samples.pop(node, None)
        self._slots.give_many(nodes)
        bare = (self.refs[parents] == 0) & (self.children[parents] == 0) & (self.parent[parents] != _NOBODY)
        for node, parent in zip(nodes[bare].tolist(), parents[bare].tolist(), strict=True):
            self._bereave(parent, node)

    def _remove_one(self, node: int) -> None:
        """:meth:`_remove` without arrays, which a single node would wait for."""
        parent = self._parent[node]
        if self._children[node] or parent == _NOBODY:
            raise AssertionError("a node with children was freed: this is a bug")
        if self._heir[parent] == node:
            self._heir[parent] = 0
        else:
            del self._others[parent << _TOKEN_BITS | self._token[node]]
        self.nodes -= 1
        self._children[parent] -= 1
        self._parent[node], self._best[node], self._key[node] = _NOBODY, -1, 0
        self._samples.pop(node, None)
        self._slots.give(node)
        self._bereave(parent, node)

    def _bereave(self, parent: int, node: int) -> None:
        """``parent`` has lost its child ``node``, maybe its last."""
        if self._is_idle(parent):
            self._stamp[parent] = max(self._stamp[parent], self._stamp[node])
            self._offer(parent)

    def _offer(self, node: int) -> None:
        """Let ``node`` be evicted if it may. Now and then entries that no longer count are swept out of the heap."""
        if not self._is_idle(node):
            return
        heapq.heappush(self._evictable, (self._stamp[node], node))
        if len(self._evictable) > 2 * self.nodes + 64:
            kept = {(stamp, at) for stamp, at in self._evictable if self._is_idle(at) and stamp == self._stamp[at]}
            self._evictable = list(kept)
            heapq.heapify(self._evictable)

    def _is_idle(self, node: int) -> bool:
        return self._refs[node] == 0 and not self._children[node] and self._parent[node] != _NOBODY

    def _require(self, condition: bool | np.bool_, node: int, what: str) -> None:
        if not condition:
            token, position = self.token[node], self.position[node]
            raise AssertionError(f"tree: node of token {token} at position {position} {what}")


def _view(column: NDArray[Any]) -> memoryview[int]:
    return memoryview(column)  # type: ignore[arg-type]


def _links(parents: Ints, tokens: Ints) -> list[int]:
    """What the nodes of ``tokens`` behind ``parents`` are found by."""
    links: list[int] = (parents << _TOKEN_BITS | tokens).tolist()
    return links
