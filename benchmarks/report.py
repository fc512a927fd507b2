"""The experiment report: `results/report.md` and its plots, from the rows that the benchmarks write.

    python benchmarks/report.py                     # render what rows there are; no GPU
    python benchmarks/report.py --run a,c,d         # measure these parts first, then render

Parts: (a) weight quantization, (b) the matmul by kernel generation, (c) attention, (d) the engine against others.
Every figure of the report comes from a row. A part without rows says that it was not measured.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.report_quality import add_options
from benchmarks.reporting import attention, engine, matmul, quantization
from benchmarks.reporting.rows import Rows

PARTS = (quantization, matmul, attention, engine)
HEAD = """# qcut: an experiment report

Written by `benchmarks/report.py` from the rows in this folder, each of which names its GPU, versions and commit.
Times are medians; docs/measuring.md describes the method."""


def report(folder: Path) -> str:
    """The page; the same rows make the same text."""
    rows = Rows(folder)
    return "\n\n".join([HEAD, *(part.text(rows) for part in PARTS)]) + "\n"


def write(folder: Path) -> Path:
    """Write the page, aside first, and the plots of what has rows."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.md"
    partial = path.with_suffix(".partial")
    partial.write_text(report(folder), encoding="utf-8")
    partial.replace(path)
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
        "a": [("report_quality", [*shared, *device, *quality])],
        "b": [(bench, shared) for bench in ("bench_ladder", "bench_gemm", "bench_linear", "bench_codebook")],
        "c": [("bench_attention", [*shared, *device])],
        "d": [("bench_compare", [*shared, *device, *compare])],
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure what was asked for, and render; 1 where a benchmark found something wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--run", default="", metavar="PARTS", help="parts to measure first, such as a,c,d [none]")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "benchmarks" / "results", help="rows and report")
    parser.add_argument("--quick", action="store_true", help="few rounds, few shapes")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add_options(parser)
    parser.add_argument("--schemes", help="of (a) [all]")
    parser.add_argument("--cases", help="of (d) [llama2c-288,llama2c-512]")
    parser.add_argument("--files", nargs="*", type=Path, default=[], metavar="FILE", help="llama2.c files for (d)")
    options = parser.parse_args(arguments)
    wanted, parts = [part for part in options.run.split(",") if part], runs(options)
    if unknown := [part for part in wanted if part not in parts]:
        parser.error(f"--run: {', '.join(unknown)} is not one of {', '.join(parts)}")
    status = 0
    for part in wanted:
        for bench, given in parts[part]:
            print(f"({part}) {bench}", file=sys.stderr, flush=True)
            status = max(status, measure(bench, given))
    print(f"report in {write(options.out)}")
    return status


def measure(bench: str, arguments: list[str]) -> int:
    """Run a benchmark in its own process, so that the next one inherits neither memory nor settings."""
    script = harness.ROOT / "benchmarks" / f"{bench}.py"
    return subprocess.run([sys.executable, str(script), *arguments]).returncode


if __name__ == "__main__":
    raise SystemExit(main())
