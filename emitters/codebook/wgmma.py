"""Prefill with codebook weights on sm_90a: many tokens, weights decoded in registers, products by ``wgmma``.

``D = act((sum_k x[m, k] * norm[n, slot(k)] * book[idx[n, k]]) * col_scale[n] + bias[n]) (+ residual)``. Device code:
``include/qcut/codebook/wgmma.cuh``. A CTA computes 128 channels x ``tokens`` tokens at a time and goes on to the
next tile. The CTAs of a cluster share tokens by multicast, or divide K. The kernels need only NVRTC.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from qcut.emitters.codebook.problem import ROTATED_BEFORE, CodebookProblem
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.constraints import Constraint, holds
from qcut.emitters.core.experts import EXPERT_ROWS
from qcut.emitters.core.family import Family, Grid
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.core.text import flag, include, kernel_source

THREADS = 384
"""Two warpgroups that multiply and one that fetches."""
ROWS = 128
"""Channels of a CTA's tile."""
TOKENS = (64, 96, 128, 160, 192, 256)
"""Tokens of a CTA's tile."""
PAIR_TABLE_BYTES = 65_536
SMEM_BYTES = architecture("sm_90a").smem_bytes
"""Shared memory that a CTA may have."""
_STAGED_BYTES = 16 * 4 * (64 + 8)  # 16 tokens of 64 channels, padded: PaddedStage<64> of epilogue.cuh
_SHAPES = (
    (256, 1, 1, "", "tf"),
    (256, 2, 1, "", "t"),
    (192, 1, 1, "f", "t"),
    (160, 2, 1, None, "t"),
    (128, 1, 1, "", "t"),
    (128, 1, 2, "", None),
    (256, 1, 2, "", "tf"),
)
"""Tokens, cluster and splits of the menu's tiles: the fastest of some shape on an H200.

Then the tile's letters (``t`` with pairs, ``f`` fine) for int8 tokens and for 16 bits; None: no such tile.
"""
_ROUTES = ((96, 1, 1, None, "tf"),)
"""More of them, for routes to experts; for tokens others are faster."""
_BUFFERS = (4, 2, 1)
_STAGES = (4, 8)
"""Fewer stages than the first give buffers up; more than the last gain nothing."""


@dataclass(frozen=True)
class CodebookWgmmaTile:
    """How one kernel divides the problem.

    Attributes:
        tokens: tokens of a CTA's tile, one of `TOKENS`.
        stages: units of K in shared memory.
        cluster: CTAs along N that share their tokens, 1 or 2.
        splits: CTAs, one cluster, that share K: 1, 2, 4 or 8.
        lead: units that one warpgroup is ahead of the other, which hides the writing of D; less than ``stages``.
        pairs: whether weights are decoded by a table of pairs in shared memory: 16-bit ones, and a codebook of pairs.
        fine: whether each product follows the decoding of its weights; else half a unit is decoded, then multiplied.
    """

    tokens: int = 256
    stages: int = 3
    cluster: int = 2
    splits: int = 1
    lead: int = 1
    pairs: bool = False
    fine: bool = False

    @property
    def name(self) -> str:
        """``{rows}x{tokens}_c{cluster}_s{stages}_l{lead}``, ``_k{splits}`` if split, ``_t`` with pairs, ``_f`` fine."""
        splits = f"_k{self.splits}" if self.splits > 1 else ""
        return (
            f"{ROWS}x{self.tokens}_c{self.cluster}_s{self.stages}_l{self.lead}{splits}"
            + "_t" * self.pairs
            + "_f" * self.fine
        )


class Stage(NamedTuple):
    """What shared memory holds of a unit of K.

    Attributes:
        element_bytes: of an element of a token.
        supply_bytes: of what warps supply for the rows: 16 int8 values of each slot, or int8 weights; 0 for none.
        routed: whether tokens are routes.
    """

    element_bytes: int
    supply_bytes: int = 0
    routed: bool = False

    def bytes(self, tokens: int) -> int:
        """Bytes of a stage, without its barriers."""
        return 128 * self.element_bytes * tokens + self.supply_bytes

    def vector_bytes(self, tokens: int, splits: int) -> int:
        """Bytes of two tiles' routes or scales of int8 tokens, and of the scales of routes, for both warpgroups."""
        scaled = self.element_bytes == 1
        if splits > 1:
            return 0
        return 2 * 4 * tokens * (2 * (self.routed or scaled) + (self.routed and scaled))

    @property
    def barrier_bytes(self) -> int:
        """Barriers of a stage: filled, read, and supplied."""
        return 24 if self.supply_bytes else 16


def stage_of(problem: CodebookProblem) -> Stage:
    """The stage of a product with codebook weights."""
    has_tables = problem.x is DType.S8 and not problem.pairs
    return Stage(problem.x.bits // 8, ROWS * 16 * problem.slots if has_tables else 0, problem.experts)


def buffers(stage: Stage, tile: CodebookWgmmaTile) -> int:
    """Staging buffers of sixteen tokens for each warpgroup: the largest of `_BUFFERS` that fits, at least one."""
    if tile.splits > 1:
        return 0
    free = SMEM_BYTES - _operand_bytes(stage, tile)
    return next((count for count in _BUFFERS if 2 * count * _STAGED_BYTES <= free), 1)


def smem_bytes(stage: Stage, tile: CodebookWgmmaTile) -> int:
    """Dynamic shared memory of a CTA."""
    return _operand_bytes(stage, tile) + 2 * buffers(stage, tile) * _STAGED_BYTES


def _operand_bytes(stage: Stage, tile: CodebookWgmmaTile) -> int:
    """Table and stages, or the sums that take their place, the barriers of each stage, and vectors of rows."""
    sums = 2 * (tile.tokens // 16) * _STAGED_BYTES if tile.splits > 1 else 0
    operands = PAIR_TABLE_BYTES * tile.pairs + tile.stages * stage.bytes(tile.tokens)
    return max(operands, sums) + stage.barrier_bytes * tile.stages + stage.vector_bytes(tile.tokens, tile.splits)


TILE_CONSTRAINTS = (
    Constraint("architecture", "is sm_90a: wgmma and its clusters", lambda p, t, arch: arch == "sm_90a"),
    Constraint("alignment_n", "is at least 1", lambda p, t, arch: p.alignment_n >= 1),
    Constraint("tokens", f"are one of {TOKENS}", lambda p, t, arch: t.tokens in TOKENS),
    Constraint("cluster", "is 1 or 2", lambda p, t, arch: t.cluster in (1, 2)),
    Constraint("splits", "are 1, 2, 4 or 8: a portable cluster", lambda p, t, arch: t.splits in (1, 2, 4, 8)),
    Constraint(
        "one_cluster",
        "shares tokens or K: cluster or splits are 1",
        lambda p, t, arch: t.cluster == 1 or t.splits == 1,
    ),
    Constraint("stages", "are at least 2: one to read and one to fill", lambda p, t, arch: t.stages >= 2),
    Constraint(
        "lead",
        "is at least 1 and less than the stages, which both warpgroups must have read",
        lambda p, t, arch: 1 <= t.lead < t.stages,
    ),
)
"""Constraints of a tile's sizes; each takes (problem, tile, arch)."""

CONSTRAINTS = (
    *TILE_CONSTRAINTS,
    ROTATED_BEFORE,
    Constraint(
        "pairs",
        "are of 16-bit values, or of a codebook of pairs, which needs them",
        lambda p, t, arch: t.pairs or not p.pairs if p.pairs or p.x is not DType.S8 else not t.pairs,
    ),
    Constraint(
        "experts",
        "divide no K, since splits write neighbouring rows, and have a row each",
        lambda p, t, arch: not p.experts or (t.splits == 1 and not p.summed),
    ),
    Constraint(
        "registers",
        "hold 4 norms a unit, or 2 with offsets, next to up to 128 tokens of 16 bits, not 256",
        lambda p, t, arch: p.x is DType.S8 or p.slots * (1 + p.offsets) < 4 or t.tokens < 256,
    ),
    Constraint(
        "shared_memory",
        f"stages and staging fit {SMEM_BYTES} bytes",
        lambda p, t, arch: smem_bytes(stage_of(p), t) <= SMEM_BYTES,
    ),
)
"""Constraints of the family; each takes (problem, tile, arch)."""


def deepest(
    stage: Stage, tokens: int, cluster: int = 1, splits: int = 1, pairs: bool = False, fine: bool = False
) -> CodebookWgmmaTile:
    """The tile with as many stages as fit."""
    enough, most = _STAGES
    stages = 0
    for count in (0,) if splits > 1 else _BUFFERS:
        free = SMEM_BYTES - 2 * count * _STAGED_BYTES - PAIR_TABLE_BYTES * pairs - stage.vector_bytes(tokens, splits)
        stages = min(free // (stage.bytes(tokens) + stage.barrier_bytes), most)
        if stages >= enough:
            break
    return CodebookWgmmaTile(tokens, stages, cluster, splits, max(1, stages // 2), pairs, fine)


class CodebookWgmma(Family[CodebookProblem, CodebookWgmmaTile]):
    """Many tokens and codebook weights on ``wgmma``, for prefill.

    Arguments are ``problem.params()`` in order; m, n, units_k >= 1 and 16-byte alignment of x, units and norms.
    `qcut.numerics.codebook.layout` describes the layout in memory. The kernel is launched on `grid`. D is stored in
    pieces of up to 16 bytes that ``problem.alignment_n`` allows; the residual has D's leading dimension. Weights,
    norms, fold, col_scale and bias may be read before the previous kernel's end (programmatic dependent launch); x,
    row_scale and the residual are read after it.

    Exactness: s8 is bitwise equal to ``qcut.numerics.int8.gemm_s8_ref`` on
    ``qcut.numerics.codebook.layout.int8_weight`` for activations none and relu. For 16-bit tokens ``norm * value`` is
    rounded to the tokens' type (bf16: the norm, too), products are exact, and the tensor core adds them in float32 in
    an order fixed by K and the splits. A token's result does not depend on the other tokens; the same inputs give the
    same bits.

    Source: PTX ISA, ``wgmma.mma_async``, ``cp.async.bulk``, ``mbarrier``, ``barrier.cluster``.
    """

    name = "codebook_wgmma"
    tile_type = CodebookWgmmaTile
    constraints = CONSTRAINTS
    smem_bytes = staticmethod(lambda problem, tile: smem_bytes(stage_of(problem), tile))

    def threads(self, tile: CodebookWgmmaTile) -> int:
        """Threads of three warpgroups."""
        return THREADS

    def grid(self, tile: CodebookWgmmaTile, n: int, sm_count: int = 1) -> Grid:
        """No more CTAs than the GPU has SMs, each going from tile to tile; with splits, one for each part."""
        columns = -(-n // (ROWS * tile.cluster))
        if tile.splits > 1:
            return Grid(tile.tokens, (columns * tile.splits, 1, 1))
        return Grid(tile.tokens, (columns * tile.cluster, 1, 1), most=max(1, sm_count // tile.cluster) * tile.cluster)

    def default_tiles(self, problem: CodebookProblem, arch: str) -> tuple[CodebookWgmmaTile, ...]:
        """Return tiles of each width of tokens, for one CTA, for two, and with K split, with as many stages as fit."""
        tiles = (
            deepest(stage_of(problem), tokens, cluster, splits, "t" in letters or problem.pairs, "f" in letters)
            for tokens, cluster, splits, int8, halves in (*_SHAPES, *_ROUTES * problem.experts)
            if (letters := int8 if problem.x is DType.S8 else halves) is not None
        )
        return tuple(tile for tile in tiles if holds(CONSTRAINTS, problem, tile, "sm_90a"))

    def _source(self, name: str, problem: CodebookProblem, tile: CodebookWgmmaTile, arch: str) -> KernelSource:
        weight = f"{problem.bits}, {problem.slots}, {flag(problem.offsets)}"
        shape = (tile.tokens, tile.stages, tile.lead, tile.cluster, tile.splits)
        align_d = gcd(problem.alignment_n * problem.epilogue.out.bits // 8, 16)
        params, rows = problem.params(), f", {EXPERT_ROWS}" if problem.experts else ""
        return kernel_source(
            name,
            arch,
            params,
            f"using Tile = qcut::WgmmaTile<{problem.x.cpp}, {weight}, {', '.join(map(str, shape))}, "
            f"{buffers(stage_of(problem), tile)}, {flag(tile.pairs)}, {flag(tile.fine)}>;",
            *problem.epilogue.statements(params),
            problem.book,
            f"qcut::codebook_wgmma<Tile, Epilogue, {align_d}>(x, units, norms, {problem.fold}, d, m, n, "
            f"units_k, ldd, book, args{rows});",
            device_code=include("codebook/wgmma.cuh"),
            block=THREADS,
            ctas_per_sm=1,
            waits=True,
            smem_bytes=self.smem_bytes(problem, tile),
            cluster=tile.cluster * tile.splits,
        )


CODEBOOK_WGMMA = CodebookWgmma()
