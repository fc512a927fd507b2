"""What JSON must look like, said as data: a check for each kind of value, and `conform` to apply one.

A check takes a value and returns it, or raises `Mismatch`, which says what was found, where, and what is allowed. No
check converts: a number in quotes is no number. Where a value stands is put together when one does not fit: headers of
150,000 tensors are checked in a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from qcut.errors import QcutError

Check = Callable[[Any], Any]
NAME_LENGTH = 4096
"""Characters of the longest name: of a layer, a tensor or a field."""


class Mismatch(ValueError):
    """A value that is not as a check wants it; `inside` says where, from the innermost key outwards.

    Args:
        value: that was found; None of an object whose fields are not those of a record.
        allowed: what is.
        fields: what is said of such an object.
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
    """A list, of ``count`` values or of ``most`` at most if that is given, each of which another check takes."""
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
    """An object whose keys are names and whose values another check takes."""

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
        optional: others, each with its check and what stands for it where it is missing.
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
