"""One verify forward on the target: K+1 positions of every request, and the outcome of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from torch import Tensor

from sglang_ssd.sampling.draw import draw
from sglang_ssd.sampling.noise import NoiseTable
from sglang_ssd.sampling.verdict import judge
from sglang_ssd.sampling.window import Window
from sglang_ssd.scheduler.draft_input import SSDDraftInput
from sglang_ssd.scheduler.draw_parameters import draw_parameters
from sglang_ssd.scheduler.draws import process
from sglang_ssd.scheduler.grammars import WindowGrammars, WindowMask
from sglang_ssd.scheduler.logprobs import add_logprobs
from sglang_ssd.scheduler.requests import RequestState

Tell: TypeAlias = Callable[[WindowMask], None]
"""Passes on what grammars allow, as early as it is known."""


def verify_input(*, width: int, tokens: Tensor | None, positions: Tensor | None, custom_mask: Tensor | None) -> Any:  # noqa: ANN401
    """SGLang's description of a linear verify window, also for graph capture (then without tokens).

    ``num_tokens_per_req`` must be the true width: a CUDA graph of another width would otherwise be replayed.
    """
    retrieve = None
    if tokens is not None:
        retrieve = torch.arange(tokens.numel(), device=tokens.device).view(-1, width)
    description = EagleVerifyInput(
        draft_token=tokens,
        custom_mask=custom_mask,
        positions=positions,
        retrieve_index=retrieve,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_cum_len=None,
        spec_steps=width - 1,
        topk=1,
        draft_token_num=width,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )
    description.num_tokens_per_req = width
    return description


def verify(
    target: Any,  # noqa: ANN401
    batch: Any,  # noqa: ANN401
    window: Window,
    states: list[RequestState],
    noise: NoiseTable,
    tell: Tell,
) -> GenerationBatchResult:
    """Run the forward and draw. Mutates ``batch``, which SGLang restores after the worker's step.

    Args:
        target: SGLang's TpModelWorker.
        batch: SGLang's ScheduleBatch in decode; its slots beyond each length are allocated.
        window: what to verify.
        states: the batch's requests, in its order.
        noise: of the target's vocabulary.
        tell: is told what grammars allow, when there are any.

    Returns:
        The result that SGLang's batch processor reads: flat tokens with stride W, ``accept_lens`` (k + 1) and the
        next draft input. Logprobs are those of the processed logits, as SGLang returns them.

    """
    tokens = torch.cat([batch.spec_info.bonus_tokens.view(-1, 1), window.drafts], dim=1)
    positions = batch.seq_lens.long()[:, None] + torch.arange(window.width, device=tokens.device)
    grammars = WindowGrammars.of(batch, window.drafts)
    _enter_verify(batch, tokens, positions)
    result, mask = _forward(target, batch, grammars, tell)
    logits = result.logits_output.next_token_logits
    process(logits, window.drafts, states, batch, mask)
    verdict = judge(logits, window, draw_parameters(states, positions[:, 0], window.width), noise)
    committed = verdict.committed(window.drafts)
    if batch.return_logprob:
        add_logprobs(batch, result.logits_output, committed.view(-1), window.width)
    result.next_token_ids = committed.view(-1).int()
    result.accept_lens = (verdict.accepted + 1).int()
    result.new_seq_lens = batch.seq_lens + result.accept_lens
    result.speculative_num_draft_tokens = result.speculative_output_stride = window.width
    result.next_draft_input = SSDDraftInput(verdict.bonus)
    return result


def draw_first(
    target: Any,  # noqa: ANN401
    batch: Any,  # noqa: ANN401
    states: list[RequestState],
    noise: NoiseTable,
    pp_proxy_tensors: Any,  # noqa: ANN401
    tell: Tell,
) -> GenerationBatchResult:
    """A prefill forward and the draw of each request's next token (a dummy where a prompt is not yet complete)."""
    last_positions = batch.seq_lens.long() - 1
    no_drafts = torch.empty(len(states), 0, dtype=torch.int64, device=last_positions.device)
    grammars = WindowGrammars.of(batch, no_drafts)
    result, mask = _forward(target, batch, grammars, tell, pp_proxy_tensors=pp_proxy_tensors)
    logits = result.logits_output.next_token_logits
    process(logits, no_drafts, states, batch, mask)
    draws = draw(logits, draw_parameters(states, last_positions, 1), noise)
    if batch.return_logprob:
        add_logprobs(batch, result.logits_output, draws, 1)
        result.logits_output.next_token_logprobs = result.logits_output.next_token_logprobs.view(-1)
    result.next_token_ids = draws
    result.new_seq_lens = batch.seq_lens
    result.next_draft_input = SSDDraftInput(draws)
    return result


def _forward(
    target: Any,  # noqa: ANN401
    batch: Any,  # noqa: ANN401
    grammars: WindowGrammars | None,
    tell: Tell,
    **more: Any,  # noqa: ANN401
) -> tuple[GenerationBatchResult, WindowMask | None]:
    """The forward, and the grammars' mask: before it on a CPU, for it is told while the forward runs; behind the
    launch on a GPU.
    """
    mask = None
    if grammars is not None and not grammars.wait_for_forward:
        tell(mask := grammars.walk())
    result = target.forward_batch_generation(batch, is_verify=True, **more)
    if grammars is not None and mask is None:
        tell(mask := grammars.walk())
    return result, mask


def _enter_verify(batch: Any, tokens: Tensor, positions: Tensor) -> None:  # noqa: ANN401
    """Turn a decode batch into a verify batch: the slots of the window are already in ``req_to_token``."""
    rows = batch.req_pool_indices.long()[:, None]
    batch.input_ids = tokens.view(-1)
    batch.out_cache_loc = batch.req_to_token_pool.req_to_token[rows, positions].view(-1).long()
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    batch.spec_info = verify_input(
        width=tokens.shape[1], tokens=batch.input_ids, positions=positions.view(-1), custom_mask=None
    )
