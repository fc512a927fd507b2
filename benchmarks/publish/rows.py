"""Rows of results, their provenance, and speeds of variants by tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks.harness import geomean, read_rows

Row = dict[str, str]
Shape = tuple[int, int, int]
"""M, N, K."""
Times = dict[Shape, dict[str, float]]
"""Shape → variant → median microseconds."""
Speeds = dict[int, dict[str, list[float]]]
"""Tokens → variant → × the baseline, by layer shape."""


class Rows:
    """CSV rows of a folder of results, read on demand.

    Args:
        folder: the folder of the benchmarks' output.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(self, bench: str, **wanted: str) -> list[Row]:
        """Return the rows of a benchmark with the given values of columns; none if there is no file."""
        path = self.folder / f"{bench}.csv"
        if not path.is_file():
            return []
        return [row for row in read_rows(path) if all(row[c] == value for c, value in wanted.items())]


def provenance(bench: str, rows: Iterable[Row]) -> str:
    """Return the file of the rows, and the hardware and software of their measurement."""
    columns = ("gpu", "driver", "cuda", "torch", "commit")
    found = dict.fromkeys(tuple(row[c] for c in columns) for row in rows)
    machines = "; ".join(
        f"{'no GPU' if gpu == 'none' else f'{gpu}, driver {driver}, CUDA {cuda}'}, torch {torch}, commit {commit}"
        for gpu, driver, cuda, torch, commit in found
    )
    return f"Rows: `{bench}.csv` ({machines})."


def missing(*benches: str) -> str:
    """Return the text of a part without rows."""
    return f"Not measured: there are no rows in {' and '.join(f'`{bench}.csv`' for bench in benches)}."


def shape_of(row: Row) -> Shape:
    """M, N, K."""
    return int(row["m"]), int(row["n"]), int(row["k"])


def times(rows: Rows, bench: str, **wanted: str) -> Times:
    """Median microseconds of the rows of a benchmark with the given values of columns."""
    by_shape: Times = {}
    for row in rows.of(bench, **wanted):
        by_shape.setdefault(shape_of(row), {})[row["variant"]] = float(row["median_us"])
    return by_shape


def speeds(rows: Iterable[tuple[str, Row]], baseline: str) -> Speeds:
    """Speeds of named rows over the baseline's at the same shape.

    Args:
        rows: the variant's name in the table, and the row, for each row.
        baseline: one of those names; shapes without it count for nothing.
    """
    found_us: Times = {}
    for name, row in rows:
        found_us.setdefault(shape_of(row), {})[name] = float(row["median_us"])
    ratios: Speeds = {}
    for (m, _, _), found in sorted(found_us.items()):
        for name in found if baseline in found else ():
            ratios.setdefault(m, {}).setdefault(name, []).append(found[baseline] / found[name])
    return ratios


def mean(found: dict[str, list[float]], name: str) -> float | None:
    """Geometric mean of a variant's speeds; None if it lacks a shape that others have."""
    values = found.get(name, [])
    return geomean(values) if values and len(values) == max(map(len, found.values())) else None
