"""Prints the README's tables of measured figures from the rows in ``benchmarks/results``.

A test holds the README to what this prints.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

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

Times = dict[tuple[int, int, int], dict[str, float]]


def times(path: Path) -> Times:
    """Shape → variant → median microseconds."""
    found: Times = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            shape = (int(row["m"]), int(row["n"]), int(row["k"]))
            found.setdefault(shape, {})[row["variant"]] = float(row["median_us"])
    return found


def us(value: float | None) -> str:
    """Three figures, as the README prints a time."""
    return "–" if value is None else f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


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


TABLES = (gemm_table, linear_table, peers_table)

if __name__ == "__main__":
    print("\n\n".join(table() for table in TABLES))
