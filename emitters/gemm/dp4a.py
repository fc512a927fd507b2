"""Raw int8 GEMM on ``dp4a`` for any M, N, K and layout. The kernels need no tensor cores, and only NVRTC.

``D = epilogue(A B)``. Device code: ``include/qcut/gemm/dp4a.cuh``, with the tile order of ``gemm.cuh`` and the
arithmetic of ``epilogue.cuh``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import product

from qcut.emitters.core.constraints import ARCHITECTURE, Constraint, shared_memory
from qcut.emitters.core.family import Family, Grid
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.core.text import flag, include, kernel_source
from qcut.emitters.gemm.problem import HOST_M, GemmProblem
from qcut.emitters.gemm.tensor_core import operand_types

MAX_THREADS = 1024
MAX_REGISTERS = 255
"""Per thread; a register beyond it is local memory."""
REGISTER_FILE = 65_536
"""Registers of a multiprocessor: one CTA must fit."""
MAX_ACCUMULATORS = 128
"""Largest number of sums of a thread; with more, operands no longer fit in registers."""

_OTHER_REGISTERS = 40  # addresses, predicates, and operands loaded ahead
_SPACE = {
    "bm": (64, 128, 256),
    "bn": (64, 128, 256),
    "bk": (8, 16, 32, 64),
    "wm": (32, 64, 128, 256),
    "wn": (32, 64, 128, 256),
    "wniter": (1, 2, 4, 8),
    "tm": (4, 8, 16, 32),
    "tn": (4, 8, 16, 32),
}


@dataclass(frozen=True)
class Dp4aTile:
    """How one kernel divides the problem among CTAs, warps, subtiles and lanes. Sizes in elements.

    A warp covers its tile in ``wmiter x wniter`` subtiles, one after another; in each, its 32 lanes own ``tm x tn``
    neighbouring elements of D.

    Attributes:
        bm: rows of a CTA's tile.
        bn: columns of a CTA's tile.
        bk: columns of K in one buffer of shared memory.
        wm: rows of a warp's tile.
        wn: columns of a warp's tile.
        wniter: subtiles of a warp along N.
        tm: rows of a lane in a subtile.
        tn: columns of a lane in a subtile.
    """

    bm: int
    bn: int
    bk: int
    wm: int
    wn: int
    wniter: int
    tm: int
    tn: int

    @property
    def name(self) -> str:
        """``{bm}x{bn}x{bk}_w{wm}x{wn}_i{wniter}_t{tm}x{tn}``."""
        return f"{self.bm}x{self.bn}x{self.bk}_w{self.wm}x{self.wn}_i{self.wniter}_t{self.tm}x{self.tn}"

    @property
    def threadblock_shape(self) -> tuple[int, int, int]:
        """CTA tile (m, n, k)."""
        return (self.bm, self.bn, self.bk)

    @property
    def threads(self) -> int:
        """Threads of a CTA: 32 for each warp tile."""
        return 32 * (self.bm // self.wm) * (self.bn // self.wn)

    @property
    def wmiter(self) -> int:
        """Subtiles of a warp along M, as the other sizes determine them."""
        return self.wm * self.wn // (32 * self.tm * self.tn * self.wniter)

    @property
    def accumulators(self) -> int:
        """Sums that a thread keeps."""
        return self.wm * self.wn // 32


def _registers(tile: Dp4aTile) -> int:
    """Estimate a thread's registers: sums, a word of K for each of its rows and columns, the next tile, the rest."""
    operands = tile.wmiter * tile.tm + tile.wniter * tile.tn
    staged = sum(max(4, size * tile.bk // 4 // tile.threads) for size in (tile.bm, tile.bn))
    return tile.accumulators + operands + staged + _OTHER_REGISTERS


def _ctas(tile: Dp4aTile) -> int:
    """CTAs that the registers of an SM should hold. The bound keeps the compiler from using one register too many.

    Each quarter of the SM has a quarter of the registers and gives them to its warps in steps of eight to a thread.
    """
    warps = 4 * (REGISTER_FILE // 4 // 32 // (-(-_registers(tile) // 8) * 8))
    return max(1, min(16, 32 * warps // tile.threads))


def smem_bytes(problem: GemmProblem, tile: Dp4aTile) -> int:
    """Dynamic shared memory of a CTA: two buffers of both operands, padded if they are contiguous along K."""
    along_k = (problem.layout_a == "row", problem.layout_b == "column")
    pitches = (size + 4 * (k and tile.bk >= 32) for size, k in zip((tile.bm, tile.bn), along_k, strict=True))
    return 2 * tile.bk * sum(pitches)


CONSTRAINTS = (
    Constraint(
        "operands",
        "are s8 x s8, which dp4a multiplies, and B one weight",
        lambda p, t, arch: p.a is DType.S8 and p.b is DType.S8 and not p.experts,
    ),
    Constraint("halves", "are the tensor cores': a row of A is a row of D", lambda p, t, arch: not p.epilogue.halves),
    Constraint("rescale", "is the tensor cores' too", lambda p, t, arch: not p.epilogue.rescale),
    HOST_M,
    Constraint(
        "alignments",
        "are at least 1",
        lambda p, t, arch: p.alignment_k >= 1 and p.alignment_n >= 1,
    ),
    ARCHITECTURE,
    Constraint(
        "power_of_two",
        "all sizes are: threads find their places by shifts, and copies come out even",
        lambda p, t, arch: all(size > 0 and size & (size - 1) == 0 for size in astuple(t)),
    ),
    Constraint(
        "block_k",
        "is 8 to 64: a copy moves two words of four k at least, and the loop over a tile is unrolled",
        lambda p, t, arch: 8 <= t.bk <= 64,
    ),
    Constraint(
        "thread_tile",
        "TM and TN are 4 or more: shared memory is read four words at a time",
        lambda p, t, arch: t.tm >= 4 and t.tn >= 4,
    ),
    Constraint(
        "warp_m",
        "WM divides BM: a CTA holds whole warps",
        lambda p, t, arch: t.bm % t.wm == 0,
    ),
    Constraint(
        "warp_n",
        "WN divides BN: a CTA holds whole warps",
        lambda p, t, arch: t.bn % t.wn == 0,
    ),
    Constraint(
        "threads",
        f"a CTA, 32 (BM / WM) (BN / WN), has at most {MAX_THREADS} threads",
        lambda p, t, arch: t.threads <= MAX_THREADS,
    ),
    Constraint(
        "wniter",
        "WNITER TN divides WN: lanes share a subtile's columns evenly",
        lambda p, t, arch: t.wn % (t.wniter * t.tn) == 0,
    ),
    Constraint(
        "wmiter",
        "32 TM TN WNITER divides WM WN: WMITER, the subtiles along M, is a whole number from 1 up",
        lambda p, t, arch: t.wm * t.wn % (32 * t.tm * t.tn * t.wniter) == 0,
    ),
    Constraint(
        "lanes",
        "WMITER TM divides WM: lanes share a subtile's rows evenly",
        lambda p, t, arch: t.wm % (t.wmiter * t.tm) == 0,
    ),
    Constraint(
        "accumulators",
        f"WM WN / 32, the sums of a thread, are at most {MAX_ACCUMULATORS}: they stay in registers",
        lambda p, t, arch: t.accumulators <= MAX_ACCUMULATORS,
    ),
    Constraint(
        "registers",
        f"sums, operands, the next tile's words and {_OTHER_REGISTERS} more fit a thread's {MAX_REGISTERS} "
        f"and the SM's {REGISTER_FILE}",
        lambda p, t, arch: _registers(t) <= min(MAX_REGISTERS, REGISTER_FILE // t.threads),
    ),
    shared_memory("two buffers of A and B fit what the architecture gives one CTA", smem_bytes),
)
"""Constraints of the family; each takes (problem, tile, arch)."""


class Int8Dp4a(Family[GemmProblem, Dp4aTile]):
    """Int8 products on ``dp4a``.

    Arguments are ``problem.params()`` in order; m, n, k >= 1. A leading dimension is the distance between contiguous
    runs (rows of a row-major operand, columns of another one) in elements. Where ``problem.alignment_k`` is a multiple
    of 4, 8 or 16, so are the addresses, leading dimensions and lengths of the runs of A and B, which are read in pieces
    of as many bytes (4 where they run across K); otherwise byte by byte, from anywhere. Where ``problem.alignment_n``
    is a multiple of 4 or 8 elements, so are D's, and four or eight neighbours are stored at once. The residual has D's
    layout and leading dimension.

    Exactness: bitwise equal to ``qcut.numerics.int8.gemm_s8_ref`` for activations none and relu; the others differ by
    the ulps of CUDA's erff, tanhf and expf. Independent of the grid, the tile and the other rows.

    Source: PTX ISA, ``dp4a``, ``prmt``.
    """

    name = "int8_dp4a"
    tile_type = Dp4aTile
    constraints = CONSTRAINTS
    smem_bytes = staticmethod(smem_bytes)

    def threads(self, tile: Dp4aTile) -> int:
        """32 for each warp."""
        return tile.threads

    def grid(self, tile: Dp4aTile, n: int, sm_count: int = 1) -> Grid:
        """One CTA per tile of D in one dimension; the kernel orders them for the L2."""
        return Grid(tile.bm, (-(-n // tile.bn), 1, 1))

    def default_tiles(self, problem: GemmProblem, arch: str) -> tuple[Dp4aTile, ...]:
        """A menu from few rows to many, legal on every architecture."""
        return (
            Dp4aTile(16, 64, 64, 16, 32, 1, 4, 4),
            Dp4aTile(32, 64, 64, 32, 16, 1, 4, 4),
            Dp4aTile(64, 64, 32, 32, 32, 1, 8, 4),
            Dp4aTile(64, 128, 32, 64, 32, 1, 8, 8),
            Dp4aTile(128, 128, 32, 64, 32, 1, 8, 8),
            Dp4aTile(128, 128, 32, 64, 64, 2, 8, 8),
        )

    def search_space(self, problem: GemmProblem, arch: str) -> Iterator[Dp4aTile]:
        """Every legal tile that a tuner may try, in a fixed order."""
        for sizes in product(*_SPACE.values()):
            tile = Dp4aTile(**dict(zip(_SPACE, sizes, strict=True)))
            if all(constraint.holds(problem, tile, arch) for constraint in CONSTRAINTS):
                yield tile

    def _source(self, name: str, problem: GemmProblem, tile: Dp4aTile, arch: str) -> KernelSource:
        align_d = next((size for size in (8, 4) if problem.alignment_n % size == 0), 1)
        params = problem.params()
        return kernel_source(
            name,
            arch,
            params,
            f"using Tile = qcut::Dp4aTile<{', '.join(map(str, astuple(tile)))}>;",
            *operand_types(problem),
            *problem.epilogue.statements(params),
            f"qcut::dp4a_gemm<Tile, A, B, Epilogue, {align_d}, {flag(problem.layout_d == 'column')}>(\n"
            "      a, b, d, m, n, k, lda, ldb, ldd, args);",
            device_code=include("gemm/dp4a.cuh"),
            block=tile.threads,
            ctas_per_sm=_ctas(tile),
            waits=True,
            smem_bytes=smem_bytes(problem, tile),
        )


INT8_DP4A = Int8Dp4a()
