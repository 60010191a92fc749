"""Parallel samples of a seeded request: sample 0 draws with the seed, sample i with a seed derived from it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from sglang_ssd.sampling.seeds import derive_seed

_REMEMBERED = 4096


class SampleSeeds:
    """Around ``TokenizerManager._send_one_request``: SGLang sends ``n`` samples with one and the same parameters."""

    def __init__(self) -> None:
        self._sent: OrderedDict[int, tuple[Any, int]] = OrderedDict()
        """id of a parameters object -> the object, kept so that its id stays its own, and how often it was sent."""

    def send(self, send: Callable[..., Any], manager: Any, request: Any) -> Any:  # noqa: ANN401
        """Send ``request``; the second and later samples of a seeded one get a seed of their own."""
        parameters = getattr(request, "sampling_params", None)
        seed = getattr(parameters, "sampling_seed", None)
        if seed is not None:
            sample = self._count(parameters)
            if sample:
                request.sampling_params = copy.copy(parameters)
                request.sampling_params.sampling_seed = derive_seed(seed, sample)
        return send(manager, request)

    def _count(self, parameters: Any) -> int:  # noqa: ANN401
        """How many samples were sent with ``parameters`` before this one."""
        _, count = self._sent.pop(id(parameters), (parameters, 0))
        self._sent[id(parameters)] = (parameters, count + 1)
        if len(self._sent) > _REMEMBERED:
            self._sent.popitem(last=False)
        return count
