"""One request as the draft server knows it: its text, what is in flight, and the tree being prepared."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_ssd.draft_server.engine import Sample
from sglang_ssd.draft_server.suffixes import Suffixes
from sglang_ssd.draft_server.target import Target
from sglang_ssd.draft_server.terms import Terms
from sglang_ssd.draft_server.tree import ROOT, Guesses, Tree

UNKNOWN_REMAINING = 1 << 30


@dataclass(eq=False, slots=True)
class Growth:
    """The tree of one round: what was planned, and how far it is."""

    fan_out: list[int]
    depth: int
    """Draft tokens that branches get, where as many are of use."""
    waiting: set[int]
    """Positions k whose candidates are not known yet."""
    live: int = 0
    """Branches with something left to run."""
    done: int = 0
    """Branches with nothing left to run."""
    deepened: bool = False
    """Whether more was asked for than was planned, because there was time."""
    leaves: bool = False
    """Whether the last tokens of branches of the whole depth were asked to run too."""
    restricted: bool = False
    """Whether a grammar has had its say: then positions may have branches before they are looked at again."""

    @property
    def complete(self) -> bool:
        """Everything planned is there."""
        return not self.waiting and not self.live


@dataclass(eq=False, slots=True)
class Session:
    """``tokens`` is the authoritative text, the pending bonus token included; ``chain`` is what was served after it.

    ``tip`` is the deepest committed node, so KV is valid for positions up to its own; ``chain_nodes`` are
    the chain's nodes, of which there are none while committed tokens lack KV. A session without a row is known but
    is not drafted for.
    """

    target: Target
    number: int
    epoch: int
    tokens: list[int]
    terms: Terms
    tree: Tree
    seen_at: float
    row: int | None = None
    key: int = 0
    """The tree's number for its terms, while it has a row."""
    tip: int = ROOT
    chain: list[int] = field(default_factory=list)
    chain_nodes: list[int] = field(default_factory=list)
    own: dict[int, Guesses] = field(default_factory=dict)
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
        steps, ahead = self.num_steps, self.target.lookahead
        return ahead if ahead < steps else steps

    @property
    def num_steps(self) -> int:
        """K: what the target asked for, or less where the request takes less."""
        steps = self.target.num_steps
        return self.limit if 0 < self.limit < steps else steps

    @property
    def length(self) -> int:
        """N, the committed tokens."""
        return len(self.tokens)

    @property
    def missing(self) -> int:
        """Committed tokens without KV."""
        return len(self.tokens) - 1 - self.tree.position_of(self.tip)

    @property
    def last(self) -> int:
        """The deepest node of text and chain."""
        return self.chain_nodes[-1] if self.chain_nodes else self.tip

    @property
    def run(self) -> int:
        """Tokens of text and chain that have KV."""
        return self.tree.position_of(self.last) + 1

    @property
    def trunk(self) -> list[int]:
        """The nodes behind exactly 0, 1, ... accepted chain tokens, as many as there are."""
        return [] if self.missing else [self.tip, *self.chain_nodes]

    def trunk_node(self, k: int) -> int | None:
        """The node behind exactly ``k`` accepted chain tokens, if it exists."""
        trunk = self.trunk
        return trunk[k] if k < len(trunk) else None

    def chain_samples(self) -> list[Sample]:
        """The samples that the chain's tokens are; all of them are known, for the chain was read from them."""
        guesses = [self.guesses(node) for node in self.trunk[: len(self.chain)]]
        return [each.sample for each in guesses if each is not None and each.sample is not None]

    def trunk_token(self, position: int) -> int:
        """Text, then chain."""
        beyond = position - len(self.tokens)
        return self.tokens[position] if beyond < 0 else self.chain[beyond]

    def knows(self, node: int) -> bool:
        """Whether there are guesses at ``node``, drawn by our terms."""
        return self.tree.knows(node, self.key) or node in self.own

    def guesses(self, node: int) -> Guesses | None:
        """What may follow ``node``, drawn by our terms."""
        return self.tree.guesses(node) if self.tree.knows(node, self.key) else self.own.get(node)

    def best(self, node: int) -> int | None:
        """The token that we would draft after ``node``; None when that is unknown, or nothing that the target takes."""
        if self.tree.knows(node, self.key):
            best = self.tree.best_of(node)
        elif node in self.own:
            best = self.own[node].best
        else:
            return None
        return best if best < self.target.vocab_size else None


def row_of(session: Session) -> int:
    """The session's table row; only sessions that have one come here."""
    if session.row is None:
        raise AssertionError(f"session {session.number} has no row: this is a bug")
    return session.row
