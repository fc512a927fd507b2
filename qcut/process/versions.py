"""The oldest torch and transformers that qcut works with, and the refusal of older ones. Imports neither."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from qcut.errors import UnsupportedError

OLDEST: dict[str, tuple[str, str]] = {
    "torch": (
        "2.11",
        "PyPI's builds before it are of CUDA 12, beside which qcut's compilers of CUDA 13 are not tested",
    ),
    "transformers": ("5.4", "the attention of its models before it has no `scaling`, which the engine reads"),
}
"""By package, the oldest version that is tested, and what is wrong with the one before."""


def require(package: str) -> None:
    """Check the version of a package, loaded or not. One that cannot be found, or has no version, passes.

    Raises:
        UnsupportedError: the version is older than `OLDEST`.
    """
    oldest, reason = OLDEST[package]
    found = _version(package)
    if found is not None and _numbers(found) < _numbers(oldest):
        raise UnsupportedError(f"{package} {found} is too old: {reason}; allowed: {package}>={oldest}")


def transformers() -> Any:
    """Import transformers.

    Raises:
        UnsupportedError: transformers is missing, or older than `OLDEST`.
    """
    require("transformers")
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UnsupportedError(f"transformers is not installed ({error}): pip install 'qcut[hf]'") from error


def _version(package: str) -> str | None:
    if (module := sys.modules.get(package)) is not None:
        return getattr(module, "__version__", None)
    # Not importlib.metadata: importing it and scanning all packages takes longer than importing qcut.
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    for folder in spec.submodule_search_locations or () if spec else ():
        for name in ("version.py", "__init__.py"):
            try:
                text = (Path(folder) / name).read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            if match := re.search(r"^__version__(?:\s*:\s*\w+)?\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE):
                return match.group(1)
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor: a development version or a build of a release counts as the release."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
