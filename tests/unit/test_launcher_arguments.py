"""SGLang's flags and ours on one command line."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from sglang_ssd.config import DEFAULT_NUM_STEPS, MAX_NUM_STEPS, ConfigError
from sglang_ssd.launcher import arguments as command_line
from sglang_ssd.launcher.arguments import Arguments

MODELS = ["--model-path", "target", "--speculative-draft-model-path", "draft"]


def parse(*argv: str, on_cpu: bool = True) -> Arguments:
    return command_line.complete(command_line.parse([*MODELS, *argv]), on_cpu=on_cpu)


def test_both_kinds_of_flags_arrive() -> None:
    arguments = parse(
        "--speculative-ssd-fan-out", "7", "--tp-size", "2", "--speculative-ssd-wait=full", "--port", "1234"
    )
    assert (arguments.config.fan_out, arguments.config.wait) == (7, "full")
    assert (arguments.server.tp_size, arguments.server.port, arguments.port_given) == (2, 1234, True)
    assert (arguments.server.model_path, arguments.server.speculative_draft_model_path) == ("target", "draft")


def test_sglang_learns_the_algorithm_and_its_widths() -> None:
    server = parse("--speculative-num-steps", "6").server
    assert (server.speculative_algorithm, server.speculative_eagle_topk) == ("SSD", 1)
    assert (server.speculative_num_steps, server.speculative_num_draft_tokens) == (6, 7)


def test_without_flags_the_lookahead_is_the_default() -> None:
    arguments = parse()
    assert arguments.server.speculative_num_steps == DEFAULT_NUM_STEPS
    assert not arguments.port_given


def test_a_matching_number_of_draft_tokens_is_accepted() -> None:
    assert (
        parse("--speculative-num-steps", "3", "--speculative-num-draft-tokens", "4").server.speculative_num_steps == 3
    )


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--speculative-num-steps", "3", "--speculative-num-draft-tokens", "3"], "--speculative-num-draft-tokens"),
        (["--speculative-num-draft-tokens", "99"], "--speculative-num-draft-tokens"),
        (["--speculative-num-steps", "0"], "--speculative-num-steps"),
        (["--speculative-num-steps", str(MAX_NUM_STEPS + 1)], "--speculative-num-steps"),
        (["--speculative-ssd-fan-out", "0"], "--speculative-ssd-fan-out"),
        (["--speculative-ssd-endpoint", "tcp://0.0.0.0:1"], "tcp://127.0.0.1"),
    ],
)
def test_what_cannot_work_is_refused_by_name(argv: list[str], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        parse(*argv)


@pytest.mark.parametrize("flag", ["--speculative-ssd-typo", "--speculative-ssd-fan", "--speculative-ssd-typo=1"])
def test_an_unknown_or_shortened_flag_of_ours_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="no option --speculative-ssd-"):
        parse(flag, "1")


def test_off_is_sglang_without_speculation() -> None:
    arguments = parse("--speculative-ssd-mode", "off", "--speculative-num-steps", "3")
    server = arguments.server
    assert not arguments.speculates
    assert server.speculative_algorithm is None
    assert server.speculative_num_steps is None
    assert server.speculative_num_draft_tokens is None
    assert server.speculative_draft_model_path is None


def test_a_cpu_gets_defaults_that_fit_it() -> None:
    arguments = parse()
    server = arguments.server
    assert (server.device, server.attention_backend, server.sleep_on_idle) == ("cpu", "torch_native", True)
    assert (server.max_total_tokens, server.max_running_requests) == (32768, 32)
    assert arguments.config.draft_max_total_tokens == 32768


def test_given_values_win_over_the_cpu_defaults() -> None:
    arguments = parse(
        *("--max-total-tokens", "500", "--max-running-requests", "3", "--attention-backend", "intel_amx"),
        *("--speculative-ssd-draft-max-total-tokens", "999"),
    )
    server = arguments.server
    assert (server.max_total_tokens, server.max_running_requests) == (500, 3)
    assert server.attention_backend == "intel_amx"
    assert arguments.config.draft_max_total_tokens == 999


def test_a_gpu_keeps_sglangs_defaults() -> None:
    arguments = parse(on_cpu=False)
    server = arguments.server
    assert (server.device, server.attention_backend, server.sleep_on_idle) == (None, None, False)
    assert (server.max_total_tokens, server.max_running_requests) == (None, None)
    assert arguments.config.draft_max_total_tokens is None


def test_our_settings_survive_the_way_into_the_scheduler_process() -> None:
    arguments = parse("--speculative-ssd-fan-out", "5")
    command_line.attach(arguments, "ipc:///run/draft.sock")
    arrived = pickle.loads(pickle.dumps(arguments.server))._ssd
    assert arrived["endpoint"] == "ipc:///run/draft.sock"
    assert arrived["target"] == "target"
    assert arrived["config"]["fan_out"] == 5
    assert type(arguments.config)(**arrived["config"]) == arguments.config


def test_a_configuration_file_may_hold_both_kinds(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("model-path: from-file\nspeculative-ssd-fan-out: 9\ntp-size: 2\nport: 4321\n")
    argv = ["--config", str(file), "--speculative-draft-model-path", "draft"]
    assert command_line.names_model(argv)
    arguments = command_line.parse(argv)
    assert (arguments.config.fan_out, arguments.server.tp_size) == (9, 2)
    assert (arguments.server.model_path, arguments.port_given) == ("from-file", True)


@pytest.mark.parametrize(
    ("argv", "named"),
    [([], False), (["--port", "1"], False), (["--model", "m"], True), (["--model-path=m"], True), (MODELS, True)],
)
def test_whether_a_model_is_named(argv: list[str], named: bool) -> None:
    assert command_line.names_model(argv) == named


def test_one_help_shows_both_kinds() -> None:
    text = command_line.help_text()
    for flag in ("--tp-size", "--speculative-num-steps", "--speculative-ssd-mode", "--speculative-ssd-endpoint"):
        assert flag in text
    assert "\nSSD:\n" in text
