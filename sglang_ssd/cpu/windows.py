"""Attention of many requests at once on a CPU: a window of W queries behind each of many texts.

SGLang's CPU backend takes request by request in a Python loop, in every layer: with 32 short requests that is a third
of a forward. Here texts of about the same length are gathered together and answered by one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_GRAIN = 64
"""A text is padded to a multiple of so many positions. Not to the longest of its batch: the same request would then
come out of its sums a little differently in other company.
"""
_MOST_SLOTS = 1 << 14
"""Gathered at a time, unless one text is longer."""


@dataclass(frozen=True)
class Bucket:
    """Requests that are padded to the same M positions.

    ``rows`` int64 [B] are their places in the batch, ``slots`` int64 [B, M] where their positions lie, ``first`` int64
    [B] the position of each window's first query.
    """

    rows: Tensor
    slots: Tensor
    first: Tensor

    def mask(self, width: int, sliding: int | None, dtype: torch.dtype) -> Tensor:
        """0 where a query sees a position, else minus infinity: [B, W, M].

        A query sees itself and what is before it, at most ``sliding`` positions back if that is given.
        """
        positions = torch.arange(self.slots.shape[1])
        queries = (self.first[:, None] + torch.arange(width))[..., None]
        visible = positions <= queries
        if sliding is not None:
            visible &= positions >= queries - sliding
        return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))


class Windows:
    """One forward's windows, all of ``width`` W: ``table`` int32 [R, L] are slots by position, of which the N requests
    have the rows ``requests`` [N]; ``first`` int64 [N].
    """

    def __init__(self, table: Tensor, requests: Tensor, first: Tensor, width: int) -> None:
        self._width = width
        self._buckets = tuple(buckets(table, requests, first, width))
        self._masks: dict[tuple[int, int | None, torch.dtype], list[Tensor]] = {}

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, sliding: int | None) -> Tensor:
        """Attention of queries [N W, H, D] over a layer's pool of keys and values [slots, H_kv, D]: [N W, H, D_v].

        The H / H_kv query heads that share a KV head are folded into the query axis, so that keys are never repeated.
        """
        width, heads, kv_heads = self._width, queries.shape[1], keys.shape[1]
        fold = heads // kv_heads
        by_row = queries.view(-1, width, kv_heads, fold, queries.shape[2])
        output = queries.new_empty(len(by_row), width, kv_heads, fold, values.shape[2])
        for bucket, mask in zip(self._buckets, self._masks_for(fold, sliding, queries.dtype), strict=True):
            asked = by_row[bucket.rows].permute(0, 2, 3, 1, 4).flatten(2, 3)
            key, value = (_gather(pool, bucket.slots).to(queries.dtype) for pool in (keys, values))
            found = scaled_dot_product_attention(asked, key, value, attn_mask=mask, scale=scale)
            output[bucket.rows] = found.view(len(bucket.rows), kv_heads, fold, width, -1).permute(0, 3, 1, 2, 4)
        return output.view(len(queries), heads, -1)

    def _masks_for(self, fold: int, sliding: int | None, dtype: torch.dtype) -> list[Tensor]:
        """Each bucket's mask [B, 1, fold W, M], made by the first layer that needs such."""
        kind = fold, sliding, dtype
        if kind not in self._masks:
            masks = (bucket.mask(self._width, sliding, dtype) for bucket in self._buckets)
            self._masks[kind] = [mask.repeat(1, fold, 1)[:, None] for mask in masks]
        return self._masks[kind]


def buckets(table: Tensor, requests: Tensor, first: Tensor, width: int) -> Iterator[Bucket]:
    """The buckets of a batch; see :class:`Windows`. What lies beyond a window stands for the text's first slot: it is
    never seen, but what others left there might not be a number, and 0 times that is none either.
    """
    ends = first + width
    padded = (-(-ends // _GRAIN) * _GRAIN).clamp(max=table.shape[1])
    for longest in sorted(set(padded.tolist())):
        members = (padded == longest).nonzero().flatten()
        for rows in members.split(max(1, _MOST_SLOTS // longest)):
            slots = table[requests[rows], :longest].long()
            inside = torch.arange(longest) < ends[rows, None]
            yield Bucket(rows, torch.where(inside, slots, slots[:, :1]), first[rows])


def _gather(pool: Tensor, slots: Tensor) -> Tensor:
    """What lies in a pool [slots, H_kv, D] at slots [B, M]: [B, H_kv, M, D]."""
    # index_select takes half of the time of an index.
    return pool.index_select(0, slots.flatten()).view(*slots.shape, *pool.shape[1:]).transpose(1, 2)
