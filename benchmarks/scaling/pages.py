"""The tables and the plot of docs/scale.md."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.engine.vllm import CONTEXT as TOKENS
from benchmarks.engine.vllm import NEW
from benchmarks.harness import percentile
from benchmarks.publish import plots
from benchmarks.publish.markdown import MISSING, figures, markdown
from benchmarks.publish.rows import Rows, missing, provenance
from benchmarks.publish.serving import FOUR_GPUS, HOSTS, TWO_GPUS
from benchmarks.scaling import split
from benchmarks.scaling.check import LIMIT, PROMPT_ROWS, STEP_ROW, Check, calibrated, checks, worst
from benchmarks.scaling.laws import (
    ASSUMED_ACROSS_HOSTS,
    ASSUMED_IN_HOST,
    FLOAT,
    GPU,
    ROUTE_STEPS,
    SCHEMES,
    Primitives,
    mixture_rows,
    weight_bytes,
)
from benchmarks.scaling.model import (
    GROUP,
    HOST_GPUS,
    LLAMAS,
    MIXTURES,
    Layout,
    Served,
    Shape,
    predicted,
    prompt,
    room,
    served,
    step,
    weights_bytes,
)
from qcut.errors import ConfigError

CONTEXT = 2048
"""Tokens of a sequence, and of a prompt."""
SEQUENCES = 256
"""Sequences on all GPUs, in the table of tokens/s and in the plot."""
GPUS = (1, 2, 4, 8, 16, 32, 64)
SHOWN = ("codebook4", "codebook4_int8", "w8a8", FLOAT)
PLOTTED = ("codebook4", "w8a8", FLOAT)
WIDTHS = (1, 2, 4, HOST_GPUS)
PAYS = 0.10
"""Twice the GPUs pay off if they make a step shorter by more than this share."""
MANY = 64
"""Sequences of one replica, in the table of the tensor-parallel size that pays off."""
PRODUCT_TOKENS = (1, 8, 64)
CHECKED = (
    ("Steps of the Llama-3-8B shape", "llama-3", True),
    ("Prompts of the Llama-3-8B shape", "llama-3", False),
    ("Steps of GPT-2 Large", "gpt2", True),
    ("Prompts of GPT-2 Large", "gpt2", False),
    ("Steps of llama2.c", "llama2c", True),
    ("Prompts of llama2.c", "llama2c", False),
    ("Steps of Qwen3-30B-A3B", "qwen3-30b-a3b", True),
    ("Prompts of Qwen3-30B-A3B", "qwen3-30b-a3b", False),
    ("Steps of OLMoE", "olmoe", True),
)
"""The summaries: a title, a part of the models' names, and whether it is about steps or about prompts."""
LARGE = "llama-3-70b"
"""The shape of `engine/vllm.py` that has a breakdown of its steps on several GPUs."""
SPLIT_CHECKED = (("Steps inside vLLM", "step"), ("Prompts inside vLLM", "prompt"))


@functools.lru_cache(maxsize=4)
def _primitives(folder: Path) -> Primitives:
    rows = Rows(folder)
    return calibrated(Primitives.read(rows), rows)


def _cases(primitives: Primitives, schemes: Sequence[str] = SHOWN) -> Iterator[tuple[Shape, str]]:
    """Shapes and schemes with measured layers."""
    for shape in (*LLAMAS, *MIXTURES):
        for scheme in schemes:
            if predicted(primitives, shape, scheme):
                yield shape, scheme


def latency_layout(gpus: int) -> Layout:
    """One replica on all GPUs: the layers split over a host's, stages over hosts."""
    tp = min(gpus, HOST_GPUS)
    return Layout(tp, gpus // tp)


def _fits(shape: Shape, scheme: str, layout: Layout) -> bool:
    return room(shape, scheme, CONTEXT, layout) > 0


def least_gpus(shape: Shape, scheme: str) -> int:
    """The fewest GPUs of a host that hold a scheme's weights and one sequence.

    Raises:
        ConfigError: a host does not.
    """
    for tp in WIDTHS:
        if _fits(shape, scheme, Layout(tp)):
            return tp
    raise ConfigError(f"{shape.name} in {scheme} does not fit on {HOST_GPUS} GPUs")


def best(primitives: Primitives, shape: Shape, scheme: str, sequences: int, gpus: int) -> Served | None:
    """The layout with the most tokens/s that has memory for so many sequences; None if none has."""
    found = served(primitives, shape, scheme, sequences, CONTEXT, gpus)
    return max(found, key=lambda one: one.tokens_s_gpu, default=None)


def overtakes(primitives: Primitives, shape: Shape, scheme: str, over: str, tp: int) -> int | None:
    """The least measured batch from which on a scheme's products of a step are faster than another's; None for none."""
    found = None
    for batch in sorted(primitives.products[over], reverse=True):
        one, other = (step(primitives, shape, name, batch, 1, Layout(tp)).us for name in (scheme, over))
        if one >= other:
            break
        found = batch
    return found


def pays_to(primitives: Primitives, shape: Shape, scheme: str, batch: int) -> int:
    """The GPUs of a host beyond which twice as many shorten a step by no more than `PAYS`."""
    tp = least_gpus(shape, scheme)
    while tp < HOST_GPUS:
        one, two = (step(primitives, shape, scheme, batch, CONTEXT, Layout(width)).us for width in (tp, 2 * tp))
        if two >= (1 - PAYS) * one:
            break
        tp *= 2
    return tp


# ── tables ───────────────────────────────────────────────────────────────────────────────────────


def _by_gpus(primitives: Primitives, cell: Callable[[Shape, str, int], str]) -> str:
    header = ["model", "scheme", *(f"{gpus} GPU{'s' * (gpus > 1)}" for gpus in GPUS)]
    lines = ([s.name, scheme, *(cell(s, scheme, gpus) for gpus in GPUS)] for s, scheme in _cases(primitives))
    return markdown(header, lines)


def steps(rows: Rows) -> str:
    """Milliseconds of a step of one sequence, all GPUs on it."""
    primitives = _primitives(rows.folder)

    def cell(shape: Shape, scheme: str, gpus: int) -> str:
        layout = latency_layout(gpus)
        if not _fits(shape, scheme, layout):
            return MISSING
        return figures(step(primitives, shape, scheme, 1, CONTEXT, layout).us / 1e3)

    return _by_gpus(primitives, cell)


def firsts(rows: Rows) -> str:
    """Milliseconds from one prompt to its first token, all GPUs on it."""
    primitives = _primitives(rows.folder)

    def cell(shape: Shape, scheme: str, gpus: int) -> str:
        layout = latency_layout(gpus)
        if not _fits(shape, scheme, layout):
            return MISSING
        return figures(prompt(primitives, shape, scheme, 1, CONTEXT, layout).us / 1e3)

    return _by_gpus(primitives, cell)


def rates(rows: Rows) -> str:
    """Tokens/s of each GPU, and the layout."""
    primitives = _primitives(rows.folder)

    def cell(shape: Shape, scheme: str, gpus: int) -> str:
        one = best(primitives, shape, scheme, SEQUENCES, gpus)
        return MISSING if one is None else f"{_rounded(one.tokens_s_gpu)} ({one.layout.name})"

    return _by_gpus(primitives, cell)


def _rounded(value: float) -> str:
    """Three significant figures."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else figures(value)


def memory(rows: Rows) -> str:
    """Weights, the fewest GPUs, the sequences that these and a host hold, and how far tensor parallelism pays."""
    primitives = _primitives(rows.folder)
    slower = replace(primitives, all_reduce_factor=2.0)
    lines = []
    for shape, scheme in _cases(primitives):
        least = least_gpus(shape, scheme)
        lines.append(
            [
                shape.name,
                scheme,
                _rounded(weights_bytes(shape, scheme) / 1e9),
                str(least),
                *(f"{room(shape, scheme, CONTEXT, Layout(tp)):,}" for tp in (least, HOST_GPUS)),
                *(str(pays_to(primitives, shape, scheme, batch)) for batch in (1, MANY)),
                str(pays_to(slower, shape, scheme, 1)),
            ]
        )
    header = ["model", "scheme", "weights, GB", "fewest GPUs", "sequences on these", f"on {HOST_GPUS}"]
    return markdown([*header, "pays to, 1 sequence", f"{MANY} sequences", "1, all-reduces twice as long"], lines)


def crossings(rows: Rows) -> str:
    """The sequences from which on another scheme is faster than codebook4."""
    primitives = _primitives(rows.folder)
    others = [scheme for scheme in SCHEMES if scheme != "codebook4"]

    def cell(shape: Shape, scheme: str, tp: int) -> str:
        if not predicted(primitives, shape, scheme):
            return MISSING
        batch = overtakes(primitives, shape, scheme, "codebook4", tp)
        return "never" if batch is None else f"{batch:,}"

    fewest: dict[Shape, int] = {}
    for shape, scheme in _cases(primitives, SCHEMES):
        fewest[shape] = max(fewest.get(shape, 1), least_gpus(shape, scheme))
    lines = [
        [shape.name, str(tp), *(cell(shape, scheme, tp) for scheme in others)]
        for shape, least in fewest.items()
        for tp in dict.fromkeys((least, HOST_GPUS))
    ]
    return markdown(["model", "GPUs", *others], lines)


def check(rows: Rows) -> str:
    """Predicted and measured times, and summaries."""
    primitives = _primitives(rows.folder)
    found = checks(primitives, rows)
    parts = [_checks(found)]
    for title, name, is_step in CHECKED:
        if about := [c for c in found if name in c.case and c.what.startswith("decode") == is_step]:
            parts.append(_summary(title, about))
    return "\n\n".join(parts)


def split_check(rows: Rows) -> str:
    """Times inside vLLM on several GPUs, and of a larger model, and their prediction from one GPU's."""
    found = split.predictions(rows.folder)
    if not found:
        return missing(f"{TWO_GPUS}/bench_vllm")
    parts = (_summary(title, [one for one in found if one.what == what]) for title, what in SPLIT_CHECKED)
    named = [(host, "bench_vllm") for host in HOSTS] + [(TWO_GPUS, "bench_crossover")]
    sources = (provenance(f"{host}/{bench}", Rows(rows.folder / host).of(bench)) for host, bench in named)
    return "\n\n".join([_checks(found), *parts, " ".join(sources)])


def hosts(rows: Rows) -> str:
    """Breakdown of a large model's steps on several H200s inside vLLM: predicted parts, and the measured time."""
    found = Rows(rows.folder / FOUR_GPUS).of("bench_vllm", shape=LARGE, what="step")
    if not found:
        return missing(f"{FOUR_GPUS}/bench_vllm")
    primitives = _primitives(rows.folder)
    lines = []
    for row in found:
        batch, gpus, scheme = int(row["batch"]), int(row["gpus"]), row["method"].removeprefix("qcut-")
        shape = split.shape_of(row["shape"])
        time = step(primitives, shape, scheme, batch, TOKENS + NEW // 2, Layout(gpus))
        head = primitives.product_us(FLOAT, batch, shape.vocabulary // gpus, shape.hidden)
        weights = shape.layers * sum(weight_bytes(scheme, n, k) for n, k in shape.products(gpus))
        floor = (weights + 2.0 * shape.vocabulary // gpus * shape.hidden) / primitives.ceiling.read_bytes * 1e6
        parts = (time.products_us, time.attention_us, time.rest_us, head, time.all_reduce_us)
        measured = float(row["median_us"])
        ms = (figures(us / 1e3) for us in (floor, *parts, sum(parts), measured))
        lines.append([f"{row['shape']}, {scheme}", str(gpus), str(batch), *ms, f"{100 * floor / measured:.0f} %"])
    columns = ("products", "attention", "norms, rest", "classifier", "all-reduces", "sum", "measured", "limit, share")
    return markdown(["model, ms", "GPUs", "sequences", "memory limit", *columns], lines)


def _checks(found: Sequence[Check]) -> str:
    lines = [
        [
            one.case,
            one.what,
            str(one.batch),
            str(one.gpus),
            *(figures(us / 1e3) for us in (one.measured_us, one.predicted_us)),
            "taken" if one.taken else _off(one) if one.near else f"**{_off(one)}**",
        ]
        for one in found
    ]
    return markdown(["model", "what", "sequences", "GPUs", "measured, ms", "predicted, ms", "off"], lines)


def _off(one: Check) -> str:
    return f"{100 * one.off:+.1f} %"


def _summary(title: str, found: Sequence[Check]) -> str:
    tested = [one for one in found if not one.taken]
    furthest = worst(tested)
    if furthest is None:
        return f"{title}: no rows."
    near = sum(one.near for one in tested)
    return (
        f"{title}: {near} of {len(tested)} rows within {100 * LIMIT:.0f} %; furthest off {_off(furthest)} "
        f"({furthest.case}, {furthest.what}, {furthest.batch} sequence{'s' * (furthest.batch > 1)})."
    )


def products(rows: Rows) -> str:
    """The error of the fitted times on their own rows, and the bandwidth that those of products correspond to."""
    primitives = _primitives(rows.folder)
    lines = []
    for scheme in SCHEMES:
        laws = primitives.products[scheme]
        bandwidths = (
            f"{weight_bytes(scheme, 1, GROUP) / GROUP / laws[m].us_per_weight / 1e6:.2f}" for m in PRODUCT_TOKENS
        )
        lines.append([scheme, *_errors([one for law in laws.values() for one in law.residuals]), *bandwidths])
    for scheme, law in primitives.mixtures.items():
        lines.append([f"{scheme}, mixtures", *_errors(law.residuals), *[MISSING] * len(PRODUCT_TOKENS)])
    header = ["scheme", "rows", "error, median", "90th percentile", "largest"]
    return markdown([*header, *(f"M = {m}, TB/s" for m in PRODUCT_TOKENS)], lines)


def _errors(residuals: Sequence[float]) -> list[str]:
    off = sorted(map(abs, residuals))
    return [str(len(off)), *(f"{100 * percentile(off, q):.1f} %" for q in (0.5, 0.9, 1.0))]


def mixtures(rows: Rows) -> str:
    """The law of mixtures, its constants, and what it assumes."""
    found = mixture_rows(rows, GPU)
    if not found:
        return missing("bench_experts")
    steps = [f"{step:.0f}" for step in ROUTE_STEPS]
    tokens = sorted({int(row["m"]) for row in found})
    models = list(dict.fromkeys(row["model"] for row in found))
    law = (
        "A mixture behind its router takes launch, for two tokens and more the time to sort routes and to add their "
        "results, and the bytes of the experts that tokens reach over a rate. An expert's weights are multiplied with "
        f"{steps[0]} routes while they are read; further routes take their operations over a peak of their own "
        f"from {steps[0]} to {steps[1]} routes, from {steps[1]} to {steps[2]}, and beyond. These constants are fitted, "
        f"for each scheme, to the rows `mixture` of `bench_experts.csv`: {', '.join(models)}, of "
        f"{', '.join(f'{m:,}' for m in tokens)} tokens."
    )
    header = ["scheme", "launch, µs", "sort and sum, µs", "weights, TB/s"]
    spans = [*(f"{low} to {high}" for low, high in itertools.pairwise(steps)), f"beyond {steps[-1]}"]
    peaks = [f"routes {span}, TFLOP/s" for span in spans]
    lines = [
        [
            scheme,
            *(figures(us) for us in (one.launch_us, one.sort_us)),
            f"{1 / one.us_per_byte / 1e6:.2f}",
            *(f"{2 / us / 1e6:,.0f}" if us > 0 else MISSING for us in one.us_per_weight),
        ]
        for scheme, one in _primitives(rows.folder).mixtures.items()
    ]
    assumed = (
        "Assumed: tokens choose experts uniformly, as in the benchmark, and M of them reach E · (1 − (1 − k / E)^M). "
        "Each GPU of a host has an equal number of whole experts, and computes the router, a float16 product, and its "
        "experts' part for all tokens. A layer waits for the GPU with most of the reached experts, on average over all "
        "choices, and adds the parts in one all-reduce. Heads are split as in a dense model; if there are fewer KV "
        "heads than GPUs, several GPUs have the same one. Float16 experts were not measured, and are left out."
    )
    return "\n\n".join([law, markdown([*header, *peaks], lines), assumed, provenance("bench_experts", found)])


def links(rows: Rows) -> str:
    """Microseconds of all-reduces, and whether each is measured or assumed."""
    primitives = _primitives(rows.folder)
    widths = WIDTHS[1:]
    lines = []
    for shape in LLAMAS:
        for batch in (1, MANY, CONTEXT):
            size = 2.0 * batch * shape.hidden
            cells = (
                f"{figures(primitives.all_reduce_us(tp, size))}{' assumed' * primitives.assumed(tp)}" for tp in widths
            )
            lines.append([shape.name, f"{batch:,}", f"{size / 1024:,.0f}", *cells])
    table = markdown(["model", "rows", "KB", *(f"{tp} GPUs, µs" for tp in widths)], lines)
    assumed = [str(tp) for tp in widths if primitives.assumed(tp)]
    near, far = ASSUMED_IN_HOST, ASSUMED_ACROSS_HOSTS
    law = (
        f"Assumed, in `benchmarks/scaling/laws.py`: an all-reduce within a host takes {near.latency_us:g} µs between "
        f"two GPUs, {near.hop_us:g} µs more for each further one, and the bytes that each GPU sends, 2 (n − 1) / n of "
        f"the sum's, over {near.bytes_s / 1e9:.0f} GB/s; a message between hosts takes {far.latency_us:g} µs and its "
        f"bytes over {far.bytes_s / 1e9:.0f} GB/s."
    )
    which = f"All-reduces over {', '.join(assumed)} GPUs are assumed, since `bench_allreduce.csv` has no rows of them."
    return "\n\n".join(
        [table, law, *([which] if assumed else []), provenance("bench_allreduce", rows.of("bench_allreduce"))]
    )


def taken(rows: Rows) -> str:
    """The three constants that were taken from rows of whole models, and these rows."""
    primitives = _primitives(rows.folder)
    left = (STEP_ROW,), PROMPT_ROWS, PROMPT_ROWS
    what = (
        ("each layer of a step: norms, activation, minus the overlap of kernels", primitives.layer_us),
        ("each layer of a prompt, the same", primitives.first_us),
        ("each prompt: to the GPU, and the first token back", primitives.prompt_us),
    )
    lines = [
        [text, figures(us), "; ".join(f"{case}, {name}" for case, name, *_ in keys)]
        for (text, us), keys in zip(what, left, strict=True)
    ]
    return markdown(["constant", "µs", "taken from"], lines)


TABLES: Mapping[str, Callable[[Rows], str]] = {
    "scale rates": rates,
    "scale steps": steps,
    "scale firsts": firsts,
    "scale memory": memory,
    "scale crossings": crossings,
    "scale check": check,
    "scale split": split_check,
    "scale hosts": hosts,
    "scale taken": taken,
    "scale products": products,
    "scale mixtures": mixtures,
    "scale links": links,
}
"""The blocks of docs/scale.md."""


def plot(rows: Rows, out: Path) -> None:
    """Tokens/s of each GPU by the number of GPUs, a line for each shape and scheme."""
    primitives = _primitives(rows.folder)
    lines: dict[str, dict[float, float]] = {}
    for shape, scheme in _cases(primitives, PLOTTED):
        if shape in LLAMAS or shape is MIXTURES[-1]:
            found = {gpus: best(primitives, shape, scheme, SEQUENCES, gpus) for gpus in GPUS}
            lines[f"{shape.name} {scheme}"] = {gpus: one.tokens_s_gpu for gpus, one in found.items() if one is not None}
    title = f"Predicted: {SEQUENCES} sequences of {CONTEXT:,} tokens, the best layout of H200s"
    plots.curves(out / "scale", lines, title, "GPUs", "tokens/s of each GPU")
