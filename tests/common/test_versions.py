"""Old torch and transformers are refused, with the reason and what is allowed, before anything fails in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qcut.common import versions
from qcut.errors import UnsupportedError
from tests.support import ROOT


def fake_package(folder: Path, name: str, version: str, file: str = "version.py") -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise RuntimeError('loaded')\n")
    (folder / name / file).write_text(f"__version__ = '{version}'\n")


def without(monkeypatch: pytest.MonkeyPatch, folder: Path, package: str) -> None:
    """Python finds the packages of a folder first, and has not loaded this one."""
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize(
    ("package", "version", "served"),
    [
        ("torch", "2.10.0", False),
        ("torch", "2.10.1+cpu", False),
        ("torch", "1.13.1", False),
        ("torch", "2.11.0", True),
        ("torch", "2.11.0a0+git1", True),
        ("torch", "3.0", True),
        ("transformers", "4.57.6", False),
        ("transformers", "5.3.0", False),
        ("transformers", "5.4.0.dev0", True),
        ("transformers", "5.23.0", True),
        ("transformers", "unknown", False),
    ],
)
def test_old_versions_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, version: str, served: bool
) -> None:
    without(monkeypatch, tmp_path, package)
    fake_package(tmp_path, package, version, "version.py" if package == "torch" else "__init__.py")
    if served:
        versions.require(package)
        return
    oldest, reason = versions.OLDEST[package]
    with pytest.raises(UnsupportedError) as refused:
        versions.require(package)
    assert str(refused.value) == f"{package} {version} is too old: {reason}; allowed: {package}>={oldest}"


def test_version_of_the_imported_module_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    fake_package(tmp_path, "torch", "1.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    versions.require("torch")
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    with pytest.raises(UnsupportedError, match=r"torch 2\.9\.1 is too old"):
        versions.require("torch")


def test_old_torch_is_refused_before_importing_it(tmp_path: Path) -> None:
    fake_package(tmp_path, "torch", "2.4.0")
    for code in ("import qcut; qcut.quantize", "from qcut import W8A8"):
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(tmp_path), str(ROOT)]}; {code}"],
            capture_output=True,
            text=True,
        )
        assert done.stderr.splitlines()[-1].startswith("qcut.errors.UnsupportedError: torch 2.4.0 is too old: ")


def test_transformers_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match=r"transformers is not installed .*: pip install 'qcut-inference\[hf\]'"):
        versions.transformers()


def test_importing_qcut_imports_no_metadata() -> None:
    code = "import sys, qcut; print('importlib.metadata' in sys.modules, 'email' in sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False False", done.stderr
