"""The cache directory and its permissions: qcut runs code only from files that no other user can change.

A file or directory is trusted as by OpenSSH: it belongs to the user who runs the process, or to root, and neither its
group nor others may write it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from qcut.errors import ConfigError

LEFTOVER_AGE_S = 86400.0
"""Seconds after which what another machine left unfinished counts as left by a dead process."""


class DistrustedError(PermissionError):
    """Another user could have written a file or directory."""


def directory() -> Path | None:
    """The cache directory, absolute, whether it exists or not: ``$QCUT_CACHE_DIR``, or the user's cache folder.

    ``~`` stands for the home directory; an empty ``$QCUT_CACHE_DIR`` is none.

    Returns:
        The path; None if no home directory is known.

    Raises:
        ConfigError: ``$QCUT_CACHE_DIR`` is relative, or begins with the ``~`` of an unknown user.
    """
    chosen = os.environ.get("QCUT_CACHE_DIR", "")
    try:
        path = Path(chosen or platformdirs.user_cache_dir("qcut")).expanduser()
    except RuntimeError as error:
        if chosen:
            raise ConfigError(f"QCUT_CACHE_DIR is {chosen!r}: {error}") from error
        return None
    if path.is_absolute():
        return path
    if chosen:
        raise ConfigError(
            f"QCUT_CACHE_DIR is {chosen!r}, a relative path, which would follow the working directory; "
            "give an absolute path, or one that begins with ~"
        )
    return None  # "~" stays if the home directory is not known


def distrust(path: Path | str, status: os.stat_result, *, sticky: bool = False) -> DistrustedError | None:
    """Say why another user could have written a file or directory.

    Args:
        path: named in the message.
        status: what is known of it, from an open descriptor.
        sticky: others may write a directory with the sticky bit, which protects each user's files, such as ``/tmp``.

    Returns:
        The error to raise; None if nobody else could.
    """
    if status.st_uid not in (0, os.geteuid()):
        whose = f"belongs to user {status.st_uid}; only what belongs to user {os.geteuid()} or root is used"
        return DistrustedError(f"{path} {whose}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not (sticky and status.st_mode & stat.S_ISVTX):
        mode = stat.S_IMODE(status.st_mode)
        mend = "chmod -R go-w" if stat.S_ISDIR(status.st_mode) else "chmod go-w"
        return DistrustedError(f"{path} can be written by others (mode {mode:04o}; {mend} mends this)")
    return None


def host_tag() -> str:
    """Eight characters for this machine, in names of unfinished files: locks may not reach beyond a machine."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def left_behind(name: str, status: os.stat_result, descriptor: int) -> bool:
    """Whether an unfinished file was abandoned; its writer keeps it locked.

    Args:
        name: holds the writer's `host_tag`.
        status: of the file.
        descriptor: of the file, open for writing; locked if the answer is True.
    """
    if f".{host_tag()}." not in name and time.time() - status.st_mtime < LEFTOVER_AGE_S:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, for this user only (mode 0700).

    Raises:
        OSError: it cannot be made, or is no directory.
    """
    for each in (*reversed(path.parents), path):
        if not each.is_dir():
            try:
                os.mkdir(each, 0o700)
            except FileExistsError:
                if not each.is_dir():
                    raise


@contextlib.contextmanager
def opened(base: Path, name: str, *, make: bool = False) -> Iterator[int]:
    """Open a folder of the cache directory.

    Args:
        base: the cache directory.
        name: the folder in it.
        make: make what is missing.

    Yields:
        A descriptor of the folder.

    Raises:
        DistrustedError: another user may write the cache directory or the folder.
        OSError: one of them is missing, cannot be made, or is no directory.
    """
    if make:
        make_directory(base / name)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with contextlib.ExitStack() as stack:
        above: int | None = None
        for path, step in ((base, str(base)), (base / name, name)):
            folder = os.open(step, flags, dir_fd=above)
            stack.callback(os.close, folder)
            if (error := distrust(path, os.fstat(folder), sticky=path == base)) is not None:
                raise error
            above = folder
        yield folder
