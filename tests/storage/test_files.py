"""The one writer of files: what a crash leaves, modes, and the order on disk."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from qcut.errors import ConfigError
from qcut.storage.files import read_json, remove_leftovers, replacing, write_bytes, write_json, write_text


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
                new.unlink()  # as safetensors does, which renames a private file of its own
                new.touch(0o600)
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
        assert [path.parent for path in new] == [tmp_path, tmp_path]
        for path in new:
            path.write_text("new")
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


def test_a_directory_that_cannot_be_flushed_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def refuse(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refuse)
    write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"


def test_leftovers_of_one_file_are_removed(tmp_path: Path) -> None:
    for name in (".a[1].0123abcd.tmp", ".a1.0123abcd.tmp", "a[1]", ".a[1].keep"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path / "a[1]")
    assert names(tmp_path) == [".a1.0123abcd.tmp", ".a[1].keep", "a[1]"]


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "there is no such file"), ("{", "not readable as JSON"), ("[]", "found a JSON list"), ("\udcff", "JSON")],
)
def test_files_that_hold_no_json_object(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "x").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        read_json(tmp_path / "x", ConfigError)
    with pytest.raises(ValueError):
        write_json(tmp_path / "x", {"x": float("nan")})
