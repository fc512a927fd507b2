"""What JSON must look like, said as data: a check for each kind of value, and `conform` to apply one.

A check takes a value and where the value stands, and returns the value, or raises `Mismatch` that says what was found
and what is allowed. No check converts: a number in quotes is no number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from qcut.errors import QcutError

Check = Callable[[Any, str], Any]
NAME_LENGTH = 4096
"""Characters of the longest name: of a layer, a tensor or a field."""


class Mismatch(ValueError):
    """A value that is not as a check wants it."""


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
        return check(value, "")
    except Mismatch as exc:
        raise error(f"{where}: {exc}") from None


def text(*, choices: Collection[str] = (), most: int = NAME_LENGTH) -> Check:
    """A string, one of the choices if there are any."""
    allowed = f"one of {', '.join(choices)}" if choices else f"text of up to {most} characters"

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, str) or len(value) > most or (choices and value not in choices):
            raise _mismatch(where, value, allowed)
        return value

    return check


def integer(least: int = 0, most: int = (1 << 31) - 1) -> Check:
    """A whole number between two bounds, both included."""

    def check(value: Any, where: str) -> Any:
        if type(value) is not int or not least <= value <= most:
            raise _mismatch(where, value, f"a whole number from {least} to {most}")
        return value

    return check


def number(least: float = -math.inf, most: float = math.inf) -> Check:
    """A finite number between two bounds, both included; given back as a float."""
    between = "" if math.isinf(least) and math.isinf(most) else f" from {least:g} to {most:g}"

    def check(value: Any, where: str) -> Any:
        if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:
            raise _mismatch(where, value, f"a finite number{between}")
        return float(value)

    return check


def boolean() -> Check:
    """``true`` or ``false``."""

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, bool):
            raise _mismatch(where, value, "true or false")
        return value

    return check


def nothing_or(inner: Check) -> Check:
    """``null``, or what another check takes."""
    return lambda value, where: None if value is None else inner(value, where)


def items(inner: Check, count: int | None = None, *, most: int | None = None) -> Check:
    """A list, of ``count`` values or of ``most`` at most if that is given, each of which another check takes."""
    allowed = f"a list of {count}" if count is not None else "a list" if most is None else f"a list of up to {most}"

    def check(value: Any, where: str) -> Any:
        fits = isinstance(value, list) and (count is None or len(value) == count)
        if not fits or (most is not None and len(value) > most):
            raise _mismatch(where, value, allowed)
        return [inner(one, f"{where}[{i}]") for i, one in enumerate(value)]

    return check


def table(inner: Check) -> Check:
    """An object whose keys are names and whose values another check takes."""

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise _mismatch(where, value, "an object")
        for key in value:
            if not isinstance(key, str) or len(key) > NAME_LENGTH:
                raise _mismatch(where, key, f"keys of up to {NAME_LENGTH} characters")
        return {key: inner(one, _under(where, key)) for key, one in value.items()}

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

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise _mismatch(where, value, "an object")
        missing = [key for key in fields if key not in value]
        foreign = [key for key in value if key not in fields and key not in optional]
        if missing:
            raise Mismatch(f"{_at(where)}field {missing[0]!r} is missing")
        if foreign and not more:
            known = ", ".join((*fields, *optional))
            raise Mismatch(f"{_at(where)}found the field {foreign[0][:80]!r}; allowed: {known}")
        made = dict(value)
        made |= {key: inner(value[key], _under(where, key)) for key, inner in fields.items()}
        for key, (inner, default) in optional.items():
            made[key] = inner(value[key], _under(where, key)) if key in value else default
        return made

    return check


def anything() -> Check:
    """Any value."""
    return lambda value, where: value


def _under(where: str, key: str) -> str:
    shown = key if len(key) <= 200 else f"{key[:200]}…"
    return f"{where}.{shown}" if where else shown


def _at(where: str) -> str:
    return f"{where}: " if where else ""


def _mismatch(where: str, value: Any, allowed: str) -> Mismatch:
    large = isinstance(value, (list, dict, str)) and len(value) > 100
    shown = f"a {type(value).__name__} of {len(value)}" if large else repr(value)
    shown = shown if len(shown) <= 120 else f"{shown[:120]}…"
    return Mismatch(f"field {where!r}: found {shown}; allowed: {allowed}" if where else f"found {shown}; {allowed}")
