"""Products of int8 tokens with codebook weights of one norm a row, on sm_90a: CUTLASS's main loop of mixed types.

``D = act(acc * row_scale[m] * col_scale[n] + bias[n])``, acc the int32 product with weights ``q[idx[n, k]]``. A row
with one norm has the same 16 int8 values as every other, so that they are an argument of the kernel, and three ``prmt``
decode four weights. Weights and tokens lie in memory as for all other kernels; how CUTLASS reads them:
``include/qcut/cutlass/codebook_operands.cuh``.

The kernel computes the transpose of D, as `qcut.emitters.gemm.cutlass.w8a16`'s does.
"""

from __future__ import annotations

from qcut.emitters.codebook.problem import ROTATED_BEFORE, CodebookProblem
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.constraints import ARCHITECTURE, Constraint, shared_memory
from qcut.emitters.core.family import Family
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.gemm.cutlass.text import Operands, emit, sm90_defines
from qcut.emitters.gemm.cutlass.tiles import tile
from qcut.emitters.gemm.cutlass.w8a16 import TRANSPOSED_TILE, swapped
from qcut.emitters.gemm.problem import TileConfig

MENU: tuple[TileConfig, ...] = (tile("cooperative", "256x128x128 c1x2"),)
"""Tiles to choose from. Few, because each tile is built on first use."""

CONSTRAINTS = (
    ARCHITECTURE,
    Constraint("tokens", "are s8", lambda p, t, arch: p.x is DType.S8),
    Constraint("weights", "are 4-bit indices with one norm a row", lambda p, t, arch: p.bits == 4 and p.row_norm),
    ROTATED_BEFORE,
    Constraint(
        "alignment_n",
        "rows of D are multiples of 16 bytes",
        lambda p, t, arch: p.alignment_n * p.epilogue.out.bits >= 128,
    ),
    Constraint("residual", "is None", lambda p, t, arch: not p.epilogue.residual),
    *TRANSPOSED_TILE,
    Constraint("k", "is 128 a stage: a unit", lambda p, t, arch: t.threadblock_shape[2] == 128),
    shared_memory(
        "two stages of operands", lambda p, t: 2 * 128 * (t.threadblock_shape[0] + t.threadblock_shape[1] // 2)
    ),
)
"""Constraints of the family; each takes (problem, tile, arch)."""


class CodebookCutlass(Family[CodebookProblem, TileConfig]):
    """Int8 tokens and codebook weights in CUTLASS's kernels.

    Arguments are ``problem.params()`` and `qcut.emitters.gemm.cutlass.text.LAUNCH_PARAMS`; norms and fold are not
    read. x, units and D start at multiples of 16 bytes.

    Exactness: bitwise equal to ``qcut.numerics.int8.gemm_s8_ref`` on ``qcut.numerics.codebook.layout.int8_weight`` for
    the activations none and relu, where all rows have the same int8 values; a zero may have either sign.

    Raises:
        EmitError: see `validate`, or nvidia-cutlass cannot be imported.
    """

    name = "codebook_cutlass"
    tile_type = TileConfig
    constraints = CONSTRAINTS

    def default_tiles(self, problem: CodebookProblem, arch: str) -> tuple[TileConfig, ...]:
        """Return the menu of an architecture; `validate` tells which tiles suit a problem."""
        return MENU if architecture(arch).wgmma else ()

    def _source(self, name: str, problem: CodebookProblem, tile: TileConfig, arch: str) -> KernelSource:
        operands = Operands("u4", "s8", DType.S32, transposed=True, units=True)
        inner = swapped(tile)
        return emit(name, operands, problem.epilogue, inner, arch, problem.params(), defines=sm90_defines(inner))


CODEBOOK_CUTLASS = CodebookCutlass()
