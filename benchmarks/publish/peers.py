"""qcut's layers next to those of other libraries: the table of the rows of `benchmarks.layers.peers`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.layers.libraries import PEERS
from benchmarks.layers.peers import BASELINE, BENCH, OURS, fastest
from benchmarks.publish.markdown import MISSING, figures, markdown
from benchmarks.publish.rows import Row, Rows, Shape, provenance, shape_of


@dataclass(frozen=True)
class Cell:
    """The methods that were timed at one shape.

    Attributes:
        us: microseconds by method, float16's among them.
        gpu: the card of all.
    """

    us: Mapping[str, float]
    gpu: str

    @property
    def fp16(self) -> float:
        """Microseconds of float16."""
        return self.us[BASELINE]

    @property
    def ours(self) -> tuple[str, float] | None:
        """qcut's fastest scheme and its microseconds; None if none was timed."""
        best = fastest({name: us for name, us in self.us.items() if name.startswith(OURS)})
        return best and (best[0].removeprefix(OURS), best[1])

    @property
    def theirs(self) -> tuple[str, float] | None:
        """The fastest method of another library and its microseconds; None if none was timed."""
        return fastest({name: us for name, us in self.us.items() if name in PEERS})

    @property
    def is_lost(self) -> bool:
        """Whether another library's fastest method is faster than qcut's."""
        ours, theirs = self.ours, self.theirs
        return theirs is not None and (ours is None or theirs[1] < ours[1])


def library_of(variant: str) -> str:
    """The library's own spelling of its name, for a method such as ``gemlite_w8a8``."""
    return PEERS[variant].library


def cells(rows: Rows) -> dict[Shape, Cell]:
    """Shape to what was timed there; shapes without float16 are left out. Nothing without rows."""
    us: dict[Shape, dict[str, float]] = {}
    gpus: dict[Shape, dict[str, None]] = {}
    for row in rows.of(BENCH):
        if row["median_us"]:
            us.setdefault(shape_of(row), {})[row["variant"]] = float(row["median_us"])
            gpus.setdefault(shape_of(row), {})[row["gpu"]] = None
    return {shape: Cell(found, ", ".join(gpus[shape])) for shape, found in us.items() if BASELINE in found}


def best_cell(cell: Cell | None) -> str:
    """Microseconds and name of the fastest method of another library."""
    best = cell and cell.theirs
    return f"{figures(best[1])} {best[0]}" if best else MISSING


def table(rows: Rows) -> str:
    """Microseconds of all methods by tokens, a table for each size, the fastest bold; then what qcut loses."""
    found = cells(rows)
    methods = list(dict.fromkeys(name for cell in found.values() for name in cell.us))
    versions = {row["variant"]: row["version"] for row in rows.of(BENCH)}
    parts = []
    for n, k in dict.fromkeys((n, k) for _, n, k in found):
        at = {m: cell for (m, *size), cell in sorted(found.items()) if size == [n, k]}
        lines = [
            [name, "" if name.startswith(OURS) else versions[name], *(_time(cell, name) for cell in at.values())]
            for name in methods
            if any(name in cell.us for cell in at.values())
        ]
        parts += [f"{n} × {k}, by tokens:", markdown(["", "version", *(f"{m:,}" for m in at)], lines)]
    return "\n\n".join([*parts, losses(found), *failures(rows.of(BENCH)), provenance(BENCH, rows.of(BENCH))])


def losses(found: Mapping[Shape, Cell]) -> str:
    """One sentence: the shapes at which another library is the fastest, and how much slower qcut is there."""
    lost = [(shape, cell) for shape, cell in sorted(found.items()) if cell.is_lost and cell.ours and cell.theirs]
    names = (
        f"{' × '.join(map(str, shape))} ({cell.theirs[0]}, {cell.ours[1] / cell.theirs[1]:.2f} × as fast)"
        for shape, cell in lost
        if cell.ours and cell.theirs
    )
    if not lost:
        return f"No other library is faster than qcut's fastest scheme at any of the {len(found)} shapes."
    return f"Another library is the fastest at {len(lost)} of {len(found)} shapes: {', '.join(names)}."


def failures(rows: Iterable[Row]) -> list[str]:
    """A list of the methods without a time, each with its shapes and its first reason; nothing if there are none."""
    shapes: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for row in rows:
        if row["reason"]:
            shapes.setdefault(row["variant"], []).append(f"{row['m']} × {row['n']} × {row['k']}")
            reasons.setdefault(row["variant"], row["reason"].replace("|", "/").replace("<", "&lt;"))
    lines = (f"- {name}: {', '.join(at)} ({reasons[name]})" for name, at in shapes.items())
    return ["Without a time:\n\n" + "\n".join(lines)] if shapes else []


def bold(value: float, is_best: bool) -> str:
    """A figure, bold if it is the best of its line."""
    return f"**{figures(value)}**" if is_best else figures(value)


def _time(cell: Cell, name: str) -> str:
    return bold(cell.us[name], cell.us[name] == min(cell.us.values())) if name in cell.us else MISSING
