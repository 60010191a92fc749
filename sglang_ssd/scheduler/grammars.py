"""Grammars over a window: the mask of every position, and which tokens it leaves where they are few.

SGLang's walk advances a grammar along the drafts as far as they are legal and rolls it back. Behind an illegal draft
nothing is masked, and nothing needs to be: that draft is not drawn, so the window ends there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.speculative.spec_utils import GrammarTree, generate_token_bitmask
from torch import Tensor

from sglang_ssd.protocol import MAX_LEGAL, LegalRow, pack_tokens


@dataclass(frozen=True)
class WindowMask:
    """``bits`` int32 [B * W, V / 32 rounded up] on the host, one bit a token, and the ``drafts`` [B][W - 1] that the
    grammars were walked along. ``grammar`` is any one of the batch: it knows how bits are applied.
    """

    grammar: Any
    bits: Tensor
    drafts: list[list[int]]
    vocab_size: int

    def apply(self, logits: Tensor) -> None:
        """Mask ``logits`` [B * W, V] in place."""
        self.grammar.apply_vocab_mask(logits=logits, vocab_mask=self.bits.to(logits.device, non_blocking=True))

    def legal(self, index: int, verified: int) -> list[list[int] | None]:
        """What request ``index`` may draw behind each of 0..``verified`` accepted drafts, where it is little.

        None where there are many. Behind an illegal draft nothing is drawn: no token.
        """
        width = len(self.drafts[index]) + 1
        words = self.bits[index * width : index * width + verified + 1].numpy().view(np.uint32)
        found: list[list[int] | None] = []
        for row, draft in zip(words, [*self.drafts[index][:verified], None], strict=True):
            found.append(_few(row, self.vocab_size))
            if draft is not None and not int(row[draft // 32]) >> draft % 32 & 1:
                return found + [[]] * (verified + 1 - len(found))
        return found


class WindowGrammars:
    """The grammars of a batch before a window of drafts. The walk is the host's work: do it while a GPU is busy."""

    def __init__(self, batch: Any, drafts: Tensor) -> None:  # noqa: ANN401 - sglang's ScheduleBatch
        """``drafts`` int64 [B, W - 1]; a copy to the host begins."""
        committed = drafts.new_zeros(drafts.shape[0], 1)
        self._batch = batch
        self._tree = GrammarTree.from_linear_chain(torch.cat([committed, drafts], dim=1))
        self.wait_for_forward = drafts.device.type != "cpu"
        """Whether the forward only has to be launched, so that the walk belongs behind it."""

    @classmethod
    def of(cls, batch: Any, drafts: Tensor) -> WindowGrammars | None:  # noqa: ANN401
        """None when no request has a grammar."""
        return cls(batch, drafts) if any(req.grammar is not None for req in batch.reqs) else None

    def walk(self) -> WindowMask:
        """The mask. To be called once, before anything else moves the grammars."""
        following, siblings, tokens = self._tree.resolve()
        info = self._batch.sampling_info
        bits, grammar = generate_token_bitmask(self._batch.reqs, following, siblings, tokens, info.vocab_size)
        info.grammar_mask = None  # what the prefill left there
        return WindowMask(grammar, bits, tokens[:, 1:].tolist(), info.vocab_size)


@dataclass(frozen=True)
class Structured:
    """A request with a grammar and a session: its place in the batch, its length, and how many drafts are verified."""

    index: int
    session: int
    epoch: int
    length: int
    verified: int


def legal_rows(mask: WindowMask, requests: Iterable[Structured]) -> tuple[LegalRow, ...]:
    """What the draft server is told of ``requests``; nothing of those that may go on with many tokens everywhere."""
    found = ((request, mask.legal(request.index, request.verified)) for request in requests)
    return tuple(
        LegalRow(
            session=request.session,
            epoch=request.epoch,
            base=request.length,
            counts=tuple(-1 if tokens is None else len(tokens) for tokens in legal),
            tokens=pack_tokens([token for tokens in legal for token in tokens or ()]),
        )
        for request, legal in found
        if any(tokens is not None for tokens in legal)
    )


def _few(words: NDArray[np.uint32], vocab_size: int) -> list[int] | None:
    """The tokens whose bits are set, ascending; None when they are more than a message lists."""
    if int(np.bitwise_count(words).sum()) > MAX_LEGAL:
        return None
    at = np.flatnonzero(words)
    bits = np.unpackbits(words[at].astype("<u4").view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    tokens = (at[:, None] * 32 + np.arange(32))[bits.astype(bool)]
    few: list[int] = tokens[tokens < vocab_size].tolist()
    return few
