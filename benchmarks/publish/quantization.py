"""Schemes of weights: quality against memory and speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.harness import geomean
from benchmarks.perplexity import divergence
from benchmarks.publish import plots
from benchmarks.publish.markdown import figures, markdown
from benchmarks.publish.rows import Row, Rows, mean, missing, provenance, shape_of, speeds

MOST_BITS = 6
"""Of methods in the plot by memory: those of 8 bits are far from all others."""
Panels = dict[str, dict[str, dict[str, tuple[float, float]]]]


def divergences(rows: Rows) -> str:
    """Each method's distance from the float model, by model, and which formats of others lose less than qcut's."""
    found = rows.of("divergence")
    if not found:
        return missing("divergence")
    by = {(row["method"], row["model"]): row for row in found}
    models = list(dict.fromkeys(row["model"] for row in found))
    bits: dict[str, list[float]] = {}
    for row in found:
        if row["by"]:
            bits.setdefault(row["method"], []).append(float(row["bits"]))
    order = sorted(bits, key=lambda name: min(bits[name]))

    def cells(text: Callable[[Row], str]) -> str:
        lines = []
        for name in order:
            least, most = f"{min(bits[name]):.3f}", f"{max(bits[name]):.3f}"
            own = (text(by[name, model]) if (name, model) in by else "–" for model in models)
            title = f"`{name}`" if name in divergence.OURS else name
            lines.append([title, least if least == most else f"{least} to {most}", *own])
        return markdown(["weights", "bits", *models], lines)

    text = found[0]
    parts = [
        f"Mean divergence of a position, and the share of positions with the same most probable token, on "
        f"{text['windows']} windows of {text['window']} tokens of {text['text']}; qcut's names are in this `type`:",
        cells(lambda row: f"{float(row['divergence']):.3g}, {float(row['same_top_percent']):.1f} %"),
        "The 99.9 % quantile of the divergence, and the change of perplexity:",
        cells(lambda row: f"{float(row['divergence_999']):.3g}, {float(row['change_percent']):+.2f} %"),
        _against(found, models),
        provenance("divergence", found),
    ]
    return "\n\n".join(parts)


_EQUAL_BITS = 0.01


def _against(rows: list[Row], models: list[str]) -> str:
    """Formats of others with a smaller mean divergence than all of qcut's schemes that have at most their bits."""

    def better(fitted: bool) -> str:
        found: dict[str, list[str]] = {}
        for row in (row for row in rows if row["by"] == "others"):
            ours = [
                float(own["divergence"])
                for own in rows
                if (own["by"], own["model"]) == ("qcut", row["model"])
                and own["method"].endswith(divergence.SUFFIXES) == fitted
                and float(own["bits"]) <= float(row["bits"]) + _EQUAL_BITS
            ]
            if ours and float(row["divergence"]) < min(ours):
                found.setdefault(row["method"], []).append(row["model"])
        on = {name: "all models" if len(every) == len(models) else ", ".join(every) for name, every in found.items()}
        return ", ".join(f"{name} ({where})" for name, where in on.items()) or "none"

    return (
        "Formats of others with a smaller mean divergence than every scheme of qcut's with at most their bits (and "
        f"{_EQUAL_BITS}), if qcut's weights are rounded, too: {better(False)}. If they are fitted: {better(True)}."
    )


def outliers(rows: Rows) -> str:
    """Perplexity by type of activations, with and without outliers."""
    found = rows.of("quality")
    return f"{_outlier_table(found)}\n\n{provenance('quality', found)}" if found else missing("quality")


def layers(rows: Rows) -> str:
    """Time of whole layers in each scheme, by tokens."""
    found = rows.of("report_layers")
    parts = [_layer_table([row for row in found if row["m"] == m], m) for m in dict.fromkeys(row["m"] for row in found)]
    return "\n\n".join([*parts, provenance("report_layers", found)]) if parts else missing("report_layers")


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
    """Mean divergence by bits of a weight, and by speed."""
    over = speeds(((row["variant"], row) for row in rows.of("report_layers", m="1")), "float").get(1, {})
    memory: Panels = {}
    speed: Panels = {}
    for row in rows.of("divergence"):
        method, far = row["method"], float(row["divergence"])
        if not row["by"]:
            continue
        fitted = method.endswith(divergence.SUFFIXES)
        kind = "other formats, rounded" if row["by"] == "others" else f"qcut, {'fitted' if fitted else 'rounded'}"
        if float(row["bits"]) <= MOST_BITS and divergence.has_float_tokens(method):
            memory.setdefault(row["model"], {}).setdefault(kind, {})[method] = float(row["bits"]), far
        timed = mean(over, divergence.scheme_of(method))
        if timed:
            speed.setdefault(row["model"], {}).setdefault(kind, {})[method] = timed, far
    axis = "mean divergence from the float model"
    if memory:
        title = "Quality by memory, activations in float"
        plots.panels(out / "divergence", memory, title, "bits a weight, with scales and tables", axis)
    if speed:
        plots.panels(out / "report_speed", speed, "Quality by speed", "speed of layers at one token, float16 = 1", axis)


TABLES: Mapping[str, Callable[[Rows], str]] = {
    "divergence": divergences,
    "outliers": outliers,
    "scheme layers": layers,
}
