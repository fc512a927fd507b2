"""GPT-2 Large in transformers with its layers replaced: prompts a second, and peak memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.layers.libraries import PEERS
from benchmarks.publish.markdown import MISSING, markdown
from benchmarks.publish.rows import Row, Rows


def model(rows: Rows) -> str:
    """GPT-2 Large in transformers with its layers replaced: prompts a second, and peak memory."""
    speed = {
        (row["logits"], row["variant"]): int(row["tokens_s"])
        for row in rows.of("bench_model", beside="w8a8")
        if row["logits"]
    }
    lines = []
    for logits, what in (("last", "logits of the last token"), ("all", "all logits")):
        before, after = speed[logits, "fp16"], speed[logits, "w8a8"]
        title = f"prompts of 8 × 1024, {what}, tokens/s"
        lines.append([title, f"{before:,}", f"{after:,} ({after / before:.2f}×)", MISSING, MISSING])
    peaks = [
        peak(rows, "bench_model", "fp16"),
        peak(rows, "bench_model", "w8a8"),
        peak(rows, "codebook_memory/bench_model", "codebook4/w8a16"),
        peak(rows, "codebook_memory/bench_model", "codebook4/codebook4"),
    ]
    lines.append(["peak memory, one sequence of 256 tokens, GB", *(f"{gb:.3f}" for gb in peaks)])
    small = [peak(rows, "small_cublas_workspace/bench_model", variant) for variant in ("fp16", "w8a8")]
    title = "the same with `CUBLAS_WORKSPACE_CONFIG=:16:8`, GB"
    lines.append([title, *(f"{gb:.3f}" for gb in small), MISSING, MISSING])
    header = ["", "float16", "w8a8", "codebook4, embeddings w8a16", "codebook4, embeddings codebook4"]
    others = ", ".join(f"`{name}` {gb:.2f} GB" for name, gb in peer_memory(rows).items()) or "not measured"
    return f"{markdown(header, lines)}\n\nPeak memory of the same with other libraries' layers: {others}."


def peak(rows: Rows, bench: str, variant: str) -> float:
    """Peak GB of generation with a variant's layers."""
    return next(float(row["generate_peak_gb"]) for row in _peaks(rows, bench) if row["variant"] == variant)


def _peaks(rows: Rows, bench: str) -> list[Row]:
    return [row for row in rows.of(bench) if row["generate_peak_gb"]]


def peer_memory(rows: Rows) -> dict[str, float]:
    """Peak GB of generation with other libraries' layers."""
    found = {row["variant"]: float(row["generate_peak_gb"]) for row in _peaks(rows, "bench_model")}
    return {name: gb for name, gb in found.items() if name in PEERS}


TABLES: Mapping[str, Callable[[Rows], str]] = {"model": model}
