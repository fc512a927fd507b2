"""What an installation takes: files are counted once, and only what pip added between two measurements."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import install_size


def test_files_count_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(b"x" * 1000)
    empty = install_size.disk_bytes(tmp_path)
    (tmp_path / "two").hardlink_to(tmp_path / "a" / "one")
    assert install_size.disk_bytes(tmp_path) == empty
    (tmp_path / "three").write_bytes(b"x" * 500)
    assert install_size.disk_bytes(tmp_path) == empty + 500


def test_shares_are_what_each_step_added(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def install(python: Path, requirement: str) -> list[str]:
        size, name = (3_000_000, "torch 1") if requirement.startswith("torch") else (1_000_000, "qcut 2")
        (python.parent / name).write_bytes(bytes(size))
        return [name]

    monkeypatch.setattr(install_size, "install", install)
    monkeypatch.setattr(install_size.venv, "create", lambda folder, with_pip: Path(folder, "bin").mkdir())
    monkeypatch.setattr(sys, "argv", ["install_size.py", "--torch", "torch==1"])
    install_size.main()
    torch, qcut = capsys.readouterr().out.splitlines()
    assert torch == "torch: 3 MB in 1 packages: torch 1"
    assert qcut == "qcut: 1 MB in 1 packages: qcut 2"
