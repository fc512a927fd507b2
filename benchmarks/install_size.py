"""Measures what ``pip install .`` brings: bytes downloaded, and bytes on disk once installed.

Installs into a fresh environment in a temporary folder, once torch alone and once qcut, and prints the README's table.
Downloads gigabytes and needs about 12 GB of disk::

    python benchmarks/install_size.py --torch torch==2.15.0
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def disk_bytes(folder: Path) -> int:
    """Bytes of all files below a folder, each counted once."""
    return sum({(s.st_dev, s.st_ino): s.st_size for p in folder.rglob("*") if (s := p.lstat())}.values())


def install(python: Path, *requirements: str) -> list[str]:
    """Install, and return the packages that pip added, as ``name version``."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-compile",
            "--report",
            report.name,
            *requirements,
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
        added = json.loads(Path(report.name).read_text())["install"]
    return [f"{package['metadata']['name']} {package['metadata']['version']}" for package in added]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="torch", metavar="REQUIREMENT", help="the torch to measure with")
    parser.add_argument("--extra", default="", metavar="NAME", help="extra of qcut to install, such as hf")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "bin", "python")
        sizes, added = [disk_bytes(Path(folder))], []
        extra = f"[{arguments.extra}]" if arguments.extra else ""
        for requirement in (arguments.torch, f"{ROOT}{extra}"):
            added.append(install(python, requirement))
            sizes.append(disk_bytes(Path(folder)))
    for name, packages, before, after in zip(("torch", "qcut"), added, sizes[:-1], sizes[1:], strict=True):
        print(f"{name}: {(after - before) / 1e6:,.0f} MB in {len(packages)} packages: {', '.join(packages)}")


if __name__ == "__main__":
    main()
