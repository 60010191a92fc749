"""``torch_native`` attention that can verify: K+1 queries of each request over its paged keys, causal at the end."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class VerifyingTorchNativeBackend(TorchNativeAttnBackend):  # type: ignore[misc]
    """SGLang's CPU backend plus TARGET_VERIFY, which it lacks (its extend_* fields are None in that mode)."""

    needs_cpu_seq_lens = True

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,  # noqa: ANN401 - sglang's RadixAttention
        forward_batch: Any,  # noqa: ANN401 - sglang's ForwardBatch
        save_kv_cache: bool = True,
    ) -> Tensor:
        """Attention output [tokens, heads * head_dim]; see TorchNativeAttnBackend.forward_extend."""
        if not forward_batch.forward_mode.is_target_verify():
            stock: Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            return stock
        if save_kv_cache and k is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        width = forward_batch.spec_info.draft_token_num
        queries = q.view(-1, width, layer.tp_q_head_num, layer.qk_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        output = q.new_empty(queries.shape[0], width, layer.tp_q_head_num, layer.v_head_dim)
        lengths = forward_batch.seq_lens_cpu.tolist()
        for index, (row, length) in enumerate(zip(forward_batch.req_pool_indices.tolist(), lengths, strict=True)):
            slots = self.req_to_token_pool.req_to_token[row, : length + width]
            output[index] = scaled_dot_product_attention(
                queries[index].transpose(0, 1)[None],
                keys[slots].transpose(0, 1)[None],
                values[slots].transpose(0, 1)[None],
                attn_mask=_window_mask(length, width),
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )[0].transpose(0, 1)
        return output.view(-1, layer.tp_q_head_num * layer.v_head_dim)


def _window_mask(length: int, width: int) -> Tensor:
    """Bool [width, length + width]: query i of the window sees every committed token and window tokens 0..i."""
    return torch.ones(width, length + width, dtype=torch.bool).tril(diagonal=length)
