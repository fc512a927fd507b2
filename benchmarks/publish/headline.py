"""The README's table and plot: a layer, models that are served, drafts, memory and quality, with the best others."""

from __future__ import annotations

from pathlib import Path

from benchmarks.layers.libraries import PEERS
from benchmarks.layers.peers import BENCH as PEER_ROWS
from benchmarks.perplexity import divergence
from benchmarks.publish import peers, plots, serving
from benchmarks.publish.gpt2 import peak, peer_memory
from benchmarks.publish.markdown import MISSING, figures, markdown
from benchmarks.publish.rows import Row, Rows, provenance

NK = (14336, 4096)
PROMPT, TOKEN = 4096, 1
FOUR_BITS = 4.6
"""The most bits of a weight, with scales, that count as four."""
QUALITY_MODEL = "gpt2-14m"


def headline(rows: Rows) -> str:
    """The table, and the rows that it is made of."""
    memory = peer_memory(rows)
    least = min(memory, key=lambda name: memory[name], default=None)
    lines = [
        *_layers(rows),
        _served(rows, "Llama 3 8B in vLLM, one sequence, tokens/s", serving.SHAPE, "1"),
        _served(rows, "the same, 64 sequences", serving.SHAPE, "64"),
        _served(rows, "Qwen3 30B-A3B, a mixture, in vLLM, one sequence", serving.MIXTURE, "1"),
        *_drafted(rows),
        [
            "GPT-2 Large, peak memory at 256 tokens, GB",
            f"{peak(rows, 'bench_model', 'fp16'):.2f}",
            f"**{peak(rows, 'codebook_memory/bench_model', 'codebook4/codebook4'):.2f}** (`codebook4`)",
            f"{memory[least]:.2f} ({peers.library_of(least)})" if least else MISSING,
        ],
        *_quality(rows),
    ]
    table = markdown(["", "float16", "qcut", "best alternative"], lines)
    vllm = rows.of("bench_vllm", gpus="1")
    release = ", ".join(dict.fromkeys(row["vllm"] for row in vllm))
    cards = " or ".join(dict.fromkeys(row["gpu"] for row in vllm))
    source = f"One run has the layers, here and in the plot. {provenance(PEER_ROWS, rows.of(PEER_ROWS))}"
    return f"{table}\n\nMedians on one {cards}, vLLM {release}. {source}"


def _layers(rows: Rows) -> list[list[str]]:
    """The lines of one layer, a prompt and a token."""
    n, k = NK
    found = cells(rows)
    return [
        _layer(f"layer {n} × {k}, a prompt of {PROMPT:,} tokens, µs", found.get(PROMPT)),
        _layer("the same, one token, µs", found.get(TOKEN)),
    ]


def _layer(title: str, cell: peers.Cell | None) -> list[str]:
    """float16, qcut's fastest scheme and the fastest other; the faster one is bold."""
    if cell is None:
        return [title, MISSING, MISSING, MISSING]
    ours, theirs = cell.ours, cell.theirs
    own = f"{peers.bold(ours[1], not cell.is_lost)} (`{ours[0]}`)" if ours else MISSING
    other = f"{peers.bold(theirs[1], cell.is_lost)} ({peers.library_of(theirs[0])})" if theirs else MISSING
    return [title, figures(cell.fp16), own, other]


def cells(rows: Rows) -> dict[int, peers.Cell]:
    """Tokens to what was timed at the headline's layer."""
    return {m: cell for (m, *size), cell in sorted(peers.cells(rows).items()) if tuple(size) == NK}


def _served(rows: Rows, title: str, shape: str, batch: str) -> list[str]:
    """Tokens a second of a step in vLLM: float16, qcut's fastest scheme and vLLM's fastest; the faster one is bold."""
    found = rows.of("bench_vllm", shape=shape, gpus="1", what="step", batch=batch)
    rates = {row["method"]: float(row["tokens_s"]) for row in found}
    ours, theirs = (
        max((rates[name], name.removeprefix(prefix)) for name in rates if name.startswith(prefix))
        for prefix in ("qcut-", "vllm ")
    )

    def cell(rate: float, name: str) -> str:
        return f"**{rate:,.0f}** ({name})" if rate == max(ours[0], theirs[0]) else f"{rate:,.0f} ({name})"

    plain = f"{rates['fp16']:,.0f}" if "fp16" in rates else MISSING
    return [title, plain, cell(ours[0], f"`{ours[1]}`"), cell(theirs[0], f"vLLM, {theirs[1]}")]


def _drafted(rows: Rows) -> list[list[str]]:
    """Tokens a second of qcut's engine, and with the drafts of a look-up for answers that edit their prompt."""
    case = "llama-3-8b-codebook4"
    (step,) = rows.of("bench_engine", case=case, what="decode", batch="1")
    texts = rows.of("speculation_texts", case=case, text="a document with edits", drafter="look-up")
    rate, speedup = float(step["tokens_s"]), min(float(row["speedup"]) for row in texts)
    return [
        ["Llama 3 8B in qcut's engine, one sequence", MISSING, f"**{rate:,.0f}** (`codebook4`)", MISSING],
        ["the same with drafts, an edit of the prompt", MISSING, f"**{rate * speedup:,.0f}**", MISSING],
    ]


def _quality(rows: Rows) -> list[list[str]]:
    """Divergence from the float model in four bits: qcut's best scheme, and the best format of others."""
    found = [row for row in rows.of("divergence", model=QUALITY_MODEL) if row["by"] and float(row["bits"]) < FOUR_BITS]
    if not found:
        return []

    def best(by: str) -> Row:
        return min((row for row in found if row["by"] == by), key=lambda row: float(row["divergence"]))

    own, other = best("qcut"), best("others")
    scheme, how = divergence.scheme_of(own["method"]), own["method"].rpartition("_")[2]
    name = f"`{scheme}`, {how}" if f"_{how}" in divergence.SUFFIXES else f"`{scheme}`"
    lost = float(other["divergence"]) < float(own["divergence"])

    def cell(row: Row, name: str, is_best: bool) -> str:
        value = f"{float(row['divergence']):.4f}"
        return f"{f'**{value}**' if is_best else value} ({name}, {float(row['bits']):.2f} bits)"

    title = "divergence from float at 4 bits, a GPT-2 of 14M (others: rounded)"
    return [[title, "0", cell(own, name, not lost), cell(other, other["method"], lost)]]


def plot(rows: Rows, out: Path) -> None:
    """Speed of one linear layer over PyTorch's float16, by tokens: qcut's best scheme, and the best other library."""
    labels, ours, theirs = [], {}, {}
    found = cells(rows)
    for m, cell in found.items():
        label = _tokens(m)
        labels.append(label)
        if cell.ours:
            ours[label] = cell.fp16 / cell.ours[1], cell.ours[0]
        if cell.theirs:
            theirs[label] = cell.fp16 / cell.theirs[1], peers.library_of(cell.theirs[0])
    libraries = dict.fromkeys(peers.library_of(name) for cell in found.values() for name in cell.us if name in PEERS)
    gpus = ", ".join(dict.fromkeys(cell.gpu for cell in found.values()))
    plots.groups(
        out / "headline",
        labels,
        {f"best of {', '.join(libraries)}": theirs, "qcut, its fastest scheme": ours},
        "PyTorch, float16",
        f"One linear layer of an 8B Llama ({NK[0]} × {NK[1]}) on an {gpus}",
        "speed, float16 = 1",
    )


def _tokens(m: int) -> str:
    return f"{m:,} token{'s' * (m > 1)}"
