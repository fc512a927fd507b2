"""Who may have written what the cache holds: nothing of another user's is ever used."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from qcut.jit import cache, folders, keylocks

KEY = "ab" * 32
ENTRY = cache.Entry({"log": "fine"}, {"cubin": b"code"})
NOBODY = 65534


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QCUT_CACHE_DIR", str(tmp_path / "above" / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "above" / "cache"


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file another user's; without the right to, make this process another user."""
    if os.geteuid() == 0:
        os.lchown(path, NOBODY, -1)
    else:
        monkeypatch.setattr(folders.os, "geteuid", lambda: os.getuid() + 1)


def entry_file() -> Path:
    path = cache.entry_path("kernel", KEY)
    assert path is not None
    return path


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_only_the_user_may_write_what_is_made(base: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        assert cache.write("kernel", KEY, ENTRY)
        with keylocks.locked(KEY):
            pass
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (base.parent, base, *base.iterdir())}
    assert modes == {"above": 0o700, "cache": 0o700, "kernels": 0o700, "locks": 0o700}
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o7133 == 0 for path in base.glob("*/*"))
    assert cache.read("kernel", KEY) == ENTRY


def test_another_users_entry_is_not_read_but_replaced(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write("kernel", KEY, ENTRY)
    with monkeypatch.context() as patch:
        give_away(entry_file(), patch)
        with pytest.warns(RuntimeWarning, match=r"belongs to user \d+; only what belongs to user \d+ or root is used"):
            assert cache.read("kernel", KEY) is None
    if os.geteuid() == 0:
        assert cache.write("kernel", KEY, ENTRY)
    assert cache.read("kernel", KEY) == ENTRY


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_entry_that_others_may_write_is_replaced(base: Path, mode: int) -> None:
    cache.write("kernel", KEY, ENTRY)
    entry_file().chmod(mode)
    with pytest.warns(RuntimeWarning, match=rf"{entry_file()} can be written by others \(mode {mode:04o}; chmod go-w "):
        assert cache.read("kernel", KEY) is None
    assert cache.write("kernel", KEY, ENTRY)
    assert cache.read("kernel", KEY) == ENTRY


@pytest.mark.parametrize("which", ["", "kernels"])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707])
def test_directory_that_others_may_write_is_not_used(base: Path, which: str, mode: int) -> None:
    cache.write("kernel", KEY, ENTRY)
    (base / which).chmod(mode)
    with pytest.warns(
        RuntimeWarning, match=rf"{base / which} can be written by others \(mode {mode:04o}; chmod -R go-w"
    ):
        assert cache.read("kernel", KEY) is None
    assert not cache.write("kernel", KEY, ENTRY)
    (base / which).chmod(0o700)
    assert cache.read("kernel", KEY) == ENTRY


@pytest.mark.parametrize("which", ["", "kernels", "locks"])
def test_another_users_directory_is_not_used(base: Path, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write("kernel", KEY, ENTRY)
    with keylocks.locked(KEY):
        pass
    give_away(base / which, monkeypatch)
    with keylocks.locked(KEY):  # unlocked, and free of errors
        pass
    if which != "locks":
        with pytest.warns(
            RuntimeWarning, match=r"belongs to user \d+; only what .* the next process builds them again"
        ):
            assert cache.read("kernel", KEY) is None
        assert not cache.write("kernel", KEY, ENTRY)


def to_link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_giant(path: Path) -> None:
    os.truncate(path, 1 << 40)  # takes no space on disk


def to_endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("plant", [to_link, to_pipe, to_giant, to_endless], ids=lambda plant: plant.__name__)
def test_irregular_or_oversized_file_is_replaced(base: Path, plant: Callable[[Path], None]) -> None:
    cache.write("kernel", KEY, ENTRY)
    plant(entry_file())
    with pytest.warns(RuntimeWarning, match=f"{entry_file()} .* the kernel is built again"):
        assert cache.read("kernel", KEY) is None
    assert cache.write("kernel", KEY, ENTRY)
    assert entry_file().is_file()
    assert not entry_file().is_symlink()
    assert cache.read("kernel", KEY) == ENTRY


def test_a_link_to_the_cache_directory_serves(base: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o755)
    base.parent.mkdir()
    base.symlink_to(tmp_path / "disk")
    assert cache.write("kernel", KEY, ENTRY)
    assert cache.read("kernel", KEY) == ENTRY
    assert (tmp_path / "disk" / "kernels").is_dir()


def test_a_sticky_directory_may_hold_the_cache(base: Path) -> None:
    base.mkdir(parents=True)
    base.chmod(0o1777)
    assert cache.write("kernel", KEY, ENTRY)
    assert cache.read("kernel", KEY) == ENTRY


@pytest.mark.parametrize("which", ["above", "above/cache", "above/cache/kernels"])
def test_a_file_in_a_directorys_place(base: Path, tmp_path: Path, which: str) -> None:
    (tmp_path / which).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    (tmp_path / which).write_text("in the way")
    with pytest.warns(RuntimeWarning, match=f"{base / 'kernels'} cannot be read .Not a directory"):
        assert cache.read("kernel", KEY) is None
    with pytest.warns(RuntimeWarning, match=f"{base / 'kernels'} cannot be written"):
        assert not cache.write("kernel", KEY, ENTRY)
    with keylocks.locked(KEY):
        pass


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a file system in which nothing can be made")
def test_folder_that_cannot_be_made_is_an_oserror() -> None:
    with pytest.raises(FileNotFoundError, match="/proc/none"):
        folders.make_directory(Path("/proc/none/of/these"))
