"""Common parts of the raw tensor-core GEMMs: limits of their tiles, the launch grid, the text.

Device code: ``include/qcut/gemm/gemm.cuh`` (tiles, pipeline) and ``include/qcut/core/epilogue.cuh``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import gcd

from qcut.emitters.core.constraints import ARCHITECTURE, CLUSTERS, SPLITS, Constraint, holds
from qcut.emitters.core.family import Family, Grid, Problem
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.core.text import flag, include, kernel_source
from qcut.emitters.gemm.problem import GemmProblem, TileConfig

_OTHER_REGISTERS = 40
"""Registers of a thread for addresses, counters and bounds."""
_COLUMN_REGISTERS = 112
"""Registers for 16 columns of D with 64-bit sums and biases, a multiplier and a shift each."""
_NEEDS_MORE = ("sm_100", "sm_120")
"""Architectures on which the compiler computes many columns at once, and spills without these registers."""


def registers(tile: TileConfig) -> int:
    """Estimate a thread's registers: 32-bit accumulators, two buffers of fragments 32 columns deep, and the rest."""
    wm, wn, _ = tile.warp_shape
    return wm * wn // 32 + (wm + wn) // 2 + _OTHER_REGISTERS


def _whole_warps(problem: GemmProblem, tile: TileConfig, arch: str) -> bool:
    pairs = zip(tile.threadblock_shape[:2], tile.warp_shape[:2], strict=True)
    return all(warp > 0 and warp % 16 == 0 and block % warp == 0 for block, warp in pairs)


def _contiguous_warp(problem: GemmProblem, tile: TileConfig, arch: str) -> bool:
    return tile.warp_shape[1 if problem.layout_d == "row" else 0] in (16, 32, 64)


def _copies_whole_runs(problem: GemmProblem, tile: TileConfig, arch: str) -> bool:
    bm, bn, _ = tile.threadblock_shape
    extents = [bm] * (problem.layout_a == "column") + [bn] * (problem.layout_b == "row")
    return all(extent & (extent - 1) == 0 and tile.threads >= extent // 2 for extent in extents)


def _fits_registers(problem: GemmProblem, tile: TileConfig, arch: str) -> bool:
    e = problem.epilogue
    rescales = e.rescale and not e.halves and arch in _NEEDS_MORE
    more = _COLUMN_REGISTERS + 8 * tile.splits if rescales else 0
    if e.col_scale == "per_unit":  # sums of units, and where their scales are
        more += tile.warp_shape[0] * tile.warp_shape[1] // 32 + 2 * tile.warp_shape[1] // 16
    return registers(tile) + more <= min(255, 65_536 // tile.threads)


TILE_CONSTRAINTS = (
    ARCHITECTURE,
    Constraint("alignments", "are at least 1", lambda p, t, arch: min(p.alignment_k, p.alignment_n) >= 1),
    Constraint("schedule", "raw GEMMs are multistage", lambda p, t, arch: t.schedule == "multistage"),
    Constraint("cluster_shape", "is (1, 1): raw GEMMs share no loads", lambda p, t, arch: t.cluster_shape == (1, 1)),
    Constraint("epilogue_tile", "is (0, 0): a warp writes its own tile", lambda p, t, arch: t.epilogue_tile == (0, 0)),
    Constraint(
        "block_k",
        "is 64 or 128: rows of 4 or 8 chunks of 16 bytes, which the swizzle spreads over all banks",
        lambda p, t, arch: t.threadblock_shape[2] in (64, 128),
    ),
    Constraint(
        "warp_k",
        "is 0 or the block's: warps do not split K",
        lambda p, t, arch: t.warp_shape[2] in (0, t.threadblock_shape[2]),
    ),
    Constraint("warp_shape", "is a multiple of 16, the product's rows, and divides the block", _whole_warps),
    Constraint(
        "contiguous_warp",
        "along D's contiguous dimension a warp has 16, 32 or 64 elements: its lanes cover whole rows",
        _contiguous_warp,
    ),
    Constraint(
        "warps",
        "are 2, 4, 8 or 16: copies give each thread the same part of every row",
        lambda p, t, arch: t.threads in (64, 128, 256, 512),
    ),
    Constraint("stages", "are 2 to 5: one to read and one to fill at least", lambda p, t, arch: 2 <= t.stages <= 5),
    Constraint(
        "registers",
        f"accumulators, two buffers of fragments and {_OTHER_REGISTERS} more fit a thread's 255 and the SM's 65536",
        _fits_registers,
    ),
    Constraint(
        "copy_runs",
        "an operand not contiguous along K has a tile of a power of two rows, two for each thread at most: a step of "
        "the copy is then 8 columns of K or more, after which the swizzle repeats",
        _copies_whole_runs,
    ),
    SPLITS,
    CLUSTERS,
)
"""Constraints of tiles of the raw tensor-core families; each takes (problem, tile, arch)."""

OPERANDS = Constraint(
    "operands",
    "are s8 x s8, and B one weight",
    lambda p, t, arch: p.a is DType.S8 and p.b is DType.S8 and not p.experts,
)
"""Constraint of int8 families; takes (problem, tile, arch)."""

SHARED_MEMORY = "pipeline and staging of a CTA fit what the architecture gives one"
"""Reason of the families' limit of shared memory."""


def staging_bytes(problem: GemmProblem, tile: TileConfig, padding: int = 0) -> int:
    """Bytes of staged accumulators: 16 rows of each warp at a time, or all rows if CTAs of a cluster share K.

    ``padding`` words follow each row.
    """
    rows, width, _ = tile.warp_shape if problem.layout_d == "row" else (tile.warp_shape[1], tile.warp_shape[0], 0)
    return tile.threads // 32 * (16 if tile.splits == 1 else rows) * (width + padding) * 4


class RawGemm(Family[Problem, TileConfig]):
    """A family of raw tensor-core GEMMs, tiled by warps."""

    tile_type = TileConfig

    def threads(self, tile: TileConfig) -> int:
        """32 for each warp."""
        return tile.threads

    def grid(self, tile: TileConfig, n: int, sm_count: int = 1) -> Grid:
        """One CTA per tile of D and part of K in one dimension; the kernel orders them for the L2."""
        bm, bn, _ = tile.threadblock_shape
        return Grid(bm, (-(-n // bn) * tile.splits, 1, 1))


def legal_tiles(constraints: tuple[Constraint, ...], problem: GemmProblem, arch: str) -> Iterator[TileConfig]:
    """Return the tiles with power-of-two sizes that keep all constraints."""
    blocks = (16, 32, 64, 128, 256)
    for bm, bn, bk, wm, wn in product(blocks, blocks, (64, 128), (16, 32, 64, 128), (16, 32, 64, 128)):
        for stages, splits in product(range(2, 6), (1, 2, 4, 8)):
            tile = TileConfig((bm, bn, bk), (wm, wn, bk), stages, splits=splits)
            if holds(constraints, problem, tile, arch):
                yield tile


class OperandGemm(RawGemm[GemmProblem]):
    """A raw GEMM of two matrices: fills the epilogue's arguments and calls a function of ``include/qcut/gemm``.

    A column-major D is the row-major ``D^T = B^T A^T``: the kernel calls the same function with the operands and their
    sizes swapped. Where M is read on the device, CTAs that have no tile return first.

    Attributes:
        header: stem of the device code's header.
        function: name of the device code's function.
        first: text that precedes the function's other template arguments.
        shapes: menu of CTA tiles (m, n, k), warp tiles (m, n), stages and splits, from decode (16 rows) to prefill.
        plain: problem that tiles of the menu must suit.
    """

    header: str
    function: str
    first = ""
    shapes: tuple[tuple[tuple[int, int, int], tuple[int, int], int, int], ...]
    plain = GemmProblem()

    def default_tiles(self, problem: GemmProblem, arch: str) -> tuple[TileConfig, ...]:
        """Return the tiles of ``shapes`` that are legal on `arch`; tiles with K split come last."""
        tiles = (TileConfig(block, (*warp, block[2]), stages, splits=k) for block, warp, stages, k in self.shapes)
        suited = problem if problem.epilogue.col_scale == "per_unit" else self.plain
        return tuple(tile for tile in tiles if holds(self.constraints, suited, tile, arch))

    def _source(self, name: str, problem: GemmProblem, tile: TileConfig, arch: str) -> KernelSource:
        swapped = problem.layout_d == "column"
        (bm, bn, bk), (wm, wn, _) = tile.threadblock_shape, tile.warp_shape
        shape = (bn, bm, bk, wn, wm) if swapped else (bm, bn, bk, wm, wn)
        operands, call = ("B, A", "b, a, d, n, m, k, ldb, lda") if swapped else ("A, B", "a, b, d, m, n, k, lda, ldb")
        align_d = gcd(problem.alignment_n * problem.epilogue.out.bits // 8, 16)
        params = problem.params()
        counted = (
            "m = qcut::device_count(m_count, m);",
            f"if (!qcut::has_tile<Tile>({'n, m' if swapped else 'm, n'})) return;",
        )
        extra = "integers" if problem.epilogue.rescale else "halves" if problem.epilogue.halves else ""
        return kernel_source(
            name,
            arch,
            params,
            f"using Tile = qcut::Tile<{', '.join(map(str, shape))}, {tile.stages}, {tile.splits}>;",
            *operand_types(problem),
            *problem.epilogue.statements(params),
            *(counted if problem.device_m else ()),
            f"qcut::{self.function}<{self.first}Tile, {operands}, Epilogue, {align_d}, {flag(swapped)}>"
            f"({call}, ldd, args);",
            device_code=include(f"gemm/{self.header}.cuh") + (include(f"gemm/{extra}.cuh") if extra else ""),
            block=tile.threads,
            waits=True,
            smem_bytes=self.smem_bytes(problem, tile),
            cluster=tile.splits,
        )


def operand_types(problem: GemmProblem) -> tuple[str, str]:
    """C++ that names the types of A and B: element, contiguous dimension, and bytes that a copy may take at once."""

    def declared(name: str, dtype: DType, by_k: bool) -> str:
        major = "kK" if by_k else "kRows"
        bytes_at_once = copy_bytes(dtype, problem.alignment_k)
        return f"using {name} = qcut::Operand<{dtype.cpp}, qcut::Major::{major}, {bytes_at_once}>;"

    return (
        declared("A", problem.a, problem.layout_a == "row"),
        declared("B", problem.b, problem.layout_b == "column"),
    )


def copy_bytes(dtype: DType, alignment: int) -> int:
    """Largest asynchronous copy that an alignment in elements allows: 16, 8 or 4 bytes; 1 if there is none."""
    size = gcd(alignment * dtype.bits // 8, 16)
    return size if size >= 4 else 1
