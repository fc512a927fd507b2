"""Common parts of the benchmarks: the measuring core of `qcut.tuning.timing`, ceilings, rows, CSV, tables, options."""

from __future__ import annotations

import argparse
import csv
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.layers.shapes import Shape
from qcut.errors import QcutError
from qcut.tuning.timing import MAX_COPIES as MAX_COPIES
from qcut.tuning.timing import ROTATE_BYTES as ROTATE_BYTES
from qcut.tuning.timing import CheckError as CheckError
from qcut.tuning.timing import Clock as Clock
from qcut.tuning.timing import CudaClock as CudaClock
from qcut.tuning.timing import Environment as Environment
from qcut.tuning.timing import Timing as Timing
from qcut.tuning.timing import Variant as Variant
from qcut.tuning.timing import WallClock as WallClock
from qcut.tuning.timing import checked as checked
from qcut.tuning.timing import environment as environment
from qcut.tuning.timing import measure as measure
from qcut.tuning.timing import percentile as percentile
from qcut.tuning.timing import plan_calls as plan_calls
from qcut.tuning.timing import rotation as rotation

# What is measured is the kernel that dispatch chose, not one that serves while nvcc builds that kernel.
os.environ.setdefault("QCUT_BUILD", "wait")

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
REFERENCE = Path("reference")
"""In place of a text's file: the Python language reference."""


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


def timed(
    label: str, variants: Iterable[Variant], clock: Clock, options: argparse.Namespace, deadline: float, **more: Any
) -> tuple[dict[str, Timing], int]:
    """Check variants and time those that are right, 15 rounds or, with ``--quick``, 7.

    Args:
        label: what messages begin with.
        variants: to check and time.
        clock: that times them.
        options: of the command line, ``quick`` among them.
        deadline: monotonic seconds at which rounds end.
        more: for `measure`.

    Returns:
        Timings by name, and how many variants were wrong.
    """
    report: Callable[[str], None] = functools.partial(print, f"{label}:", flush=True)
    good, wrong = checked(list(variants), report)
    more = {"rounds": 7 if options.quick else 15, **more}
    return measure(good, clock, deadline=deadline, report=report, **more), len(wrong)


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


def timing_options(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark that takes times."""
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for CSV and plots")
    parser.add_argument("--quick", action="store_true", help="few shapes, few rounds")
    parser.add_argument("--time-budget", type=float, default=90.0, metavar="SECONDS", help="stop measuring after this")


def model_options(parser: argparse.ArgumentParser) -> None:
    """The options of benchmarks that evaluate models on a text."""
    parser.add_argument("--models-dir", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--models", type=list_of(), default="gpt2-14m,llama-13m", help="folders of --models-dir")
    parser.add_argument("--text", type=existing, required=True, help="UTF-8 text file, or `reference`")
    parser.add_argument("--window", type=int, default=512, help="tokens per window [512]")
    parser.add_argument("--max-windows", type=int, help="evaluate on at most so many windows [all]")
    device_option(parser)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for results")


def device_option(parser: argparse.ArgumentParser) -> None:
    """``--device``, which `script` resolves: auto is the GPU where there is one."""
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")


def existing(text: str) -> Path:
    """A path of the command line that exists, or `REFERENCE`."""
    if text != str(REFERENCE) and not Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text} does not exist")
    return Path(text)


def list_of(allowed: Iterable[str] = (), separator: str = ",") -> Callable[[str], list[str]]:
    """Reads a list of the command line.

    Args:
        allowed: the values that an item may have; any by default.
        separator: between two items.
    """
    known = list(allowed)

    def parse(text: str) -> list[str]:
        items = [item.strip() for item in text.split(separator) if item.strip()]
        if unknown := [item for item in items if known and item not in known]:
            mark = f"{separator} "
            raise argparse.ArgumentTypeError(f"{mark.join(unknown)} is not one of {mark.join(known)}")
        return items

    return parse


def script(
    *options: Callable[[argparse.ArgumentParser], None], gpu: bool = False, time_budget: float = 90.0
) -> Callable[[Callable[[argparse.Namespace], int]], Callable[..., int]]:
    """Make a function of its options the ``main`` of a benchmark; the help is the module's docstring.

    The function runs without gradients and returns the exit status. A `QcutError` is printed and gives 1, a
    `argparse.ArgumentTypeError` is an error of the command line.

    Args:
        options: add the options, `timing_options` and `model_options` among them.
        gpu: whether nothing can be measured without a GPU: the status is then 2.
        time_budget: default of ``--time-budget``, in seconds.
    """

    def wrap(run: Callable[[argparse.Namespace], int]) -> Callable[..., int]:
        @functools.wraps(run)
        def main(arguments: Sequence[str] | None = None) -> int:
            words = run.__module__.split(".")[1:]
            parser = argparse.ArgumentParser(
                prog=" ".join(("benchmarks", *words)),
                description=sys.modules[run.__module__].__doc__,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            for add in options:
                add(parser)
            parser.set_defaults(time_budget=time_budget)
            given = parser.parse_args(arguments)
            if getattr(given, "device", "") == "auto":
                given.device = "cuda" if torch.cuda.is_available() else "cpu"
            try:
                if "models_dir" in given:
                    given.models = [existing(str(given.models_dir / name)) for name in given.models]
                if gpu:
                    require_gpu()
                with torch.no_grad():
                    return run(given)
            except argparse.ArgumentTypeError as error:
                parser.error(str(error))
            except QcutError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1

        return main

    return wrap


def command(module: str, *arguments: str) -> list[str]:
    """The command line of a benchmark in a process of its own, from any folder.

    Args:
        module: such as ``benchmarks.engine.steps``.
        arguments: of the benchmark.
    """
    return [sys.executable, str(ROOT / "benchmarks"), *module.split(".")[1:], *arguments]


def served_dtype(device: str) -> torch.dtype:
    """The dtype in which models are served: float16 on a GPU."""
    return torch.float16 if device == "cuda" else torch.float32


def require_gpu() -> None:
    """Exit with status 2 and one line on a machine without a CUDA device."""
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device; torch finds none here.", file=sys.stderr)
        raise SystemExit(2)
