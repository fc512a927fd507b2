"""Part (c): attention of one token, by context."""

from __future__ import annotations

from pathlib import Path

from benchmarks.publish import plots
from benchmarks.publish.markdown import figures, markdown
from benchmarks.publish.rows import Row, Rows, missing, provenance


def text(rows: Rows) -> str:
    """The fused kernel beside torch's and a naive one, by context."""
    found = rows.of("bench_attention")
    if not found:
        return "\n\n".join(["## (c) Attention of one token", missing("bench_attention")])
    variants = list(dict.fromkeys(row["variant"] for row in found))
    times: dict[tuple[int, int], dict[str, Row]] = {}
    for row in found:
        times.setdefault((int(row["batch"]), int(row["context"])), {})[row["variant"]] = row
    lines = []
    for (batch, context), of in sorted(times.items()):
        us = {name: float(row["median_us"]) for name, row in of.items()}
        gain = f"{us['naive'] / us['qcut']:.1f}×" if {"naive", "qcut"} <= us.keys() else "–"
        share = of["qcut"]["floor_pct"] if "qcut" in of else ""
        cells = [figures(us.get(name)) for name in variants]
        lines.append([str(batch), str(context), *cells, gain, "–" if share in ("", "nan") else f"{float(share):.0f} %"])
    first = found[0]
    return "\n\n".join(
        [
            "## (c) Attention of one token",
            f"{first['heads']} heads of {first['head']}, {first['kv_heads']} of keys; µs. `naive` is two products with "
            "a softmax between, `sdpa` torch's own; the bandwidth is that of reading keys and values once.",
            markdown(["batch", "context", *variants, "naive / qcut", "qcut, of the bandwidth"], lines),
            "![attention by context](report_attention.svg)",
            provenance("bench_attention", found),
        ]
    )


def plot(rows: Rows, out: Path) -> None:
    """Time by context, a line for each kernel and batch."""
    series: dict[str, dict[float, float]] = {}
    for row in rows.of("bench_attention"):
        line = series.setdefault(f"{row['variant']}, batch {row['batch']}", {})
        line[float(row["context"])] = float(row["median_us"])
    if series:
        plots.curves(out / "report_attention", series, "Attention of one token", "context", "µs")
