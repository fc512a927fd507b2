"""Plots of the benchmarks, each as SVG and PNG; without matplotlib, a line that says so."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

MARKERS = "osD^vP*X<>"


def ratios(path: Path, labels: Sequence[str], series: Mapping[str, Sequence[float]], title: str, axis: str) -> None:
    """Dots of speed relative to a baseline, which is the line at 1; higher is faster.

    Args:
        path: file name without suffix; ``.svg`` and ``.png`` are written.
        labels: one per position on the x axis.
        series: name to one ratio per label; NaN leaves a gap.
        title: heading.
        axis: what the y axis says.
    """
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed: no plot")
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(max(6.0, 0.32 * len(labels) + 2), 5), layout="constrained")
    axes = figure.subplots()
    for marker, (name, values) in zip(MARKERS * (1 + len(series) // len(MARKERS)), series.items(), strict=False):
        axes.plot(range(len(labels)), values, marker, label=name, markersize=5, alpha=0.85)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
    axes.grid(axis="y", which="both", alpha=0.3)
    axes.set_ylabel(axis)
    axes.set_title(title)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_figure(path.with_suffix(".png"), dpi=150)
    FigureCanvasSVG(figure).print_figure(path.with_suffix(".svg"))
