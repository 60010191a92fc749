"""Per-request options, checked at the door."""

from __future__ import annotations

from typing import Any


def check_custom_params(_result: None, sampling_params: Any, *_args: Any) -> None:  # noqa: ANN401
    """After ``SamplingParams.verify``: raises ValueError (HTTP 400) for an ``ssd`` entry that means nothing."""
    custom_params = sampling_params.custom_params
    given = custom_params.get("ssd") if isinstance(custom_params, dict) else None
    if given is None:
        return
    if not isinstance(given, dict) or not set(given) <= {"enabled", "num_steps"}:
        raise ValueError('custom_params["ssd"] takes {"enabled": true or false, "num_steps": a number}.')
    if not isinstance(given.get("enabled", True), bool):
        raise ValueError('custom_params["ssd"]["enabled"] must be true or false.')  # noqa: TRY004 - SGLang maps ValueError
    num_steps = given.get("num_steps", 0)
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 0:
        raise ValueError('custom_params["ssd"]["num_steps"] must be a whole number of at least 0.')
