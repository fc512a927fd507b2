"""Code that runs when a module is imported."""

from __future__ import annotations

import subprocess
import sys
import threading
import zipfile
from importlib import import_module, invalidate_caches, reload
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from qcut.common import hooks
from qcut.common.hooks import when_imported
from tests.support import ROOT

NAME = "imported_later"
STARTED, GO_ON = threading.Event(), threading.Event()
SEEN: list[ModuleType] = []


def noted(module: ModuleType) -> None:
    SEEN.append(module)


def noted_too(module: ModuleType) -> None:
    SEEN.append(module)


def refused(module: ModuleType) -> None:
    raise LookupError(f"{module.__name__} is refused")


NOTED, NOTED_TOO, REFUSED = (f"{__name__}:{function.__name__}" for function in (noted, noted_too, refused))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / f"{NAME}.py"
    file.write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files of one size change within a second
    monkeypatch.setattr(hooks._FINDER, "waiting", {})
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    for event in (STARTED, GO_ON):
        event.clear()
    SEEN.clear()
    return file


@pytest.mark.usefixtures("file")
def test_a_function_runs_after_each_import_and_reload() -> None:
    finders = list(sys.meta_path)
    for _ in range(3):
        when_imported(NAME, NOTED)
    assert not SEEN
    module = import_module(NAME)
    assert [module] == SEEN
    assert module.value == 1
    import_module(NAME)
    assert [module] == SEEN
    assert reload(module) is module
    assert [module, module] == SEEN
    del sys.modules[NAME]
    assert import_module(NAME) is not module
    assert len(SEEN) == 3
    assert finders == sys.meta_path


@pytest.mark.usefixtures("file")
def test_hook_runs_for_imported_module_and_at_reload() -> None:
    module = import_module(NAME)
    when_imported(NAME, NOTED)
    assert [module] == SEEN
    reload(module)
    assert [module, module] == SEEN


@pytest.mark.usefixtures("file")
def test_several_functions_wait_for_one_module() -> None:
    for then in (NOTED, NOTED_TOO):
        when_imported(NAME, then)
    module = import_module(NAME)
    assert [module, module] == SEEN


@pytest.mark.usefixtures("file")
def test_find_spec_runs_no_hook() -> None:
    plain = find_spec(NAME)
    assert plain is not None
    when_imported(NAME, NOTED)
    for _ in range(2):
        spec = find_spec(NAME)
        assert spec is not None
        assert spec.origin == plain.origin
        assert spec.loader is not None
        assert spec.loader.get_source(NAME) == "value = 1\n"
    assert not SEEN
    assert NAME not in sys.modules
    module = import_module(NAME)
    assert [module] == SEEN
    assert type(module.__loader__) is type(module.__spec__.loader) is SourceFileLoader
    assert type(module.__spec__) is type(plain)


def test_failed_import_runs_no_hook_and_may_be_retried(file: Path) -> None:
    when_imported(NAME, NOTED)
    file.write_text("raise ImportError('something is missing')\n")
    for _ in range(2):
        with pytest.raises(ImportError, match="something is missing"):
            import_module(NAME)
    assert not SEEN
    file.write_text("value = 2\n")
    assert import_module(NAME).value == 2
    assert len(SEEN) == 1


@pytest.mark.usefixtures("file")
def test_missing_module_stays_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    when_imported(f"{NAME}_not", NOTED)
    with pytest.raises(ModuleNotFoundError):
        import_module(f"{NAME}_not")
    monkeypatch.setitem(sys.modules, NAME, None)  # how tests and users shut a module out
    when_imported(NAME, NOTED)
    with pytest.raises(ModuleNotFoundError):
        import_module(NAME)
    assert not SEEN


@pytest.mark.usefixtures("file")
def test_what_a_function_raises_the_import_raises() -> None:
    when_imported(NAME, REFUSED)
    with pytest.raises(LookupError, match=f"{NAME} is refused"):
        import_module(NAME)
    assert NAME not in sys.modules


def test_hook_runs_only_for_its_module(tmp_path: Path, file: Path) -> None:
    """An archive has one loader for all its modules."""
    file.unlink()
    with zipfile.ZipFile(tmp_path / "some.zip", "w") as archive:
        archive.writestr(f"{NAME}.py", "value = 1\n")
        archive.writestr(f"{NAME}_beside.py", "value = 2\n")
    sys.path.insert(0, str(tmp_path / "some.zip"))
    invalidate_caches()
    when_imported(NAME, NOTED)
    try:
        assert import_module(f"{NAME}_beside").value == 2
        module = import_module(NAME)
    finally:
        del sys.path[0]
        sys.modules.pop(f"{NAME}_beside", None)
    assert [module] == SEEN


@pytest.mark.parametrize("waits", ["before", "within"])
@pytest.mark.parametrize("fails", [False, True])
def test_hook_of_a_module_for_itself_runs_last(file: Path, waits: str, fails: bool) -> None:
    end = "1 / 0" if fails else "value = 1"
    file.write_text(f"from qcut.common.hooks import when_imported\nwhen_imported({NAME!r}, {NOTED!r})\n{end}\n")
    if waits == "before":
        when_imported(NAME, NOTED)
    if fails:
        with pytest.raises(ZeroDivisionError):
            import_module(NAME)
        assert not SEEN
        file.write_text("value = 1\n")
    module = import_module(NAME)
    assert [module] == SEEN
    assert module.value == 1
    assert "Telling" not in type(module.__spec__).__name__


@pytest.mark.parametrize("fails", [False, True])
def test_hook_runs_after_import_in_another_thread(file: Path, fails: bool) -> None:
    body = f"from {__name__} import GO_ON, STARTED\nSTARTED.set()\nassert GO_ON.wait(60)\n"
    file.write_text(f"{body}{'1 / 0' if fails else 'value = 1'}\n")
    problems: list[Exception] = []

    def load() -> None:
        try:
            import_module(NAME)
        except ZeroDivisionError as exc:
            problems.append(exc)

    thread = threading.Thread(target=load)
    thread.start()
    assert STARTED.wait(60)
    for then in (NOTED, NOTED_TOO, NOTED):
        when_imported(NAME, then)
    assert not SEEN
    GO_ON.set()
    thread.join(60)
    assert len(problems) == fails
    assert {module.value for module in SEEN} == (set() if fails else {1})
    assert len(SEEN) == (0 if fails else 3)  # one of them twice, as it was asked for twice meanwhile


def test_many_threads_import_once(file: Path) -> None:
    file.write_text("import time\ntime.sleep(0.05)\nvalue = 1\n")
    when_imported(NAME, NOTED)
    threads = [threading.Thread(target=import_module, args=(NAME,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [module.value for module in SEEN] == [1]


@pytest.mark.usefixtures("file")
def test_one_finder_whatever_is_reloaded() -> None:
    when_imported(NAME, NOTED)
    finders = list(sys.meta_path)
    reload(hooks)
    assert finders == sys.meta_path
    hooks.when_imported(NAME, NOTED)
    import_module(NAME)
    assert len(SEEN) == 1


def test_importing_qcut_imports_next_to_nothing() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); before = set(sys.modules); import qcut\n"
        "print(*(set(sys.modules) - before))"
    )
    ran = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    new = set(ran.stdout.split())
    own = {name for name in new if name.partition(".")[0] == "qcut"}
    assert own == {"qcut", "qcut.errors", "qcut.common", "qcut.common.hooks", "qcut.common.versions"}
    assert {name.partition(".")[0] for name in new - own} <= sys.stdlib_module_names
    slow = {"asyncio", "ast", "dataclasses", "inspect", "json", "logging", "socket", "subprocess", "threading"}
    assert not new & slow
