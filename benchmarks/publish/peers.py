"""qcut's layers next to those of other libraries: the tables and the plot of the rows of `benchmarks.layers.peers`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.layers.libraries import PEERS
from benchmarks.layers.peers import BASELINE, BENCH, OURS, fastest
from benchmarks.publish import plots
from benchmarks.publish.markdown import MISSING, figures, markdown
from benchmarks.publish.rows import Row, Rows, provenance, shape_of

Shape = tuple[int, int, int]


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


def headline(title: str, cell: Cell) -> list[str]:
    """A line of the README's table: float16, qcut's fastest scheme and the fastest other; the faster one is bold."""
    ours, theirs = cell.ours, cell.theirs
    own = f"{_bold(ours[1], not cell.is_lost)} (`{ours[0]}`)" if ours else MISSING
    other = f"{_bold(theirs[1], cell.is_lost)} ({library_of(theirs[0])})" if theirs else MISSING
    return [title, figures(cell.fp16), own, other]


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


def plot(found: Mapping[int, Cell], size: tuple[int, int], out: Path) -> None:
    """Speed over float16 by tokens: qcut's fastest scheme, and the fastest method of another library.

    Args:
        found: tokens to what was timed there.
        size: N and K.
        out: folder of the plot.
    """
    labels, ours, theirs = [], {}, {}
    for m, cell in found.items():
        label = f"{m:,} token{'s' * (m > 1)}"
        labels.append(label)
        if cell.ours:
            ours[label] = cell.fp16 / cell.ours[1], cell.ours[0]
        if cell.theirs:
            theirs[label] = cell.fp16 / cell.theirs[1], library_of(cell.theirs[0])
    libraries = dict.fromkeys(library_of(name) for cell in found.values() for name in cell.us if name in PEERS)
    gpus = ", ".join(dict.fromkeys(cell.gpu for cell in found.values()))
    plots.groups(
        out / "headline",
        labels,
        {f"best of {', '.join(libraries)}": theirs, "qcut, its fastest scheme": ours},
        "PyTorch, float16",
        f"One linear layer of an 8B Llama ({size[0]} × {size[1]}) on an {gpus}",
        "speed, float16 = 1",
    )


def _bold(us: float, bold: bool) -> str:
    return f"**{figures(us)}**" if bold else figures(us)


def _time(cell: Cell, name: str) -> str:
    return _bold(cell.us[name], cell.us[name] == min(cell.us.values())) if name in cell.us else MISSING
