"""Options to flags and back, and what is refused."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ssd.config import MAX_NUM_STEPS, MAX_SUPPORT, ConfigError, SSDConfig, check_num_steps


def parse(*argv: str) -> SSDConfig:
    parser = argparse.ArgumentParser()
    SSDConfig.add_arguments(parser)
    return SSDConfig.from_arguments(parser.parse_args(argv))


def test_no_flags_give_the_defaults() -> None:
    assert parse() == SSDConfig()
    assert SSDConfig().to_arguments() == []


CONFIGS = st.builds(
    SSDConfig,
    mode=st.sampled_from(["ssd", "sync", "off"]),
    wait=st.sampled_from(["auto", "full"]),
    fallback=st.sampled_from(["auto", "jit", "ngram", "none"]),
    lookahead=st.sampled_from(["auto", "fixed"]),
    planner=st.sampled_from(["confidence", "measured", "geometric", "uniform", "full"]),
    verify=st.sampled_from(["coupled", "rejection"]),
    rejection_support=st.integers(1, MAX_SUPPORT),
    saguaro_c=st.floats(0.0, 1.0),
    fan_out=st.integers(1, 1000),
    endpoint=st.sampled_from([None, "ipc:///run/draft.sock", "tcp://127.0.0.1:5555", "tcp://[::1]:5555"]),
    draft_engine=st.sampled_from(["sglang", "torch"]),
    draft_device=st.sampled_from([None, "cpu", "cuda:1"]),
    draft_max_total_tokens=st.none() | st.integers(256, 10**7),
    deadline_ms=st.none() | st.floats(0.1, 1e4),
)


@given(CONFIGS)
@settings(derandomize=True, deadline=None)
def test_a_config_survives_its_own_command_line(config: SSDConfig) -> None:
    assert parse(*config.to_arguments()) == config


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"mode": "fast"}, "--speculative-ssd-mode"),
        ({"wait": "long"}, "--speculative-ssd-wait"),
        ({"fallback": "magic"}, "--speculative-ssd-fallback"),
        ({"verify": "greedy"}, "--speculative-ssd-verify"),
        ({"rejection_support": 0}, "--speculative-ssd-rejection-support"),
        ({"rejection_support": MAX_SUPPORT + 1}, "--speculative-ssd-rejection-support"),
        ({"saguaro_c": 1.1}, "--speculative-ssd-saguaro-c"),
        ({"saguaro_c": -0.1}, "--speculative-ssd-saguaro-c"),
        ({"saguaro_c": float("nan")}, "--speculative-ssd-saguaro-c"),
        ({"fan_out": 0}, "--speculative-ssd-fan-out"),
        ({"draft_engine": "vllm"}, "--speculative-ssd-draft-engine"),
        ({"draft_max_total_tokens": 255}, "--speculative-ssd-draft-max-total-tokens"),
        ({"deadline_ms": 0.0}, "--speculative-ssd-deadline-ms"),
        ({"deadline_ms": -1.0}, "--speculative-ssd-deadline-ms"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_flag(change: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        SSDConfig().replace(**change)


@pytest.mark.parametrize(
    "endpoint", ["tcp://0.0.0.0:1", "tcp://10.0.0.7:1", "tcp://*:1", "ipc://", "inproc://x", "http://127.0.0.1:1", ""]
)
def test_endpoints_that_others_could_reach_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError):
        SSDConfig(endpoint=endpoint)


@pytest.mark.parametrize("num_steps", [-1, 0, MAX_NUM_STEPS + 1])
def test_lookahead_out_of_range_is_refused(num_steps: int) -> None:
    with pytest.raises(ConfigError, match="--speculative-num-steps"):
        check_num_steps(num_steps)


@pytest.mark.parametrize("num_steps", [1, MAX_NUM_STEPS])
def test_lookahead_in_range_is_accepted(num_steps: int) -> None:
    check_num_steps(num_steps)
