"""Who gets which GPU and which core."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ssd.config import ConfigError
from sglang_ssd.launcher.placement import VISIBLE_VARIABLE, make_room, place, target_gpus


def server(**changes: object) -> Any:
    defaults = {"device": None, "tp_size": 1, "pp_size": 1, "dp_size": 1, "base_gpu_id": 0, "gpu_id_step": 1}
    return SimpleNamespace(**{**defaults, "mem_fraction_static": None, **changes})


@pytest.mark.parametrize(
    ("changes", "gpus", "draft"),
    [
        ({}, 2, 1),
        ({"tp_size": 4}, 8, 4),
        ({"tp_size": 2, "base_gpu_id": 2}, 8, 4),
        ({"tp_size": 2, "gpu_id_step": 2}, 8, 3),
        ({"tp_size": 2, "dp_size": 2}, 8, 4),
        ({"base_gpu_id": 1}, 2, 0),
        ({"tp_size": 2, "gpu_id_step": 2, "base_gpu_id": 1}, 4, 0),
    ],
)
def test_the_draft_gets_the_first_gpu_that_the_target_leaves(changes: dict[str, int], gpus: int, draft: int) -> None:
    placement = place(server(**changes), None, gpus)
    assert (placement.draft_device, placement.draft_gpu, placement.shared_gpu) == ("cuda", draft, False)


@given(st.integers(1, 8), st.integers(0, 7), st.integers(1, 3), st.integers(1, 16))
@settings(derandomize=True, deadline=None)
def test_a_gpu_is_shared_only_when_the_target_has_them_all(tp: int, base: int, step: int, gpus: int) -> None:
    record = server(tp_size=tp, base_gpu_id=base, gpu_id_step=step)
    placement = place(record, None, gpus)
    free = set(range(gpus)) - set(target_gpus(record))
    assert placement.shared_gpu == (not free)
    assert placement.shared_gpu or placement.draft_gpu in free


def test_one_gpu_is_shared_and_leaves_room_for_the_draft() -> None:
    record = server()
    placement = place(record, None, 1)
    assert placement.shared_gpu
    assert make_room(record, placement) is not None
    assert record.mem_fraction_static < 0.9


def test_a_given_memory_fraction_is_kept_on_a_shared_gpu() -> None:
    record = server(mem_fraction_static=0.5)
    make_room(record, place(record, None, 1))
    assert record.mem_fraction_static == 0.5


def test_a_draft_gpu_can_be_chosen() -> None:
    assert place(server(), "cuda:3", 4).draft_gpu == 3
    assert place(server(), "cuda", 4).draft_gpu == 1
    assert place(server(), "cuda:0", 4).shared_gpu
    assert place(server(), "cpu", 4).draft_device == "cpu"


@pytest.mark.parametrize("device", ["cuda:4", "cuda:", "cuda:x", "xpu", "cuda:-1"])
def test_a_draft_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="draft-device"):
        place(server(), device, 4)


def test_a_gpu_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="use cpu"):
        place(server(), "cuda:0", 0)


def test_the_draft_sees_its_gpu_only() -> None:
    placement = place(server(), None, 2)
    assert placement.draft_environment({})[VISIBLE_VARIABLE] == "1"
    assert placement.draft_environment({VISIBLE_VARIABLE: "4,6"})[VISIBLE_VARIABLE] == "6"
    assert placement.draft_environment({VISIBLE_VARIABLE: "GPU-a,GPU-b", "X": "y"}) == {
        VISIBLE_VARIABLE: "GPU-b",
        "X": "y",
    }


def test_on_a_cpu_the_environment_is_inherited_as_it_is() -> None:
    assert place(server(), None, 0).draft_environment({"X": "y"}) == {"X": "y"}


@pytest.mark.parametrize(("cores", "target", "draft"), [({0, 1}, {0}, {1}), ({2, 3, 5}, {2, 3}, {5})])
def test_on_a_cpu_each_process_has_cores_of_its_own(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], target: set[int], draft: set[int]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: cores)
    placement = place(server(), None, 0)
    assert (placement.target_cores, placement.draft_cores) == (target, draft)


def test_on_a_single_core_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    placement = place(server(), None, 0)
    assert placement.target_cores is None
    assert placement.draft_cores is None
