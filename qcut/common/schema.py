"""Files that are not trusted: read within bounds, parsed as JSON without surprises, and held to a schema.

Only regular files are read, no larger than stated. Whatever is wrong ends in the exception that the caller names, with
the path. No file makes the reader wait (a pipe, a device) or take more memory than its limit.

A schema is data: a check for each kind of value, and `conform` to apply one. A check takes a value and returns it, or
raises `Mismatch`, which names what was found, where, and what is allowed. No check converts: a number in quotes is no
number. Where a value stands is put together when one does not fit: headers of 150,000 tensors are checked in a second.
"""

from __future__ import annotations

import gc
import json
import math
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from qcut.errors import QcutError

JSON_BYTES = 64 << 20
"""The largest JSON file that is read: the index of a checkpoint of some 200,000 tensors."""
JSON_DEPTH = 64
"""Objects and lists within one another that JSON may have."""
JSON_VALUES = 2_000_000
"""Values that one JSON file may have, which bounds the memory of what is made of it."""
JSON_WIDTH = 1 << 18
"""Values that one object or list may have, which bounds the time: more than any checkpoint has tensors."""
_DIGITS = 20
Check = Callable[[Any], Any]
NAME_LENGTH = 4096
"""Characters of the longest name: of a layer, a tensor or a field."""


def open_regular(path: Path, error: type[QcutError]) -> BinaryIO:
    """Open a file for reading, unbuffered, without ever waiting for it.

    Raises:
        QcutError: of class ``error``, if there is no such file, or one that cannot be opened or is not regular.
    """
    try:
        # A pipe without a writer would be waited for.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise error(f"{_shown(path)}: there is no such file") from None
    except (OSError, ValueError) as exc:
        raise error(f"{_shown(path)}: cannot be opened: {getattr(exc, 'strerror', None) or exc}") from exc
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise error(f"{_shown(path)}: not a regular file; a pipe, device or directory is not read")
    return os.fdopen(handle, "rb", buffering=0)


@contextmanager
def reading(path: Path, error: type[QcutError]) -> Iterator[BinaryIO]:
    """`open_regular` for a block; OSError and MemoryError in it become ``error`` with the path."""
    with open_regular(path, error) as file, closed_if_refused(file, path, error):
        yield file


@contextmanager
def closed_if_refused(file: BinaryIO, path: Path, error: type[QcutError]) -> Iterator[None]:
    """Check an open file in a block that closes it if it raises; OSError and MemoryError become ``error``."""
    try:
        yield
    except BaseException as exc:
        file.close()
        if isinstance(exc, (OSError, MemoryError)):
            raise error(f"{_shown(path)}: cannot be read: {getattr(exc, 'strerror', None) or exc!r}") from exc
        raise


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from walking through all objects while a block makes many that stay: half the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def file_size(file: BinaryIO) -> int:
    """Bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def read_up_to(file: BinaryIO, count: int) -> bytes:
    """Bytes from the file's position on: ``count``, or fewer if the file ends."""
    pieces: list[bytes] = []
    while count > 0 and (piece := file.read(min(count, 1 << 20))):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def read_into(file: BinaryIO, buffer: memoryview) -> int:
    """Fill a buffer of bytes from the file's position on; returns how many there were."""
    done = 0
    while done < len(buffer) and (count := file.readinto(buffer[done:])):  # type: ignore[attr-defined]
        done += count
    return done


def read_bytes(path: Path, limit: int, error: type[QcutError]) -> bytes:
    """Read a whole file.

    Args:
        path: the file.
        limit: bytes that it may have.
        error: class of the exception to raise.

    Raises:
        QcutError: of class ``error``: see `open_regular`; or the file is larger, or cannot be read.
    """
    with reading(path, error) as file:
        return read_bounded(file, limit, path, error)


def read_bounded(file: BinaryIO, limit: int, path: Path, error: type[QcutError]) -> bytes:
    """Read an open file from its position on; ``error`` where more than ``limit`` bytes are there."""
    size = file_size(file)
    data = read_up_to(file, limit + 1) if size <= limit else b""
    if size > limit or len(data) > limit:
        raise error(f"{_shown(path)}: found {max(size, len(data))} bytes; at most {limit} are read")
    return data


def parse_json(data: bytes, where: object, error: type[QcutError]) -> Any:
    """Parse JSON with bounds on depth, number of values and numbers.

    Args:
        data: UTF-8 text.
        where: for messages.
        error: class of the exception to raise.

    Raises:
        QcutError: of class ``error``: not JSON; deeper than `JSON_DEPTH`, wider than `JSON_WIDTH` or of more values
            than `JSON_VALUES`; NaN, Inf or a number beyond float64, a whole number beyond 64 bits; a key twice in an
            object; text that is not Unicode.
    """
    check_extent(data, where, error)

    def refuse(text: str) -> Any:
        raise _NotAllowed(f"the number {text[:40]}; finite numbers are needed")

    def real(text: str) -> float:
        return value if math.isfinite(value := float(text)) else refuse(text)

    def whole(text: str) -> int:
        if len(text) > _DIGITS or not -(1 << 63) <= (value := int(text)) < 1 << 63:
            raise _NotAllowed(f"the number {text[:40]}; whole numbers of 64 bits are needed")
        return value

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise _NotAllowed(f"the key {twice[:80]!r} twice in one object")
        if len(made) > JSON_WIDTH:
            raise _NotAllowed(f"an object of {len(made)} keys; at most {JSON_WIDTH} are read")
        return made

    try:
        parsed = json.loads(
            data.decode("utf-8"), parse_constant=refuse, parse_float=real, parse_int=whole, object_pairs_hook=unique
        )
        if b"\\u" in data:  # lone surrogates, which no file name and no terminal takes
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except _NotAllowed as exc:
        raise error(f"{_shown(where)}: found {exc}") from None
    except (ValueError, RecursionError, MemoryError) as exc:
        raise error(f"{_shown(where)}: not readable as JSON: {exc}") from exc
    return parsed


def read_json(path: Path, error: type[QcutError], *, limit: int = JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: the file.
        error: class of the exception to raise.
        limit: bytes that the file may have.

    Raises:
        QcutError: of class ``error``: see `read_bytes` and `parse_json`; or the file holds no object.
    """
    data = parse_json(read_bytes(path, limit, error), path, error)
    if not isinstance(data, dict):
        raise error(f"{path}: found a JSON {type(data).__name__}, an object is needed")
    return data


class _NotAllowed(ValueError):
    """JSON that Python would read and qcut does not."""


def check_extent(data: bytes, where: object, error: type[QcutError]) -> None:
    """Bound depth, width and number of values of JSON before anything is made of the text.

    Raises:
        QcutError: of class ``error``: deeper than `JSON_DEPTH`, of more values than `JSON_VALUES`, or of more than
            `JSON_WIDTH` plain values one behind another.
    """
    outside = b"".join(data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    marks = outside.translate(None, delete=bytes(set(range(256)) - set(b"[]{},")))
    if len(marks) > JSON_VALUES:
        raise error(f"{_shown(where)}: more than {JSON_VALUES} values; fewer are read")
    if b"," * JSON_WIDTH in marks:
        raise error(f"{_shown(where)}: more than {JSON_WIDTH} values in one object or list; fewer are read")
    depth = 0
    for mark in marks.translate(None, delete=b","):
        depth += 1 if mark in b"[{" else -1
        if depth > JSON_DEPTH:
            raise error(f"{_shown(where)}: not readable as JSON: more than {JSON_DEPTH} objects within one another")


def _shown(where: object) -> str:
    text = str(where).encode("utf-8", "replace").decode()
    return text if len(text) <= 1024 else f"{text[:400]}…{text[-400:]}"


class Mismatch(ValueError):
    """A value that fails a check; `inside` adds where, from the innermost key outwards.

    Args:
        value: that was found; None for an object with other fields than a record's.
        allowed: what is.
        fields: the message for such an object.
    """

    def __init__(self, value: Any = None, allowed: str = "", *, fields: str = "") -> None:
        super().__init__()
        self._value, self._allowed, self._fields = value, allowed, fields
        self._steps: list[str | int] = []

    def inside(self, step: str | int) -> Mismatch:
        """The same one, of a value under a key, or at an index, of another value."""
        self._steps.append(step)
        return self

    def __str__(self) -> str:
        where = ""
        for step in reversed(self._steps):
            name = f"[{step}]" if isinstance(step, int) else step if len(step) <= 200 else f"{step[:200]}…"
            where += name if isinstance(step, int) or not where else f".{name}"
        if self._fields:
            return f"{where}: {self._fields}" if where else self._fields
        value = self._value
        large = isinstance(value, (list, dict, str)) and len(value) > 100
        shown = f"a {type(value).__name__} of {len(value)}" if large else repr(value)
        shown = shown if len(shown) <= 120 else f"{shown[:120]}…"
        return (f"field {where!r}: found {shown}; allowed: " if where else f"found {shown}; ") + self._allowed


def conform(value: Any, check: Check, where: object, error: type[QcutError]) -> Any:
    """Apply a check.

    Args:
        value: from a JSON file.
        check: one of this module's.
        where: path of the file, for messages.
        error: class of the exception to raise.

    Returns:
        The value, with defaults in place of optional fields that are missing.

    Raises:
        QcutError: of class ``error``, naming the field, the value found and what is allowed.
    """
    try:
        return check(value)
    except Mismatch as exc:
        raise error(f"{where}: {exc}") from None


def text(*, choices: Collection[str] = (), most: int = NAME_LENGTH) -> Check:
    """A string, one of the choices if there are any."""
    allowed = f"one of {', '.join(choices)}" if choices else f"text of up to {most} characters"

    def check(value: Any) -> Any:
        if not isinstance(value, str) or len(value) > most or (choices and value not in choices):
            raise Mismatch(value, allowed)
        return value

    return check


def integer(least: int = 0, most: int = (1 << 31) - 1) -> Check:
    """A whole number between two bounds, both included."""

    def check(value: Any) -> Any:
        if type(value) is not int or not least <= value <= most:
            raise Mismatch(value, f"a whole number from {least} to {most}")
        return value

    return check


def number(least: float = -math.inf, most: float = math.inf) -> Check:
    """A finite number between two bounds, both included; given back as a float."""
    between = "" if math.isinf(least) and math.isinf(most) else f" from {least:g} to {most:g}"

    def check(value: Any) -> Any:
        if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:
            raise Mismatch(value, f"a finite number{between}")
        return float(value)

    return check


def boolean() -> Check:
    """``true`` or ``false``."""

    def check(value: Any) -> Any:
        if not isinstance(value, bool):
            raise Mismatch(value, "true or false")
        return value

    return check


def nothing_or(inner: Check) -> Check:
    """``null``, or what another check takes."""
    return lambda value: None if value is None else inner(value)


def items(inner: Check, count: int | None = None, *, most: int | None = None) -> Check:
    """A list of values that another check takes: ``count`` of them, or at most ``most``, if one is given."""
    allowed = f"a list of {count}" if count is not None else "a list" if most is None else f"a list of up to {most}"

    def check(value: Any) -> Any:
        fits = isinstance(value, list) and (count is None or len(value) == count)
        if not fits or (most is not None and len(value) > most):
            raise Mismatch(value, allowed)
        made = []
        try:
            for one in value:
                made.append(inner(one))
        except Mismatch as exc:
            raise exc.inside(len(made)) from None
        return made

    return check


def table(inner: Check) -> Check:
    """An object with names as keys and values that another check takes."""

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise Mismatch(value, "an object")
        made = {}
        for key, one in value.items():
            if not isinstance(key, str) or len(key) > NAME_LENGTH:
                raise Mismatch(key, f"keys of up to {NAME_LENGTH} characters")
            try:
                made[key] = inner(one)
            except Mismatch as exc:
                raise exc.inside(key) from None
        return made

    return check


def record(
    fields: Mapping[str, Check], optional: Mapping[str, tuple[Check, Any]] | None = None, *, more: bool = False
) -> Check:
    """An object with known fields.

    Args:
        fields: those that must be there.
        optional: others, each with its check and what stands for it if it is missing.
        more: whether fields of other names may be there; they are given back as they are.
    """
    optional = optional or {}
    checks = {**fields, **{key: inner for key, (inner, _) in optional.items()}}
    defaults = {key: default for key, (_, default) in optional.items()}

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise Mismatch(value, "an object")
        if missing := [key for key in fields if key not in value]:
            raise Mismatch(fields=f"field {missing[0]!r} is missing")
        made = {**defaults, **value}
        for key, one in value.items():
            inner = checks.get(key)
            if inner is not None:
                try:
                    made[key] = inner(one)
                except Mismatch as exc:
                    raise exc.inside(key) from None
            elif not more:
                raise Mismatch(fields=f"found the field {key[:80]!r}; allowed: {', '.join(checks)}")
        return made

    return check


def anything() -> Check:
    """Any value."""
    return lambda value: value
