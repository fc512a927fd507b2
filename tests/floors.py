"""Tests on the oldest versions that pyproject.toml allows: ``python -m tests.floors``, or ``make floors``.

The oldest versions lie in a virtual environment over the one that runs this, in ``build/floors``, so that torch is not
installed twice. torch itself is left out: its oldest version is gigabytes, and `qcut.process.versions` refuses
older ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tests.support import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = ROOT / "build" / "floors"
TESTS = (
    "tests/checkpoints",
    "tests/engine",
    "tests/integrations",
    "tests/storage",
    "tests/cli/test_models.py",
    "tests/cli/test_quantize_any.py",
    "tests/cli/test_refusals.py",
    "tests/conversion/test_fusion.py",
    "tests/jit/test_cache.py",
    "tests/process/test_progress.py",
)


def oldest(project: dict[str, Any]) -> list[str]:
    """``name==version`` of each dependency with a lower bound, but for torch and the CUDA packages."""
    lines = [*project["dependencies"], *project["optional-dependencies"]["hf"]]
    found = []
    for requirement in map(Requirement, lines):
        bounds = [s.version for s in requirement.specifier if s.operator == ">="]
        if bounds and requirement.name != "torch" and not requirement.name.startswith("cuda-"):
            found.append(f"{requirement.name}=={bounds[0]}")
    return found


def environment() -> Path:
    """Make the environment unless it is there; returns its Python."""
    python = FOLDER / "bin" / "python"
    wanted = oldest(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
    stamp = FOLDER / "installed.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(wanted):
        venv.create(FOLDER, clear=True)
        (site,) = FOLDER.glob("lib/python*/site-packages")
        (site / "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted], check=True)
        stamp.write_text("\n".join(wanted))
    return python


def main() -> int:
    """Install and test; returns pytest's exit status."""
    python = environment()
    below = Path(sysconfig.get_path("purelib"))
    settings = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plugins of the packages beneath, whose other modules are not found
        "LD_LIBRARY_PATH": str(below / "nvidia" / "cu13" / "lib"),  # NVRTC, which is looked for in one environment
    }
    options = ["-p", "xdist", "--numprocesses", "auto", "--quiet", "-p", "no:cacheprovider"]
    command = [python, "-m", "pytest", *options, *TESTS, *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env=os.environ | settings, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
