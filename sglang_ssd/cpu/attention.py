"""``torch_native`` attention that can verify, and that decodes a batch without a loop over its requests."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from sglang_ssd.cpu.windows import Windows


class VerifyingTorchNativeBackend(TorchNativeAttnBackend):  # type: ignore[misc]
    """SGLang's CPU backend plus TARGET_VERIFY, which it lacks (its extend_* fields are None in that mode).

    Decode is a window of one query and goes the same way, so that a request is served alike with drafts and without.
    """

    needs_cpu_seq_lens = True

    def init_forward_metadata(self, forward_batch: Any) -> None:  # noqa: ANN401 - sglang's ForwardBatch
        """Find the windows of this forward; see TorchNativeAttnBackend.init_forward_metadata."""
        super().init_forward_metadata(forward_batch)
        self._windows = _windows(forward_batch, self.req_to_token_pool.req_to_token)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,  # noqa: ANN401 - sglang's RadixAttention
        forward_batch: Any,  # noqa: ANN401
        save_kv_cache: bool = True,
    ) -> Tensor:
        """Attention output [tokens, heads * head_dim]; see TorchNativeAttnBackend.forward_decode."""
        if self._windows is not None and _is_ordinary(layer):
            return self._attend(self._windows, q, k, v, layer, forward_batch.out_cache_loc if save_kv_cache else None)
        stock: Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return stock

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,  # noqa: ANN401 - sglang's RadixAttention
        forward_batch: Any,  # noqa: ANN401
        save_kv_cache: bool = True,
    ) -> Tensor:
        """Attention output [tokens, heads * head_dim]; see TorchNativeAttnBackend.forward_extend."""
        if self._windows is not None and _is_ordinary(layer):
            return self._attend(self._windows, q, k, v, layer, forward_batch.out_cache_loc if save_kv_cache else None)
        stock: Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return stock

    def _attend(
        self,
        windows: Windows,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,  # noqa: ANN401
        write_to: Tensor | None,
    ) -> Tensor:
        if write_to is not None and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(write_to, self.swa_out_cache_loc), k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return windows.attend(queries, keys, values, layer.scaling, _sliding(layer)).flatten(1)


def _windows(forward_batch: Any, table: Tensor) -> Windows | None:  # noqa: ANN401 - sglang's ForwardBatch
    """None for a prefill, which is the original's. ``seq_lens`` of a decode count the token that is run."""
    mode, lengths = forward_batch.forward_mode, forward_batch.seq_lens_cpu
    rows = table[forward_batch.req_pool_indices]
    if mode.is_target_verify():
        return Windows(rows, lengths.long(), forward_batch.spec_info.draft_token_num)
    if mode.is_decode() and forward_batch.encoder_lens is None:
        return Windows(rows, lengths.long() - 1, 1)
    return None


def _is_ordinary(layer: Any) -> bool:  # noqa: ANN401 - sglang's RadixAttention
    return layer.attn_type == AttentionType.DECODER and not layer.is_cross_attention


def _sliding(layer: Any) -> int | None:  # noqa: ANN401
    window = layer.sliding_window_size
    return window if window is not None and window > -1 else None
