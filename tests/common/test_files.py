"""The one writer of files: what a crash leaves, modes, and the order on disk."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from qcut.common import files
from qcut.common.files import make_directory, replacing, write_bytes, write_json, write_text, writing
from qcut.common.schema import read_json
from qcut.errors import ConfigError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_are_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_bytes(path, iter([b"one", b"", b"two"]))
    assert path.read_bytes() == b"onetwo"
    write_text(path, "µ\n")
    assert path.read_bytes() == "µ\n".encode()
    write_json(path, {"x": [1]})
    assert read_json(path, ConfigError) == {"x": [1]}
    assert names(tmp_path) == ["a"]


def test_new_files_have_the_mode_of_any_other(tmp_path: Path) -> None:
    """The umask is never changed for it: another thread would create its files with that."""
    for mask in (0o022, 0o077, 0o002):
        before = os.umask(mask)
        try:
            write_text(tmp_path / "text", "")
            with replacing(tmp_path / "other") as (new,):
                new.write(b"x")
        finally:
            os.umask(before)
        for name in ("text", "other"):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~mask


def test_files_reach_the_disk_before_any_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    fsync, replace = os.fsync, os.replace

    def flush(handle: int) -> None:
        steps.append("directory" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def rename(source: Path, target: Path) -> None:
        steps.append(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", rename)
    with replacing(tmp_path / "b", tmp_path / "a") as new:
        for file in new:
            file.write(b"new")
    assert steps == ["file", "file", "b", "a", "directory"]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("failing", ["fsync", "replace", "the block"])
def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def half_written() -> Iterator[bytes]:
        yield b"new"
        if failing == "the block":
            full()

    write_text(tmp_path / "a", "old")
    if failing != "the block":
        monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="No space"):
        write_bytes(tmp_path / "a", half_written())
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_failure_to_flush_a_directory_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def refuse(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refuse)
    write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"


def test_next_writer_removes_only_leftovers_of_dead_ones(tmp_path: Path) -> None:
    others = {".a1.0123abcd.tmp", ".a[1].keep", ".a[1].tmp"}
    for name in (".a[1].0123abcd.tmp", *others):
        (tmp_path / name).touch()
    with replacing(tmp_path / "a[1]") as (slow,):
        slow.write(b"slow")
        write_text(tmp_path / "a[1]", "fast")  # does not touch the file in progress
        assert len(names(tmp_path)) == 1 + len(others) + 1
    assert (tmp_path / "a[1]").read_text() == "slow"
    assert set(names(tmp_path)) == {"a[1]", *others}


def test_temporary_file_removed_before_locking_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, taken = fcntl.flock, []

    def late(file: BinaryIO, how: int) -> None:
        if not taken and how == fcntl.LOCK_EX:
            taken.append(file.name)
            os.unlink(file.name)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    write_text(tmp_path / "a", "new")
    assert taken
    assert (tmp_path / "a").read_text() == "new"


def test_new_directories_reach_the_disk_with_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = []
    fsync = os.fsync

    def flush(handle: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", flush)
    assert make_directory(tmp_path / "a" / "b") == [tmp_path / "a" / "b", tmp_path / "a"]
    assert flushed == [str(tmp_path / "a"), str(tmp_path)]
    assert make_directory(tmp_path / "a") == []


# ── one writer at a time ─────────────────────────────────────────────────────────────────────────


def test_writers_wait_for_one_another_until_the_timeout(tmp_path: Path) -> None:
    with writing(tmp_path, "x"), writing(tmp_path, "y"):
        start = time.monotonic()
        message = r"another process has been writing here for 0\.1 s.*\.x\.lock"
        with pytest.raises(TimeoutError, match=message), writing(tmp_path, "x", 0.1):
            pass
        assert 0.1 <= time.monotonic() - start < 5
    assert names(tmp_path) == []
    inside, most = [], []

    def write(i: int) -> None:
        with writing(tmp_path, "x"):
            inside.append(i)
            most.append(len(inside))
            time.sleep(0.005)
            inside.remove(i)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(20)))
    assert most == [1] * 20
    assert names(tmp_path) == []


def test_directory_removed_by_another_writer_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, lock, gone = tmp_path / "new", files._lock, []

    def late(path: Path, wait_s: float) -> int:
        if not gone:
            gone.append(path)
            folder.rmdir()
        return lock(path, wait_s)

    monkeypatch.setattr(files, "_lock", late)
    with writing(folder, "x"):
        assert names(folder) == [".x.lock"]
    assert gone
    assert names(tmp_path) == []


def test_lock_of_a_dead_forked_writer_is_free(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with writing(tmp_path, "x"):
            if grandchild := os.fork():
                os.write(writer, b"%d\n" % grandchild)
                time.sleep(60)
            time.sleep(60)
        os._exit(0)
    grandchild = int(os.read(reader, 20))
    with pytest.raises(TimeoutError), writing(tmp_path, "x", 0.05):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        with writing(tmp_path, "x", 5.0):
            pass
    finally:
        os.kill(grandchild, signal.SIGKILL)
    assert names(tmp_path) == []
