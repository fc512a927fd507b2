"""The kernel cache: what it stores comes back, and no fault of disk or process reaches the caller."""

from __future__ import annotations

import errno
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qcut.errors import ConfigError
from qcut.jit import cache
from tests.support import ROOT

KEY = "ab" * 32
ENTRY = cache.Entry({"log": "fine", "resources": None}, {"cubin": bytes(range(64)), "host_so": b"\0\1"})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QCUT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "cache"


def entry_file() -> Path:
    path = cache.entry_path("kernel", KEY)
    assert path is not None
    return path


def worker(folder: Path, log: Path, *options: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, str(ROOT / "tests" / "support" / "jit_worker.py"), "--log", str(log), *options]
    environment = os.environ | {"QCUT_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def compilations(log: Path) -> int:
    return len(log.read_text().splitlines())


def test_round_trip(folder: Path) -> None:
    assert cache.read("kernel", KEY) is None
    assert cache.write("kernel", KEY, ENTRY)
    assert cache.read("kernel", KEY) == ENTRY
    assert [path.name for path in (folder / "kernels").iterdir()] == [f"kernel-{KEY[:40]}.qcut"]
    cache.discard("kernel", KEY)
    assert cache.read("kernel", KEY) is None


def test_truncated_entry_is_a_miss_at_every_length(folder: Path) -> None:
    cache.write("kernel", KEY, ENTRY)
    whole = entry_file().read_bytes()
    for length in range(len(whole)):
        entry_file().write_bytes(whole[:length])
        with pytest.warns(RuntimeWarning, match="damaged: its digest does not match.*built again"):
            assert cache.read("kernel", KEY) is None, length
        cache._warned.clear()
    entry_file().write_bytes(whole + b"\0")
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert cache.read("kernel", KEY) is None


def test_corrupt_byte_is_a_miss_anywhere(folder: Path) -> None:
    cache.write("kernel", KEY, ENTRY)
    whole = entry_file().read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        entry_file().write_bytes(damaged)
        with pytest.warns(RuntimeWarning, match=re.escape(f"{entry_file()} is damaged")):
            assert cache.read("kernel", KEY) is None, position
        cache._warned.clear()


def test_entry_of_another_key_is_a_miss(folder: Path) -> None:
    cache.write("kernel", KEY, ENTRY)
    other = KEY[:40] + "00" * 12  # the same file name: only the key inside tells
    assert cache.entry_path("kernel", other) == entry_file()
    with pytest.warns(RuntimeWarning, match="is the entry of another kernel"):
        assert cache.read("kernel", other) is None


def test_damaged_entry_is_replaced(folder: Path) -> None:
    cache.write("kernel", KEY, ENTRY)
    entry_file().write_bytes(b"qcut")
    assert cache.write("kernel", KEY, ENTRY)
    assert cache.read("kernel", KEY) == ENTRY


def test_directory_in_the_entrys_place(folder: Path) -> None:
    (entry_file() / "inside").mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="cannot be read .Is a directory"):
        assert cache.read("kernel", KEY) is None
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        assert not cache.write("kernel", KEY, ENTRY)
    cache.discard("kernel", KEY)


def test_no_space_while_writing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match=r"No space left on device.*QCUT_CACHE_DIR"):
        assert not cache.write("kernel", KEY, ENTRY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once is enough
        assert not cache.write("kernel", KEY, ENTRY)
    assert list((folder / "kernels").iterdir()) == []


def test_a_tilde_is_the_home_and_an_empty_variable_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for chosen, expected in (("", "home/.cache/qcut"), ("~/kernels", "home/kernels"), (str(tmp_path / "k"), "k")):
        monkeypatch.setenv("QCUT_CACHE_DIR", chosen)
        assert cache.directory() == tmp_path / expected


@pytest.mark.parametrize("chosen", ["kernels", "./kernels", "..", " ", "~no_such_user_here/kernels"])
def test_a_path_that_depends_on_the_place_is_refused(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QCUT_CACHE_DIR", chosen)
    for use in (cache.directory, lambda: cache.read("kernel", KEY), lambda: cache.write("kernel", KEY, ENTRY)):
        with pytest.raises(ConfigError, match=re.escape(f"QCUT_CACHE_DIR is {chosen!r}")):
            use()


def test_no_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> None:
        raise KeyError("uid not found")

    for name in ("QCUT_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(cache, "_warned", set())
    assert cache.directory() is None
    assert cache.read("kernel", KEY) is None
    with pytest.warns(RuntimeWarning, match="no home directory"):
        assert not cache.write("kernel", KEY, ENTRY)
    with cache.locked(KEY):
        pass


def test_processes_race_and_build_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    workers = [worker(tmp_path / "cache", log, "--seconds", "0.5") for _ in range(3)]
    for process in workers:
        assert outcome(process) == {"bytes": 1000, "warnings": []}
    assert compilations(log) == 2  # `worker` and `second`, once each
    assert len(list((tmp_path / "cache" / "kernels").iterdir())) == 2


def test_killed_build_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    log = tmp_path / "log"
    victim = worker(tmp_path / "cache", log, "--seconds", "60")
    assert victim.stdout is not None
    assert victim.stdout.readline() == "compiling\n"
    waiting = worker(tmp_path / "cache", log)
    time.sleep(0.5)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert outcome(waiting) == {"bytes": 1000, "warnings": []}
    assert compilations(log) == 3  # the victim's, and both kernels of the other
    assert outcome(worker(tmp_path / "cache", log))["bytes"] == 1000
    assert compilations(log) == 3


def test_killed_before_the_rename(tmp_path: Path) -> None:
    log, kernels = tmp_path / "log", tmp_path / "cache" / "kernels"
    victim = worker(tmp_path / "cache", log, "--die-in-rename")
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    assert [path.suffix for path in kernels.iterdir()] == [".tmp"]
    assert outcome(worker(tmp_path / "cache", log)) == {"bytes": 1000, "warnings": []}
    assert compilations(log) == 3
    assert {path.suffix for path in kernels.iterdir()} == {".qcut"}


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that an unprivileged user can reach (pytest's own are private)."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_read_only_directory(public: Path) -> None:
    folder, log = public / "cache", public / "log"
    folder.mkdir(mode=0o555)
    result = outcome(worker(folder, log, "--unprivileged"))
    assert result["bytes"] == 1000
    assert len(result["warnings"]) == 1
    assert "cannot be written (Permission denied)" in result["warnings"][0]
    assert compilations(log) == 2  # from memory the second time


def test_read_only_directory_still_serves_what_it_holds(public: Path) -> None:
    folder, log = public / "cache", public / "log"
    outcome(worker(folder, log))
    for path in (folder / "kernels", folder / "locks", folder):
        path.chmod(0o555)
    assert outcome(worker(folder, log, "--unprivileged")) == {"bytes": 1000, "warnings": []}
    assert compilations(log) == 2


def test_file_size_limit(tmp_path: Path) -> None:
    log = tmp_path / "log"
    result = outcome(worker(tmp_path / "cache", log, "--size", "200000", "--file-limit", "65536"))
    assert result["bytes"] == 200_000
    assert len(result["warnings"]) == 1
    assert "File too large" in result["warnings"][0]
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


def test_full_disk(tmp_path: Path) -> None:
    """A real one: a file system of 64 KiB, mounted where only the worker sees it."""
    folder, log = tmp_path / "cache", tmp_path / "log"
    folder.mkdir()
    mount = ("unshare", "--mount", "--map-root-user", "sh", "-c")
    script = f"mount -t tmpfs -o size=64k tmpfs '{folder}' && "
    if not shutil.which("unshare") or subprocess.run([*mount, script + "true"], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs user namespaces, which this machine refuses")
    listing = tmp_path / "listing"
    run = f'{script}"$@" && ls {folder}/kernels > {listing}'
    process = worker(folder, log, "--size", "200000", prefix=(*mount, run, "sh"))
    result = outcome(process)
    assert result["bytes"] == 200_000
    assert len(result["warnings"]) == 1
    assert "No space left on device" in result["warnings"][0]
    assert listing.read_text() == ""
