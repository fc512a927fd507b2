"""The experiment report: `results/report.md` and its plots, from the rows that the benchmarks write.

    python benchmarks publish report                     # render what rows there are; no GPU
    python benchmarks publish report --run a,c,d         # measure these parts first, then render

Parts: (a) weight quantization, (b) the matmul by kernel generation, (c) attention, (d) the engine against others.
Every figure of the report comes from a row. A part without rows says that it was not measured.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.perplexity.sizes import add_quality_options
from benchmarks.publish import attention, engine, matmul, quantization
from benchmarks.publish.rows import Rows

PARTS = (quantization, matmul, attention, engine)
HEAD = """# qcut: an experiment report

Written by `python benchmarks publish report` from the rows in this folder, each of which names its GPU, versions and
commit. Times are medians; docs/measuring.md describes the method."""


def report(folder: Path) -> str:
    """The page; the same rows make the same text."""
    rows = Rows(folder)
    return "\n\n".join([HEAD, *(part.text(rows) for part in PARTS)]) + "\n"


def write(folder: Path) -> Path:
    """Write the page, aside first, and the plots of what has rows."""
    path = harness.replace_text(folder / "report.md", report(folder))
    for part in PARTS:
        part.plot(Rows(folder), folder)
    return path


def runs(options: argparse.Namespace) -> Mapping[str, Sequence[tuple[str, list[str]]]]:
    """Return the benchmark modules of each part, with the arguments of their ``main``."""
    shared = ["--out", str(options.out), *(["--quick"] if options.quick else [])]
    device = ["--device", options.device]
    quality = ["--models", *map(str, options.models), "--window", str(options.window)]
    quality += ["--calibration-windows", str(options.calibration_windows)]
    quality += ["--text", str(options.text)] if options.text else []
    quality += ["--max-windows", str(options.max_windows)] if options.max_windows else []
    quality += ["--schemes", options.schemes] if options.schemes else []
    compare = ["--cases", options.cases] if options.cases else []
    compare += ["--files", *map(str, options.files)] if options.files else []
    return {
        "a": [("benchmarks.perplexity.sizes", [*shared, *device, *quality])],
        "b": [(f"benchmarks.layers.{bench}", shared) for bench in ("tutorial", "gemm", "linear", "codebook")],
        "c": [("benchmarks.attention.decode", [*shared, *device])],
        "d": [("benchmarks.engine.compare", [*shared, *device, *compare])],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=harness.list_of("abcd"), default="", help="parts to measure first, such as a,c,d")
    parser.add_argument("--schemes", help="of (a) [all]")
    parser.add_argument("--cases", help="of (d) [llama2c-288,llama2c-512]")
    parser.add_argument("--files", nargs="*", type=Path, default=[], metavar="FILE", help="llama2.c files for (d)")


@harness.script(harness.timing_options, harness.device_option, add_quality_options, add_options)
def main(options: argparse.Namespace) -> int:
    """Measure what was asked for, and render; 1 where a benchmark found something wrong."""
    status, parts = 0, runs(options)
    for part in options.run:
        for bench, given in parts[part]:
            print(f"({part}) {bench}", file=sys.stderr, flush=True)
            status = max(status, measure(bench, given))
    print(f"report in {write(options.out)}")
    return status


def measure(bench: str, arguments: list[str]) -> int:
    """Run a benchmark in its own process, so that the next one inherits neither memory nor settings."""
    return subprocess.run(harness.command(bench, *arguments)).returncode
