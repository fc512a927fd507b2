"""Folders for compilers to work in: private, safe for the shell that nvcc runs, gone when the compiler is done."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from qcut.errors import BuildError
from qcut.jit import folders

# nvcc puts paths between double quotes into commands for a shell, which still acts on these characters.
_UNSAFE = re.compile(r'["$`\\\x00-\x1f\x7f]')
_NAME = re.compile(r"qcut-build\.[0-9a-f]{8}\.[0-9a-f]{16}")
_LOCK = "lock"
_ADVICE = "set TMPDIR to a directory in which compilers can work"


def unsafe_character(path: Path | str) -> str | None:
    """The first character of a path on which the shell beneath nvcc would act; None if the path is safe."""
    match = _UNSAFE.search(str(path))
    return match.group() if match else None


def environment() -> Mapping[str, str]:
    """Environment of a compiler that runs in a scratch folder: temporary files lie there too, under relative paths."""
    return os.environ | {"TMPDIR": ".", "LC_ALL": "C"}


@contextlib.contextmanager
def scratch_folder(kernel: str | None = None) -> Iterator[Path]:
    """Make a folder of mode 0700 in ``$TMPDIR``, or else in the system's directory for temporary files.

    Where the path of that directory has a character that is unsafe beneath nvcc, the folder is made in the cache
    directory. Folders that killed processes left behind are deleted.

    Args:
        kernel: named in errors.

    Yields:
        The folder, which is deleted when the block ends.

    Raises:
        BuildError: the directory is missing, cannot be written, is full, or others may change what is in it; or both
            paths are unsafe. Raised for any `OSError` of the block too.
    """
    base = _temporary_directory(kernel)
    if unsafe_character(base) is not None:
        base = _in_cache(base, kernel)
    try:
        if (distrusted := folders.distrust(base, base.stat(), sticky=True)) is not None:
            raise BuildError(f"no scratch space to compile in: {distrusted}, or {_ADVICE}", kernel=kernel)
        _remove_leftovers(base)
        folder, lock = _make(base)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
    except OSError as error:
        reason = error.strerror or str(error)
        raise BuildError(f"no scratch space to compile in: {base}: {reason}; {_ADVICE}", kernel=kernel) from error


def _temporary_directory(kernel: str | None) -> Path:
    if chosen := os.environ.get("TMPDIR"):  # tempfile would take another one in silence
        return Path(os.path.realpath(chosen))
    try:
        return Path(os.path.realpath(tempfile.gettempdir()))
    except OSError as error:
        raise BuildError(
            f"no scratch space to compile in: {error.strerror or error}; {_ADVICE}", kernel=kernel
        ) from None


def _in_cache(unsafe: Path, kernel: str | None) -> Path:
    cache = folders.directory()
    base = Path(os.path.realpath(cache)) / "scratch" if cache else None
    if base is None or unsafe_character(base) is not None:
        raise BuildError(
            f"no scratch space to compile in: the path {str(unsafe)!r} has the character {unsafe_character(unsafe)!r}, "
            f"on which the shell that nvcc runs would act, and so has the cache directory ({str(cache)!r}); {_ADVICE}",
            kernel=kernel,
        )
    try:
        with folders.opened(base.parent, base.name, make=True):
            return base
    except OSError as error:
        raise BuildError(
            f"no scratch space to compile in: {base}: {error.strerror or error}; {_ADVICE}", kernel=kernel
        ) from error


def _make(base: Path) -> tuple[Path, int]:
    """Make a folder with a locked file in it: a folder with an unlocked file was left by a dead process."""
    while True:
        folder = base / f"qcut-build.{folders.host_tag()}.{secrets.token_hex(8)}"
        os.mkdir(folder, 0o700)
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # taken for a leftover before it was locked, here and below
            continue
        except OSError:
            os.rmdir(folder)
            raise
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)


def _remove_leftovers(base: Path) -> None:
    with os.scandir(base) as entries:
        names = [entry.name for entry in entries if _NAME.fullmatch(entry.name)]
    for name in names:
        folder = base / name
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.geteuid():
                continue
            try:
                lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                os.rmdir(folder)  # no more than empty ones
                continue
            try:
                if folders.left_behind(name, status, lock):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
