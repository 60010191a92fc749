"""The planners by name, as the command line gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from sglang_ssd.policy.confidence import ConfidencePlanner
from sglang_ssd.policy.fan_out import FullAcceptancePlanner, GeometricPlanner, UniformPlanner
from sglang_ssd.policy.measured import MeasuredPlanner
from sglang_ssd.policy.planner import Planner

PLANNERS: Mapping[str, Callable[[], Planner]] = MappingProxyType(
    {
        "confidence": ConfidencePlanner,
        "measured": MeasuredPlanner,
        "geometric": GeometricPlanner,
        "uniform": UniformPlanner,
        "full": FullAcceptancePlanner,
    }
)
