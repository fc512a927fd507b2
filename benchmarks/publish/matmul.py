"""Part (b): the gain by each generation of kernels, on few tokens and on prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.publish import plots
from benchmarks.publish.markdown import figures, markdown
from benchmarks.publish.rows import Row, Rows, Speeds, mean, missing, provenance, shape_of, speed_table, speeds

SCHEMES = ("w8a16", "codebook4", "codebook4_int8")
DECODE = tuple(f"{scheme}{kind}" for scheme in SCHEMES for kind in (" plain", " pdl", " layer"))
PROMPT_TOKENS = 256
"""And more are a prompt."""


def decode_speeds(rows: Rows) -> Speeds:
    """Products plain and with dependent launch, and layers, over the float16 layer, up to 64 tokens."""
    named = [("fp16", row) for row in rows.of("bench_codebook", part="layer", variant="fp16")]
    for scheme in SCHEMES:
        named += [(f"{scheme} layer", row) for row in rows.of("bench_codebook", part="layer", variant=scheme)]
        for launch in ("plain", "pdl"):
            kernel = rows.of("bench_codebook", part="kernel", variant=f"{scheme}:{launch}")
            named += [(f"{scheme} {launch}", row) for row in kernel]
    return speeds(named, "fp16")


def int8_prompt_speeds(rows: Rows) -> Speeds:
    """Layers of int8 weights over the float16 layer, on prompts."""
    found = speeds(((row["variant"].removeprefix("qcut_"), row) for row in rows.of("bench_linear")), "fp16")
    return {m: of for m, of in found.items() if m >= PROMPT_TOKENS}


def codebook_wgmma_speeds(rows: Rows) -> Speeds:
    """Codebook layers over the float16 layer, on prompts."""
    return speeds(((row["variant"], row) for row in rows.of("bench_codebook", part="prompt")), "fp16")


def gemm_speeds(rows: Rows) -> Speeds:
    """Products over cuBLAS's in float16; squares are left out."""
    layers = [row for row in rows.of("bench_gemm") if not row["m"] == row["n"] == row["k"]]
    return speeds(((row["variant"], row) for row in layers), "fp16")


@dataclass(frozen=True)
class Table:
    """Speeds by tokens.

    Attributes:
        title: heading.
        about: description of the figures.
        bench: the benchmark whose rows the table shows.
        variants: columns.
        speeds: function that reads the speeds.
    """

    title: str
    about: str
    bench: str
    variants: Sequence[str]
    speeds: Callable[[Rows], Speeds]


TABLES = (
    Table(
        "Few tokens",
        "Over the float16 layer, geometric mean over layer shapes. `plain`: the product alone, one kernel after the "
        "other; `pdl`: the same with dependent launch; `layer`: whole, rotation included.",
        "bench_codebook",
        DECODE,
        decode_speeds,
    ),
    Table(
        "Prompts, int8 weights",
        "Whole layers over the float16 layer, geometric mean over layer shapes.",
        "bench_linear",
        ("w8a8", "w8a8_static", "w8a16", "int16x8"),
        int8_prompt_speeds,
    ),
    Table(
        "Prompts, codebooks",
        "Whole layers over the float16 layer, each at the clock that it settles on; geometric mean over layer shapes.",
        "bench_codebook",
        ("codebook4", "codebook4_int8"),
        codebook_wgmma_speeds,
    ),
    Table(
        "Products alone",
        "Over cuBLAS in float16, geometric mean over layer shapes. `qcut_s8` and `qcut_f16` dequantize too.",
        "bench_gemm",
        ("int_mm", "fp8", "cublaslt_s8", "qcut_s8", "qcut_f16"),
        gemm_speeds,
    ),
)


def text(rows: Rows) -> str:
    """The steps of the tutorial at a prompt's size, and speeds by tokens."""
    parts = ["## (b) The matmul", "### One int8 GEMM, step by step"]
    steps = [row for row in rows.of("bench_tutorial") if row["m"]]
    if steps:
        parts += [
            f"A prompt's size, {' × '.join(map(str, shape_of(steps[0])))}; docs/kernel-notes/tutorial.md says "
            "what each step is.",
            _step_table(steps),
            "![TOPS of each step](bench_tutorial.svg)",
            provenance("bench_tutorial", steps),
        ]
    else:
        parts.append(missing("bench_tutorial"))
    for table in TABLES:
        parts.append(f"### {table.title}")
        found = table.speeds(rows)
        if not found:
            parts.append(missing(table.bench))
            continue
        parts += [table.about, speed_table(found, table.variants)]
        if table.variants is DECODE:
            parts.append("![speed on few tokens](report_matmul.svg)")
        parts.append(provenance(table.bench, rows.of(table.bench)))
    return "\n\n".join(parts)


def _step_table(steps: list[Row]) -> str:
    first = steps[0]

    def ratio(of: Row, to: Row) -> str:
        return figures(float(of["median_us"]) / float(to["median_us"]))

    lines = []
    for before, row in zip([None, *steps], steps, strict=False):
        gain = "–" if before is None else ratio(before, row)
        cells = [figures(float(row[column])) for column in ("median_us", "tops")]
        lines.append([row["step"], *cells, gain, ratio(first, row)])
    return markdown(["step", "µs", "TOPS", "× the step before", f"× {first['step']}"], lines)


def plot(rows: Rows, out: Path) -> None:
    """Speed of kernels and layers by tokens."""
    found = decode_speeds(rows)
    if found:
        series = {name: [mean(of, name) or math.nan for of in found.values()] for name in DECODE}
        labels = [f"{m} tokens" for m in found]
        plots.ratios(out / "report_matmul", labels, series, "Products and layers on few tokens", "speed, float16 = 1")
