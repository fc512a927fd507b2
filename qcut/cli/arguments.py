"""Types of command-line arguments."""

from __future__ import annotations

import argparse
import math

_DIGITS = 18
"""Most digits of a whole number: more may not fit torch's 63 bits."""


def positive(text: str) -> int:
    """A whole number from 1 up, of at most 18 digits."""
    value = natural(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a whole number from 1 up")
    return value


def natural(text: str) -> int:
    """A whole number from 0 up, of at most 18 digits."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a whole number from 0 up")
    if len(text) > _DIGITS:
        raise argparse.ArgumentTypeError(f"{text[:20]!r}… has {len(text)} digits; allowed: {_DIGITS}")
    return int(text)


def positive_float(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
