"""What the rows of a batch draw with, from the requests on the host: no device value is read to learn it."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ssd.sampling.draw import DrawParameters
from sglang_ssd.sampling.filters import Filters, can_cut
from sglang_ssd.scheduler.requests import RequestState


def draw_parameters(states: list[RequestState], first_positions: Tensor, width: int) -> DrawParameters | None:
    """The parameters of the rows that sample, None when all are greedy.

    Args:
        states: the B requests.
        first_positions: int64 [B], position of each window's first token.
        width: W; the batch's B * W rows are row-major by request.

    """
    sampling = [(index, state) for index, state in enumerate(states) if state.temperature > 0]
    if not sampling:
        return None
    device = first_positions.device
    asked = [state.req.sampling_params for _, state in sampling]
    whole = [(index, state.seed, given.top_k) for (index, state), given in zip(sampling, asked, strict=True)]
    real = [(state.temperature, given.top_p, given.min_p) for (_, state), given in zip(sampling, asked, strict=True)]
    wholes = torch.tensor(whole, dtype=torch.int64).to(device, non_blocking=True)
    reals = torch.tensor(real, dtype=torch.float32).to(device, non_blocking=True)
    requests, seeds, top_ks = wholes.repeat_interleave(width, dim=0).unbind(1)
    temperatures, top_ps, min_ps = reals.repeat_interleave(width, dim=0).unbind(1)
    columns = torch.arange(width, device=device).repeat(len(sampling))
    cut = any(can_cut(given.top_k, given.top_p, given.min_p) for given in asked)
    return DrawParameters(
        rows=requests * width + columns,
        temperatures=temperatures,
        seeds=seeds,
        positions=first_positions[requests] + columns,
        filters=Filters(top_ks, top_ps, min_ps) if cut else None,
    )
