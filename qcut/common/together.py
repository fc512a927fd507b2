"""Replaces several files of fixed names as one: a crash between two renames leaves no mixture.

The new files lie under ``.{name}.{random}.new`` and are on the disk when the *record*, ``.{key}.commit``, is renamed
into place: that is the commit. The record lists the renames that are to follow, and goes when they are done. A reader
that finds a record takes each new file that still has its temporary name; the next writer finishes the renames first.
Readers that know nothing of records find the finished directory.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from qcut.common import schema
from qcut.common.files import flush_directory, is_at, write_json, writing
from qcut.common.schema import open_regular, read_json
from qcut.errors import QcutError

_FORMAT = "qcut-commit"
_RECORD = schema.record({"format": schema.text(choices=(_FORMAT,)), "renames": schema.table(schema.text(most=255))})
_RECORD_BYTES = 1 << 16
_TRIES, _PAUSE_S = 200, 0.005


def record_path(directory: Path, key: str) -> Path:
    """Where the record of a commit is while its renames are under way."""
    return directory / f".{key}.commit"


@contextlib.contextmanager
def replacing_together(
    directory: Path, names: Sequence[str], key: str, error: type[QcutError]
) -> Iterator[list[BinaryIO]]:
    """Hand out an empty file for each name; when the block ends, the files replace those of these names together.

    Other writers of the key wait meanwhile. If the block raises, nothing has changed.

    Args:
        directory: created if missing.
        names: of the files, renamed in this order.
        key: of these files; the same for every writer and reader.
        error: class of the exception to raise.

    Raises:
        OSError: a file cannot be created, flushed or renamed. Readers then find the old files, or the new ones where a
            rename had been done.
        QcutError: of class ``error``: a record of an earlier writer is damaged.
    """
    with writing(directory, key):
        _finish(directory, key, _renames(directory, key, error))
        _remove_leftovers(directory, names)
        revision = secrets.token_hex(4)
        renames = {f".{name}.{revision}.new": name for name in names}
        try:
            with ExitStack() as stack:
                files: list[BinaryIO] = [stack.enter_context(open(directory / new, "xb")) for new in renames]
                yield files
                for file in files:
                    file.flush()
                    os.fsync(file.fileno())
            flush_directory(directory)
            write_json(record_path(directory, key), {"format": _FORMAT, "renames": renames})
            _finish(directory, key, renames)
        except BaseException:
            _withdraw(directory, key, renames)
            raise


def _finish(directory: Path, key: str, renames: dict[str, str] | None) -> None:
    if renames is None:
        return
    for new, name in renames.items():
        with contextlib.suppress(FileNotFoundError):  # renamed before the writer died
            os.replace(directory / new, directory / name)
    flush_directory(directory)
    record_path(directory, key).unlink(missing_ok=True)
    flush_directory(directory)


def _withdraw(directory: Path, key: str, renames: dict[str, str]) -> None:
    """After a failure: nothing of the new files stays, unless one of them is in force already."""
    with contextlib.suppress(OSError):
        if record_path(directory, key).exists():
            if not all((directory / new).exists() for new in renames):
                return
            record_path(directory, key).unlink()
        for new in renames:
            (directory / new).unlink(missing_ok=True)


def _remove_leftovers(directory: Path, names: Sequence[str]) -> None:
    ours = re.compile(rf"\.(?:{'|'.join(map(re.escape, names))})\.[0-9a-f]{{8}}\.new")
    for path in directory.iterdir():
        if ours.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _renames(directory: Path, key: str, error: type[QcutError]) -> dict[str, str] | None:
    path = record_path(directory, key)
    if not path.exists():
        return None
    try:
        data = schema.conform(read_json(path, error, limit=_RECORD_BYTES), _RECORD, path, error)
    except QcutError:
        if not path.exists():  # the commit ended meanwhile
            return None
        raise
    renames: dict[str, str] = data["renames"]
    for new, name in renames.items():
        if Path(name).name != name or not re.fullmatch(rf"\.{re.escape(name)}\.[0-9a-f]{{8}}\.new", new):
            raise error(f"{path}: found the rename of {new!r} to {name!r}; '.name.01234567.new' to 'name' is needed")
    return renames


def open_together(
    directory: Path, names: Sequence[str], key: str, error: type[QcutError]
) -> dict[str, tuple[Path, BinaryIO]]:
    """Open files that `replacing_together` wrote, all of one commit; those that are missing are left out.

    The files stay readable when they are replaced.

    Args:
        directory: where they are.
        names: of the files.
        key: see `replacing_together`.
        error: class of the exception to raise.

    Returns:
        By name, where the file is and the open file.

    Raises:
        QcutError: of class ``error``: a file is not regular or cannot be opened, the record is damaged, or the files
            are replaced again and again.
    """
    for _ in range(_TRIES):
        with ExitStack() as stack:
            renames = _renames(directory, key, error)
            opened = {}
            for name, path in _resolved(directory, names, renames).items():
                try:
                    opened[name] = path, stack.enter_context(open_regular(path, error))
                except QcutError:
                    if path.exists():
                        raise
            again = _renames(directory, key, error)
            paths = _resolved(directory, names, again)
            held = all(is_at(paths[name], file.fileno()) for name, (_, file) in opened.items())
            if again == renames and held and not any(paths[name].exists() for name in names if name not in opened):
                stack.pop_all()
                return opened
        time.sleep(_PAUSE_S)
    raise error(f"{directory}: its files were replaced {_TRIES} times while they were read")


def _resolved(directory: Path, names: Sequence[str], renames: dict[str, str] | None) -> dict[str, Path]:
    new = {name: directory / temporary for temporary, name in (renames or {}).items()}
    return {n: new[n] if n in new and new[n].exists() else directory / n for n in names}
