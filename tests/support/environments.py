"""Virtual environments over the one that runs: other versions of some packages, without installing torch again."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from tests.support import ROOT


def environment(folder: Path, wanted: Sequence[str], *options: str) -> Path:
    """Make an environment unless it is there; returns its Python.

    Args:
        folder: of the environment.
        wanted: requirements of packages that take precedence over those beneath.
        options: of ``pip install``.
    """
    python = folder / "bin" / "python"
    stamp = folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(wanted):
        venv.create(folder, clear=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *options, *wanted]
        subprocess.run([python, *install], check=True)
        stamp.write_text("\n".join(wanted))
    return python


def run_tests(python: Path, arguments: Sequence[str]) -> int:
    """Run pytest on all cores in an environment; returns its exit status. With ``--install``, nothing is run."""
    if "--install" in arguments:
        return 0
    below = Path(sysconfig.get_path("purelib"))
    settings = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plugins of the packages beneath, whose other modules are not found
        "LD_LIBRARY_PATH": str(below / "nvidia" / "cu13" / "lib"),  # NVRTC, which is looked for in one environment
    }
    options = ["-p", "xdist", "--numprocesses", "auto", "--quiet", "-p", "no:cacheprovider"]
    command = [python, "-m", "pytest", *options, *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | settings, check=False).returncode
