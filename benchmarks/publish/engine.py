"""Part (d): the engine against eager loops, torch.compile and C++, on the same files."""

from __future__ import annotations

from pathlib import Path

from benchmarks.publish import plots
from benchmarks.publish.markdown import figures, markdown
from benchmarks.publish.rows import Row, Rows, missing, provenance

VARIANTS = {
    "qcut": "qcut.Engine",
    "qcut_w8a16": "qcut.Engine, w8a16",
    "compile": "torch.compile, static cache, CUDA graphs",
    "eager_static": "transformers eager, static cache",
    "eager_dynamic": "transformers eager, growing cache",
    "cpp": "C++ on the CPU",
}


def text(rows: Rows) -> str:
    """Tokens a second of one sequence, by model; the baseline is the better eager loop."""
    found = rows.of("bench_compare")
    parts = ["## (d) The engine against others"]
    if not found:
        return "\n\n".join([*parts, missing("bench_compare")])
    for case in dict.fromkeys(row["case"] for row in found):
        own = [row for row in found if row["case"] == case]
        eager = max((float(r["tokens_s"]) for r in own if r["variant"].startswith("eager") and rate(r)), default=0.0)
        lines = []
        for row in sorted(own, key=lambda row: list(VARIANTS).index(row["variant"])):
            cells, why = ["–", "–", "–"], (row.get("reason") or "").replace("|", "\\|")
            if rate(row):
                over = f"{rate(row) / eager:.2f}×" if eager else "–"
                cells = [f"{rate(row):,.0f}", figures(float(row["median_us"])), over]
            lines.append([_name(row), row["dtype"], *cells, f"not measured: {why}" if why else ""])
        first = own[0]
        sizes = f"{first['layers']} layers of {first['width']}, vocabulary {first['vocabulary']}"
        parts += [
            f"**{case}**: {sizes}; {first['new']} tokens after {first['prompt']}.",
            markdown(["", "", "tokens/s", "µs a token", "× eager", ""], lines),
        ]
    facts = dict.fromkeys(f"{row['cpu']}, transformers {row['transformers']}" for row in found)
    parts += [
        "One sequence; all ran the same llama2.c file, and tokens were checked before they were timed. × eager: over "
        "the better of the eager loops.",
        "![tokens a second](report_engine.svg)",
        f"{provenance('bench_compare', found)} {'; '.join(facts)}.",
    ]
    return "\n\n".join(parts)


def _name(row: Row) -> str:
    threads = row.get("threads") or ""
    return VARIANTS[row["variant"]] + (f", {threads} thread{'s' * (threads != '1')}" if threads else "")


def rate(row: Row) -> float:
    """Tokens a second; 0 where it was not measured."""
    return float(row.get("tokens_s") or 0)


def plot(rows: Rows, out: Path) -> None:
    """Tokens a second, the fastest row of each variant and type."""
    best: dict[str, float] = {}
    for row in rows.of("bench_compare"):
        label = f"{row['case']} {row['variant']} {row['dtype']}"
        if rate(row):
            best[label] = max(best.get(label, 0.0), rate(row))
    if best:
        plots.bars(out / "report_engine", list(best), list(best.values()), {}, "One sequence", "tokens/s")
