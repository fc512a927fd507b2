"""The kernel cache: what it stores comes back, and no fault of disk or process reaches the caller."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import pwd
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from qcut.emitters.core.source import KernelSource
from qcut.errors import ConfigError
from qcut.jit import cache, folders
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
    command = [*prefix, sys.executable, str(ROOT / "tests" / "jit" / "worker.py"), "--log", str(log), *options]
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


def test_cache_path_expands_tilde_and_ignores_empty_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for chosen, expected in (("", "home/.cache/qcut"), ("~/kernels", "home/kernels"), (str(tmp_path / "k"), "k")):
        monkeypatch.setenv("QCUT_CACHE_DIR", chosen)
        assert cache.directory() == tmp_path / expected


@pytest.mark.parametrize("chosen", ["kernels", "./kernels", "..", " ", "~no_such_user_here/kernels"])
def test_relative_cache_path_is_refused(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_only_dead_processes_unfinished_files_are_removed(folder: Path) -> None:
    cache.write("kernel", KEY, ENTRY)
    here, elsewhere = (folder / "kernels" / f".x.{tag}.0123abcd.tmp" for tag in (folders.host_tag(), "0" * 8))
    for path in (here, elsewhere):
        path.touch()
    with here.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cache.write("kernel", KEY, ENTRY)
        assert here.exists()
    cache.write("kernel", KEY, ENTRY)
    assert not here.exists()
    assert elsewhere.exists()  # another machine's, whose locks may not reach here
    os.utime(elsewhere, (time.time() - 2 * 86400,) * 2)
    cache.write("kernel", KEY, ENTRY)
    assert not elsewhere.exists()


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


# ── crafted entries: whole, with the right digest, and wrong inside ──────────────────────────────


def craft(body: bytes) -> bytes:
    return cache._MAGIC + hashlib.sha256(body).digest() + body


def with_header(header: object, blobs: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return craft(struct.pack("<Q", len(text)) + text + blobs)


GOOD = {"key": KEY, "name": "kernel", "meta": {"log": "", "resources": None}, "blobs": [["cubin", 4]]}
CRAFTED: dict[str, bytes] = {
    "no file": b"",
    "no body": craft(b""),
    "half a length": craft(b"\1\0\0"),
    "length beyond the file": craft(struct.pack("<Q", 1 << 62) + b"{}"),
    "all ones": craft(b"\xff" * 64),
    "no JSON": with_header(b"\x80\x81"),
    "deep": with_header(b"[" * 200_000 + b"]" * 200_000),
    "deep objects": with_header(b'{"key":' * 100_000),
    "huge header": with_header({**GOOD, "meta": "x" * (cache.MAX_HEADER_BYTES + 1)}, b"code"),
    "huge number": with_header(json.dumps(GOOD).replace("4]", "1" * 5000 + "]").encode(), b"code"),
    "infinite": with_header(json.dumps(GOOD).replace("4]", "1e999]").encode(), b"code"),
    "list": with_header([1, 2], b"code"),
    "number": with_header(7),
    "null": with_header(None),
    "no key": with_header({"meta": {}, "blobs": []}),
    "key of another type": with_header({**GOOD, "key": [KEY]}, b"code"),
    "meta of another type": with_header({**GOOD, "meta": [1]}, b"code"),
    "blobs of another type": with_header({**GOOD, "blobs": 5}, b"code"),
    "blob of three": with_header({**GOOD, "blobs": [["cubin", 4, 4]]}, b"code"),
    "negative size": with_header({**GOOD, "blobs": [["cubin", -1], ["cubin", 5]]}, b"code"),
    "size of another type": with_header({**GOOD, "blobs": [["cubin", "4"]]}, b"code"),
    "true size": with_header({**GOOD, "blobs": [["cubin", True]]}, b"c"),
    "too large": with_header({**GOOD, "blobs": [["cubin", 5]]}, b"code"),
    "too small": with_header({**GOOD, "blobs": [["cubin", 3]]}, b"code"),
    "beyond 64 bits": with_header({**GOOD, "blobs": [["cubin", 10**30]]}, b"code"),
}
CONTENT: dict[str, bytes] = {
    "other blobs": with_header({**GOOD, "blobs": [["so", 4]]}, b"code"),
    "no log": with_header({**GOOD, "meta": {"resources": None}}, b"code"),
    "log of another type": with_header({**GOOD, "meta": {"log": 3, "resources": None}}, b"code"),
    "no resources": with_header({**GOOD, "meta": {"log": ""}}, b"code"),
    "resources of another type": with_header({**GOOD, "meta": {"log": "", "resources": [1]}}, b"code"),
    "empty resources": with_header({**GOOD, "meta": {"log": "", "resources": {}}}, b"code"),
    "foreign resources": with_header({**GOOD, "meta": {"log": "", "resources": {"system": 1}}}, b"code"),
    "resources of text": with_header(
        {**GOOD, "meta": {"log": "", "resources": dict.fromkeys(["registers", "smem_bytes"], "1")}}, b"code"
    ),
}


def test_the_frame_of_the_crafted_entries_is_right(folder: Path) -> None:
    (folder / "kernels").mkdir(parents=True, mode=0o700)
    entry_file().write_bytes(with_header(GOOD, b"code"))
    assert cache.read("kernel", KEY) == cache.Entry({"log": "", "resources": None}, {"cubin": b"code"})


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_entry_is_a_miss(folder: Path, name: str) -> None:
    (folder / "kernels").mkdir(parents=True, mode=0o700)
    entry_file().write_bytes(CRAFTED[name])
    with pytest.warns(RuntimeWarning, match=f"{entry_file()} .*; its content is not used, and the kernel is built"):
        assert cache.read("kernel", KEY) is None


@pytest.mark.parametrize("name", CRAFTED | CONTENT)
def test_crafted_entry_is_built_again(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = import_module("qcut.jit.build")
    code = b"\x7fELF, as the stand-in compiler makes it"
    monkeypatch.setattr(builder, "_memory", {})
    monkeypatch.setattr(builder, "device_fingerprint", lambda source: KEY)
    monkeypatch.setattr(builder, "compile_text", lambda source, device=True: (code, None, "said nothing"))
    (folder / "kernels").mkdir(parents=True, mode=0o700)
    entry_file().write_bytes((CRAFTED | CONTENT)[name])
    source = KernelSource("kernel", "// text", "kernel", (), "sm_80")
    with pytest.warns(RuntimeWarning, match=f"{entry_file()} .*; its content is not used, and the kernel is built"):
        assert builder.build(source).cubin == code
    monkeypatch.setattr(builder, "_memory", {})
    monkeypatch.setattr(builder, "compile_text", None)  # no more compiling: the entry has been mended
    assert builder.build(source).cubin == code


def test_random_damage_under_a_right_digest(folder: Path) -> None:
    """Each byte string ends in an entry or in a warning, never in an exception of another kind."""
    (folder / "kernels").mkdir(parents=True, mode=0o700)
    body, chance = with_header(GOOD, b"code")[len(cache._MAGIC) + 32 :], random.Random(0)
    outcomes = set()
    for _ in range(600):
        damaged = bytearray(body)
        for _ in range(chance.choice((1, 1, 2, 8))):
            at = chance.randrange(len(damaged))
            damaged[at : at + chance.randrange(3)] = chance.choice(
                (b"", chance.randbytes(1), b"[", b"{", b'"', b"-", b"9" * 30, b"null")
            )
        entry_file().write_bytes(craft(bytes(damaged)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cache._warned.clear()
            found = cache.read("kernel", KEY)
        assert (found is None) == (len(caught) == 1)
        outcomes.add(found is None)
    assert outcomes == {True, False}


# ── deaths: at each step of a write ──────────────────────────────────────────────────────────────

_DYING = """
import os, signal, sys
from qcut.jit import cache, folders
KEY = "ab" * 32
def entry(which):
    return cache.Entry({"log": which}, {"cubin": which.encode() * 1000})
STEPS = ("mkdir", "open", "fstat", "listdir", "fsync", "replace", "unlink", "close")
def die_at(step):
    left = [step]
    for name in STEPS:
        def stepped(*args, real=getattr(os, name), **more):
            for when in ("before", "after"):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                if when == "before":
                    result = real(*args, **more)
            return result
        setattr(os, name, stepped)
def deaths(old):
    step, seen = 0, []
    while True:
        child = os.fork()
        if child == 0:
            die_at(step)
            cache.write("kernel", KEY, entry("new"))
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = cache.read("kernel", KEY)
        seen.append("none" if found is None else "old" if found == entry("old") else "new")
        assert found in (old, entry("new")), step
        assert cache.write("kernel", KEY, old or entry("new"))
        names = os.listdir(cache.directory() / "kernels")
        assert names == [cache.entry_path("kernel", KEY).name], names
        if status == 0:
            return seen
        if old is None:
            cache.discard("kernel", KEY)
            os.rmdir(cache.directory() / "kernels")
            os.rmdir(cache.directory())
        step += 1
print(deaths(None))
cache.write("kernel", KEY, entry("old"))
print(deaths(entry("old")))
"""


def test_death_at_any_step_keeps_a_whole_entry(folder: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _DYING], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for line, before in zip(done.stdout.splitlines(), ("none", "old"), strict=True):
        seen = json.loads(line.replace("'", '"'))
        assert set(seen) == {before, "new"}
        assert seen == sorted(seen, key=[before, "new"].index)
        assert len(seen) > 15
