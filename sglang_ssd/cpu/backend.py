"""What our two CPU attention backends share: many rows a call where they can, SGLang's own loop where they cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor


class BatchedTorchNativeBackend(TorchNativeAttnBackend):  # type: ignore[misc]
    """``torch_native`` with :meth:`takes` and :meth:`answer` of a subclass, in decode and extend alike."""

    needs_cpu_seq_lens = True

    def takes(self, layer: Any) -> bool:  # noqa: ANN401 - sglang's RadixAttention
        """Whether :meth:`answer` can do this layer of the present forward; else the original does."""
        raise NotImplementedError

    def answer(self, queries: Tensor, keys: Tensor, values: Tensor, layer: Any) -> Tensor:  # noqa: ANN401
        """Attention of queries [tokens, H, D] over a layer's pool [slots, H_kv, D]: [tokens, H, D_v]."""
        raise NotImplementedError

    def forward_decode(self, *args: Any, **more: Any) -> Tensor:  # noqa: ANN401
        """Attention output [tokens, heads * head_dim]; see TorchNativeAttnBackend.forward_decode."""
        return self._forward(super().forward_decode, *args, **more)

    def forward_extend(self, *args: Any, **more: Any) -> Tensor:  # noqa: ANN401
        """Attention output [tokens, heads * head_dim]; see TorchNativeAttnBackend.forward_extend."""
        return self._forward(super().forward_extend, *args, **more)

    def _forward(
        self,
        stock: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,  # noqa: ANN401
        forward_batch: Any,  # noqa: ANN401
        save_kv_cache: bool = True,
    ) -> Tensor:
        if not self.takes(layer):
            return stock(q, k, v, layer, forward_batch, save_kv_cache)
        # Every row's KV is in its slot before any row reads: a row may read what another row of this forward wrote.
        if save_kv_cache and k is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        return self.answer(q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), keys, values, layer).flatten(1)


def is_ordinary(layer: Any) -> bool:  # noqa: ANN401 - sglang's RadixAttention
    """A decoder's self-attention."""
    return bool(layer.attn_type == AttentionType.DECODER and not layer.is_cross_attention)


def sliding_window(layer: Any) -> int | None:  # noqa: ANN401
    """How many positions back the layer sees, None for all of them."""
    window: int | None = layer.sliding_window_size
    return window if window is not None and window > -1 else None
