"""The compatibility check knows every symbol of SGLang that the package uses."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sglang_ssd
from sglang_ssd import plugin
from sglang_ssd.surfaces import SURFACES

PACKAGE = Path(sglang_ssd.__file__).parent
DO_WITHOUT = {"sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus"}
"""Where it cannot be built a session's own text is searched."""


def imported(path: Path) -> set[str]:
    """The symbols of SGLang that a file imports, wherever in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    assert not [name for name in plain if name.split(".")[0] == "sglang"], f"{path}: import a symbol, not a module"
    found = [
        node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang"
    ]
    return {f"{node.module}.{name.name}" for node in found for name in node.names}


def test_the_table_has_every_symbol_that_is_imported_and_no_other() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if "stand_in" not in path.parts]
    listed = [symbol for symbols in SURFACES.values() for symbol in symbols]
    assert len(listed) == len(set(listed))
    assert set(listed) == set().union(*map(imported, files)) - DO_WITHOUT


def test_the_installed_sglang_has_all_of_them() -> None:
    assert plugin.check_compatibility() == []


def test_what_is_missing_is_named_with_its_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        plugin, "SURFACES", {"a purpose": ("sglang.srt.runtime_context.get_nothing", "sglang.nowhere.x")}
    )
    first, second = plugin.check_compatibility()
    assert first.startswith("This SGLang has no sglang.srt.runtime_context.get_nothing (a purpose); install")
    assert "sglang.nowhere.x" in second
