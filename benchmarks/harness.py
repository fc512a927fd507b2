"""Common parts of the benchmarks: the measuring core of `qcut.tuning.timing`, ceilings, rows, CSV, tables, options."""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.shapes import Shape
from qcut.tuning.timing import (
    MAX_COPIES,
    ROTATE_BYTES,
    CheckError,
    Clock,
    CudaClock,
    Environment,
    Timing,
    Variant,
    checked,
    environment,
    measure,
    percentile,
    plan_calls,
    rotation,
)

__all__ = [
    "CEILINGS",
    "MAX_COPIES",
    "ROOT",
    "ROTATE_BYTES",
    "Ceiling",
    "CheckError",
    "Clock",
    "CudaClock",
    "Environment",
    "Results",
    "Timing",
    "Variant",
    "add_model_options",
    "checked",
    "cpu_us",
    "environment",
    "geomean",
    "measure",
    "parser",
    "percentile",
    "plan_calls",
    "read_rows",
    "require_gpu",
    "rotation",
    "table",
    "with_models",
]

# What is measured is the kernel that dispatch chose, not one that serves while nvcc builds that kernel.
os.environ.setdefault("QCUT_BUILD", "wait")

ROOT = Path(__file__).resolve().parents[1]


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers; NaN of none."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def cpu_us(
    call: Callable[[], object],
    *,
    calls: int = 200,
    rounds: int = 25,
    settle: Callable[[], object] = torch.cuda.synchronize,
    now: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Host microseconds per call, returned before the device is done.

    Args:
        call: queues work and returns; ``calls`` of them must fit the launch queue (1,024 entries).
        calls: calls per sample.
        rounds: samples.
        settle: waits for the device between samples.
        now: the host's clock, in seconds.
    """
    samples = []
    for _ in range(rounds + 2):
        settle()
        start = now()
        for _ in range(calls):
            call()
        samples.append((now() - start) / calls * 1e6)
    settle()
    return Timing.of(samples[2:], "cpu")


@dataclass(frozen=True)
class Ceiling:
    """Rates that bound any kernel: datasheet arithmetic, measured read bandwidth."""

    int8_ops: float
    f16_ops: float
    read_bytes: float

    def floor_us(self, ops: float, bytes_moved: float, bits: int = 8) -> float:
        """Return the least time for an amount of arithmetic and of memory traffic."""
        return max(ops / (self.int8_ops if bits == 8 else self.f16_ops), bytes_moved / self.read_bytes) * 1e6


CEILINGS = {"NVIDIA H200": Ceiling(1979e12, 989.5e12, 4.48e12)}


@dataclass
class Results:
    """The rows of one benchmark.

    Attributes:
        bench: name of the benchmark; its files are called after it.
        env: columns every row repeats.
        rows: one dict per measured variant and shape, in order.
    """

    bench: str
    env: Environment
    rows: list[dict[str, object]] = field(default_factory=list)

    def add(self, timing: Timing, **columns: object) -> dict[str, object]:
        """Append one row and return it."""
        row: dict[str, object] = {"bench": self.bench, **columns}
        row |= {
            "median_us": round(timing.median_us, 3),
            "p20_us": round(timing.p20_us, 3),
            "p80_us": round(timing.p80_us, 3),
            "samples": timing.samples,
            "mode": timing.mode,
        }
        self.rows.append(row)
        return row

    def add_gemm(
        self, timing: Timing, shape: Shape, variant: str, moved: float, bits: int, **columns: object
    ) -> dict[str, object]:
        """Append the row of one GEMM, with its rates and its share of the floor.

        Args:
            timing: of one call.
            shape: its sizes.
            variant: what computed it.
            moved: bytes that have to be read and written.
            bits: of the products' operands, for the arithmetic's share of the floor.
            columns: further ones, after these.
        """
        ceiling = CEILINGS.get(self.env.gpu)
        floor_us = ceiling.floor_us(shape.ops, moved, bits) if ceiling else math.nan
        return self.add(
            timing,
            m=shape.m,
            n=shape.n,
            k=shape.k,
            variant=variant,
            tops=round(shape.ops / timing.median_us / 1e6, 2),
            gb_s=round(moved / timing.median_us / 1e3, 1),
            floor_pct=round(100 * floor_us / timing.median_us, 1),
            **columns,
        )

    def write_csv(self, directory: Path, key: Sequence[str] = ()) -> Path:
        """Write ``<bench>.csv``: aside first, so that a killed run leaves no half file.

        Args:
            directory: where the file is, or will be.
            key: columns that name what a row measures. Rows of the file that no new row has the key of are kept, with
                the environment that they were measured in. Without a key the file is written anew.
        """
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.bench}.csv"
        rows: list[dict[str, object]] = [{**row, **self.env.__dict__} for row in self.rows]
        if key and path.is_file():
            new = {tuple(str(row[column]) for column in key) for row in rows}
            kept = [row for row in read_rows(path) if tuple(row[column] for column in key) not in new]
            rows[:0] = [{**row} for row in kept]
        columns = list(dict.fromkeys(column for row in rows for column in row if column not in self.env.__dict__))
        partial = path.with_suffix(".partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*columns, *self.env.__dict__], restval="")
            writer.writeheader()
            writer.writerows(rows)
        partial.replace(path)
        return path


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a file that `Results.write_csv` wrote."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Right-aligned plain text; floats with three significant digits or one decimal."""

    def text(value: object) -> str:
        if isinstance(value, float):
            return "-" if math.isnan(value) else f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"
        return str(value)

    cells = [list(header), *([text(v) for v in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def parser(description: str) -> argparse.ArgumentParser:
    """The options every benchmark has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for CSV and plots")
    options.add_argument("--quick", action="store_true", help="few shapes, few rounds")
    options.add_argument("--time-budget", type=float, default=90.0, metavar="SECONDS", help="stop measuring after this")
    return options


def add_model_options(options: argparse.ArgumentParser) -> None:
    """The options of benchmarks that evaluate models on a text; `with_models` reads them."""
    options.add_argument("--models-dir", type=Path, required=True, help="folder of checkpoints")
    options.add_argument("--models", default="gpt2-14m,llama-13m", help="folders of --models-dir, comma-separated")
    options.add_argument("--text", type=Path, required=True, help="UTF-8 text file")
    options.add_argument("--window", type=int, default=512, help="tokens per window [512]")
    options.add_argument("--max-windows", type=int, help="evaluate on at most so many windows [all]")
    options.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    options.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for results")


def with_models(
    options: argparse.ArgumentParser, argv: list[str] | None, text: Path | None = None
) -> argparse.Namespace:
    """Parse options with those of `add_model_options`: models become paths, the device one that is there.

    Args:
        options: the parser.
        argv: arguments; None takes the process's own.
        text: what ``--text`` may be without being a file.
    """
    args = options.parse_args(argv)
    args.models = [args.models_dir / name for name in args.models.split(",")]
    for path in (*args.models, *([] if args.text == text else [args.text])):
        if not path.exists():
            options.error(f"{path} does not exist (--models-dir, --models, --text)")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def require_gpu() -> None:
    """Exit with status 2 and one line on a machine without a CUDA device."""
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device; torch finds none here.", file=sys.stderr)
        raise SystemExit(2)
