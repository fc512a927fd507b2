"""Prints the README's tables of measured figures from the rows in ``benchmarks/results``.

A test holds the README to what this prints.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_codebook import FEW_TOKENS, NK, PEERS_US, PROMPTS, speedups
from benchmarks.harness import CEILINGS, geomean

RESULTS = Path(__file__).parent / "results"
SQUARES = (1024, 2048, 4096, 8192)
LAYERS = ((1280, 1280), (3840, 1280), (5120, 1280), (1280, 5120), (4096, 4096), (14336, 4096), (4096, 14336))
TOKENS = (64, 256, 1024, 4096)
GEMMS = ("cublaslt_s8", "qcut_s8", "qcut_f16")
LINEARS = ("fp16", "qcut_w8a8", "qcut_w8a8_static", "qcut_w8a16")
LINEAR_SHAPES = (
    *((1, n, k) for n, k in ((1280, 1280), (5120, 1280), (4096, 4096), (14336, 4096), (4096, 14336))),
    *((64, 14336, 4096), (1024, 4096, 4096), (1024, 14336, 4096), (4096, 14336, 4096)),
    *((m, n, k) for m in (4096, 8192) for n, k in ((1280, 1280), (3840, 1280), (5120, 1280), (1280, 5120))),
)
PEERS = (
    "fp16",
    "qcut_w8a8",
    "bitsandbytes_int8",
    "torchao_w8a8",
    "gemlite_w8a8",
    "humming_w8a8",
    "qcut_w8a16",
    "torchao_w8a16",
    "gemlite_w8a16",
    "humming_w8a16",
    "bitsandbytes_nf4",
)

CODEBOOK_LAYERS = ("fp16", "codebook4", "codebook4_int8", "w8a16")
KERNEL_TOKENS = (1, 16, 64)
CODEBOOK_LAYER_SHAPES = (*((m, n, k) for m in (1, FEW_TOKENS) for n, k in NK), (64, 14336, 4096), *PROMPTS)

Shape = tuple[int, int, int]
Row = dict[str, str]
Times = dict[Shape, dict[str, float]]


def rows_of(path: Path) -> list[tuple[Shape, Row]]:
    """Each row with its M, N and K."""
    with path.open(newline="") as file:
        return [((int(row["m"]), int(row["n"]), int(row["k"])), row) for row in csv.DictReader(file)]


def times(path: Path) -> Times:
    """Shape → variant → median microseconds."""
    found: Times = {}
    for shape, row in rows_of(path):
        found.setdefault(shape, {})[row["variant"]] = float(row["median_us"])
    return found


def us(value: float | None) -> str:
    """Three figures, as the README prints a time."""
    return "–" if value is None else f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


def figures(value: float | None) -> str:
    """Three significant figures, where times of a few microseconds are compared with figures to reach."""
    return us(value) if value is None or value >= 9.995 else f"{value:.2f}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def gemm_table() -> str:
    """cuBLASLt / int8 output / float16 output, by layer and tokens, and the squares below."""
    found = times(RESULTS / "bench_gemm.csv")

    def cell(m: int, n: int, k: int) -> str:
        return " / ".join(us(found[m, n, k][variant]) for variant in GEMMS)

    rows = [[f"{n} × {k}", *(cell(m, n, k) for m in TOKENS)] for n, k in LAYERS]
    squares = "; ".join(f"{size}³ {cell(size, size, size)}" for size in SQUARES)
    return markdown(["N × K", *(f"M = {m}" for m in TOKENS)], rows) + f"\n\nSquares: {squares}."


def linear_table() -> str:
    """float16 and qcut's schemes, by shape."""
    found = times(RESULTS / "bench_linear.csv")
    rows = [[" × ".join(map(str, shape)), *(us(found[shape][name]) for name in LINEARS)] for shape in LINEAR_SHAPES]
    return markdown(["M × N × K", *(name.removeprefix("qcut_") for name in LINEARS)], rows)


def peers_table() -> str:
    """Other libraries' layers beside qcut's, one row each."""
    found = times(RESULTS / "peers" / "bench_linear.csv")
    rows = [[f"{name}", *(us(found[shape].get(name)) for shape in found)] for name in PEERS]
    return markdown(["", *(" × ".join(map(str, shape)) for shape in found)], rows)


def codebook_kernel_table() -> str:
    """The product alone on few tokens, plain / dependent launch, with the rate of the latter."""
    found = {(row["variant"], shape): row for shape, row in _codebook_rows("kernel")}
    peak_gb_s = CEILINGS["NVIDIA H200"].read_bytes / 1e9

    def pair(scheme: str, shape: Shape, column: str = "median_us") -> str:
        values = [float(found[f"{scheme}:{launch}", shape][column]) for launch in ("plain", "pdl")]
        if column == "target_us":
            return "–" if math.isnan(values[0]) else " / ".join(f"{v:g}" for v in values)
        return " / ".join(map(figures, values))

    lines = []
    for m, n, k in ((m, n, k) for m in KERNEL_TOKENS for n, k in NK):
        shape = m, n, k
        rate = float(found["codebook4:pdl", shape]["gb_s"])
        share = f"{100 * rate / peak_gb_s:.0f} %"
        fourth = [pair("codebook4", shape), pair("codebook4", shape, "target_us"), f"{rate:.0f}", share]
        eighth = [pair("w8a16", shape), pair("w8a16", shape, "target_us")]
        lines.append([" × ".join(map(str, shape)), *fourth, pair("codebook4_int8", shape), *eighth])
    header = ["M × N × K", "codebook4", "to reach", "GB/s", "of 4.48 TB/s", "codebook4_int8", "w8a16", "to reach"]
    return markdown(header, lines)


def codebook_layer_table() -> str:
    """Whole layers beside float16 and the fastest of other libraries' at that shape."""
    found: Times = {}
    for part in ("layer", "prompt"):
        for shape, row in _codebook_rows(part):
            found.setdefault(shape, {})[row["variant"]] = float(row["median_us"])
    rows = [
        [" × ".join(map(str, shape)), *(figures(found[shape].get(name)) for name in CODEBOOK_LAYERS), best_peer(shape)]
        for shape in CODEBOOK_LAYER_SHAPES
    ]
    return markdown(["M × N × K", *CODEBOOK_LAYERS, "best of others"], rows)


def codebook_quality_table() -> str:
    """Perplexity of codebook weights and 4-bit integers, by model."""
    with (RESULTS / "codebook_quality.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    models = list(dict.fromkeys(row["model"] for row in rows))
    cells = {
        (row["variant"], row["model"]): f"{float(row['perplexity']):.2f}"
        if row["variant"] == "float32"
        else f"{float(row['change_percent']):+.2f} %"
        for row in rows
    }
    names = dict.fromkeys(row["variant"] for row in rows)
    return markdown(["weights", *models], [[name, *(cells[name, model] for model in models)] for name in names])


def best_peer(shape: Shape) -> str:
    """The fastest layer of another library, of 8 or 4 bits, with its name: measured beside qcut's or before."""
    others = times(RESULTS / "peers" / "bench_linear.csv").get(shape, {})
    known = {name: value for name, value in others.items() if name != "fp16" and not name.startswith("qcut_")}
    if shape in PEERS_US:
        name, value = PEERS_US[shape]
        known[name] = min(value, known.get(name, math.inf))
    if not known:
        return "–"
    best = min(known, key=lambda name: known[name])
    return f"{us(known[best])} {best}"


def codebook_speedups() -> str:
    """One sentence: whole layers over float16, for few tokens and for prompts."""
    parts: dict[str, list[str]] = {}
    for (part, scheme), ratios in speedups(row for _, row in _codebook_rows()).items():
        worst = min(ratios, key=lambda shape: ratios[shape])
        where = f"{worst.m} × {worst.n} × {worst.k}"
        parts.setdefault(part, []).append(
            f"`{scheme}` {geomean(ratios.values()):.2f}× (worst {ratios[worst]:.2f}× at {where})"
        )
    few, prompts = (", ".join(parts[part]) for part in ("layer", "prompt"))
    return f"Over fp16, geometric mean: 1 to 64 tokens {few}; prompts {prompts}."


def codebook_misses() -> str:
    """One sentence: which of the figures to reach were not."""
    aimed, missed = 0, []
    for shape, row in _codebook_rows():
        target, measured = float(row["target_us"]), float(row["median_us"])
        aimed += not math.isnan(target)
        if measured > target:
            kind = "kernel" if row["part"] == "kernel" else "layer"
            name = row["variant"].replace(":", f" {kind} ") if kind == "kernel" else f"{row['variant']} {kind}"
            missed.append(f"{name} at {' × '.join(map(str, shape))} {figures(measured)} ({target:g})")
    if not missed:
        return f"All {aimed} figures to reach are reached."
    return f"Of {aimed} figures to reach {len(missed)} are missed, µs (to reach): {'; '.join(missed)}."


def _codebook_rows(part: str | None = None) -> list[tuple[Shape, Row]]:
    rows = rows_of(RESULTS / "bench_codebook.csv")
    return [(shape, row) for shape, row in rows if part is None or row["part"] == part]


ENGINE_MODELS = {
    "gpt2-large-int8": "GPT-2 Large, w8a8",
    "llama-3-8b-codebook4": "Llama-3-8B shape, codebook4",
    "llama-3-8b-int8": "Llama-3-8B shape, w8a8",
    "llama2c-288": "llama2.c 288 / 6, w8a16",
    "llama2c-512": "llama2.c 512 / 8, w8a16",
    "llama2c-288-float": "llama2.c 288 / 6, float16",
}


def _engine_rows() -> list[Row]:
    with (RESULTS / "bench_engine.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["what"] != "kernel"]


def engine_table() -> str:
    """Tokens per second of the engine, beside the floor of what a step reads."""
    rows = []
    for row in _engine_rows():
        decode = row["what"] == "decode"
        floor = f"{float(row['batch']) / float(row['floor_us']) * 1e6:,.0f}" if decode else "–"
        mark = f"{int(row['mark']):,}" if row["mark"] else "–"
        what = "one token each" if decode else row["what"].replace("prefill", "prompts")
        rows.append([ENGINE_MODELS[row["case"]], what, row["batch"], f"{int(row['tokens_s']):,}", mark, floor])
    return markdown(["model", "what", "sequences", "tokens/s", "to reach", "memory alone"], rows)


def engine_misses() -> str:
    """One sentence: which of the engine's figures to reach were not."""
    rows = [row for row in _engine_rows() if row["mark"]]
    missed = [row for row in rows if int(row["tokens_s"]) < int(row["mark"])]
    if not missed:
        return f"All {len(rows)} figures to reach are reached."
    names = (
        f"{ENGINE_MODELS[r['case']]}, {r['batch']} {'at once' if r['what'] == 'decode' else 'prompts'}, "
        f"by {100 - 100 * int(r['tokens_s']) / int(r['mark']):.0f} %"
        for r in missed
    )
    return f"Of {len(rows)} figures to reach {len(missed)} are missed: {'; '.join(names)}."


def comparison() -> str:
    """One sentence: one sequence of the larger llama2.c shape, by the engine and by others."""
    with (RESULTS / "bench_compare.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["case"] == "llama2c-512" and row["tokens_s"]]
    best: dict[str, float] = {}
    for row in rows:
        name = row["variant"].removesuffix("_dynamic").removesuffix("_static")
        if name != "qcut" or row["dtype"] == "float16":
            best[name] = max(best.get(name, 0.0), float(row["tokens_s"]))
    rate = {name: f"{value:,.0f}" for name, value in best.items()}
    return (
        f"`qcut.Engine` {rate['qcut_w8a16']} tokens/s (w8a16) and {rate['qcut']} (float16), `torch.compile` with CUDA "
        f"graphs {rate['compile']}, transformers eager {rate['eager']}, plain C++ on the CPU {rate['cpp']}."
    )


ATTENTION_CONTEXTS = ("64", "512", "2048", "8192", "32768")


def attention_table() -> str:
    """Attention of one token, µs, and the share of the bandwidth."""
    with (RESULTS / "bench_attention.csv").open(newline="") as file:
        rows = {(r["batch"], r["context"], r["variant"]): r for r in csv.DictReader(file)}
    names = ("qcut", "qcut int8", "sdpa", "naive")
    table = []
    for batch in ("1", "8"):
        for context in ATTENTION_CONTEXTS:
            found = [rows.get((batch, context, name)) for name in names]
            if any(found):
                cells = (figures(float(row["median_us"])) if row else "–" for row in found)
                own = found[0]
                table.append(
                    [f"{batch} × {int(context):,}", *cells, f"{float(own['floor_pct']):.0f} %" if own else "–"]
                )
    return markdown(["sequences × context", *names, "of 4.48 TB/s"], table)


TABLES = (
    gemm_table,
    linear_table,
    peers_table,
    codebook_kernel_table,
    codebook_layer_table,
    codebook_quality_table,
    engine_table,
    attention_table,
)
SENTENCES = (codebook_speedups, codebook_misses, engine_misses, comparison)

if __name__ == "__main__":
    print("\n\n".join(text() for text in (*TABLES, *SENTENCES)))
