"""The tables of the engine: under load, by model family, and the breakdown of a step by kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.publish.markdown import MISSING, figures, markdown
from benchmarks.publish.rows import Rows, missing

STEP = "step"
"""The role of `engine/breakdown.py` that is the whole step."""
_FEW_TOKENS = 64
"""Tokens up to which products of experts are bound by the memory."""


def batching(rows: Rows) -> str:
    """The scheduler and a static batch."""
    found = {row["what"]: row for row in rows.of("bench_batching", case="llama-3-8b-codebook4")}
    if not found:
        return missing("bench_batching")
    rates = {what: float(found[what]["tokens_s"]) for what in ("continuous", "static")}
    copied = float(found["row copied"]["median_us"]) / 1000
    lines = [
        ["tokens/s", f"{rates['continuous']:,.0f}, {rates['continuous'] / rates['static']:.2f} × a static batch"],
        ["tokens/s of a static batch", f"{rates['static']:,.0f}"],
        ["ms between tokens, median", _ms(found["gap"]["median_us"])],
        ["ms between tokens, 99th percentile", _worst(found["gap"])],
        ["ms to copy the KV cache of 1,024 tokens", f"{copied:.2f}"],
    ]
    if "constrained" in found:
        free, form = (float(found[what]["tokens_s"]) for what in ("free", "constrained"))
        lines.append(["tokens/s if all answers have a JSON Schema", f"{form:,.0f}, {form / free:.2f} × those without"])
    return markdown(["64 clients", ""], lines)


def server(rows: Rows) -> str:
    """The server, and the scheduler without HTTP."""
    found = {row["what"]: row for row in rows.of("bench_server", case="llama-3-8b-codebook4")}
    if not found:
        return missing("bench_server")
    rates = {what: float(found[what]["tokens_s"]) for what in ("server", "scheduler")}
    first, gap = found["first token"], found["gap"]
    lines = [
        ["tokens/s", f"{rates['server']:,.0f}, {rates['server'] / rates['scheduler']:.2f} × the scheduler"],
        ["ms to the first token, median", _ms(first["median_us"])],
        ["ms to the first token, 99th percentile", _worst(first)],
        ["ms between tokens, median", _ms(gap["median_us"])],
        ["ms between tokens, 99th percentile", _worst(gap)],
    ]
    return markdown(["64 HTTP clients", ""], lines)


def families(rows: Rows) -> str:
    """Steps of models of many families, and the share of the time that the memory traffic needs."""
    found = {(row["family"], row["batch"]): row for row in rows.of("bench_families")}
    if not found:
        return missing("bench_families")
    batches = list(dict.fromkeys(batch for _, batch in found))
    lines = []
    for family in dict.fromkeys(family for family, _ in found):
        here = [found[family, batch] for batch in batches]
        cells = ((f"{int(row['tokens_s']):,}", f"{float(row['fraction']):.2f}") for row in here)
        lines.append([family, *(cell for pair in cells for cell in pair)])
    header = [name for batch in batches for name in (f"tokens/s of {batch}", "memory limit, share")]
    return markdown(["codebook4", *header], lines)


def breakdown(rows: Rows) -> str:
    """The time that each kind of kernel adds to a step of one and of eight sequences, and its memory limit."""
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for row in rows.of("bench_breakdown", case="llama-3-8b-codebook4"):
        count = int(row["count"])
        if row["role"] == STEP:
            cells: tuple[str, ...] = ("1", figures(float(row["median_us"])), figures(float(row["floor_us"])))
        else:
            cells = (str(count), *(figures(count * float(row[column])) for column in ("added_us", "floor_us")))
        if count > 1 or float(cells[2]) > 1 or "argmax" in row["role"] or row["role"] == STEP:
            found.setdefault(named(row["role"]), {})[row["batch"]] = cells
    if not found:
        return missing("bench_breakdown")
    batches = ("1", "8")
    lines = [
        [name, *(cell for batch in batches for cell in here.get(batch, (MISSING,) * 3)[batch != batches[0] :])]
        for name, here in found.items()
    ]
    lines.sort(key=lambda line: line[0] == STEP)
    header = ["count", "µs of 1", "memory limit", "µs of 8", "memory limit"]
    return markdown(["kernels", *header], lines)


def named(role: str) -> str:
    """A role of `engine/breakdown.py` by its input and its kernel's family, without shapes and tiles."""
    kernel, _, read = role.partition(": ")
    return f"{read}: {kernel.removeprefix('qcut_').partition('_sm')[0]}" if read else role


def _ms(us: str) -> str:
    return figures(float(us) / 1000)


def _worst(row: Mapping[str, str]) -> str:
    """The 99th percentile, and its ratio to the median."""
    return f"{_ms(row['p99_us'])}, {float(row['p99_us']) / float(row['median_us']):.1f} × the median"


def experts(rows: Rows) -> str:
    """Products of mixtures' experts for few tokens: the share of the memory's rate, and µs of whole mixtures."""
    found = {(r["model"], r["scheme"], r["m"], r["part"]): r for r in rows.of("bench_experts")}
    if not found:
        return missing("bench_experts")
    few = {key: row for key, row in found.items() if int(key[2]) <= _FEW_TOKENS}
    tokens = list(dict.fromkeys(m for _, _, m, _ in few))
    lines = []
    for model, scheme in dict.fromkeys((model, scheme) for model, scheme, _, _ in few):
        for part in ("up", "down", "mixture"):
            here = [found.get((model, scheme, m, part)) for m in tokens]
            what = part if part != "mixture" else "the whole mixture"
            cells = (f"{float(r['median_us']):.1f}, {float(r['memory_pct']):.0f} %" if r else MISSING for r in here)
            lines.append([model, scheme, what, *cells])
    return markdown(["experts of", "scheme", "product", *(f"{m} token{'s' * (m != '1')}, µs" for m in tokens)], lines)


def expert_prompts(rows: Rows) -> str:
    """Products of mixtures' experts for prompts, next to dense layers of equal work."""
    found = {(r["model"], r["scheme"], r["m"], r["part"]): float(r["median_us"]) for r in rows.of("bench_experts")}
    dense = [key for key in found if key[3].endswith(":dense")]
    if not dense:
        return missing("bench_experts")
    lines = []
    for model, scheme, m, part in dense:
        name = part.removesuffix(":dense")
        one, other = found[model, scheme, m, name], found[model, scheme, m, part]
        lines.append([model, scheme, m, name, f"{one:.0f}", f"{other:.0f}", f"{other / one:.2f}"])
    return markdown(["experts of", "scheme", "tokens", "product", "µs", "dense, µs", "its speed"], lines)


def speculation(rows: Rows) -> str:
    """By sequences and context: what a wide step costs, and what drafts bring at best and at worst."""
    found = rows.of("bench_speculation", case="llama-3-8b-codebook4")
    if not found:
        return missing("bench_speculation")
    us = {
        (int(row["batch"]), int(row["context"]), row["what"], int(row["width"])): float(row["median_us"])
        for row in found
    }
    widths = sorted({width for _, _, what, width in us if what == "wrong drafts"})
    wrong = ("wrong drafts, steps as they pay", max(widths))
    has_wrong = any(key[2:] == wrong for key in us)
    lines = []
    for batch, context in dict.fromkeys(key[:2] for key in us):
        here = {key[2:]: time for key, time in us.items() if key[:2] == (batch, context)}
        plain = here["plain", 1]
        costs = (f"{here['wrong drafts', width] / plain:.3f}" for width in widths)
        gains = (f"{plain / here['right drafts', width]:.2f} ×" for width in widths)
        least = (("look-up finds nothing", 1), *(wrong,) * has_wrong)
        speeds = (f"{plain / here[key]:.3f} ×" for key in least)
        lines.append([f"{batch}", f"{context:,}", figures(plain), *costs, *gains, *speeds])
    header = ["sequences", "context", "plain step, µs", *(f"{width} tokens" for width in widths)]
    header += [*(f"{width - 1} right" for width in widths), "nothing found", *["all wrong"] * has_wrong]
    return markdown(header, lines)


def speculation_texts(rows: Rows) -> str:
    """New tokens a step, by text and drafter, and how much faster that is at the cost of the 8B shape's steps."""
    found = rows.of("speculation_texts")
    if not found:
        return missing("speculation_texts")
    lines = []
    for row in found:
        looked = row["drafter"] == "look-up"
        drafter = "look-up" if looked else "{}, drafts: {}".format(*row["drafter"].split(", "))
        speed = f"{float(row['speedup']):.2f} ×" if looked else MISSING
        lines.append([row["text"], row["model"], drafter, f"{float(row['tokens_a_step']):.2f}", speed])
    return markdown(["text", "model", "drafter", "tokens a step", "speed"], lines)


TABLES: Mapping[str, Callable[[Rows], str]] = {
    "batching": batching,
    "server": server,
    "families": families,
    "experts": experts,
    "expert prompts": expert_prompts,
    "breakdown": breakdown,
    "speculation": speculation,
    "speculation texts": speculation_texts,
}
