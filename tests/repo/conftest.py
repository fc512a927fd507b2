"""Distributions of qcut, built as `pip` builds them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from qcut.emitters.core.source import DType
from qcut.jit import packs
from tests.jit.test_packs import argmax
from tests.support import ROOT


def build(folder: Path, kind: str) -> Path:
    """Build the ``wheel`` or the ``sdist`` of a folder, without a network."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}('dist'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "dist" / done.stdout.splitlines()[-1]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a checkout that a distribution is made of, so that none of its build folders leaks in."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("qcut", "emitters"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.rmtree(copy / "qcut" / "binaries", ignore_errors=True)
    return copy


@pytest.fixture(scope="session")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with a small pack, as ``make wheel ARCHS=90a`` makes one with all kernels."""
    copy = tmp_path_factory.mktemp("packed") / "source"
    shutil.copytree(source, copy, symlinks=True)
    facts = {"arch": "sm_90a", "sources": packs.sources_digest()}
    kernel = argmax(DType.F16)
    (copy / "qcut" / "binaries").mkdir()
    data = packs.pack_bytes([(kernel.name, packs.key_of(kernel), packs.Packed(b"code", None, None))], facts)
    (copy / "qcut" / "binaries" / "sm_90a.qpack").write_bytes(data)
    return build(copy, "wheel")


@pytest.fixture(scope="session")
def wheel_without_kernels(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from nothing except the source distribution."""
    copy = tmp_path_factory.mktemp("sdist") / "source"
    shutil.copytree(source, copy, symlinks=True)
    with tarfile.open(build(copy, "sdist")) as archive:
        archive.extractall(copy.parent, filter="data")
    (unpacked,) = (path for path in copy.parent.iterdir() if path != copy)
    return build(unpacked, "wheel")
