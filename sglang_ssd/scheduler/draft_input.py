"""What a batch carries from one round to the next: the pending bonus token of each row."""

from __future__ import annotations

from typing import ClassVar

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor


class SSDDraftInput(SpecInput):  # type: ignore[misc]
    """SGLang's ``next_draft_input`` for our worker: ``bonus_tokens`` int64 [B], and nothing else.

    In the overlap loop the scheduler keeps the tokens in its ``FutureMap`` and sets ``future_indices``; then the rows
    are filtered and merged by those.
    """

    # Read by RelayPayload.from_draft_input; other algorithms relay more than the bonus token.
    topk_p: ClassVar[None] = None
    topk_index: ClassVar[None] = None
    hidden_states: ClassVar[None] = None
    draft_probs: ClassVar[None] = None
    capture_hidden_mode = CaptureHiddenMode.NULL

    def __init__(self, bonus_tokens: Tensor) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)
        self.bonus_tokens = bonus_tokens
        self.future_indices: Tensor | None = None

    def filter_batch(self, new_indices: Tensor, new_indices_cpu: Tensor | None = None) -> None:  # noqa: ARG002
        """Keep the rows ``new_indices``."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
        else:
            self.bonus_tokens = self.bonus_tokens[new_indices]

    def merge_batch(self, other: SSDDraftInput) -> None:
        """Append the rows of ``other``."""
        if self.future_indices is not None and other.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
        else:
            self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
