"""One request as the draft server knows it: its text, what is in flight, and the branches being prepared."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_ssd.draft_server.engine import Sample
from sglang_ssd.draft_server.suffixes import Suffixes
from sglang_ssd.draft_server.target import Target
from sglang_ssd.draft_server.terms import Terms
from sglang_ssd.draft_server.tree import Guesses, Node

UNKNOWN_REMAINING = 1 << 30


@dataclass(eq=False, slots=True)
class Branch:
    """A guess at an outcome and its continuation: a table row that shares the session's entries up to its start.

    ``first`` is the bonus candidate, consumed first; ``todo`` forwards are left, and ``node`` is the last that was
    run or is in flight. ``row`` is None once nothing is left to run.
    """

    session: Session
    node: Node
    first: int
    todo: int
    row: int | None
    nodes: list[Node] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Growth:
    """The tree of one round: what was planned, and how far it is."""

    fan_out: list[int]
    depth: int
    """Draft tokens that branches get, where as many are of use."""
    waiting: set[int]
    """Positions k whose candidates are not known yet."""
    live: list[Branch] = field(default_factory=list)
    done: list[Branch] = field(default_factory=list)
    deepened: bool = False
    """Whether more was asked for than was planned, because there was time."""
    leaves: bool = False
    """Whether the last tokens of branches of the whole depth were asked to run too."""

    @property
    def complete(self) -> bool:
        """Everything planned is there."""
        return not self.waiting and not self.live

    def branches(self) -> list[Branch]:
        """All of them; the last is the first to go when slots are short."""
        return [*self.done, *self.live]


@dataclass(eq=False, slots=True)
class Session:
    """``tokens`` is the authoritative text, the pending bonus token included; ``chain`` is what was served after it.

    ``tip`` is the deepest committed node, so KV is valid for positions up to ``tip.position``; ``chain_nodes`` are
    the chain's nodes, of which there are none while committed tokens lack KV. A session without a row is known but
    is not drafted for.
    """

    target: Target
    number: int
    epoch: int
    tokens: list[int]
    terms: Terms
    tip: Node
    seen_at: float
    row: int | None = None
    chain: list[int] = field(default_factory=list)
    chain_nodes: list[Node] = field(default_factory=list)
    own: dict[Node, Guesses] = field(default_factory=dict)
    """Guesses of ours at nodes whose own guesses were drawn by other terms."""
    growth: Growth | None = None
    limit: int = 0
    """The request's own limit to K, 0 for none."""
    legal: dict[int, list[int]] = field(default_factory=dict)
    """The few tokens that a grammar lets follow k accepted drafts of the chain in flight, for every k where it is known
    and they are few."""
    remaining: int = UNKNOWN_REMAINING
    sampled: bool = True
    """Whether the chain is the draft's own, and in rejection mode sampled from its q."""
    suffixes: Suffixes | None = None
    """The index of its text, once that was asked for a guess."""
    prefilling: bool = True
    """Whether its text is still being run in chunks; until then its rounds are answered with nothing."""
    chunk_turn: int = 0
    """When it last had a prefill chunk; the lowest is next."""
    hopeless: bool = False
    """Never drafted for in this epoch: too long, or with ids that the draft does not know."""

    @property
    def temperature(self) -> float:
        """0 for greedy."""
        return self.terms.temperature

    @property
    def seed(self) -> int:
        """What keys its noise."""
        return self.terms.seed

    @property
    def lookahead(self) -> int:
        """Draft tokens that the coming round can use."""
        return min(self.num_steps, self.target.lookahead)

    @property
    def num_steps(self) -> int:
        """K: what the target asked for, or less where the request takes less."""
        return min(self.target.num_steps, self.limit or self.target.num_steps)

    @property
    def length(self) -> int:
        """N, the committed tokens."""
        return len(self.tokens)

    @property
    def missing(self) -> int:
        """Committed tokens without KV."""
        return len(self.tokens) - 1 - self.tip.position

    @property
    def last(self) -> Node:
        """The deepest node of text and chain."""
        return self.chain_nodes[-1] if self.chain_nodes else self.tip

    def trunk_node(self, k: int) -> Node | None:
        """The node behind exactly ``k`` accepted chain tokens, if it exists."""
        if self.missing or k > len(self.chain_nodes):
            return None
        return self.chain_nodes[k - 1] if k else self.tip

    def chain_samples(self) -> list[Sample]:
        """The samples that the chain's tokens are; all of them are known, for the chain was read from them."""
        nodes = (self.trunk_node(k) for k in range(len(self.chain)))
        guesses = [self.guesses(node) for node in nodes if node is not None]
        return [each.sample for each in guesses if each is not None and each.sample is not None]

    def chain_guesses(self) -> list[Guesses | None]:
        """What may follow the text and each of the chain's tokens, None where that is not known yet."""
        nodes = [self.trunk_node(k) for k in range(len(self.chain) + 1)]
        return [None if node is None else self.guesses(node) for node in nodes]

    def trunk_token(self, position: int) -> int:
        """Text, then chain."""
        beyond = position - len(self.tokens)
        return self.tokens[position] if beyond < 0 else self.chain[beyond]

    def guesses(self, node: Node) -> Guesses | None:
        """What may follow ``node``, drawn by our terms."""
        return node.guesses if node.guesses is not None and node.key == self.terms else self.own.get(node)


def row_of(session: Session) -> int:
    """The session's table row; only sessions that have one come here."""
    if session.row is None:
        raise AssertionError(f"session {session.number} has no row: this is a bug")
    return session.row


def branch_row(branch: Branch) -> int:
    """The table row of a branch that has something left to run."""
    if branch.row is None:
        raise AssertionError("a finished branch has no row: this is a bug")
    return branch.row
