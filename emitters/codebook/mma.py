"""Tokens x codebook weights on ``mma.sync``: for every architecture, any number of tokens.

``D = epilogue(x W^T)`` of `qcut.emitters.codebook.problem.CodebookProblem`. The family serves GPUs without ``wgmma``
and prefill of any length; decode has its own kernels. Device code: ``include/qcut/codebook/mma.cuh``.
"""

from __future__ import annotations

from math import gcd

from qcut.emitters.codebook.problem import DENSE_TABLE_BYTES, ONE_WEIGHT, ROTATED_BEFORE, CodebookProblem
from qcut.emitters.core.constraints import ARCHITECTURE, Constraint, holds, shared_memory
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.core.text import flag, include, kernel_source
from qcut.emitters.gemm.problem import TileConfig
from qcut.emitters.gemm.tensor_core import SHARED_MEMORY, RawGemm

_UNIT_COLUMNS = 128
_OTHER_REGISTERS = 48
"""Registers of a thread for the codebook, addresses, counters and bounds."""
_NEEDS_MORE = ("sm_100", "sm_120")
"""Architectures on which decoding needs more registers: without them, the compiler spills."""


def smem_bytes(problem: CodebookProblem, tile: TileConfig) -> int:
    """Dynamic shared memory of a CTA: a table of pairs, and the pipeline, or the epilogue's staging if it is larger."""
    bm, bn, _ = tile.threadblock_shape
    unit = 16 * _UNIT_COLUMNS * problem.bits // 8 + problem.norm_bytes
    pipeline = tile.stages * (bm * _UNIT_COLUMNS * problem.x.bits // 8 + bn // 16 * unit)
    table = DENSE_TABLE_BYTES * problem.pairs
    return table + max(pipeline, tile.threads // 32 * 16 * tile.warp_shape[1] * 4)


def registers(problem: CodebookProblem, tile: TileConfig, arch: str) -> int:
    """Estimate a thread's registers: accumulators, tokens, indices of its row tiles, and the rest."""
    wm, wn, _ = tile.warp_shape
    decoder = 2 * problem.bits + (10 if problem.x is DType.S8 else 1 + problem.offsets)
    more = 34 if arch in _NEEDS_MORE else 0
    return wm * wn // 32 + wm // 4 + wn // 16 * decoder + _OTHER_REGISTERS + more


def _whole_warps(problem: CodebookProblem, tile: TileConfig, arch: str) -> bool:
    pairs = zip(tile.threadblock_shape[:2], tile.warp_shape[:2], strict=True)
    return all(warp > 0 and warp % 16 == 0 and block % warp == 0 for block, warp in pairs)


CONSTRAINTS = (
    ARCHITECTURE,
    Constraint("alignment_n", "is at least 1", lambda p, t, arch: p.alignment_n >= 1),
    ROTATED_BEFORE,
    ONE_WEIGHT,
    Constraint("schedule", "is multistage", lambda p, t, arch: t.schedule == "multistage"),
    Constraint("cluster_shape", "is (1, 1): CTAs share no loads", lambda p, t, arch: t.cluster_shape == (1, 1)),
    Constraint("epilogue_tile", "is (0, 0): a warp writes its own tile", lambda p, t, arch: t.epilogue_tile == (0, 0)),
    Constraint("one_cta", "sums all of K: splits are 1", lambda p, t, arch: t.splits == 1),
    Constraint("block_k", "is 128: a unit", lambda p, t, arch: t.threadblock_shape[2] == _UNIT_COLUMNS),
    Constraint("warp_k", "is 0 or 128: warps do not split K", lambda p, t, arch: t.warp_shape[2] in (0, _UNIT_COLUMNS)),
    Constraint("warp_shape", "is a multiple of 16, rows of a unit, and divides the block", _whole_warps),
    Constraint(
        "contiguous_warp",
        "along N a warp has 16, 32 or 64 elements: its lanes write whole rows",
        lambda p, t, arch: t.warp_shape[1] in (16, 32, 64),
    ),
    Constraint("warps", "are 1 to 16", lambda p, t, arch: 32 <= t.threads <= 512),
    Constraint("stages", "are 2 to 6: one to read and one to fill at least", lambda p, t, arch: 2 <= t.stages <= 6),
    Constraint(
        "registers",
        f"accumulators, tokens, weights and {_OTHER_REGISTERS} more fit a thread's 255 and the SM's 65536",
        lambda p, t, arch: registers(p, t, arch) <= min(255, 65_536 // t.threads),
    ),
    shared_memory(SHARED_MEMORY, smem_bytes),
)
"""Constraints of the family; each takes (problem, tile, arch)."""


_MENU = (
    ((16, 64), (16, 16), 6),
    ((32, 64), (32, 16), 4),
    ((64, 64), (64, 16), 4),
    ((64, 128), (64, 32), 3),
    ((128, 64), (64, 32), 2),
    ((128, 128), (64, 32), 2),
    ((128, 128), (128, 32), 2),
    ((128, 128), (64, 32), 3),
    ((128, 128), (128, 32), 3),
    ((256, 128), (128, 32), 2),
)
"""Tall warps: each decodes the weights it multiplies."""


class CodebookMma(RawGemm[CodebookProblem]):
    """Tokens and codebook weights on ``mma.sync``.

    Arguments are ``problem.params()`` in order; m, n, units_k >= 1. `qcut.emitters.codebook.problem` describes the
    arguments. Weights, norms and ``fold`` are read before the kernel waits for its predecessor.

    Exactness: int8 tokens: bitwise equal to ``qcut.numerics.int8.gemm_s8_ref`` on
    ``qcut.numerics.codebook.layout.int8_weight`` for activations none and relu. 16-bit tokens: value times norm is
    rounded once to the tokens' type (with bfloat16 the norm, too); their products are exact in float32 and added in an
    order fixed by K, with error at most ``K * 2**-23 * sum_k |x * w|``. A token's result does not depend on the others;
    the same inputs give the same bits.

    Source: PTX ISA, ``mma.sync.m16n8k16``, ``mma.sync.m16n8k32``, ``ldmatrix``, ``cp.async``, ``prmt``.
    """

    name = "codebook_mma"
    constraints = CONSTRAINTS
    smem_bytes = staticmethod(smem_bytes)

    def default_tiles(self, problem: CodebookProblem, arch: str) -> tuple[TileConfig, ...]:
        """Return tiles from few tokens to long prompts, all legal for the problem on `arch`."""
        tiles = (TileConfig((*block, _UNIT_COLUMNS), (*warp, _UNIT_COLUMNS), stages) for block, warp, stages in _MENU)
        return tuple(t for t in tiles if holds(CONSTRAINTS, problem, t, arch))

    def _source(self, name: str, problem: CodebookProblem, tile: TileConfig, arch: str) -> KernelSource:
        (bm, bn, bk), (wm, wn, _) = tile.threadblock_shape, tile.warp_shape
        align_d = gcd(problem.alignment_n * problem.epilogue.out.bits // 8, 16)
        params = problem.params()
        weight = f"{problem.bits}, {problem.slots}, {flag(problem.offsets)}"
        return kernel_source(
            name,
            arch,
            params,
            f"using Tile = qcut::Tile<{bm}, {bn}, {bk}, {wm}, {wn}, {tile.stages}, 1>;",
            *problem.epilogue.statements(params),
            problem.book,
            f"qcut::codebook_mma<Tile, {problem.x.cpp}, {weight}, Epilogue, {align_d}>"
            f"(x, units, norms, {problem.fold}, d, m, n, units_k, ldd, book, args);",
            device_code=include("codebook/mma.cuh"),
            block=tile.threads,
            # Left to itself, such a compiler spills in order to fit a second CTA.
            ctas_per_sm=1 if arch in _NEEDS_MORE else None,
            waits=True,
            smem_bytes=smem_bytes(problem, tile),
        )


CODEBOOK_MMA = CodebookMma()
