"""The measured figures of README.md and some pages of docs, written from the rows in ``benchmarks/results``.

    python benchmarks publish tables

A pair of comments, ``<!-- measured: name -->`` and ``<!-- end -->``, marks each block of a page. The function of this
name in `MEASURED` writes the text between the two. A test checks that the pages agree with the rows.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping

from benchmarks import harness
from benchmarks.attention.prompt import NAMES as PROMPT_NAMES
from benchmarks.engine.steps import IN_CONTEXT
from benchmarks.harness import CEILINGS, RESULTS, ROOT, geomean
from benchmarks.layers import crossover
from benchmarks.layers.codebook import FEW_TOKENS, NK, PROMPTS, speedups
from benchmarks.layers.peers import BENCH as PEER_ROWS
from benchmarks.layers.shapes import CLAIM_MIN_TOKENS
from benchmarks.perplexity import encoder
from benchmarks.perplexity import plans as planning
from benchmarks.perplexity.codebooks import VARIANTS
from benchmarks.publish import engines, gpt2, headline, peers, quantization, serving
from benchmarks.publish.markdown import MISSING, figures, markdown, us
from benchmarks.publish.rows import Row, Rows, Shape, Times, missing, shape_of, times
from benchmarks.scaling import pages as scale
from qcut.engine.kv_cache.cache import KV_DTYPES

DOCS = ROOT / "docs"
PAGES = (
    ROOT / "README.md",
    DOCS / "batching.md",
    DOCS / "performance.md",
    DOCS / "scale.md",
    DOCS / "server.md",
    DOCS / "serving.md",
    DOCS / "speculation.md",
    DOCS / "transformers.md",
    DOCS / "kernel-notes" / "decoder.md",
    DOCS / "kernel-notes" / "experts.md",
    DOCS / "kernel-notes" / "triton.md",
)

SQUARES = (1024, 2048, 4096, 8192)
LAYERS = ((1280, 1280), (3840, 1280), (5120, 1280), (1280, 5120), (4096, 4096), (14336, 4096), (4096, 14336))
TOKENS = (64, 256, 1024, 4096)
LINEARS = ("fp16", "qcut_w8a8", "qcut_w8a8_static", "qcut_w8a16", "qcut_fp8", "qcut_fp8_blocks", "qcut_int16x8")
LINEAR_SHAPES = (
    *((1, n, k) for n, k in ((1280, 1280), (5120, 1280), (4096, 4096), (14336, 4096), (4096, 14336))),
    *((64, 14336, 4096), (1024, 4096, 4096), (1024, 14336, 4096), (4096, 14336, 4096)),
    *((m, n, k) for m in (4096, 8192) for n, k in ((1280, 1280), (3840, 1280), (5120, 1280), (1280, 5120))),
)
CODEBOOK_LAYERS = ("fp16", "codebook4", "codebook4_int8", "w8a16")
KERNEL_TOKENS = (1, 16, 64)
CODEBOOK_LAYER_SHAPES = (*((m, n, k) for m in (1, FEW_TOKENS) for n, k in NK), (64, 14336, 4096), *PROMPTS)
CELLS = 20
"""The least number of cells in the table of the slowest."""
ATTENTION_CONTEXTS = ("64", "512", "2048", "8192", "32768")
ENGINE_MODELS = {
    "gpt2-large-int8": "GPT-2 Large, w8a8",
    "llama-3-8b-codebook4": "Llama-3-8B shape, codebook4",
    "llama-3-8b-codebook4-head": "Llama-3-8B shape, codebook4, embeddings and head too",
    "llama-3-8b-codebook4-int8": "Llama-3-8B shape, codebook4_int8",
    "llama-3-8b-int8": "Llama-3-8B shape, w8a8",
    "qwen3-30b-a3b-codebook4-head": "Qwen3-30B-A3B shape, codebook4, embeddings and head too",
    "gpt-oss-20b-codebook4": "GPT-OSS-20B shape, codebook4",
    "gpt-oss-20b-codebook4-g64": "GPT-OSS-20B shape, codebook4_g64",
    "gpt-oss-20b-codebook4-g64-head": "GPT-OSS-20B shape, codebook4_g64, embeddings and head too",
    "gpt-oss-20b-mxfp4": "GPT-OSS-20B shape, experts in mxfp4",
    "olmoe-1b-7b-codebook4": "OLMoE-1B-7B shape, codebook4",
    "llama2c-288": "llama2.c, 6 layers of 288, w8a16",
    "llama2c-512": "llama2.c, 8 layers of 512, w8a16",
    "llama2c-288-float": "llama2.c, 6 layers of 288, float16",
}


def name_of(shape: Shape) -> str:
    """``M × N × K``."""
    return " × ".join(map(str, shape))


# ── products and layers ──────────────────────────────────────────────────────────────────────────


def gemm(rows: Rows) -> str:
    """cuBLASLt / int8 output / float16 output, by layer and tokens; the squares, and the means, below."""
    measured = times(rows, "bench_gemm")

    def cell(shape: Shape) -> str:
        return " / ".join(us(measured[shape][name]) for name in ("cublaslt_s8", "qcut_s8", "qcut_f16"))

    def mean(variant: str) -> str:
        over = gemm_speeds(measured, variant, "cublaslt_s8")
        return f"{geomean(over):.2f}× (least {min(over):.2f}×)"

    few = min(one["cublaslt_s8"] / one["qcut_s8"] for (m, _, _), one in measured.items() if m < CLAIM_MIN_TOKENS)

    table = markdown(
        ["N × K", *(f"M = {m}" for m in TOKENS)],
        ([f"{n} × {k}", *(cell((m, n, k)) for m in TOKENS)] for n, k in LAYERS),
    )
    squares = "; ".join(f"{size}³ {cell((size, size, size))}" for size in SQUARES)
    count = len(gemm_speeds(measured, "qcut_s8", "cublaslt_s8"))
    return (
        f"{table}\n\nSquares: {squares}.\n\nOver the {count} shapes with M ≥ {CLAIM_MIN_TOKENS}, speed relative to "
        f"cuBLASLt, geometric mean: {mean('qcut_f16')} with float16 output, {mean('qcut_s8')} with int8 output. With "
        f"fewer tokens the least is {few:.2f}×."
    )


def gemm_speeds(measured: Times, variant: str, baseline: str) -> list[float]:
    """Speeds over a baseline at the shapes that the figures are stated over."""
    return [one[baseline] / one[variant] for (m, _, _), one in measured.items() if m >= CLAIM_MIN_TOKENS]


def linear(rows: Rows) -> str:
    """float16 and int8 schemes, by shape."""
    measured = times(rows, "bench_linear")
    names = [name for name in LINEARS if all(name in measured[shape] for shape in LINEAR_SHAPES)]
    lines = ([name_of(shape), *(us(measured[shape][name]) for name in names)] for shape in LINEAR_SHAPES)
    return markdown(["M × N × K", *(name.removeprefix("qcut_") for name in names)], lines)


def float8(rows: Rows) -> str:
    """Products of e4m3 tokens and weights, and whole layers with them, next to torch's products of e4m3."""
    measured = times(rows, "bench_linear")
    torchs, products = ("torch_scaled_mm", "torch_scaled_mm_fast"), ("qcut_fp8_product",)
    layers = ("qcut_fp8_dynamic", "qcut_fp8_static")
    shapes = sorted(shape for shape, one in measured.items() if "qcut_fp8_product" in one)
    names = (*torchs, *products, *layers)
    lines = (
        [name_of(shape), *(us(one[name]) for name in names), f"{one[torchs[0]] / one[products[0]]:.2f} ×"]
        for shape in shapes
        for one in (measured[shape],)
    )
    header = ["`_scaled_mm`", "`_scaled_mm`, fast sums", "product", *(name.removeprefix("qcut_") for name in layers)]
    return markdown(["M × N × K", *header, "product, speed over `_scaled_mm`"], lines)


def codebook_kernel(rows: Rows) -> str:
    """Only the product on few tokens, plain / with dependent launch, and the rate of the latter."""
    measured = {(row["variant"], shape_of(row)): row for row in rows.of("bench_codebook", part="kernel")}
    peak_gb_s = CEILINGS["NVIDIA H200"].read_bytes / 1e9

    def pair(scheme: str, shape: Shape) -> str:
        return " / ".join(figures(float(measured[f"{scheme}:{how}", shape]["median_us"])) for how in ("plain", "pdl"))

    lines = []
    for shape in ((m, n, k) for m in KERNEL_TOKENS for n, k in NK):
        rate = float(measured["codebook4:pdl", shape]["gb_s"])
        share = f"{100 * rate / peak_gb_s:.0f} %"
        cells = (pair(scheme, shape) for scheme in ("codebook4_int8", "w8a16"))
        lines.append([name_of(shape), pair("codebook4", shape), f"{rate:.0f}", share, *cells])
    header = ["M × N × K", "codebook4", "codebook4, GB/s", "of 4.48 TB/s", "codebook4_int8", "w8a16"]
    return markdown(header, lines)


def codebook_scales(rows: Rows) -> str:
    """The product with a scale for 128, 32 and 16 columns, with dependent launch: microseconds and GB/s."""
    measured = {(row["variant"], shape_of(row)): row for row in rows.of("bench_codebook", part="kernel")}
    shapes = sorted(shape for variant, shape in measured if variant == "nvfp4:pdl")

    def cell(scheme: str, shape: Shape) -> str:
        row = measured[f"{scheme}:pdl", shape]
        return f"{figures(float(row['median_us']))}, {float(row['gb_s']):.0f}"

    names = ("codebook4", "mxfp4", "nvfp4")
    lines = [[name_of(shape), *(cell(name, shape) for name in names)] for shape in shapes]
    return markdown(["M × N × K", *(f"{name}, µs, GB/s" for name in names)], lines)


def codebook_layer(rows: Rows) -> str:
    """Whole layers, float16, and the fastest layer of another library at that shape; means below."""
    measured = times(rows, "bench_codebook", part="layer") | times(rows, "bench_codebook", part="prompt")
    others = peers.cells(rows)
    lines = [
        [
            name_of(shape),
            *(figures(measured[shape].get(name)) for name in CODEBOOK_LAYERS),
            peers.best_cell(others.get(shape)),
        ]
        for shape in CODEBOOK_LAYER_SHAPES
    ]
    table = markdown(["M × N × K", *CODEBOOK_LAYERS, "best of others"], lines)
    best = (
        f"*Best of others* is the fastest 8- or 4-bit layer in the rows of `{PEER_ROWS}.csv`, layers without bias; a "
        "dash means that none was timed at that shape."
    )
    return f"{table}\n\n{codebook_speedups(rows)}\n\n{best}"


def codebook_speedups(rows: Rows) -> str:
    """One sentence: whole layers over float16, on few tokens and on prompts."""
    parts: dict[str, list[str]] = {}
    for (part, scheme), ratios in speedups(rows.of("bench_codebook")).items():
        worst = min(ratios, key=lambda shape: ratios[shape])
        where = f"{ratios[worst]:.2f}× at {worst.m} × {worst.n} × {worst.k}"
        parts.setdefault(part, []).append(f"`{scheme}` {geomean(ratios.values()):.2f}× (least {where})")
    few, prompts = (", ".join(parts[part]) for part in ("layer", "prompt"))
    return f"Speed over float16, geometric mean: 1 to 64 tokens {few}; prompts {prompts}."


def crossover_cells(rows: Rows) -> str:
    """Whole layers over float16: the worst cells, then the least of all shapes by tokens."""
    found = [row for row in rows.of("bench_crossover") if row["variant"] in crossover.SCHEMES]
    if not found:
        return missing("bench_crossover")
    slow = sum(map(crossover.is_slow, found))
    worst = crossover.worst_first(found)[: max(CELLS, slow)]
    cells = markdown(
        ["M × N × K", "scheme", "fp16", "qcut", "speed"],
        (
            [
                name_of(shape_of(row)),
                row["variant"],
                *(figures(float(row[c])) for c in ("fp16_us", "median_us")),
                f"{float(row['x_fp16']):.2f}×",
            ]
            for row in worst
        ),
    )
    by_tokens = markdown(
        ["M", *crossover.SCHEMES],
        (
            [f"{m:,}", *(f"{of[scheme]:.2f}×" if scheme in of else MISSING for scheme in crossover.SCHEMES)]
            for m, of in crossover.least_by_tokens(found).items()
        ),
    )
    return (
        f"{slow} of {len(found)} cells are slower than they should be. The {len(worst)} slowest, microseconds:\n\n"
        f"{cells}\n\nThe least speed of all shapes:\n\n{by_tokens}"
    )


def crossover_float8(rows: Rows) -> str:
    """Microseconds of layers with 8-bit tokens, where those of e4m3 were measured next to int8, and of float16."""
    cells: dict[Shape, dict[str, float]] = {}
    for row in rows.of("bench_crossover"):
        of = cells.setdefault(shape_of(row), {})
        of[row["variant"]] = float(row["median_us"])
        if row["variant"] == crossover.FLOAT8[0]:
            of["fp16"] = float(row["fp16_us"])
    columns = ("w8a8", "w8a8_rotated", *crossover.FLOAT8, "fp16")
    lines = [[name_of(shape), *(figures(of.get(c)) for c in columns)] for shape, of in cells.items() if "fp16" in of]
    return markdown(["M × N × K", *columns], lines) if lines else missing("bench_crossover")


def triton_layers(rows: Rows) -> str:
    """Microseconds of layers on the Triton back end, and their speed over CUDA's."""
    found = rows.of("bench_portable")
    if not found:
        return missing("bench_portable")
    cells: dict[Shape, dict[str, str]] = {}
    for row in found:
        scheme, _, path = row["variant"].partition(":")
        if path == "portable":
            of = cells.setdefault(shape_of(row), {})
            of[scheme] = f"{us(float(row['median_us']))} ({float(row['x_fused']):.2f}×)"
    schemes = dict.fromkeys(scheme for of in cells.values() for scheme in of)
    lines = ([name_of(shape), *(of.get(scheme, MISSING) for scheme in schemes)] for shape, of in sorted(cells.items()))
    return markdown(["M × N × K", *schemes], lines)


# ── quality ──────────────────────────────────────────────────────────────────────────────────────


def quality(rows: Rows) -> str:
    """Perplexity of float16, and its change by scheme, with and without outliers."""
    lines: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows.of("quality"):
        lines.setdefault((row["model"], row["condition"]), {})[row["scheme"]] = row
    measured = {name for of_scheme in lines.values() for name in of_scheme}
    every = ("w8a16", "int16x8", "w8a8", "w8a8_rotated", "w8a8_static", "smooth", "hybrid")
    names = [name for name in every if name in measured]
    table = []
    for (model, condition), of_scheme in lines.items():
        changes = [of_scheme.get(name, {}).get("change_percent") for name in names]
        cells = [MISSING if change is None else f"{float(change):+.2f} %" for change in changes]
        plan = of_scheme["hybrid"]
        left = f"{plan['off_int8']} of {plan['layers']}"
        title = model if condition == "plain" else f"{model}, {condition}"
        table.append([title, f"{float(of_scheme['float16']['perplexity']):.2f}", *cells, left])
    titles = ("w8a8_static, smoothed", "plan", "layers changed by the plan")
    header = ["", "float16", *names[:-2], *titles]
    return markdown(header, table)


def codebook_quality(rows: Rows) -> str:
    """Perplexity of codebook weights and 4-bit integers, by model."""
    measured = {(row["variant"], row["model"]): row for row in rows.of("codebook_quality")}
    models = list(dict.fromkeys(model for _, model in measured))

    def cell(name: str, model: str) -> str:
        row = measured[name, model]
        plain = name == "float32"
        return f"{float(row['perplexity']):.2f}" if plain else f"{float(row['change_percent']):+.2f} %"

    found = dict.fromkeys(name for name, _ in measured)
    names = [name for name in dict.fromkeys(("float32", *VARIANTS, *found)) if name in found]
    return markdown(["weights", *models], ([name, *(cell(name, model) for model in models)] for name in names))


def plans(rows: Rows) -> str:
    """Perplexity of plans within a budget of bits, and of one scheme for all layers, by bits."""
    return planning.report(rows.of("plan_quality"))


def encoders(rows: Rows) -> str:
    """Mean and least cosine of a quantized sentence encoder's embeddings with the float model's."""
    return encoder.report(rows.of("encoder_quality"))


# ── models ───────────────────────────────────────────────────────────────────────────────────────


def engine(rows: Rows) -> str:
    """Prefill and decode of the engine, and the limit of the memory bandwidth."""
    lines = []
    cases = list(ENGINE_MODELS)
    for row in sorted(rows.of("bench_engine"), key=lambda row: cases.index(row["case"])):
        if row["what"] == "kernel" or row["what"].startswith(IN_CONTEXT):
            continue
        decode = row["what"] == "decode"
        limit = f"{float(row['batch']) / float(row['floor_us']) * 1e6:,.0f}" if decode else MISSING
        ms = f"{float(row['median_us']) / 1e3:.2f}"
        lines.append([ENGINE_MODELS[row["case"]], row["what"], row["batch"], ms, f"{int(row['tokens_s']):,}", limit])
    return markdown(["model", "work", "sequences", "ms", "tokens/s", "memory limit, tokens/s"], lines)


def contexts(rows: Rows) -> str:
    """Steps of engines with a short and with the longest context, on sequences that fit the short one."""
    found: dict[tuple[int, int], list[str]] = {}
    for row in rows.of("bench_engine"):
        if row["what"].startswith(IN_CONTEXT):
            key = list(ENGINE_MODELS).index(row["case"]), int(row["batch"])
            context = int(row["what"].removeprefix(IN_CONTEXT))
            found.setdefault(key, []).append(f"{int(row['tokens_s']):,} in {context:,}")
    lines = [[list(ENGINE_MODELS.values())[case], str(batch), *found[case, batch]] for case, batch in sorted(found)]
    return markdown(["model", "sequences", "tokens/s, short context", "tokens/s, long context"], lines)


def generation_rates(rows: Rows) -> dict[str, float]:
    """Best tokens/s of one sequence of llama2.c's larger shape, by program; qcut in float16 and w8a16."""
    best: dict[str, float] = {}
    for row in rows.of("bench_compare", case="llama2c-512"):
        name = row["variant"].removesuffix("_dynamic").removesuffix("_static")
        if row["tokens_s"] and (name != "qcut" or row["dtype"] == "float16"):
            best[name] = max(best.get(name, 0.0), float(row["tokens_s"]))
    return best


def comparison(rows: Rows) -> str:
    """One sequence of llama2.c's larger shape, by the engine and by others."""
    names = {
        "qcut_w8a16": "`qcut.Engine`, w8a16",
        "qcut": "`qcut.Engine`, float16",
        "compile": "`torch.compile` with CUDA graphs, float16",
        "cpp": "plain C++ on the CPU, float32",
        "eager": "transformers eager, float16",
    }
    rates = generation_rates(rows)
    return markdown(["", "tokens/s"], ([names[name], f"{rates[name]:,.0f}"] for name in names))


def attention(rows: Rows) -> str:
    """Attention of one token, µs, and the share of the bandwidth."""
    measured = {(r["batch"], r["context"], r["variant"]): r for r in rows.of("bench_attention")}
    names = ("qcut", "qcut int8", "qcut int4", "sdpa", "naive")
    lines = []
    for batch, context in ((b, c) for b in ("1", "8") for c in ATTENTION_CONTEXTS):
        here = [measured.get((batch, context, name)) for name in names]
        if any(here):
            cells = (figures(float(row["median_us"])) if row else MISSING for row in here)
            share = f"{float(here[0]['floor_pct']):.0f} %" if here[0] else MISSING
            lines.append([f"{batch} × {int(context):,}", *cells, share])
    return markdown(["sequences × context", *names, "of 4.48 TB/s"], lines)


def caches(rows: Rows) -> str:
    """Tokens per second of all sequences, by sequences and context, and bytes of a token, for each cache."""
    measured = {(r["batch"], r["context"], r["cache"]): r for r in rows.of("bench_cache")}
    if not measured:
        return missing("bench_cache")
    lines = []
    for batch, context in dict.fromkeys((batch, context) for batch, context, _ in measured):
        here = [measured.get((batch, context, cache)) for cache in KV_DTYPES]
        cells = (f"{float(row['tokens_s']):,.0f}" if row else MISSING for row in here)
        lines.append([f"{batch} × {int(context):,}", *cells])
    sizes = (next((r["bytes_token"] for (_, _, c), r in measured.items() if c == cache), "") for cache in KV_DTYPES)
    lines.append(["bytes a token", *(f"{int(size):,}" if size else MISSING for size in sizes)])
    return markdown(["sequences × context", *KV_DTYPES], lines)


def cache_quality(rows: Rows) -> str:
    """Change of perplexity by cache, with the standard error of the paired difference over windows."""
    found = rows.of("cache_quality")
    if not found:
        return missing("cache_quality")
    models = list(dict.fromkeys(row["model"] for row in found))
    by = {(row["cache"], row["model"]): row for row in found}

    def cell(cache: str, model: str) -> str:
        row = by.get((cache, model))
        if row is None:
            return MISSING
        if cache == "float":
            return f"{float(row['perplexity']):.2f}"
        return f"{float(row['change_percent']):+.2f} ± {float(row['error_percent']):.2f} %"

    names = dict.fromkeys(row["cache"] for row in found)
    return markdown(["", *models], ([name, *(cell(name, model) for model in models)] for name in names))


def prompt_attention(rows: Rows) -> str:
    """Attention of prompts, µs, and qcut's rate."""
    sizes = ("batch", "tokens", "heads", "kv_heads", "head")
    measured: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows.of("bench_prompt_attention"):
        measured.setdefault(tuple(row[size] for size in sizes), {})[row["variant"]] = row
    lines = []
    for (batch, tokens, heads, kv_heads, head), here in measured.items():
        times = {name: float(row["median_us"]) for name, row in here.items()}
        cells = (figures(times[name]) if name in times else MISSING for name in PROMPT_NAMES)
        rate = f"{float(here['qcut']['tflops']):.0f}" if "qcut" in here else MISSING
        lines.append([f"{batch} × {int(tokens):,}", f"{heads} / {kv_heads} of {head}", *cells, rate])
    return markdown(["sequences × tokens", "heads", *PROMPT_NAMES, "qcut, TFLOP/s"], lines)


def quantizing(rows: Rows) -> str:
    """Time and memory of quantizing the layers of a 7B Llama."""
    lines = (
        [row["scheme"], row["fit"], f"{float(row['seconds']):.1f}", f"{float(row['peak_beyond_gb']):.1f}"]
        for row in rows.of("bench_quantize")
    )
    return markdown(["scheme", "indices", "seconds", "GB beyond the float model"], lines)


def zero_points(rows: Rows) -> str:
    """Speed of layers with zero points over int4 without them, by tokens and shape."""
    found = rows.of("bench_foreign")
    if not found:
        return missing("bench_foreign")
    cells = {(row["variant"], int(row["m"]), f"{row['n']} × {row['k']}"): float(row["x_int4"]) for row in found}
    names, shapes = dict.fromkeys(key[0] for key in cells), dict.fromkeys(key[2] for key in cells)
    columns = [(name, shape) for name in names for shape in shapes]
    header = ["M", *(f"{name.removesuffix('_shifted')}, {shape}" for name, shape in columns)]
    lines = (
        [f"{m:,}", *(f"{cells[name, m, shape]:.2f}×" for name, shape in columns)]
        for m in sorted({key[1] for key in cells})
    )
    means = (f"`{name}` {geomean([v for key, v in cells.items() if key[0] == name]):.3f}×" for name in names)
    return f"{markdown(header, lines)}\n\nGeometric means: {', '.join(means)}."


def loading(rows: Rows) -> str:
    """Memory of loading a model, by loader."""
    columns = ("model_mb", "anonymous_mb", "mapped_mb")
    lines = ([row["door"], *(f"{float(row[column]):.0f}" for column in columns)] for row in rows.of("bench_loading"))
    return markdown(["", "the model's tensors, MB", "peak memory, MB", "peak file pages, MB"], lines)


# ── pages ────────────────────────────────────────────────────────────────────────────────────────

MEASURED: Mapping[str, Callable[[Rows], str]] = {
    "headline": headline.headline,
    "quality": quality,
    "gemm": gemm,
    "linear": linear,
    "float8": float8,
    "peers": peers.table,
    "codebook kernel": codebook_kernel,
    "codebook scales": codebook_scales,
    "codebook layer": codebook_layer,
    "crossover": crossover_cells,
    "crossover float8": crossover_float8,
    "triton": triton_layers,
    "codebook quality": codebook_quality,
    "plan quality": plans,
    "encoder quality": encoders,
    "engine": engine,
    "contexts": contexts,
    "comparison": comparison,
    "attention": attention,
    "caches": caches,
    "cache quality": cache_quality,
    "prompt attention": prompt_attention,
    "quantizing": quantizing,
    "loading": loading,
    "zero points": zero_points,
    **gpt2.TABLES,
    **quantization.TABLES,
    **engines.TABLES,
    **serving.TABLES,
    **scale.TABLES,
}
_BLOCK = re.compile(r"<!-- measured: (?P<name>[\w ]+) -->\n.*?<!-- end -->", re.DOTALL)


def filled(page: str, rows: Rows) -> str:
    """Return a page with its marked blocks filled from the rows.

    Raises:
        KeyError: `MEASURED` lacks the name of a block.
    """

    def written(block: re.Match[str]) -> str:
        name = block["name"]
        return f"<!-- measured: {name} -->\n\n{MEASURED[name](rows)}\n\n<!-- end -->"

    return _BLOCK.sub(written, page)


@harness.script()
def main(_: argparse.Namespace) -> int:
    """Write the pages and their plots."""
    rows = Rows(RESULTS)
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8"), rows), encoding="utf-8")
    for draw in (headline.plot, quantization.plot, scale.plot):
        draw(rows, RESULTS)
    return 0
