"""Code that runs when a module is imported."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from qcut.process.imports import when_imported


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "imported_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "imported_later", raising=False)
    return "imported_later"


def test_a_function_runs_once_after_the_import(name: str) -> None:
    seen: list[ModuleType] = []
    finders = len(sys.meta_path)
    when_imported(name, seen.append)
    assert not seen
    module = __import__(name)
    assert seen == [module]
    assert module.value == 1
    assert len(sys.meta_path) == finders
    del sys.modules[name]
    __import__(name)
    assert seen == [module]


def test_a_function_runs_now_on_what_is_imported(name: str) -> None:
    module, seen, finders = __import__(name), [], len(sys.meta_path)
    when_imported(name, seen.append)
    assert seen == [module]
    assert len(sys.meta_path) == finders


def test_several_functions_wait_for_one_module(name: str) -> None:
    seen: list[int] = []
    for i in range(3):
        when_imported(name, lambda module, i=i: seen.append(i))
    __import__(name)
    assert sorted(seen) == [0, 1, 2]


def test_a_module_that_does_not_exist_is_missing_as_before(name: str) -> None:
    when_imported(f"{name}_not", lambda module: None)
    with pytest.raises(ModuleNotFoundError):
        __import__(f"{name}_not")
