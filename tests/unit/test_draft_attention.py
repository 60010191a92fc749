"""The draft's CPU attention against SGLang's own row-by-row loop, on random trees of slots."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_ssd.cpu.draft_attention import DraftAttentionBackend, group_rows

SLOTS, WIDTH, HEAD_DIM = 400, 48, 16


class Pool:
    """One layer's KV buffers, random, so that a slot that should not be read changes the answer."""

    def __init__(self, kv_heads: int, generator: torch.Generator) -> None:
        self.keys, self.values = torch.randn(2, SLOTS, kv_heads, HEAD_DIM, generator=generator)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values

    def set_kv_buffer(self, layer, where: KVWriteLoc, k: torch.Tensor, v: torch.Tensor) -> None:
        self.keys[where.loc], self.values[where.loc] = k.view(len(k), -1, HEAD_DIM), v.view(len(v), -1, HEAD_DIM)


def _layer(heads: int, kv_heads: int, window: int = -1) -> SimpleNamespace:
    return SimpleNamespace(
        layer_id=0,
        tp_q_head_num=heads,
        tp_k_head_num=kv_heads,
        qk_head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        scaling=HEAD_DIM**-0.5,
        is_cross_attention=False,
        attn_type=AttentionType.DECODER,
        sliding_window_size=window,
    )


def _tree(sessions: int, rows: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A table of branches, and each row's length: row i shares a random prefix with its session, then is alone."""
    free = iter(rng.permutation(np.arange(1, SLOTS)))
    trunks = [[next(free) for _ in range(rng.integers(1, WIDTH - 8))] for _ in range(sessions)]
    table, lengths = np.zeros((rows, WIDTH), dtype=np.int32), np.zeros(rows, dtype=np.int64)
    for row in range(rows):
        trunk = trunks[rng.integers(sessions)]
        path = trunk[: rng.integers(1, len(trunk) + 1)] + [next(free) for _ in range(rng.integers(1, 4))]
        table[row, : len(path)], lengths[row] = path, len(path)
        table[row, len(path) :] = rng.integers(0, SLOTS)  # what an earlier branch left there
    return torch.from_numpy(table), torch.from_numpy(lengths)


def _both(heads: int, kv_heads: int, table: torch.Tensor, batch: SimpleNamespace, layer: SimpleNamespace, call: str):
    """The outputs of our backend and of SGLang's for the same queries over equal pools."""
    generator = torch.Generator().manual_seed(7)
    tokens = len(batch.input_ids)
    q = torch.randn(tokens, heads * HEAD_DIM, generator=generator)
    k, v = torch.randn(2, tokens, kv_heads * HEAD_DIM, generator=generator)
    outputs = []
    for kind in (DraftAttentionBackend, TorchNativeAttnBackend):
        pool = Pool(kv_heads, torch.Generator().manual_seed(8))
        runner = SimpleNamespace(
            device="cpu", req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=pool
        )
        backend = kind(runner)
        backend.init_forward_metadata(batch)
        outputs.append(getattr(backend, call)(q.clone(), k.clone(), v.clone(), layer, batch))
    return outputs


def _decode(table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        input_ids=torch.zeros(len(rows), dtype=torch.int64),
        req_pool_indices=rows,
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        out_cache_loc=table[rows, lengths - 1].long(),
        encoder_lens=None,
    )


def _extend(table: torch.Tensor, row: int, prefix: int, count: int) -> SimpleNamespace:
    length = torch.tensor([prefix + count])
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        input_ids=torch.zeros(count, dtype=torch.int64),
        req_pool_indices=torch.tensor([row]),
        seq_lens=length,
        seq_lens_cpu=length,
        extend_prefix_lens=torch.tensor([prefix]),
        extend_seq_lens=torch.tensor([count]),
        out_cache_loc=table[row, prefix : prefix + count].long(),
        encoder_lens=None,
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (4, 1)])
@pytest.mark.parametrize(("sessions", "rows"), [(1, 1), (1, 12), (4, 12)])
def test_decode_equals_the_row_by_row_loop(heads: int, kv_heads: int, sessions: int, rows: int) -> None:
    table, lengths = _tree(sessions, rows, np.random.default_rng(sessions * 100 + rows))
    ours, stock = _both(
        heads, kv_heads, table, _decode(table, torch.arange(rows), lengths), _layer(heads, kv_heads), "forward_decode"
    )
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-5)


def test_several_tokens_of_one_sequence_see_the_ones_before_them() -> None:
    table, _ = _tree(1, 3, np.random.default_rng(5))
    table[1] = torch.arange(1, WIDTH + 1)
    batch = _decode(table, torch.tensor([1] * 6), torch.arange(10, 16))
    ours, stock = _both(4, 2, table, batch, _layer(4, 2), "forward_decode")
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("prefix", "count"), [(0, 1), (0, 9), (13, 1), (13, 20)])
def test_a_prefill_chunk_equals_sglangs(prefix: int, count: int) -> None:
    table = torch.from_numpy(np.random.default_rng(3).permutation(SLOTS - 1)[: 2 * WIDTH].reshape(2, WIDTH) + 1)
    batch = _extend(table.int(), 1, prefix, count)
    ours, stock = _both(9, 3, table.int(), batch, _layer(9, 3), "forward_extend")
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-5)


def test_sliding_windows_are_left_to_sglang() -> None:
    table, lengths = _tree(1, 6, np.random.default_rng(11))
    batch = _decode(table, torch.arange(6), lengths)
    ours, stock = _both(4, 2, table, batch, _layer(4, 2, window=3), "forward_decode")
    full, _ = _both(4, 2, table, batch, _layer(4, 2), "forward_decode")
    assert torch.equal(ours, stock)
    assert not torch.allclose(ours, full, atol=1e-2)


def test_a_shared_slot_is_gathered_once() -> None:
    slots = np.array([[1, 2, 3, 9], [1, 2, 4, 9], [7, 8, 0, 0]], dtype=np.int32)
    groups = list(group_rows(slots, np.array([3, 3, 2])))
    assert [group.queries.tolist() for group in groups] == [[0, 1], [2]]
    assert [group.slots.tolist() for group in groups] == [[1, 2, 3, 4], [7, 8]]
    assert groups[0].visible.tolist() == [[True, True, True, False], [True, True, False, True]]
