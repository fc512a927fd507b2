"""Compiling, caching and loading the C++ operators."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from qcut.backends.cuda.launch import native as _native
from qcut.backends.cuda.launch.plans import LaunchSpec
from qcut.backends.cuda.launch.prebuild import prebuild
from qcut.errors import ToolchainError
from qcut.jit import cache as disk
from qcut.jit import toolchain
from tests.support import ROOT


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("QCUT_CACHE_DIR", str(tmp_path))
    _native.build.cache_clear()
    yield tmp_path
    _native.build.cache_clear()


def test_a_second_process_does_not_compile() -> None:
    assert _native.build() is not None, "g++ and torch's headers are there: it must compile"
    code = """
from qcut.backends.cuda.launch import native as _native
def refuse():
    raise AssertionError("compiled again")
_native._compile = refuse
library = _native.load()
print(library.bucket(65), library.hits)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "80 0"), done.stderr


def test_entry_that_does_not_load_is_a_miss(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QCUT_CACHE_DIR")
    good = _native.build()
    assert good is not None
    monkeypatch.setenv("QCUT_CACHE_DIR", str(empty_cache))
    _native.build.cache_clear()
    monkeypatch.setattr(_native, "_compile", lambda: good)
    disk.write(_native._NAME, _native.fingerprint(), disk.Entry({}, {"so": b"not a library"}))
    assert _native.load() is not None
    entry = disk.read(_native._NAME, _native.fingerprint())
    assert entry is not None
    assert entry.blobs["so"] == good


def test_an_entry_without_a_library_is_a_miss(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_compile", lambda: b"made again")
    disk.write(_native._NAME, _native.fingerprint(), disk.Entry({}, {"cubin": b"something else"}))
    with pytest.warns(RuntimeWarning, match="holds no shared object; its content is not used"):
        assert _native.build() == b"made again"
    _native.build.cache_clear()
    monkeypatch.setattr(_native, "_compile", None)
    assert _native.build() == b"made again"


def test_threads_compile_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []

    def compile_slowly() -> bytes:
        time.sleep(0.1)
        made.append(b"code")
        return made[0]

    monkeypatch.setattr(_native, "_compile", compile_slowly)
    monkeypatch.setattr(disk, "write", lambda *_: False)  # the disk would serve the others
    threads = [threading.Thread(target=_native.build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [b"code"]


def test_a_compiler_error_is_told_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = empty_cache / "broken.cpp"
    broken.write_text("#error no such luck\n")
    monkeypatch.setattr(_native, "SOURCE", broken)
    with pytest.warns(RuntimeWarning, match="(?s)does not compile: g\\+\\+ ended with 1.*no such luck"):
        assert _native.load() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _native.load() is None


def test_without_a_compiler_there_is_no_word(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ToolchainError("no g++")

    monkeypatch.setattr(toolchain, "find_gxx", missing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _native.load() is None
    assert _native.problem() == "no g++"


def test_fingerprint_covers_source_torch_and_compiler(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prints = {_native.fingerprint()}
    changed, with_header = (shutil.copytree(_native.SOURCE.parent, empty_cache / name) for name in ("a", "b"))
    for path in (changed / _native.SOURCE.name, with_header / "launch.h"):
        path.write_text(path.read_text() + "\n")
    for owner, name, value in (
        (_native, "SOURCE", changed / _native.SOURCE.name),
        (_native, "SOURCE", with_header / _native.SOURCE.name),
        (_native, "_FLAGS", (*_native._FLAGS, "-g")),
        (torch, "__version__", "2.99"),
        (torch, "compiled_with_cxx11_abi", lambda: False),
        (toolchain, "find_gxx", lambda: toolchain.Tool("g++", Path("g++"), "99.1.0")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            prints.add(_native.fingerprint())
    assert len(prints) == 7


@dataclass
class KernellessCall:
    """A layer's call that launches nothing."""

    calls_native: bool

    def launches(self, device: int) -> list[LaunchSpec]:
        return []


def test_prebuild_compiles_it_where_a_call_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    monkeypatch.setattr(_native, "build", lambda: built.append("C++"))
    prebuild([KernellessCall(False)], 0)
    assert not built
    prebuild([KernellessCall(False), KernellessCall(True)], 0)
    assert built == ["C++"]


def test_layouts_are_the_sources() -> None:
    assert [ctypes.sizeof(s) for s in (_native.Key, _native.Launch, _native.Plan)] == [72, 72, 160]
