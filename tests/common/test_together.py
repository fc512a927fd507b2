"""Files of fixed names that are replaced as one."""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from qcut.common.together import open_together, record_path, replacing_together
from qcut.errors import CheckpointError
from tests.support.faults import deaths

NAMES = ("a", "b", "c")


def write(folder: Path, value: str, names: tuple[str, ...] = NAMES) -> None:
    with replacing_together(folder, names, "a", CheckpointError) as files:
        for file in files:
            file.write(value.encode())


def read(folder: Path) -> dict[str, str]:
    with ExitStack() as stack:
        opened = open_together(folder, NAMES, "a", CheckpointError)
        return {name: stack.enter_context(file).read().decode() for name, (_, file) in opened.items()}


def whole(value: str) -> dict[str, str]:
    return dict.fromkeys(NAMES, value)


def test_files_are_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    (tmp_path / ".a.01234567.new").touch()  # of a process that was killed
    write(tmp_path, "1")
    assert read(tmp_path) == whole("1")
    write(tmp_path, "2", ("a", "b"))
    assert read(tmp_path) == {"a": "2", "b": "2", "c": "1"}
    assert {path.name for path in tmp_path.iterdir()} == {*NAMES, "other"}
    assert read(tmp_path / "none") == {}


@pytest.mark.parametrize("old", [True, False])
def test_death_at_any_step_leaves_no_mixture(tmp_path: Path, old: bool) -> None:
    seen = []
    before = whole("old") if old else {}
    if old:
        write(tmp_path / "0", "old")
    for step in deaths(lambda: write(tmp_path / f"{len(seen)}", "new")):
        folder = tmp_path / f"{step}"
        found = read(folder)
        assert found in (before, whole("new"))
        seen.append(found)
        write(folder, "later")
        assert read(folder) == whole("later")
        assert {path.name for path in folder.iterdir()} == set(NAMES)
        if old:
            write(tmp_path / f"{step + 1}", "old")
    assert (seen[0], seen[-1]) == (before, whole("new"))


@pytest.mark.parametrize("function", ["fsync", "replace", "open"])
def test_failure_at_any_step_leaves_no_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    real, seen = getattr(os, function), []
    for step in range(100):
        write(tmp_path, "old")
        calls = []

        def full(*args: object, calls: list[int] = calls, step: int = step, **kwargs: object) -> object:
            calls.append(1)
            if len(calls) > step:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, function, full)
        try:
            write(tmp_path, "new")
            break
        except OSError as error:
            seen.append(error.errno)
        finally:
            monkeypatch.undo()
        assert read(tmp_path) in (whole("old"), whole("new"))
    assert read(tmp_path) == whole("new")
    assert seen
    assert set(seen) == {errno.ENOSPC}
    write(tmp_path, "later")
    assert {path.name for path in tmp_path.iterdir()} == set(NAMES)


def test_readers_see_one_commit_while_writers_work(tmp_path: Path) -> None:
    write(tmp_path, "0")
    stop = threading.Event()

    def save(name: str) -> None:
        count = 0
        while not stop.is_set():
            count += 1
            write(tmp_path, f"{name}{count}")

    writers = [threading.Thread(target=save, args=(name,)) for name in "xy"]
    for writer in writers:
        writer.start()
    try:
        found: list[dict[str, str]] = []
        end = time.monotonic() + 60
        while time.monotonic() < end and len({one["a"] for one in found}) < 20:
            found.append(read(tmp_path))
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert all(len(one) == 3 and len(set(one.values())) == 1 for one in found)
    assert len({one["a"] for one in found}) == 20


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"format": "x", "renames": {}}', '{"format": "qcut-commit", "renames": {".a.01234567.new": "../a"}}'],
)
def test_records_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path, "1")
    record_path(tmp_path, "a").write_text(text)
    with pytest.raises(CheckpointError, match=r"\.a\.commit"):
        read(tmp_path)
    with pytest.raises(CheckpointError, match=r"\.a\.commit"):
        write(tmp_path, "2")
