"""Checks of numbers that a caller gives."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from qcut.errors import ConfigError, shown


def is_number(value: object) -> bool:
    """Whether a caller's value is a real number."""
    return isinstance(value, Real)


def is_whole(value: object) -> bool:
    """Whether a caller's value is a whole number, of Python, numpy or another kind, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_integer(value: Any, what: str, least: int = 1, most: int | None = None) -> None:
    """Check a caller's integer.

    Raises:
        ConfigError: this is none, one below ``least`` or beyond ``most``, or one that takes more than 64 bits.
    """
    if not is_whole(value) or not least <= value <= ((1 << 63) - 1 if most is None else most):
        allowed = f"{least} and more" if most is None else f"{least} to {most}"
        raise ConfigError(f"{what} is {shown(value)}; allowed: {allowed}")


SEEDS = -(1 << 63)
"""The least seed of torch's generators."""
