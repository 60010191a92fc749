"""One target as the draft server knows it: what it asked for, and how its rounds went."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_ssd.config import MAX_NUM_STEPS, MAX_SUPPORT
from sglang_ssd.draft_server.outlook import Ended
from sglang_ssd.draft_server.terms import Proposal
from sglang_ssd.policy.confidence import ConfidencePlanner
from sglang_ssd.policy.pace import Expected
from sglang_ssd.policy.planner import Planner
from sglang_ssd.policy.planners import PLANNERS
from sglang_ssd.protocol import PROTOCOL_VERSION, Build, Hello, other_version

_PADDING = 1024
"""Vocabularies of one unknown tokenizer may differ by this much: output layers are padded to round sizes."""


@dataclass
class Totals:
    """Running totals of the forwards made for one target; see protocol.Build."""

    forwards: int = 0
    rows: int = 0
    path_rows: int = 0
    forward_us: int = 0

    def build(self, steps: tuple[tuple[int, int], ...]) -> Build:
        """As they go over the wire, with (rows, microseconds) of the steps seen so far."""
        return Build(self.forwards, self.rows, self.path_rows, self.forward_us, steps)


@dataclass(eq=False)
class Target:
    """The terms of one Hello. ``vocab_size`` is what both sides have in common."""

    identity: bytes
    name: str
    num_steps: int
    vocab_size: int
    fan_out: int
    grows: bool
    waits: bool
    proposal: Proposal | None = None
    """How draft tokens are sampled in rejection mode."""
    planner: Planner = field(default_factory=ConfidencePlanner)
    totals: Totals = field(default_factory=Totals)
    verify_us: int = 0
    expected: Expected | None = None
    """When its next outcomes should come, by the server's clock; None when nobody knows."""
    lookahead: int = 0
    """K of the coming round."""
    jit_steps: int = 0
    """What its rule says of a single miss."""
    ended: list[Ended] = field(default_factory=list)
    """Rounds that its planner has not learnt from yet."""

    @classmethod
    def of(cls, identity: bytes, hello: Hello, vocab_size: int) -> Target:
        """The terms that ``hello`` (checked by :func:`refusal`) asks for."""
        common = min(hello.vocab_size, vocab_size)
        return cls(
            identity=identity,
            name=hello.target,
            num_steps=hello.num_steps,
            vocab_size=common,
            fan_out=hello.fan_out,
            grows=hello.mode == "ssd",
            waits=hello.wait == "full",
            proposal=_proposal(hello, common) if hello.verify == "rejection" else None,
            planner=PLANNERS[hello.planner](),
            lookahead=hello.num_steps,
        )


def _proposal(hello: Hello, vocab_size: int) -> Proposal:
    """F is what an outcome gets of the fan-out, evenly spread: the tokens that C makes hits of."""
    top_f = max(1, hello.fan_out // (hello.num_steps + 1))
    return Proposal(hello.support, top_f, hello.saguaro_c, vocab_size)


def refusal(hello: Hello, vocab_size: int, fingerprint: str) -> str:
    """Why this draft (its vocabulary and tokenizer fingerprint) cannot serve ``hello``; '' when it can."""
    if hello.version != PROTOCOL_VERSION:
        return other_version(hello.version)
    known = bool(hello.fingerprint and fingerprint)
    if known and hello.fingerprint != fingerprint:
        return "the target's tokenizer gives other ids than the draft's: use a draft with the same tokenizer"
    padding = abs(hello.vocab_size - vocab_size)
    if hello.vocab_size < 1 or (not known and padding > _PADDING):
        return f"the target's vocabulary has {hello.vocab_size} tokens, the draft's {vocab_size}"
    if hello.verify not in {"coupled", "rejection"}:
        return f"verify mode {hello.verify!r} is not one that this draft server drafts for (coupled, rejection)"
    if not (1 <= hello.support <= MAX_SUPPORT and 0.0 <= hello.saguaro_c <= 1.0):
        return f"a support of {hello.support} tokens with C = {hello.saguaro_c} is outside what can be sampled from"
    if hello.mode not in {"ssd", "sync"} or hello.wait not in {"auto", "full"}:
        return f"mode {hello.mode!r} with wait {hello.wait!r} is unknown here"
    if hello.planner not in PLANNERS:
        return f"planner {hello.planner!r} is unknown here (there are {', '.join(PLANNERS)})"
    if not 1 <= hello.num_steps <= MAX_NUM_STEPS or hello.fan_out < 1:
        return f"{hello.num_steps} draft tokens with fan-out {hello.fan_out} is outside what can be drafted"
    return ""
