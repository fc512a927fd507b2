"""Schemes of weights: quality against memory and speed, and the int8 cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.harness import geomean
from benchmarks.publish import plots
from benchmarks.publish.markdown import figures, markdown
from benchmarks.publish.rows import Row, Rows, mean, missing, provenance, shape_of, speeds


def schemes(rows: Rows) -> str:
    """Each scheme's quality and memory, and the cost of an int8 cache, by model."""
    quality = rows.of("report_quality")
    parts = []
    for model in dict.fromkeys(row["model"] for row in quality):
        own = [row for row in quality if row["model"] == model]
        parts += [_quality_table(own), _cache_table(own)]
    return "\n\n".join([*parts, provenance("report_quality", quality)]) if parts else missing("report_quality")


def outliers(rows: Rows) -> str:
    """Perplexity by type of activations, with and without outliers."""
    found = rows.of("quality")
    return f"{_outlier_table(found)}\n\n{provenance('quality', found)}" if found else missing("quality")


def layers(rows: Rows) -> str:
    """Time of whole layers in each scheme, by tokens."""
    found = rows.of("report_layers")
    parts = [_layer_table([row for row in found if row["m"] == m], m) for m in dict.fromkeys(row["m"] for row in found)]
    return "\n\n".join([*parts, provenance("report_layers", found)]) if parts else missing("report_layers")


def _quality_table(rows: list[Row]) -> str:
    first = rows[0]
    lines = [
        [
            row["scheme"],
            row["what"],
            f"{float(row['perplexity']):.2f}",
            f"{float(row['change_percent']):+.2f} %",
            f"{int(row['weight_bytes']) / 1e6:.2f}",
            f"{float(row['weight_bits']):.2f}",
        ]
        for row in rows
        if row["kv_cache"] == "auto"
    ]
    head = f"**{first['model']}**, {first['windows']} windows of {first['window']} tokens of {first['text']}:\n\n"
    return head + markdown(["scheme", "weights", "perplexity", "change", "MB", "bits a weight"], lines)


def _cache_table(rows: list[Row]) -> str:
    float_cache = {row["scheme"]: row for row in rows if row["kv_cache"] == "auto"}
    lines = []
    for row in rows:
        if row["kv_cache"] == "int8" and row["scheme"] in float_cache:
            before = float_cache[row["scheme"]]
            pairs = [f"{float(r['perplexity']):.3f} ({float(r['change_percent']):+.3f} %)" for r in (before, row)]
            sizes = f"{before['cache_bytes_token']} → {row['cache_bytes_token']}"
            lines.append([row["scheme"], *pairs, f"{float(row['cache_percent']):+.4f} %", sizes])
    if not lines:
        return f"{rows[0]['model']}, int8 keys and values: not measured."
    header = ["scheme", "float cache", "int8 cache", "change by the cache", "bytes a token"]
    return f"{rows[0]['model']}, KV cache in float and in int8:\n\n{markdown(header, lines)}"


def _outlier_table(rows: list[Row]) -> str:
    """Change of perplexity by scheme, with and without injected outliers."""
    names = list(dict.fromkeys(row["scheme"] for row in rows))
    subjects = list(dict.fromkeys((row["model"], row["condition"]) for row in rows))
    by = {(row["scheme"], row["model"], row["condition"]): row for row in rows}

    def cell(name: str, model: str, condition: str) -> str:
        row = by.get((name, model, condition))
        if row is None:
            return "–"
        is_float = name.startswith("float")
        return f"{float(row['perplexity']):.2f}" if is_float else f"{float(row['change_percent']):+.3f} %"

    header = ["", *(model if condition == "plain" else f"{model}, {condition}" for model, condition in subjects)]
    lines = [[name, *(cell(name, *subject) for subject in subjects)] for name in names]
    head = (
        f"Weights in 8 bits, {rows[0]['windows']} windows of {rows[0]['window']} tokens of {rows[0]['text']}. Outliers "
        "multiply three channels of each norm by 60, and divide the weights that read them:\n\n"
    )
    return head + markdown(header, lines)


def _layer_table(rows: list[Row], m: str) -> str:
    times = {(row["variant"], shape_of(row)): row for row in rows}
    shapes = list(dict.fromkeys(shape for _, shape in times))
    over = speeds(((row["variant"], row) for row in rows), "float")
    lines = []
    for name in dict.fromkeys(name for name, _ in times):
        cells = [figures(float(row["median_us"])) if (row := times.get((name, s))) else "–" for s in shapes]
        lines.append([name, *cells, f"{geomean(over[int(m)][name]):.2f}×"])
    header = ["", *(f"{n} × {k}" for _, n, k in shapes), "× float16"]
    return f"{m} token{'s' * (m != '1')}, whole layers, µs by N × K:\n\n{markdown(header, lines)}"


def plot(rows: Rows, out: Path) -> None:
    """Perplexity by bits of a weight, and by speed."""
    quality = rows.of("report_quality", kv_cache="auto")
    over = speeds(((row["variant"], row) for row in rows.of("report_layers", m="1")), "float").get(1, {})
    memory: dict[str, dict[str, tuple[float, float]]] = {}
    speed: dict[str, dict[str, tuple[float, float]]] = {}
    for row in quality:
        scheme, change = row["scheme"], float(row["change_percent"])
        memory.setdefault(row["model"], {})[scheme] = float(row["weight_bits"]), change
        timed = mean(over, scheme.removesuffix("_fit"))
        if timed:
            speed.setdefault(row["model"], {})[scheme] = timed, change
    if memory:
        plots.points(out / "report_memory", memory, "Quality by memory", "bits a weight", "perplexity, change in %")
    if speed:
        axis = "speed of layers at one token, float16 = 1"
        plots.points(out / "report_speed", speed, "Quality by speed", axis, "perplexity, change in %")


TABLES: Mapping[str, Callable[[Rows], str]] = {
    "schemes": schemes,
    "outliers": outliers,
    "scheme layers": layers,
}
