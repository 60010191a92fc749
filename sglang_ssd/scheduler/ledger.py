"""What the draft server knows of each session: the length that it has confirmed; and what was committed since."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sglang_ssd.protocol import Outcome, pack_tokens
from sglang_ssd.scheduler.committed import CommittedRow


@dataclass
class _Account:
    """``announced``: the draft server has been told of this epoch and of everything in it."""

    epoch: int
    confirmed: int
    tail: list[int] = field(default_factory=list)
    announced: bool = False

    @property
    def length(self) -> int:
        return self.confirmed + len(self.tail)


class Ledger:
    """Sessions by number. Tokens are sent with every outcome until an answer has confirmed them.

    A session whose unconfirmed tokens are more than four windows of ``num_steps + 1`` is not worth catching up with: it
    is to begin anew.
    """

    def __init__(self, num_steps: int) -> None:
        self._accounts: dict[int, _Account] = {}
        self._longest_tail = 4 * (num_steps + 1)

    def __len__(self) -> int:
        return len(self._accounts)

    def open(self, session: int, epoch: int, length: int) -> None:
        """A new epoch, of which nobody has been told."""
        self._accounts[session] = _Account(epoch, length)

    def close(self, sessions: Iterable[int]) -> tuple[int, ...]:
        """They have ended; returns those that there were."""
        return tuple(session for session in sessions if self._accounts.pop(session, None) is not None)

    def announce(self, session: int) -> None:
        """The draft server has been told of it."""
        self._accounts[session].announced = True

    def disown(self, session: int) -> None:
        """The draft server does not know it."""
        self._accounts[session].announced = False

    def disown_all(self) -> None:
        """It knows none."""
        for account in self._accounts.values():
            account.announced = False

    def is_announced(self, session: int) -> bool:
        """Whether the draft server knows it; False too for what has ended."""
        account = self._accounts.get(session)
        return account is not None and account.announced

    def has(self, session: int, epoch: int) -> bool:
        """Whether this is a session's present epoch."""
        account = self._accounts.get(session)
        return account is not None and account.epoch == epoch

    def length(self, session: int) -> int:
        """Committed tokens, as far as we have been told."""
        return self._accounts[session].length

    def outcome(self, row: CommittedRow, tokens: list[int]) -> Outcome | None:
        """What to send of ``tokens``, just committed; None for an old epoch (see :meth:`has`) and for a session that
        the draft server cannot follow any more.
        """
        account = self._accounts.get(row.session)
        if account is None or account.epoch != row.epoch:
            return None
        if account.length != row.length_before:
            account.announced = False
        account.tail.extend(tokens)
        if not account.announced or len(account.tail) > self._longest_tail:
            return None
        return Outcome(
            session=row.session,
            epoch=row.epoch,
            base=account.confirmed,
            verified_len=row.verified_len,
            remaining=max(0, row.remaining_before - len(tokens)),
            tokens=pack_tokens(account.tail),
        )

    def reaches(self, session: int, length: int) -> bool:
        """Whether an answer behind ``length`` tokens can be about our text."""
        account = self._accounts[session]
        return account.confirmed <= length <= account.length

    def confirm(self, session: int, length: int) -> bool:
        """The draft server has the first ``length`` tokens; returns whether that is all of them."""
        account = self._accounts[session]
        del account.tail[: length - account.confirmed]
        account.confirmed = length
        return not account.tail
