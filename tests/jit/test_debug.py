"""``QCUT_DEBUG``, ``QCUT_DUMP`` and ``QCUT_LINEINFO``: what each shows of a kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qcut import jit
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.decoder.argmax import ArgmaxRows
from qcut.errors import ConfigError
from qcut.jit import debug
from qcut.jit.build import device_fingerprint, rebuild


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelSource:
    """A kernel that no cache has."""
    monkeypatch.setenv("QCUT_CACHE_DIR", str(tmp_path / "cache"))
    plain = ArgmaxRows(DType.F16, "sm_80", False).emit()
    return replace(plain, defines=(f"TEST_{abs(hash(str(tmp_path)))}",))


def test_builds_are_logged(
    source: KernelSource, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jit.build(source)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("QCUT_DEBUG", "build, choice")
    rebuild(source)
    err = capsys.readouterr().err
    assert err.startswith(f"qcut: build: {source.name} in ")
    assert "registers=" in err


def test_choices_are_logged_with_their_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose = debug.logs_choice(lambda m, *, k: f"tile {m} x {k}")
    assert choose(3, k=4) == "tile 3 x 4"
    monkeypatch.setenv("QCUT_DEBUG", "choice")
    assert choose(3, k=4) == "tile 3 x 4"
    assert capsys.readouterr().err == "qcut: choice: <lambda>(3, k=4): tile 3 x 4\n"


def test_an_unknown_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QCUT_DEBUG", "builds")
    with pytest.raises(ConfigError, match="QCUT_DEBUG: found 'builds'; allowed: choice, build, launch"):
        debug.is_logged("build")


def test_dump_holds_every_stage(source: KernelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QCUT_DUMP", str(tmp_path / "dump"))
    binary = jit.build(source)
    files = {path.suffix: path.read_bytes() for path in (tmp_path / "dump").iterdir()}
    assert files.keys() == {".cu", ".flags", ".ptx", ".cubin", ".sass", ".log"}
    assert files[".cu"] == source.text.encode()
    assert files[".cubin"] == binary.cubin
    assert b".visible .entry" in files[".ptx"]
    assert b"registers" in files[".log"]
    assert b"--fmad=false" in files[".flags"]
    assert b"EXIT" in files[".sass"] or files[".sass"].startswith(b"// no nvdisasm")


def test_unwritable_dump_names_the_folder(
    source: KernelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QCUT_DUMP", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"QCUT_DUMP=.*file: cannot be written"):
        jit.build(source)


def test_line_numbers_have_keys_of_their_own(source: KernelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, key = jit.build(source), device_fingerprint(source)
    monkeypatch.setenv("QCUT_LINEINFO", "1")
    assert device_fingerprint(source) != key
    lines = jit.build(source)
    assert b".debug_line" in lines.cubin
    assert b".debug_line" not in plain.cubin
