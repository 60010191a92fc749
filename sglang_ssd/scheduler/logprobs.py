"""Logprobs of what a forward committed: of the processed logits, as SGLang returns them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from torch import Tensor


def add_logprobs(batch: Any, logits_output: Any, tokens: Tensor, width: int) -> None:  # noqa: ANN401
    """Write the logprobs that the requests ask for into ``logits_output``.

    A greedy request's are those at temperature 1 in every batch. (SGLang takes them so if all requests are greedy, and
    else divides by the temperature that may stand beside ``top_k=1``.)

    Args:
        batch: SGLang's ScheduleBatch; its ``sampling_info`` is replaced, and restored by SGLang after the step.
        logits_output: SGLang's LogitsProcessorOutput with [B * W, V] processed logits.
        tokens: [B * W].
        width: W.

    """
    given = batch.sampling_info
    temperatures = torch.where(given.top_ks.view(-1, 1) == 1, 1.0, given.temperatures)
    batch.sampling_info = dataclasses.replace(given, temperatures=temperatures)
    compute_spec_logprobs(batch, logits_output, tokens, chain_stride=width)
