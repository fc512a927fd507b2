"""Tables and plot of the ladder, from its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.ladder.steps import NAMES
from benchmarks.publish import plots

COLUMNS = {
    "step": "step",
    "median_us": "µs",
    "tops": "TOPS",
    "tensor_peak_pct": "% of tensor peak",
    "unit_peak_pct": "% of unit's peak",
    "x_previous": "× step before",
    "registers": "registers",
    "spill_bytes": "spilled bytes",
    "smem_bytes": "shared bytes",
    "ctas_per_sm": "CTAs/SM",
    "occupancy_pct": "occupancy %",
}
COUNTER_COLUMNS = {
    "step": "step",
    "bank_conflicts": "bank conflicts",
    "shared_wavefronts": "of wavefronts",
    "conflicts_ld": "LDS",
    "conflicts_ldsm": "LDSM",
    "conflicts_ldgsts": "cp.async",
    "conflicts_st": "STS",
    "load_sector_pct": "load sectors %",
    "store_sector_pct": "store sectors %",
    "warps_active_pct": "warps active %",
    "tensor_active_pct": "tensor pipe %",
}
TARGETS = (
    ("mma_sync", "tops", 800.0, "TOPS"),
    ("dp4a", "unit_peak_pct", 60.0, "% of the measured dp4a peak"),
    ("mma_sync", "store_sector_pct", 100.0, "% of the bytes of stored sectors"),
)
"""Step, column, the least it should be, unit."""


def _number(row: dict[str, object], column: str) -> float:
    value = row.get(column, math.nan)
    return float(value) if isinstance(value, (int, float)) else math.nan


def _cells(rows: Sequence[dict[str, object]], columns: Sequence[str]) -> list[list[object]]:
    return [[row["step"], *(_text(row, column) for column in columns if column != "step")] for row in rows]


def _text(row: dict[str, object], column: str) -> str:
    value = row.get(column, "")
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if value.is_integer() and column not in ("median_us", "tops"):
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _counted(results: harness.Results) -> list[dict[str, object]]:
    return [row for row in results.rows if any(column in row for column in COUNTER_COLUMNS if column != "step")]


def text_table(results: harness.Results) -> str:
    """Return the measured figures, with the counters if there are any."""
    tables = [harness.table(list(COLUMNS.values()), _cells(results.rows, list(COLUMNS)))]
    if counted := _counted(results):
        tables.append(harness.table(list(COUNTER_COLUMNS.values()), _cells(counted, list(COUNTER_COLUMNS))))
    return "\n\n".join(tables)


def write_markdown(path: Path, results: harness.Results) -> Path:
    """Write the figures as a Markdown page, to a temporary file that then replaces the page."""

    def rows(columns: dict[str, str], cells: list[list[object]]) -> str:
        lines: list[list[object]] = [[*columns.values()], ["---", *["---:"] * (len(columns) - 1)], *cells]
        return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)

    env = results.env
    parts = [
        "# The ladder, measured",
        f"Written by `layers/ladder.py`; docs/kernel-notes/ladder.md explains the steps. {env.gpu}, driver "
        f"{env.driver}, CUDA {env.cuda}, torch {env.torch}, commit {env.commit}.",
        rows(COLUMNS, _cells(results.rows, list(COLUMNS))),
    ]
    if counted := _counted(results):
        parts.append(rows(COUNTER_COLUMNS, _cells(counted, list(COUNTER_COLUMNS))))
    kernels = [f"- {row['step']}: `{row['kernel']}`" for row in results.rows]
    parts += ["Kernels:", "\n".join(kernels)]
    return harness.replace_text(path, "\n\n".join(parts) + "\n")


def summary(results: harness.Results) -> str:
    """Return the targets and the measured figures."""
    rows = {str(row["step"]): row for row in results.rows}
    lines = []
    for step, column, least, unit in TARGETS:
        value = _number(rows.get(step, {}), column)
        if not math.isnan(value):
            verdict = "reached" if value >= least else "NOT reached"
            lines.append(f"{step}: {value:.1f} {unit} (to reach {least:.0f}): {verdict}")
    for step in ("wmma_blocked", "mma_sync"):
        row = rows.get(step, {})
        loads = _number(row, "conflicts_ldsm")
        if not math.isnan(loads):
            verdict = "reached" if loads == 0 else "NOT reached"
            lines.append(f"{step}: {loads:.0f} bank conflicts of fragment loads (to reach 0): {verdict}")
    return "\n".join(lines)


def plot(path: Path, results: harness.Results) -> None:
    """TOPS of each step, and the peaks that were measured or are known."""
    rows = [row for row in results.rows if row["step"] in NAMES]
    peaks = {str(row["step"]): _number(row, "tops") for row in results.rows if row["step"] not in NAMES}
    if results.env.gpu in harness.CEILINGS:
        peaks = {"int8 tensor peak": harness.CEILINGS[results.env.gpu].int8_ops / 1e12} | peaks
    sizes = "×".join(str(rows[0][side]) for side in "mnk")
    plots.bars(
        path,
        [str(row["step"]) for row in rows],
        [_number(row, "tops") for row in rows],
        peaks,
        f"int8 GEMM step by step, {sizes}, on {results.env.gpu}",
        "TOPS",
    )
