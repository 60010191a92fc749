"""From a forward's logits to those that the target draws by: one pipeline for prefill, decode and verify rows.

The order is SGLang's: penalties, grammar mask, logit bias, custom processors, no NaN, then temperature and filters.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.utils.async_probe import sanitize_nan_logits
from torch import Tensor

from sglang_ssd.sampling.penalties import PenaltyRow, apply_penalties
from sglang_ssd.scheduler.grammars import WindowMask
from sglang_ssd.scheduler.requests import RequestState


def process(
    logits: Tensor,
    drafts: Tensor,
    states: list[RequestState],
    batch: Any,  # noqa: ANN401 - sglang's ScheduleBatch
    mask: WindowMask | None,
) -> None:
    """Change the logits of every window position in place, as the requests ask.

    Args:
        logits: [B * W, V], row-major by request.
        drafts: int64 [B, W - 1].
        states: the B requests.
        batch: SGLang's ScheduleBatch of them.
        mask: what the grammars leave; None when no request has one.

    """
    sampling_info = batch.sampling_info
    window = logits.view(drafts.shape[0], drafts.shape[1] + 1, -1)
    apply_penalties(window, drafts, [row for i, s in enumerate(states) if (row := _penalty_row(i, s)) is not None])
    if mask is not None:
        mask.apply(logits)
    if sampling_info.logit_bias is not None:
        window += sampling_info.logit_bias[:, None, : window.shape[-1]]
    if sampling_info.has_custom_logit_processor:
        _apply_custom_processors(window, sampling_info)
    sanitize_nan_logits(logits, "SSD: target logits")


def draws_one_wide(state: RequestState) -> bool:
    """Whether a request's processing is known at the window's first position only, so that nothing is verified.

    A custom processor may look at the request, whose output does not hold the window.
    """
    return bool(state.req.custom_logit_processor)


def _penalty_row(index: int, state: RequestState) -> PenaltyRow | None:
    parameters = state.req.sampling_params
    row = PenaltyRow(
        row=index,
        output_ids=[],
        frequency=parameters.frequency_penalty,
        presence=parameters.presence_penalty,
        repetition=parameters.repetition_penalty,
        min_new_tokens=parameters.min_new_tokens,
        stop_ids=[],
    )
    if not (row.frequency or row.presence or row.repetition != 1.0 or row.min_new_tokens > 0):
        return None
    row.output_ids.extend(state.output_ids)
    row.stop_ids.extend(_stop_ids(state.req))
    return row


def _stop_ids(req: Any) -> set[int]:  # noqa: ANN401 - sglang's Req
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        ids |= set(req.tokenizer.additional_stop_token_ids or ()) | {req.tokenizer.eos_token_id}
    return {index for index in ids if index is not None}


def _apply_custom_processors(window: Tensor, sampling_info: Any) -> None:  # noqa: ANN401
    """At the first position only, see `draws_one_wide`; a processor may keep state and is called once a round."""
    first = window[:, 0].contiguous()
    apply_custom_logit_processor(first, sampling_info)
    window[:, 0] = first
