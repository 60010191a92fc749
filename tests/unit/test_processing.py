"""The logits that the target draws by, of requests as SGLang hands them over."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang.srt.environ import envs

from sglang_ssd.scheduler.draws import process


def test_logits_that_are_no_numbers_are_never_drawn() -> None:
    """Where SGLang's own switch asks for it, as its sampler does."""
    logits = torch.tensor([[float("nan"), 2.0, 1.0], [float("-inf"), float("nan"), float("inf")]])
    sampling_info = SimpleNamespace(logit_bias=None, has_custom_logit_processor=False)
    with envs.SGLANG_SANITIZE_NAN_LOGITS.override(True):
        batch = SimpleNamespace(reqs=[], sampling_info=sampling_info)
        process(logits, torch.empty(2, 0, dtype=torch.int64), [], batch, None)
    assert logits.argmax(-1).tolist() == [1, 2]
    for temperature in (0.05, 1.0, 2.0):
        assert torch.softmax(logits / temperature, -1).isfinite().all()
