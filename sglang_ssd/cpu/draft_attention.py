"""``torch_native`` attention for the draft: rows that share a prefix read its keys once.

SGLang's own CPU backend gathers the keys and values of every row anew, in a Python loop per layer. The rows of the
draft server are branches of few sequences, so here the rows with a common first slot form a group: the union of
their slots is found once per forward and gathered once per layer, and one call under a mask answers all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sglang_ssd.cpu.backend import BatchedTorchNativeBackend, is_ordinary, sliding_window


@dataclass(frozen=True)
class Group:
    """Queries int64 [Q] (indices into the batch), the slots int64 [U] they read, and who sees which: bool [Q, U]."""

    queries: Tensor
    slots: Tensor
    visible: Tensor


class DraftAttentionBackend(BatchedTorchNativeBackend):
    """SGLang's CPU backend with one call per group of rows; what it cannot group goes to the original."""

    def init_forward_metadata(self, forward_batch: Any) -> None:  # noqa: ANN401 - sglang's ForwardBatch
        """Find the groups of this forward; see TorchNativeAttnBackend.init_forward_metadata."""
        super().init_forward_metadata(forward_batch)
        table, lengths = self.req_to_token_pool.req_to_token, forward_batch.seq_lens_cpu
        slots = table[forward_batch.req_pool_indices, : int(lengths.max())]
        self._groups: list[Group] = []
        self._masks: dict[int, list[Tensor]] = {}
        if forward_batch.forward_mode.is_decode():
            self._groups = list(group_rows(slots.numpy(), lengths.numpy()))
        elif forward_batch.forward_mode.is_extend() and len(slots) == 1:
            self._groups = [_chunk(slots[0], len(forward_batch.input_ids))]

    def takes(self, layer: Any) -> bool:  # noqa: ANN401 - sglang's RadixAttention
        """See BatchedTorchNativeBackend."""
        return bool(self._groups) and is_ordinary(layer) and sliding_window(layer) is None

    def answer(self, queries: Tensor, keys: Tensor, values: Tensor, layer: Any) -> Tensor:  # noqa: ANN401
        """See BatchedTorchNativeBackend."""
        output = queries.new_empty(len(queries), layer.tp_q_head_num, layer.v_head_dim)
        masks = self._masks_for(layer.tp_q_head_num // layer.tp_k_head_num, queries.dtype)
        for group, mask in zip(self._groups, masks, strict=True):
            own_keys, own_values = keys[group.slots].to(queries.dtype), values[group.slots].to(queries.dtype)
            output[group.queries] = attend(queries[group.queries], own_keys, own_values, mask, layer.scaling)
        return output

    def _masks_for(self, fold: int, dtype: torch.dtype) -> list[Tensor]:
        """Each group's mask for :func:`attend`, made by the first layer that has this many query heads a KV head."""
        if fold not in self._masks:
            self._masks[fold] = [additive_mask(group.visible, fold, dtype) for group in self._groups]
        return self._masks[fold]


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of queries [Q, H, D] over keys and values [U, H_kv, D]: [Q, H, D_v].

    The ``H / H_kv`` query heads that share a KV head are folded into the query axis, so that keys are never
    repeated; ``mask`` is :func:`additive_mask` for that many.
    """
    count, heads, _ = queries.shape
    kv_heads = keys.shape[1]
    folded = queries.view(count, kv_heads, heads // kv_heads, -1).permute(1, 2, 0, 3).flatten(1, 2)
    output = scaled_dot_product_attention(
        folded[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], attn_mask=mask, scale=scale
    )
    unfolded = output.view(kv_heads, heads // kv_heads, count, -1).permute(2, 0, 1, 3)
    return unfolded.reshape(count, heads, -1)


def additive_mask(visible: Tensor, fold: int, dtype: torch.dtype) -> Tensor:
    """0 where ``visible`` bool [Q, U], else minus infinity, once for each of ``fold`` heads: [fold * Q, U]."""
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
    return mask.repeat(fold, 1)


def group_rows(slots: NDArray[np.int32], lengths: NDArray[np.int64]) -> Iterator[Group]:
    """The groups of a decode forward: rows [B, L] of slot ids, of which row i reads the first ``lengths[i]``."""
    inside = np.arange(slots.shape[1]) < lengths[:, None]
    for first in np.unique(slots[:, 0]):
        queries = np.flatnonzero(slots[:, 0] == first)
        member, position = np.nonzero(inside[queries])
        read = slots[queries[member], position]
        taken = np.zeros(read.max() + 1, dtype=bool)
        taken[read] = True
        union = np.flatnonzero(taken)
        visible = np.zeros((len(queries), len(union)), dtype=bool)
        visible[member, (np.cumsum(taken) - 1)[read]] = True
        yield Group(torch.from_numpy(queries), torch.from_numpy(union), torch.from_numpy(visible))


def _chunk(slots: Tensor, count: int) -> Group:
    """The group of a prefill chunk: the last ``count`` tokens of a row of slots [L], causal."""
    visible = torch.ones(count, len(slots), dtype=torch.bool).tril(diagonal=len(slots) - count)
    return Group(torch.arange(count), slots.long(), visible)
