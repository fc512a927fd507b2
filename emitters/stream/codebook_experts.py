"""Products of routes to experts with codebook weights, in tiles of up to 32 routes of one expert: decode.

Device code: ``include/qcut/experts/codebook.cuh``.
"""

from __future__ import annotations

from qcut.emitters.codebook.problem import ROTATED_BEFORE, CodebookProblem
from qcut.emitters.core.constraints import Constraint
from qcut.emitters.core.experts import EXPERT_ROWS
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.core.text import flag
from qcut.emitters.stream import experts
from qcut.emitters.stream.codebook import decode_source, registers, table_bytes
from qcut.emitters.stream.experts import ExpertsFamily, ExpertsTile, tile_constraints

_MORE_REGISTERS, _MORE_REGISTERS_INT8, _MORE_TOKENS = 36, 48, 24
"""Of a thread, beyond those of ``codebook_stream``: where the next rows, tokens and routes lie; and of more tokens, for
each eight.
"""


def smem_bytes(problem: CodebookProblem, tile: ExpertsTile) -> int:
    """Dynamic shared memory of a CTA."""
    return experts.smem_bytes(problem.x.bits // 8, table_bytes(problem), tile)


def _registers(problem: CodebookProblem, tile: ExpertsTile) -> int:
    more = _MORE_REGISTERS_INT8 if problem.x is DType.S8 else _MORE_REGISTERS
    return registers(problem, tile) + more + _MORE_TOKENS * (-(-tile.tokens // 8) - 1)


CONSTRAINTS = (
    ROTATED_BEFORE,
    Constraint("experts", "have a row for each route", lambda p, t, arch: p.experts and not p.summed),
    *tile_constraints(_registers, smem_bytes),
)
"""Constraints of the family; each takes (problem, tile, arch)."""


class CodebookExperts(ExpertsFamily[CodebookProblem]):
    """Routes to experts in tiles, and codebook weights.

    Arguments are ``problem.params()`` in order: n >= 1, units_k up to ``units * warps * splits``; m counts the places
    of all tiles, ``tokens`` each. A route's row of D is written, and no other, element by element, with any
    ``alignment_n``. With ``early_routes`` all but ``x`` and ``row_scale`` is read before the last kernel's end.

    Exactness: that of `qcut.emitters.stream.codebook.CodebookStream`; neither the order of routes nor the number of
    tiles changes a result.

    Source: PTX ISA, ``mma.sync``, ``cp.async``, ``ldmatrix``, ``barrier.cluster``.
    """

    name = "codebook_experts"
    constraints = CONSTRAINTS
    smem_bytes = staticmethod(smem_bytes)

    def _source(self, name: str, problem: CodebookProblem, tile: ExpertsTile, arch: str) -> KernelSource:
        table = flag(problem.pairs or problem.x is not DType.S8)
        return decode_source(
            name,
            problem,
            arch,
            header="experts/codebook",
            function="codebook_experts",
            tile=f"qcut::StreamTile<{tile.sizes}>",
            shared="qcut::ExpertShared",
            shared_last=f", {table}",
            last=f", {flag(problem.early_routes)}",
            rows=f", {EXPERT_ROWS}",
            block=32 * tile.warps,
            smem_bytes=smem_bytes(problem, tile),
            cluster=tile.splits,
            ctas_per_sm=tile.ctas,
        )


CODEBOOK_EXPERTS = CodebookExperts()
