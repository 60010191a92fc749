"""Which tokens a window's masks leave, and what of it is told; a scripted grammar stands in for xgrammar's."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_ssd.protocol import MAX_LEGAL, LegalRow, pack_tokens
from sglang_ssd.scheduler.grammars import Structured, WindowGrammars, WindowMask, legal_rows

VOCAB = 200


def bits(*rows: list[int] | None) -> torch.Tensor:
    """A row of set bits for every position; None: all."""
    words = np.zeros((len(rows), (VOCAB + 31) // 32), dtype=np.uint32)
    for row, tokens in zip(words, rows, strict=True):
        if tokens is None:
            row[:] = 2**32 - 1
        for token in tokens or ():
            row[token // 32] |= np.uint32(1 << token % 32)
    return torch.from_numpy(words.view(np.int32))


class Counting:
    """A grammar that allows the next number only, and any token from 10 on."""

    def __init__(self) -> None:
        self.at = 0

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: str) -> torch.Tensor:
        return bits(*[None] * batch_size)

    def fill_vocab_mask(self, mask: torch.Tensor, row: int) -> None:
        mask[row] = bits([self.at + 1] if self.at < 10 else None)[0]

    def accept_token(self, token: int) -> None:
        self.at += 1

    def rollback(self, count: int) -> None:
        self.at -= count

    def is_terminated(self) -> bool:
        return False

    def apply_vocab_mask(self, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        kept = [WindowMask(self, vocab_mask[row : row + 1], [[]], VOCAB).legal(0, 0)[0] for row in range(len(logits))]
        for row, tokens in zip(logits, kept, strict=True):
            if tokens is not None:
                row[[t for t in range(VOCAB) if t not in tokens]] = -torch.inf


def mask(drafts: list[int], *rows: list[int] | None) -> WindowMask:
    return WindowMask(None, bits(*rows), [drafts], VOCAB)


def test_the_few_are_listed_and_the_many_are_not() -> None:
    few, many = list(range(31, 31 + MAX_LEGAL)), list(range(MAX_LEGAL + 1))
    assert mask([40, 3, 0], few, many, [199, 0, 63, 64], None).legal(0, 3) == [few, None, [0, 63, 64, 199], None]


def test_behind_an_illegal_draft_nothing_is_legal() -> None:
    assert mask([4, 9, 1], [4, 7], [8], None, None).legal(0, 3) == [[4, 7], [8], [], []]


def test_what_was_not_verified_is_not_told() -> None:
    assert mask([4, 0, 0], [4], [8], None, None).legal(0, 1) == [[4], [8]]
    assert mask([9, 0, 0], [4], [8], None, None).legal(0, 0) == [[4]]


def test_only_requests_with_few_tokens_somewhere_are_told_of() -> None:
    window = WindowMask(None, bits(None, None, None, [5, 6], [4], None), [[4], [4], [5]], VOCAB)
    requests = [Structured(0, 70, 1, 30, verified=1), Structured(1, 71, 2, 31, 0), Structured(2, 72, 1, 32, 1)]
    assert legal_rows(window, requests) == (LegalRow(72, 1, 32, (1, 0), pack_tokens([4])),)
    both = [Structured(1, 71, 2, 31, verified=1), Structured(2, 72, 1, 32, 0)]
    assert legal_rows(window, both) == (
        LegalRow(71, 2, 31, (-1, 2), pack_tokens([5, 6])),
        LegalRow(72, 1, 32, (1,), pack_tokens([4])),
    )


def test_bits_beyond_the_vocabulary_are_no_tokens() -> None:
    words = bits([1])
    words[0, -1] = -1  # 192..223, of which there are eight
    assert WindowMask(None, words, [[]], VOCAB).legal(0, 0) == [[1, *range(192, 200)]]


@pytest.mark.parametrize(("drafts", "legal"), [([1, 2], [[1], [2], [3]]), ([1, 7], [[1], [2], []])])
def test_a_walk_masks_structured_requests_only_and_leaves_the_grammar_where_it_was(drafts, legal) -> None:
    grammar = Counting()
    reqs = [SimpleNamespace(grammar=None), SimpleNamespace(grammar=grammar)]
    batch = SimpleNamespace(reqs=reqs, sampling_info=SimpleNamespace(vocab_size=VOCAB, grammar_mask="old"))
    window = WindowGrammars.of(batch, torch.tensor([[5, 5], drafts]))
    found = window.walk()
    assert (grammar.at, batch.sampling_info.grammar_mask) == (0, None)
    assert found.legal(0, 2) == [None] * 3
    assert found.legal(1, 2) == legal
    logits = torch.zeros(6, VOCAB)
    found.apply(logits)
    assert logits.isfinite().sum(-1).tolist()[:5] == [VOCAB] * 3 + [1, 1]
    assert logits[3].argmax() == 1


def test_no_grammar_no_walk() -> None:
    batch = SimpleNamespace(reqs=[SimpleNamespace(grammar=None)])
    assert WindowGrammars.of(batch, torch.zeros(1, 0, dtype=torch.int64)) is None
