"""Per-request figures in ``meta_info``: integers, the totals so far, in streams too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_ssd.protocol import FIGURES_KEY

_NAMES = ("ssd_rounds", "ssd_hits", "ssd_partial", "ssd_misses")


def fold_figures(
    update: Callable[..., None],
    manager: Any,  # noqa: ANN401 - sglang's TokenizerManager
    meta_info: dict[str, Any],
    state: Any,  # noqa: ANN401
    customized_info: Mapping[str, Any],
    index: int,
    finish_reason: Any,  # noqa: ANN401
) -> None:
    """Around ``TokenizerManager.update_request_meta_info``, which would append every output's totals to a list."""
    figures = customized_info.get(FIGURES_KEY)
    if figures is not None:
        meta_info.update(zip(_NAMES, figures[index][-1], strict=True))
        customized_info = {key: values for key, values in customized_info.items() if key != FIGURES_KEY}
    update(manager, meta_info, state, customized_info, index, finish_reason)
