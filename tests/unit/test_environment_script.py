"""The environment that make uses: named by its dependencies, complete or made again, shared by checkouts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", CHECKOUT / "scripts" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pip_calls(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(script, "_pip", lambda _environment, *arguments: calls.append(arguments))
    monkeypatch.setattr(script.venv, "create", lambda path, **_: path.mkdir())
    return calls


def checkout(path: Path, *, change: tuple[str, str] = ("", "")) -> Path:
    path.mkdir()
    text = (CHECKOUT / "pyproject.toml").read_text()
    assert change[0] in text
    (path / "pyproject.toml").write_text(text.replace(*change, 1))
    return path


def test_the_name_follows_the_dependencies_and_nothing_else(script: ModuleType, tmp_path: Path) -> None:
    first = script.environment_path(checkout(tmp_path / "a"), tmp_path)
    assert script.environment_path(checkout(tmp_path / "b"), tmp_path) == first
    version = checkout(tmp_path / "c", change=('version = "0.1.0"', 'version = "9.9.9"'))
    assert script.environment_path(version, tmp_path) == first
    dependency = checkout(tmp_path / "d", change=("sglang==0.5.23", "sglang==0.5.24"))
    assert script.environment_path(dependency, tmp_path) != first


def test_it_is_made_once_and_pointed_at_each_checkout_in_turn(
    script: ModuleType, pip_calls: list[tuple[str, ...]], tmp_path: Path
) -> None:
    one, two = checkout(tmp_path / "one"), checkout(tmp_path / "two")
    environment = script.environment_path(one, tmp_path / "cache")
    script.install(one, environment)
    assert any(f"{one}[bench,dev]" in call for call in pip_calls)
    pip_calls.clear()
    script.install(one, environment)
    assert pip_calls == []
    script.install(two, environment)
    script.install(one, environment)
    assert [call[-1] for call in pip_calls] == [str(two), str(one)]
    assert all("--no-deps" in call for call in pip_calls)


def test_an_interrupted_installation_is_made_again(
    script: ModuleType, pip_calls: list[tuple[str, ...]], tmp_path: Path
) -> None:
    here = checkout(tmp_path / "one")
    environment = script.environment_path(here, tmp_path / "cache")
    environment.mkdir(parents=True)
    (environment / "half").touch()
    script.install(here, environment)
    assert not (environment / "half").exists()
    assert (environment / script.MARKER).exists()
    assert len(pip_calls) == 2


def test_a_failed_installation_is_not_marked_complete(
    script: ModuleType, pip_calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_arguments: object) -> None:
        raise OSError("the network is gone")

    monkeypatch.setattr(script, "_pip", fail)
    here = checkout(tmp_path / "one")
    environment = script.environment_path(here, tmp_path / "cache")
    with pytest.raises(OSError, match="network"):
        script.install(here, environment)
    assert not (environment / script.MARKER).exists()


def test_older_environments_of_ours_are_deleted_and_nothing_else(
    script: ModuleType, pip_calls: list[tuple[str, ...]], tmp_path: Path
) -> None:
    here = checkout(tmp_path / "one")
    cache = tmp_path / "cache"
    for name in ("venv-0123456789ab", "demo"):
        (cache / name).mkdir(parents=True)
    script.install(here, script.environment_path(here, cache))
    assert not (cache / "venv-0123456789ab").exists()
    assert (cache / "demo").exists()


def test_wrong_usage_is_said(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["upgrade"]) == 2
    assert "usage" in capsys.readouterr().err
