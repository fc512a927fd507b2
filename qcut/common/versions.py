"""The oldest torch and transformers that qcut works with, and qcut's own distribution. Imports none of them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

from qcut.errors import UnsupportedError

OLDEST: dict[str, tuple[str, str]] = {
    "torch": (
        "2.11",
        "PyPI's builds before it are of CUDA 12, and qcut's compilers of CUDA 13 are not tested with them",
    ),
    "transformers": ("5.4", "the attention of its models before it has no `scaling`, which the engine reads"),
}
"""By package, the oldest version that is tested, and what is wrong with the one before."""


DISTRIBUTION = "qcut-inference"
"""Name under which pip knows qcut; ``qcut`` is another project's on PyPI."""


def install(extra: str) -> str:
    """The command that installs an extra of qcut."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def refuse_other_distribution(package: Path) -> None:
    """Look whether a distribution named ``qcut`` was installed into qcut's own folder.

    Args:
        package: the folder of the package ``qcut``.

    Raises:
        UnsupportedError: it was, so that files of the two replace one another.
    """
    with os.scandir(package.parent) as entries:
        others = [entry.name for entry in entries if re.fullmatch(r"qcut-[^-]+\.(dist|egg)-info", entry.name, re.I)]
    for name in others:
        if _installs_into(package, package.parent / name):
            raise UnsupportedError(
                f"{package}: the distribution {name.rpartition('.')[0]} has files here, too: pip uninstall --yes qcut "
                f"{DISTRIBUTION}, then install {DISTRIBUTION} again; each of the two needs an environment of its own"
            )


def _installs_into(package: Path, info: Path) -> bool:
    """Whether a distribution's list of files names the folder; True if there is no list."""
    for listed in ("RECORD", "top_level.txt"):
        try:
            lines = (info / listed).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        tops = {re.split(r"[/\\,]", line, maxsplit=1)[0] for line in lines}
        like = [top for top in tops if top.lower() == package.name.lower()]
        return any(os.path.exists(info.parent / top) and (info.parent / top).samefile(package) for top in like)
    return True


def require(package: str) -> None:
    """Check the version of a package, loaded or not. One that cannot be found, or has no version, passes.

    Raises:
        UnsupportedError: the version is older than `OLDEST`.
    """
    oldest, reason = OLDEST[package]
    found = _version(package)
    if found is not None and numbers(found) < numbers(oldest):
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
        raise UnsupportedError(f"transformers is not installed ({error}): {install('hf')}") from error


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


def numbers(version: str) -> tuple[int, ...]:
    """Major and minor: a development version or a build of a release counts as the release."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
