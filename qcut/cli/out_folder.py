"""A folder that a command writes: whole under its name, or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from qcut.common.files import flush_directory, make_directory
from qcut.errors import ConfigError

_MODEL_FILES = ("config.json", "qcut_config.json")
_LOCK = ".writing"


def check_folder(path: Path, overwrite: bool) -> None:
    """Check that a model may be written to a folder.

    Args:
        path: of the folder.
        overwrite: whether a model that is there may be replaced.

    Raises:
        ConfigError: something is there and ``overwrite`` is not given, or what is there is no folder with a model.
    """
    if path.is_dir():
        if not any(path.iterdir()):
            return
        if not any((path / name).is_file() for name in _MODEL_FILES):
            raise ConfigError(f"--out {path}: a folder with other things than a model; it is not replaced")
        if path.is_symlink() or path.resolve() == Path.cwd():
            raise ConfigError(f"--out {path}: a link, or the working directory; it is not replaced")
    elif not path.exists() and not path.is_symlink():
        return
    else:
        raise ConfigError(f"--out {path}: there is something that is no folder; it is not replaced")
    if not overwrite:
        raise ConfigError(f"--out {path}: there is a model already; --overwrite replaces it")


def check_file(path: Path, option: str, overwrite: bool) -> None:
    """Check that a file may be written.

    Args:
        path: of the file.
        option: that names it, for messages.
        overwrite: whether a file that is there may be replaced.

    Raises:
        ConfigError: something is there, or the folder is not, or may not be written to.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path}: there is a folder of that name")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: no permission to write to the folder {path.parent}")
    if path.exists() and not overwrite:
        raise ConfigError(f"{option} {path}: the file exists already; --overwrite replaces it")


@contextlib.contextmanager
def new_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    """Hand out an empty folder beside a path; when the block ends, put it in the path's place.

    If the block raises, or is interrupted, what was there is there as before and the new folder is gone. What killed
    processes left is deleted.

    Args:
        path: of the folder; see `check_folder`.
        overwrite: replace a model that is there.

    Raises:
        ConfigError: see `check_folder`, which is asked at the beginning and at the end; or the folder cannot be
            written.
    """
    _clear_up(path)
    check_folder(path, overwrite)
    work = path.parent / f".{path.name}.{secrets.token_hex(4)}.partial"
    created: list[Path] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_empty, created)
        stack.callback(_remove, work)
        try:
            created += make_directory(path.parent)
            work.mkdir()
            lock = os.open(work / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"--out {path}: cannot be written: {error.strerror or error}") from error
        stack.callback(os.close, lock)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield work
        check_folder(path, overwrite)
        try:
            (work / _LOCK).unlink()
            _put(work, path)
        except OSError as error:
            raise ConfigError(f"--out {path}: cannot be written: {error.strerror or error}") from error


def _remove(folder: Path) -> None:
    """Delete a folder, through a signal that comes meanwhile."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _remove_empty(folders: list[Path]) -> None:
    with contextlib.suppress(OSError):  # where something lies in them
        for folder in folders:
            folder.rmdir()


def _put(work: Path, path: Path) -> None:
    """Rename a folder to a path; an old folder makes room, and comes back if that fails."""
    old = work.with_suffix(".old")
    replaced = path.is_dir() and any(path.iterdir())
    try:
        if replaced:
            path.rename(old)
        work.rename(path)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    finally:
        if path.exists():
            _remove(old)
    flush_directory(path.parent)


def _clear_up(path: Path) -> None:
    """Delete unfinished folders whose writers hold their lock no more; an old one that made room comes back."""
    name = glob.escape(path.name)
    for work in path.parent.glob(f".{name}.*.partial"):
        with contextlib.suppress(OSError):
            lock = os.open(work / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(work)
            finally:
                os.close(lock)
    for old in path.parent.glob(f".{name}.*.old"):
        with contextlib.suppress(OSError):
            if path.exists():
                shutil.rmtree(old)
            else:
                old.rename(path)
