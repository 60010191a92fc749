"""``torch_native`` attention that can verify, and that decodes a batch without a loop over its requests."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_ssd.cpu.backend import BatchedTorchNativeBackend, is_ordinary, sliding_window
from sglang_ssd.cpu.windows import Windows


class VerifyingTorchNativeBackend(BatchedTorchNativeBackend):
    """SGLang's CPU backend plus TARGET_VERIFY, which it lacks (its extend_* fields are None in that mode).

    Decode is a window of one query and goes the same way, so that a request is served alike with drafts and without.
    """

    def init_forward_metadata(self, forward_batch: Any) -> None:  # noqa: ANN401 - sglang's ForwardBatch
        """Find the windows of this forward; see TorchNativeAttnBackend.init_forward_metadata."""
        super().init_forward_metadata(forward_batch)
        self._windows = _windows(forward_batch, self.req_to_token_pool.req_to_token)

    def takes(self, layer: Any) -> bool:  # noqa: ANN401 - sglang's RadixAttention
        """See BatchedTorchNativeBackend; a prefill is the original's."""
        return self._windows is not None and is_ordinary(layer)

    def answer(self, queries: Tensor, keys: Tensor, values: Tensor, layer: Any) -> Tensor:  # noqa: ANN401
        """See BatchedTorchNativeBackend."""
        assert self._windows is not None
        return self._windows.attend(queries, keys, values, layer.scaling, sliding_window(layer))


def _windows(forward_batch: Any, table: Tensor) -> Windows | None:  # noqa: ANN401 - sglang's ForwardBatch
    """None for a prefill. ``seq_lens`` of a decode count the token that is run."""
    mode, rows, lengths = forward_batch.forward_mode, forward_batch.req_pool_indices, forward_batch.seq_lens_cpu
    if mode.is_target_verify():
        return Windows(table, rows, lengths.long(), forward_batch.spec_info.draft_token_num)
    if mode.is_decode() and forward_batch.encoder_lens is None:
        return Windows(table, rows, lengths.long() - 1, 1)
    return None
