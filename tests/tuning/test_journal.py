"""The tuner's journal: what a crash, a full disk and a bad disk leave of it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from qcut.errors import ConfigError
from qcut.tuning import journal as module
from qcut.tuning.journal import Journal
from tests.support.faults import deaths, failing_at, files_of_at_most, mounted


def fill(path: Path, count: int) -> None:
    with Journal(path) as book:
        for i in range(len(book), count):
            book.add(f"key {i}", us=float(i), kernel="k")


def keys(path: Path) -> list[str]:
    with Journal(path) as book:
        assert book.skipped in (0, 1)
        return [key for key in (f"key {i}" for i in range(50)) if book.get(key) is not None]


def test_dead_tuner_loses_only_the_measurement_in_progress(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal.jsonl"
    counts = []
    for _ in deaths(lambda: fill(path, 6)):
        found = keys(path)
        assert found == [f"key {i}" for i in range(len(found))]
        counts.append(len(found))
    assert counts == sorted(counts)
    assert len(keys(path)) == 6
    assert [one.name for one in path.parent.iterdir()] == ["journal.jsonl"]


@pytest.mark.parametrize("function", ["write", "fsync"])
def test_unwritable_measurement_is_an_error_without_traces(tmp_path: Path, function: str) -> None:
    path = tmp_path / "journal.jsonl"
    fill(path, 2)
    before = path.read_bytes()
    with Journal(path) as book:
        with failing_at(0, function), pytest.raises(ConfigError, match=f"{path}: cannot be written: No space"):
            book.add("key 2", us=1.0)
        assert book.get("key 2") is None
        assert path.read_bytes() == before
        book.add("key 2", us=2.0)
    assert keys(path) == ["key 0", "key 1", "key 2"]


def test_a_disk_that_fills_up_within_a_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    fill(path, 2)
    before = path.read_bytes()
    with files_of_at_most(len(before) + 10), Journal(path) as book:
        with pytest.raises(ConfigError, match=f"{path}: cannot be written: File too large"):
            book.add("key 2", us=1.0)
        assert path.read_bytes() == before


def test_what_is_no_json_is_not_written(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as book:
        for value in (float("nan"), float("inf"), object()):
            with pytest.raises(ConfigError, match="cannot be written"):
                book.add("key", us=value)
        assert (tmp_path / "j").read_bytes() == b""


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(ConfigError, match=f"{name}: not a regular file"):
            Journal(tmp_path / name)
    for name in ("pipe/j", "x" * 300, "."):
        with pytest.raises(ConfigError, match="cannot be written"):
            Journal(tmp_path / name)
    with mounted(tmp_path / "disk", "ro"), pytest.raises(ConfigError, match="Read-only"):
        Journal(tmp_path / "disk" / "j")
    with failing_at(0, "open", errno.EDQUOT), pytest.raises(ConfigError, match="quota"):
        Journal(tmp_path / "j")


def test_damaged_lines_are_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "j"
    fill(path, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    deep, infinite = b'{"key": ' + b"[" * 100_000 + b"\n", b'{"key": "key 9", "us": 1e999}\n'
    changed = lines[1].replace(b"1.0", b"7.0")
    foreign = b'{"key": "key 7", "us": "abc"}\n{"key": "key 8"}\n{"key": "key 8", "left_out": 3}\n'
    path.write_bytes(lines[0] + changed + deep + infinite + foreign + b"\xff\n" + lines[2])
    with Journal(path) as book:
        assert (len(book), book.skipped) == (2, 7)
        assert book.get("key 1") is None
        assert book.get("key 2") == {"key": "key 2", "us": 2.0, "kernel": "k"}


def test_lines_of_before_checksums_are_read(tmp_path: Path) -> None:
    (tmp_path / "j").write_text(json.dumps({"key": "key 0", "us": 1.5}) + "\n")
    assert keys(tmp_path / "j") == ["key 0"]


def test_journals_beyond_the_limit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "j", 3)
    monkeypatch.setattr(module, "JOURNAL_BYTES", 20)
    with pytest.raises(ConfigError, match="at most 20 are read: begin a fresh journal"):
        Journal(tmp_path / "j")
