"""Kernels seen from outside: log lines, files and line numbers, by environment variables.

``QCUT_DEBUG=choice,build,launch`` writes lines of these kinds to standard error. ``QCUT_DUMP=FOLDER`` writes the text,
flags, PTX, SASS and compiler's report of each kernel that is built or read. ``QCUT_LINEINFO=1`` compiles kernels with
line numbers for profilers; such kernels have keys of their own in the cache. The variables are read when they are used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from qcut.errors import ConfigError

KINDS = ("choice", "build", "launch")
F = TypeVar("F", bound=Callable[..., object])


def is_logged(kind: str) -> bool:
    """Whether lines of a kind are written.

    Raises:
        ConfigError: ``QCUT_DEBUG`` names something else than `KINDS`.
    """
    value = os.environ.get("QCUT_DEBUG", "")
    kinds = [word.strip() for word in value.split(",") if word.strip()]
    if unknown := [word for word in kinds if word not in KINDS]:
        raise ConfigError(f"QCUT_DEBUG: found {unknown[0]!r}; allowed: {', '.join(KINDS)}, with commas between them")
    return kind in kinds


def log(kind: str, text: str) -> None:
    """Write a line of a kind, unless ``QCUT_DEBUG`` leaves it out."""
    if is_logged(kind):
        print(f"qcut: {kind}: {text}", file=sys.stderr, flush=True)


def logs_choice(choose: F) -> F:
    """Decorates a function of dispatch: each choice is logged with what it was chosen for."""

    @wraps(choose)
    def logged(*args: object, **named: object) -> object:
        result = choose(*args, **named)
        if is_logged("choice"):
            given = ", ".join([*map(str, args), *(f"{name}={value}" for name, value in named.items())])
            log("choice", f"{choose.__name__}({given}): {result}")
        return result

    return logged  # type: ignore[return-value]


def has_line_numbers() -> bool:
    """Whether kernels are compiled with line numbers."""
    return os.environ.get("QCUT_LINEINFO", "") not in ("", "0")
