"""Plots of the benchmarks as SVG; without matplotlib only a message is printed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MARKERS = "osD^vP*X<>"
BLANK = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}


def ratios(path: Path, labels: Sequence[str], series: Mapping[str, Sequence[float]], title: str, axis: str) -> None:
    """Dots of speed relative to a baseline, which is the line at 1; higher is faster.

    Args:
        path: file name without suffix.
        labels: one per position on the x axis.
        series: name to one ratio per label; NaN leaves a gap.
        title: heading.
        axis: label of the y axis.
    """
    axes = _axes((max(6.0, 0.32 * len(labels) + 2), 5))
    if axes is None:
        return
    for marker, (name, values) in zip(MARKERS * (1 + len(series) // len(MARKERS)), series.items(), strict=False):
        axes.plot(range(len(labels)), values, marker, label=name, markersize=5, alpha=0.85)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}×")
    axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
    axes.grid(axis="y", which="both", alpha=0.3)
    axes.set_ylabel(axis)
    _print(axes, path, title)


def bars(
    path: Path, labels: Sequence[str], values: Sequence[float], lines: Mapping[str, float], title: str, axis: str
) -> None:
    """Labelled bars on a logarithmic axis, and horizontal lines for comparison.

    Args:
        path: file name without suffix.
        labels: one per bar.
        values: positive, one per bar.
        lines: name to height.
        title: heading.
        axis: label of the y axis.
    """
    axes = _axes((max(6.0, 0.7 * len(labels) + 1), 5))
    if axes is None:
        return
    drawn = axes.bar(range(len(labels)), values, color="tab:blue", alpha=0.85)
    axes.bar_label(
        drawn, [f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in values], fontsize=8, bbox=BLANK
    )
    for style, (name, height) in zip(("-", "--", ":") * (1 + len(lines) // 3), lines.items(), strict=False):
        axes.axhline(height, color="black", linewidth=1, linestyle=style, zorder=0, label=f"{name}: {height:.0f}")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
    axes.set_ylabel(axis)
    _print(axes, path, title, legend="upper left" if lines else "")


def stacks(
    path: Path,
    parts: Mapping[str, Mapping[str, float]],
    ticks: Mapping[str, Mapping[str, float]],
    title: str,
    axis: str,
) -> None:
    """Horizontal bars, each a stack of parts, with ticks on them.

    Args:
        path: file name without suffix.
        parts: label of a bar to the sizes of its parts, from the left.
        ticks: kind of tick to label to position on the bar; NaN draws none. The first kind is black.
        title: heading.
        axis: label of the x axis.
    """
    axes = _axes((9, 0.55 * len(parts) + 2))
    if axes is None:
        return
    rows = range(len(parts))
    left = [0.0] * len(parts)
    for name in dict.fromkeys(name for stack in parts.values() for name in stack):
        sizes = [stack.get(name, 0.0) for stack in parts.values()]
        axes.barh(rows, sizes, left=left, label=name)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for (name, places), color in zip(ticks.items(), ("black", "red"), strict=False):
        axes.plot(
            [places[label] for label in parts], rows, "|", color=color, markersize=22, markeredgewidth=2, label=name
        )
    axes.set_yticks(rows, parts, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(axis)
    _print(axes, path, title)


def curves(path: Path, series: Mapping[str, Mapping[float, float]], title: str, x_axis: str, y_axis: str) -> None:
    """Lines on two logarithmic axes.

    Args:
        path: file name without suffix.
        series: name to the line's points, x to y.
        title: heading.
        x_axis: label of the x axis.
        y_axis: label of the y axis.
    """
    axes = _axes((7, 5))
    if axes is None:
        return
    for marker, (name, found) in zip(MARKERS * (1 + len(series) // len(MARKERS)), series.items(), strict=False):
        axes.plot(list(found), list(found.values()), f"{marker}-", label=name, markersize=4, alpha=0.85)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(which="both", alpha=0.3)
    axes.set_xlabel(x_axis)
    axes.set_ylabel(y_axis)
    _print(axes, path, title)


def panels(
    path: Path,
    points: Mapping[str, Mapping[str, Mapping[str, tuple[float, float]]]],
    title: str,
    x_axis: str,
    y_axis: str,
) -> None:
    """Labelled points in panels, two in a row, with logarithmic y.

    Args:
        path: file name without suffix.
        points: title of a panel to series to label to (x, y), y positive; all panels have the same series.
        title: heading.
        x_axis: label of the x axes.
        y_axis: label of the y axes.
    """
    rows = -(-len(points) // 2)
    grid = _axes((13, 6.5 * rows), rows, 2)
    if grid is None:
        return
    for axes, (name, series) in zip(grid.flat, points.items(), strict=False):
        for i, (kind, found) in enumerate(series.items()):
            xs, ys = zip(*found.values(), strict=True)
            axes.plot(xs, ys, MARKERS[i], label=kind, markersize=5, alpha=0.85)
            # Labels of the first series are on the left, where they cover none of the others'.
            side: dict[str, Any] = {"xytext": (4, -2)} if i else {"xytext": (-4, -2), "ha": "right"}
            for label, place in found.items():
                axes.annotate(label, place, textcoords="offset points", fontsize=6.5, **side)
        axes.set_yscale("log")
        axes.grid(which="both", alpha=0.3)
        axes.set(title=name, xlabel=x_axis, ylabel=y_axis)
        axes.margins(x=0.15)
    for axes in grid.flat[len(points) :]:
        axes.remove()
    grid.flat[0].figure.suptitle(title, fontsize=11)
    _print(grid.flat[0], path)


def groups(
    path: Path,
    labels: Sequence[str],
    series: Mapping[str, Mapping[str, tuple[float, str]]],
    baseline: str,
    title: str,
    axis: str,
) -> None:
    """Bars side by side in groups, each with its value and a word below, over a baseline at 1.

    Args:
        path: file name without suffix.
        labels: one per group.
        series: name to a group's label to the bar's height and the word below; a group may lack a bar.
        baseline: label of the line at 1.
        title: heading.
        axis: label of the y axis.
    """
    axes = _axes((9, 4))
    if axes is None:
        return
    width = 0.8 / len(series)
    for i, (color, (name, heights)) in enumerate(zip(("tab:orange", "tab:blue"), series.items(), strict=True)):
        places = [labels.index(label) + (i - (len(series) - 1) / 2) * width for label in heights]
        values = [value for value, _ in heights.values()]
        drawn = axes.bar(places, values, width * 0.95, label=name, color=color)
        axes.bar_label(drawn, [f"{value:.1f}×" for value in values], fontsize=9)
        for place, (_, word) in zip(places, heights.values(), strict=True):
            axes.text(place, 0.06, word, ha="center", va="bottom", rotation=90, fontsize=8, color="white")
    axes.axhline(1.0, color="black", linewidth=1, label=baseline)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel(axis)
    axes.margins(y=0.12)
    _print(axes, path, title)


def _axes(size: tuple[float, float], *grid: int) -> Any:
    """The axes of a new figure of this size in inches, or an array of rows and columns; None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed: no plot")
        return None
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained").subplots(*grid, squeeze=not grid)


def _print(axes: Any, path: Path, title: str | None = None, legend: str = "best") -> None:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    if title is not None:
        axes.set_title(title, fontsize=11)
    if legend:
        axes.legend(fontsize=8, loc=legend)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The same figures make the same file: no date in it, and no random ids.
    with matplotlib.rc_context({"svg.hashsalt": path.name}):
        FigureCanvasSVG(axes.figure).print_figure(path.with_suffix(".svg"), metadata={"Date": None})
