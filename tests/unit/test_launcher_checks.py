"""Each refusal is one sentence that says what to do, and comes before anything heavy."""

from __future__ import annotations

import importlib.metadata
import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from sglang_ssd.config import ConfigError
from sglang_ssd.launcher import arguments as command_line
from sglang_ssd.launcher import checks
from sglang_ssd.launcher.arguments import Arguments


def parse(*argv: str) -> Arguments:
    return command_line.parse(["--model-path", "target", "--speculative-draft-model-path", "draft", *argv])


@pytest.mark.parametrize(
    ("argv", "advice"),
    [
        (["--pp-size", "2"], "--pp-size 1"),
        (["--dp-size", "2", "--enable-dp-attention"], "--enable-dp-attention"),
        (["--attn-dp-size", "2", "--tp-size", "2"], "data-parallel attention"),
        (["--enable-lora"], "--enable-lora"),
        (["--lora-paths", "a=b"], "--lora-paths"),
        (["--tokenizer-worker-num", "2"], "--tokenizer-worker-num 1"),
        (["--nnodes", "2"], "--nnodes 1"),
        (["--disaggregation-mode", "decode"], "--disaggregation-mode"),
        (["--grammar-backend", "outlines"], "--grammar-backend xgrammar"),
        (["--encoder-only"], "--encoder-only"),
        (["--smg-grpc-mode"], "--grpc-mode"),
        (["--speculative-algorithm", "EAGLE"], "EAGLE"),
    ],
)
def test_what_is_not_supported_yet_is_refused(argv: list[str], advice: str) -> None:
    with pytest.raises(ConfigError, match=advice) as refusal:
        checks.check_supported(parse(*argv))
    assert "\n" not in str(refusal.value)


def test_what_is_supported_passes() -> None:
    checks.check_supported(parse("--tp-size", "2", "--speculative-algorithm", "SSD"))


def test_without_speculation_all_of_sglang_is_supported() -> None:
    checks.check_supported(parse("--pp-size", "2", "--enable-lora", "--speculative-ssd-mode", "off"))


def model(path: Path, vocabulary: dict[str, int], padded_to: int) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": padded_to}))
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return path


def parse_models(target: Path, draft: Path, *argv: str) -> Arguments:
    models = ["--model-path", str(target), "--speculative-draft-model-path", str(draft)]
    return command_line.parse([*models, *argv])


VOCABULARY = {"<unk>": 0, "a": 1, "b": 2}


def test_models_with_the_same_tokens_pass_whatever_their_padding(tmp_path: Path) -> None:
    target, draft = model(tmp_path / "t", VOCABULARY, 3), model(tmp_path / "d", VOCABULARY, 64)
    checks.check_models(parse_models(target, draft))


@pytest.mark.parametrize("other", [{"<unk>": 0, "b": 1, "a": 2}, {"<unk>": 0, "a": 1}, {**VOCABULARY, "c": 3}])
def test_models_with_other_tokens_are_refused(tmp_path: Path, other: dict[str, int]) -> None:
    target, draft = model(tmp_path / "t", VOCABULARY, 64), model(tmp_path / "d", other, 64)
    with pytest.raises(ConfigError, match="another tokenizer"):
        checks.check_models(parse_models(target, draft))
    checks.check_models(parse_models(target, draft, "--speculative-ssd-mode", "off"))


def test_a_model_without_a_draft_is_refused(tmp_path: Path) -> None:
    target = model(tmp_path / "t", VOCABULARY, 3)
    with pytest.raises(ConfigError, match="--speculative-draft-model-path"):
        checks.check_models(command_line.parse(["--model-path", str(target)]))
    checks.check_models(command_line.parse(["--model-path", str(target), "--speculative-ssd-mode", "off"]))


def test_a_draft_server_that_runs_already_has_its_own_model(tmp_path: Path) -> None:
    target = model(tmp_path / "t", VOCABULARY, 3)
    argv = ["--model-path", str(target), "--speculative-ssd-endpoint", "ipc:///run/draft.sock"]
    checks.check_models(command_line.parse(argv))
    with pytest.raises(ConfigError, match=r"^--speculative-draft-model-path"):
        checks.check_models(command_line.parse([*argv, "--speculative-draft-model-path", str(tmp_path / "nothing")]))


def test_missing_models_are_refused(tmp_path: Path) -> None:
    target = model(tmp_path / "t", VOCABULARY, 3)
    with pytest.raises(ConfigError, match=r"^--model-path"):
        checks.check_models(parse_models(tmp_path / "nothing", target))
    with pytest.raises(ConfigError, match=r"^--speculative-draft-model-path"):
        checks.check_models(parse_models(target, tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        checks.check_models(parse_models(tmp_path, target))


def pretend_entry_points(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    found = [EntryPoint(name, "module:function", checks.PLUGIN_GROUP) for name in names]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: found)


def test_a_plugin_that_sglang_will_not_load_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(checks.WHITELIST_VARIABLE, raising=False)
    pretend_entry_points(monkeypatch, "other")
    with pytest.raises(ConfigError, match="install"):
        checks.check_plugin_visible()
    pretend_entry_points(monkeypatch, "other", checks.PLUGIN_NAME)
    checks.check_plugin_visible()
    monkeypatch.setenv(checks.WHITELIST_VARIABLE, "other, another")
    with pytest.raises(ConfigError, match=checks.WHITELIST_VARIABLE):
        checks.check_plugin_visible()
    monkeypatch.setenv(checks.WHITELIST_VARIABLE, f"other, {checks.PLUGIN_NAME}")
    checks.check_plugin_visible()


def test_our_plugin_is_visible_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(checks.WHITELIST_VARIABLE, raising=False)
    checks.check_plugin_visible()
    checks.check_sglang_version()


def test_another_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.22" if name == "sglang" else real(name))
    with pytest.raises(ConfigError, match=rf"sglang=={checks.pinned_sglang()}"):
        checks.check_sglang_version()


def test_missing_symbols_are_named() -> None:
    checks.check_compatible([])
    with pytest.raises(ConfigError, match=r"a\.b is missing\. c\.d is missing\."):
        checks.check_compatible(["a.b is missing.", "c.d is missing."])
