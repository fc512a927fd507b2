"""Measures ``pip install .``: bytes downloaded, and bytes on disk once installed.

Installs into a fresh environment in a temporary folder, once only torch and once qcut, and prints the README's table.
Downloads gigabytes and needs about 12 GB of disk::

    python benchmarks load install --torch torch==2.15.0
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from benchmarks import harness


def disk_bytes(folder: Path) -> int:
    """Bytes of all files below a folder, each counted once."""
    return sum({(s.st_dev, s.st_ino): s.st_size for p in folder.rglob("*") if (s := p.lstat())}.values())


def install(python: Path, *requirements: str) -> list[str]:
    """Install, and return the packages that pip added, as ``name version``."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        options = ("--quiet", "--no-compile", "--report", report.name)
        subprocess.run([str(python), "-m", "pip", "install", *options, *requirements], check=True, stdout=sys.stderr)
        added = json.loads(Path(report.name).read_text())["install"]
    return [f"{package['metadata']['name']} {package['metadata']['version']}" for package in added]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--torch", default="torch", metavar="REQUIREMENT", help="the torch to measure with")
    parser.add_argument("--extra", default="", metavar="NAME", help="extra of qcut to install, such as hf")


@harness.script(add_options)
def main(options: argparse.Namespace) -> int:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "bin", "python")
        sizes, added = [disk_bytes(Path(folder))], []
        extra = f"[{options.extra}]" if options.extra else ""
        for requirement in (options.torch, f"{harness.ROOT}{extra}"):
            added.append(install(python, requirement))
            sizes.append(disk_bytes(Path(folder)))
    for name, packages, before, after in zip(("torch", "qcut"), added, sizes[:-1], sizes[1:], strict=True):
        print(f"{name}: {(after - before) / 1e6:,.0f} MB in {len(packages)} packages: {', '.join(packages)}")
    return 0
