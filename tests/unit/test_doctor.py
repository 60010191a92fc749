"""The doctor names what keeps a machine from serving."""

from __future__ import annotations

import pytest

from sglang_ssd import doctor
from sglang_ssd.config import ConfigError
from sglang_ssd.doctor import Finding
from sglang_ssd.launcher import checks


def test_a_machine_that_runs_these_tests_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ready"
    assert {line.split()[0] for line in lines[:-1]} >= {"python", "sglang", "torch", "host", "plugin", "hooks"}


def refuse() -> None:
    raise ConfigError("do this instead")


def test_a_problem_is_named_and_sets_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "check_plugin_visible", refuse)
    monkeypatch.setattr(checks, "check_sglang_version", refuse)
    assert doctor.main() == 1
    output = capsys.readouterr().out
    assert output.count("do this instead") == 2
    assert output.endswith("not ready: 2 problem(s)\n")


def test_a_missing_package_is_a_problem_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise ModuleNotFoundError("No module named 'sglang'")

    monkeypatch.setattr(doctor, "_check_symbols", absent)
    assert [finding.topic for finding in doctor.examine() if finding.problem] == ["hooks"]


def test_the_report_shows_facts_and_problems() -> None:
    assert doctor.report([Finding("python", "3.11")]) == "python      3.11\nready\n"
    assert "broken" in doctor.report([Finding("hooks", "fine", "broken")])
