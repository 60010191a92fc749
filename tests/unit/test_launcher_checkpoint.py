"""A draft model's name becomes a folder before the draft server is started."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from sglang_ssd.config import ConfigError
from sglang_ssd.launcher.checkpoint import local_checkpoint


def test_a_folder_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("nothing to fetch"))
    assert local_checkpoint(str(tmp_path), None) == str(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert local_checkpoint(f"~/{tmp_path.name}", None) == str(tmp_path)


def test_a_name_is_fetched_at_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fetch(name: str, **options: object) -> str:
        calls.append((name, options["revision"]))
        return "/cache/snapshot"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert local_checkpoint("family/draft", "v2") == "/cache/snapshot"
    assert calls == [("family/draft", "v2")]


def test_a_name_that_cannot_be_fetched_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_name: str, **_options: object) -> str:
        raise LocalEntryNotFoundError("No network.\nMany more words.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=r"family/draft .* No network\.$"):
        local_checkpoint("family/draft", None)


def test_what_is_no_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be fetched"):
        local_checkpoint("not a name at all", None)
