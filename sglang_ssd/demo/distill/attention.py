"""Attention without padding for transformers' models: whole texts side by side, or a batch that decodes.

transformers calls what is registered here for every layer and passes our keyword arguments through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

PACKED = "sglang_ssd_packed"
STEPPED = "sglang_ssd_stepped"


def register() -> None:
    """Make both known to transformers; models are made with ``attn_implementation=PACKED`` or ``STEPPED``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PACKED, attend_packed)
    ALL_ATTENTION_FUNCTIONS.register(STEPPED, attend_stepped)


def attend_packed(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: None,
    **given: Any,  # noqa: ANN401 - transformers' own keywords and ours
) -> tuple[Tensor, None]:
    """Causal attention inside each of the texts that lie side by side in one row.

    ``query`` [1, heads, n, head_dim]; ``lengths`` (a keyword of the model's forward) sum to n. A text sees itself only.
    """
    lengths: list[int] = given["lengths"]
    texts = zip(*(torch.split(each, lengths, dim=2) for each in (query, key, value)), strict=True)
    parts = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=given["scaling"], enable_gqa=True)
        for q, k, v in texts
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


class KeyValues:
    """Keys and values [layers, batch, kv_heads, room, head_dim] of a batch that grows by the same number of tokens."""

    def __init__(self, layers: int, room: int) -> None:
        self.filled = 0
        self._room = room
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def put(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write after what is filled; all that this layer holds by then. :meth:`advance` moves on."""
        held = self._layers[layer]
        if held is None:
            shape = (*key.shape[:2], self._room, key.shape[3])
            held = self._layers[layer] = key.new_zeros(shape), key.new_zeros(shape)
        end = self.filled + key.shape[2]
        for store, new in zip(held, (key, value), strict=True):
            store[:, :, self.filled : end] = new
        return held[0][:, :, :end], held[1][:, :, :end]

    def advance(self, count: int) -> None:
        """The last ``count`` positions of every layer are complete."""
        self.filled += count

    def keep(self, rows: Tensor) -> None:
        """Forget every row of the batch but ``rows``."""
        self._layers = [held and (held[0][rows], held[1][rows]) for held in self._layers]


def attend_stepped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: None,
    **given: Any,  # noqa: ANN401 - transformers' own keywords and ours
) -> tuple[Tensor, None]:
    """Attention of a left-padded batch over ``memory`` (KeyValues); ``visible`` [B, 1, n, filled + n] is its mask."""
    memory: KeyValues = given["memory"]
    layer: Any = module.layer_idx
    keys, values = memory.put(layer, key, value)
    attended = scaled_dot_product_attention(
        query, keys, values, attn_mask=given["visible"], scale=given["scaling"], enable_gqa=True
    )
    return attended.transpose(1, 2), None
