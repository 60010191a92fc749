"""The target's CPU attention: decode against SGLang's own loop, windows against the definition."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_ssd.cpu import windows
from sglang_ssd.cpu.attention import VerifyingTorchNativeBackend
from tests.unit.test_draft_attention import HEAD_DIM, SLOTS, Pool, _decode, _extend, _layer

LENGTHS = torch.tensor([1, 62, 63, 64, 65, 7, 70])
"""Committed tokens; on both sides of where a text is padded to twice as many positions."""
ROOM = 80


@pytest.fixture
def table() -> torch.Tensor:
    """Slots of every request by position, no two alike but those behind the texts, which are anybody's."""
    wanted = int((LENGTHS + 8).sum())
    free = iter((torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(3))[:wanted] + 1).tolist())
    slots = torch.randint(1, SLOTS, (len(LENGTHS), ROOM), generator=torch.Generator().manual_seed(4))
    for row, length in enumerate(LENGTHS.tolist()):
        slots[row, : length + 8] = torch.tensor([next(free) for _ in range(length + 8)])
    return slots.int()


def backend(kind: type, table: torch.Tensor, pool: Pool):
    tables = SimpleNamespace(req_to_token=table)
    return kind(SimpleNamespace(device="cpu", req_to_token_pool=tables, token_to_kv_pool=pool))


def window_batch(table: torch.Tensor, rows: torch.Tensor, width: int) -> SimpleNamespace:
    """A verify of ``rows``; as in SGLang, the lengths do not count the window."""
    positions = LENGTHS[rows, None] + torch.arange(width)
    return SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        req_pool_indices=rows,
        seq_lens=LENGTHS[rows],
        seq_lens_cpu=LENGTHS[rows],
        out_cache_loc=table[rows[:, None], positions].flatten().long(),
        spec_info=SimpleNamespace(draft_token_num=width),
        encoder_lens=None,
    )


def verify(table, rows, width, heads=9, kv_heads=3, sliding=-1, spoil=None):
    """Output [rows, width, heads, D] of windows whose queries, keys and values belong to their rows; and the pool."""
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(len(LENGTHS), width, heads * HEAD_DIM, generator=generator)[rows]
    k, v = torch.randn(2, len(LENGTHS), width, kv_heads * HEAD_DIM, generator=generator)[:, rows]
    pool = Pool(kv_heads, torch.Generator().manual_seed(8))
    if spoil is not None:
        pool.keys[spoil] = pool.values[spoil] = torch.nan
    ours, batch = backend(VerifyingTorchNativeBackend, table, pool), window_batch(table, rows, width)
    ours.init_forward_metadata(batch)
    flat = (each.flatten(0, 1) for each in (q, k, v))
    output = ours.forward_extend(*flat, _layer(heads, kv_heads, sliding), batch)
    return output.view(len(rows), width, heads, HEAD_DIM), q.view(len(rows), width, heads, HEAD_DIM), pool


def by_definition(query, keys, values, sliding):
    """One query [H, D] behind keys and values [n, H_kv, D], the last of which is its own."""
    first = 0 if sliding < 0 else max(0, len(keys) - 1 - sliding)
    keys, values = (each[first:].double().repeat_interleave(len(query) // each.shape[1], 1) for each in (keys, values))
    weights = torch.softmax(torch.einsum("hd,nhd->hn", query.double(), keys) * HEAD_DIM**-0.5, -1)
    return torch.einsum("hn,nhd->hd", weights, values)


@pytest.mark.parametrize("sliding", [-1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (4, 1)])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_window_sees_its_text_and_itself(table, width, heads, kv_heads, sliding) -> None:
    rows = torch.arange(len(LENGTHS))
    output, queries, pool = verify(table, rows, width, heads, kv_heads, sliding)
    for row, length in enumerate(LENGTHS.tolist()):
        for i in range(width):
            slots = table[row, : length + i + 1].long()
            expected = by_definition(queries[row, i], pool.keys[slots], pool.values[slots], sliding)
            torch.testing.assert_close(output[row, i].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [1, 3])
def test_who_else_is_in_the_batch_changes_no_bit(table, width) -> None:
    together, _, _ = verify(table, torch.arange(len(LENGTHS)), width)
    for row in range(len(LENGTHS)):
        alone, _, _ = verify(table, torch.tensor([row]), width)
        assert torch.equal(alone[0], together[row])


def test_what_others_left_behind_a_text_does_not_matter(table) -> None:
    """Not even where it is no number."""
    rows = torch.arange(len(LENGTHS))
    own = torch.cat([table[row, : length + 3] for row, length in enumerate(LENGTHS.tolist())])
    spoil = torch.ones(SLOTS, dtype=torch.bool)
    spoil[own.long()] = False
    assert torch.equal(verify(table, rows, 3, spoil=spoil)[0], verify(table, rows, 3)[0])


def test_a_large_batch_is_gathered_in_parts(table, monkeypatch) -> None:
    rows = torch.arange(len(LENGTHS))
    whole, _, _ = verify(table, rows, 2)
    monkeypatch.setattr(windows, "_MOST_SLOTS", 130)
    parts = [len(bucket.rows) for bucket in windows.buckets(table, rows, LENGTHS, 2)]
    assert sorted(parts) == [1, 1, 1, 1, 1, 2]  # three that fit into 64 positions, four that need all 80
    assert torch.equal(verify(table, rows, 2)[0], whole)


@pytest.mark.parametrize("sliding", [-1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3)])
def test_decode_equals_sglangs_loop(table, heads, kv_heads, sliding) -> None:
    batch = _decode(table, torch.arange(len(LENGTHS)), LENGTHS)
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(len(LENGTHS), heads * HEAD_DIM, generator=generator)
    k, v = torch.randn(2, len(LENGTHS), kv_heads * HEAD_DIM, generator=generator)
    outputs = []
    for kind in (VerifyingTorchNativeBackend, TorchNativeAttnBackend):
        mine = backend(kind, table, Pool(kv_heads, torch.Generator().manual_seed(8)))
        mine.init_forward_metadata(batch)
        outputs.append(mine.forward_decode(q.clone(), k.clone(), v.clone(), _layer(heads, kv_heads, sliding), batch))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)


def test_a_prefill_is_sglangs_own(table) -> None:
    batch = _extend(table, 4, 20, 9)
    q = torch.randn(9, 4 * HEAD_DIM, generator=torch.Generator().manual_seed(7))
    k, v = torch.randn(2, 9, 2 * HEAD_DIM, generator=torch.Generator().manual_seed(9))
    outputs = []
    for kind in (VerifyingTorchNativeBackend, TorchNativeAttnBackend):
        mine = backend(kind, table, Pool(2, torch.Generator().manual_seed(8)))
        mine.init_forward_metadata(batch)
        outputs.append(mine.forward_extend(q.clone(), k.clone(), v.clone(), _layer(4, 2), batch))
    assert torch.equal(*outputs)
