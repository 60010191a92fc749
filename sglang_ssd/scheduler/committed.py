"""A round as the link is told of it: what was committed, and what the next round is to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_ssd.policy.fallback import Fallback
from sglang_ssd.protocol import Outcome, Outcomes


@dataclass(frozen=True)
class CommittedRow:
    """One request's part of a round, as the forward knows it before the outcome is on the host."""

    session: int
    epoch: int
    length_before: int
    verified_len: int
    remaining_before: int


@dataclass(frozen=True)
class RoundPlan:
    """What the next round is to be: K, and the answers for 1, 2, ... missed rows.

    Not ``wanted``: the draft server prepares for K as ever, but this time nobody asks for its drafts.
    """

    num_steps: int
    answers: tuple[Fallback, ...]
    wanted: bool = True

    def message(self, boot: int, number: int, verify_us: int, rows: Sequence[Outcome]) -> Outcomes:
        """The outcomes of round ``number``, with this plan for the next one, which should take ``verify_us``."""
        return Outcomes.of(
            boot=boot,
            round=number,
            verify_us=verify_us,
            fallback=tuple(answer.kind for answer in self.answers),
            rows=tuple(rows),
            jit_steps=tuple(answer.steps for answer in self.answers),
            num_steps=self.num_steps,
        )


@dataclass(frozen=True)
class CommittedRound:
    """A round whose tokens may still be on their way from the device.

    ``tokens()`` blocks until they are on the host and returns, per row, what was committed. It is called from both
    threads and must give the same answer to each.
    """

    number: int
    rows: tuple[CommittedRow, ...]
    tokens: Callable[[], list[list[int]]]
    verify_us: int
    plan: RoundPlan
