"""The HTTP side: figures in meta_info, options at the door, seeds of parallel samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from sglang_ssd.api.meta_info import fold_figures
from sglang_ssd.api.options import check_custom_params
from sglang_ssd.api.samples import SampleSeeds


def test_the_last_totals_become_integers_and_the_rest_is_passed_on() -> None:
    passed_on = {}

    def update(manager, meta_info, state, customized_info, index, finish_reason) -> None:
        passed_on.update(customized_info)

    meta_info: dict = {}
    info = {"ssd": [[(0, 0, 0, 0)], [(5, 3, 1, 1)]], "other": [[1], [2]]}
    fold_figures(update, None, meta_info, None, info, 1, None)
    assert meta_info == {"ssd_rounds": 5, "ssd_hits": 3, "ssd_partial": 1, "ssd_misses": 1}
    assert passed_on == {"other": [[1], [2]]}
    assert "ssd" in info  # shared by the requests of a batch


@pytest.mark.parametrize("given", [None, {}, {"enabled": False}, {"num_steps": 0}, {"enabled": True, "num_steps": 3}])
def test_good_options_pass(given: object) -> None:
    check_custom_params(None, SimpleNamespace(custom_params={"ssd": given, "else": 1}))
    check_custom_params(None, SimpleNamespace(custom_params=None))


@pytest.mark.parametrize("given", [1, [], {"on": True}, {"enabled": 1}, {"num_steps": -1}, {"num_steps": True}])
def test_bad_options_are_refused(given: object) -> None:
    with pytest.raises(ValueError, match="custom_params"):
        check_custom_params(None, SimpleNamespace(custom_params={"ssd": given}))


@dataclass
class Parameters:
    sampling_seed: int | None


@dataclass
class Manager:
    sent: list[int | None] = field(default_factory=list)

    def send(self, request) -> None:
        self.sent.append(request.sampling_params.sampling_seed)


def test_samples_of_a_seed_get_seeds_of_their_own() -> None:
    seeds, manager = SampleSeeds(), Manager()
    shared, other, unseeded = Parameters(9), Parameters(9), Parameters(None)
    for parameters in (shared, shared, other, shared, unseeded, unseeded):
        seeds.send(Manager.send, manager, SimpleNamespace(sampling_params=parameters))
    first, second, again, third, *rest = manager.sent
    assert (first, again, rest) == (9, 9, [None, None])
    assert len({first, second, third}) == 3
    assert shared.sampling_seed == 9
