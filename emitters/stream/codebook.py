"""Products of up to 32 rotated tokens with codebook weights on ``mma.sync``: decode, bound by the weights' traffic.

Device code: ``include/qcut/stream/codebook.cuh``. Weights are the tensor core's first operand, tokens the second. Each
warp keeps its tokens in registers; the warps of a cluster's CTAs divide K. From about 16 tokens on,
`qcut.emitters.stream.codebook_wgmma` is faster for large products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.codebook.rotate import group_factor
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.constraints import ARCHITECTURE, CLUSTERS, SPLITS, Constraint, shared_memory
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.core.text import flag, include, kernel_source
from qcut.emitters.stream.family import ROW_TILE, StreamFamily

PAIR_TABLE_BYTES = 65_536
MAX_ROW_TILES = 64


@dataclass(frozen=True)
class CodebookStreamTile:
    """How a CTA and its cluster share a product.

    Attributes:
        tokens: the most tokens of a launch: 1, 2, 4, 8, 16, 24 or 32.
        row_tiles: tiles of 16 rows of a CTA.
        warps: warps of a CTA, which share K.
        units: units of 128 columns of every row tile that a warp multiplies.
        splits: CTAs of a cluster, which share K: 1, 2, 4 or 8.
        prefetch: row tiles of units that a warp has in flight.
        alone: whether a CTA has its multiprocessor to itself. Otherwise the early CTAs of the next kernel would share
            busy multiprocessors instead of taking idle ones.
        mirrored: whether int8 products take two passes, of negative and of positive values, with the same results; the
            codebook must be mirrored.
    """

    tokens: int
    row_tiles: int
    warps: int
    units: int = 1
    splits: int = 1
    prefetch: int = 1
    alone: bool = False
    mirrored: bool = False

    @property
    def name(self) -> str:
        """``t{tokens}_r{row_tiles}_w{warps}_u{units}_k{splits}_p{prefetch}``, ``_a`` if alone, ``_m`` if mirrored."""
        sizes = f"t{self.tokens}_r{self.row_tiles}_w{self.warps}_u{self.units}_k{self.splits}_p{self.prefetch}"
        return sizes + "_a" * self.alone + "_m" * self.mirrored

    @property
    def capacity(self) -> int:
        """Units along K that a cluster takes at most."""
        return self.units * self.warps * self.splits


def registers(problem: CodebookProblem, tile: Any) -> int:
    """Estimate a thread's registers: tokens, weights in flight, accumulators, decoded operands, and the rest."""
    token_tiles = -(-tile.tokens // 8)
    int8 = problem.x is DType.S8
    tokens = tile.units * token_tiles * (8 if int8 else 16)
    slots = problem.slots * (1 + problem.offsets)
    weights = tile.prefetch * tile.units * (2 * problem.bits + slots + (2 if int8 else 0))
    sums = token_tiles * (4 if int8 else 12)
    if problem.offsets and problem.slots in (2, 4):
        # Sums of tokens by slot; of four slots and several units the compiler keeps more than these.
        sums += 2 * tile.units * problem.slots * token_tiles + 20 * (problem.slots == 4 and tile.units > 1)
    elif problem.offsets and problem.slots == 8:
        sums += 2 * tile.units
    return tokens + weights + sums + (28 + 8 * (tile.units > 1) if int8 else 20)


def register_limit(tile: CodebookStreamTile) -> int:
    """Registers that the register file has for a thread of the CTA, in steps of 8."""
    return min(255, 65_536 // (32 * tile.warps) // 8 * 8)


def smem_bytes(problem: CodebookProblem, tile: CodebookStreamTile) -> int:
    """Dynamic shared memory of a CTA. The kernel's text asserts that the device code's own count is the same."""
    blocks, rows = problem.x.bits // 8, ROW_TILE * tile.row_tiles
    staged = tile.units * blocks * -(-tile.tokens // 8) * 128 * min(tile.tokens, 8)
    sums = 4 * tile.tokens * (rows + 4)
    operands = table_bytes(problem) + tile.warps * max(staged, sums)
    if problem.summed:
        return operands + tile.warps * (8 * rows + 4) + tile.warps * tile.splits * (8 + 4 * rows)
    inbox = 4 * ROW_TILE * tile.splits * -(-tile.row_tiles * tile.tokens // tile.splits) if tile.splits > 1 else 0
    return operands + inbox + 8 * rows + 4 * tile.tokens


def table_bytes(problem: CodebookProblem) -> int:
    """Shared memory of the table of pairs: 16-bit products have one, and codebooks of pairs."""
    return PAIR_TABLE_BYTES if problem.pairs or problem.x is not DType.S8 else 0


CONSTRAINTS = (
    ARCHITECTURE,
    Constraint(
        "experts",
        "add the results of a token's routes, and a tile has one token",
        lambda p, t, arch: not p.experts or (p.summed and t.tokens == 1),
    ),
    Constraint("alignment", "is at least 1", lambda p, t, arch: p.alignment_n >= 1),
    Constraint(
        "tokens",
        "are 1, 2, 4, 8, 16, 24 or 32: rows of the second operand, eight to a product",
        lambda p, t, arch: t.tokens in (1, 2, 4, 8, 16, 24, 32),
    ),
    Constraint("row_tiles", "are 1 to 64", lambda p, t, arch: 1 <= t.row_tiles <= MAX_ROW_TILES),
    Constraint("warps", "are 1 to 32: those of a CTA", lambda p, t, arch: 1 <= t.warps <= 32),
    Constraint("units", "of a warp are 1 to 8", lambda p, t, arch: 1 <= t.units <= 8),
    Constraint(
        "prefetch",
        "is 1 to 4 row tiles, no more than the CTA has",
        lambda p, t, arch: 1 <= t.prefetch <= min(4, t.row_tiles),
    ),
    SPLITS,
    Constraint(
        "mirrored",
        "is of up to 8 tokens and mirrored codebooks; more would not leave enough registers for second sums",
        lambda p, t, arch: not t.mirrored or (p.mirrored and t.tokens <= 8),
    ),
    Constraint(
        "rotates",
        "takes a tile of one token: more are rotated once, by a kernel before",
        lambda p, t, arch: t.tokens == 1 or p.rotates is None,
    ),
    CLUSTERS,
    Constraint(
        "registers",
        "tokens, weights in flight and sums fit a thread's 255 and the SM's 65536",
        lambda p, t, arch: registers(p, t) <= register_limit(t),
    ),
    shared_memory("the table, and the sums or tokens of all warps, fit what the architecture gives a CTA", smem_bytes),
)
"""Constraints of the family; each takes (problem, tile, arch)."""


class CodebookStream(StreamFamily[CodebookProblem, CodebookStreamTile]):
    """Up to 32 tokens and codebook weights.

    Arguments are ``problem.params()`` in order: n >= 1, 1 <= m <= ``tile.tokens``, 1 <= units_k <= ``tile.capacity``.
    D is stored element by element, with any ``alignment_n``. ``x``, ``row_scale`` and the residual are read after
    the previous kernel's end; all other arguments may be read before.

    Summed over routes, x has the tokens of all routes, ``units_k`` units each, a multiple of ``tile.units``; a route's
    units are those of one CTA. ``chosen`` and ``weights`` are read before the last kernel's end with ``early_routes``,
    and all else after it without.

    Exactness: int8 tokens: bitwise equal to ``qcut.numerics.int8.gemm_s8_ref`` on
    ``qcut.numerics.codebook.layout.int8_weight`` for activations none and relu. 16-bit tokens: products are exact, sums
    float32 in an order that the tile and units_k fix, with error at most ``(128 * units_k + 4) * 2**-23 * sum_k |x *
    w|`` before the channel's scale. Weights with offsets in slots of 16 columns are rounded before, as those of
    `qcut.emitters.codebook.mma.CodebookMma` are. A token's result does not depend on the others; the same inputs give
    the same bits.

    Source: PTX ISA, ``mma.sync.m16n8k16``, ``mma.sync.m16n8k32``, ``cp.async``, ``ldmatrix``, ``barrier.cluster``.
    """

    name = "codebook_stream"
    tile_type = CodebookStreamTile
    constraints = CONSTRAINTS
    smem_bytes = staticmethod(smem_bytes)

    def _source(self, name: str, problem: CodebookProblem, tile: CodebookStreamTile, arch: str) -> KernelSource:
        sizes = (tile.tokens, tile.row_tiles, tile.warps, tile.units, tile.splits, tile.prefetch)
        table = f", {flag(table_bytes(problem) > 0)}"
        tokens = f"qcut::{'RouteToken' if problem.summed else 'BlockTokens'}<{problem.x.cpp}, Tile>{{x}}"
        routes = f"qcut::SummedRoutes<{flag(problem.early_routes)}>{{chosen, weights, experts, per_token}}"
        return decode_source(
            name,
            problem,
            arch,
            header="stream/codebook_sums" if problem.summed else "stream/codebook",
            function="codebook_stream",
            tile=f"qcut::StreamTile<{', '.join(map(str, sizes))}{', true' * tile.mirrored}>",
            shared="qcut::SumsShared" if problem.summed else "qcut::StreamShared",
            shared_last=table if problem.summed else shared_last(problem),
            tokens=_row_token(problem) if problem.rotates else tokens,
            rows=f", {routes}" if problem.summed else "",
            block=32 * tile.warps,
            smem_bytes=smem_bytes(problem, tile),
            cluster=tile.splits,
            alone=tile.alone,
        )


CODEBOOK_STREAM = CodebookStream()


def shared_last(problem: CodebookProblem) -> str:
    """Last template argument of the shared memory of int8 products with a table of pairs."""
    return ", true" if problem.pairs and problem.x is DType.S8 else ""


def _row_token(problem: CodebookProblem) -> str:
    group = 128 // problem.slots
    kind, source = "RowToken" if problem.rotates is problem.x else "QuantizedToken", problem.rotates or problem.x
    return f"qcut::{kind}<{source.cpp}, Tile, {group}>(x, signs, k, units_pass, {group_factor(group)})"


def decode_source(
    name: str,
    problem: CodebookProblem,
    arch: str,
    *,
    header: str,
    function: str,
    tile: str,
    shared: str,
    shared_last: str = "",
    tokens: str = "x",
    last: str = "",
    rows: str = "",
    block: int,
    smem_bytes: int,
    cluster: int = 1,
    ctas_per_sm: int = 1,
    alone: bool = False,
) -> KernelSource:
    """Emit a kernel of few tokens with codebook weights that calls ``qcut::{function}`` of ``{header}.cuh``.

    Args:
        name: procedural name.
        problem: types, widths and epilogue.
        arch: real architecture.
        header: folder and stem of the header.
        function: name of the device code's function.
        tile: C++ type of the tile.
        shared: C++ template with the bytes of shared memory as ``kBytes``.
        shared_last: text that follows this template's arguments.
        tokens: first argument of the function.
        last: text that follows the function's template arguments.
        rows: text that follows the function's arguments.
        block: threads per CTA.
        smem_bytes: dynamic shared memory per CTA.
        cluster: CTAs that share K.
        ctas_per_sm: CTAs of a multiprocessor that the compiler keeps registers for.
        alone: whether a CTA reserves more than half of a multiprocessor's shared memory.
    """
    x, params = problem.x.cpp, problem.params()
    return kernel_source(
        name,
        arch,
        params,
        f"using Tile = {tile};",
        f'static_assert({shared}<{x}, Tile{shared_last}>::kBytes == {smem_bytes}, "the launch\'s shared memory");',
        *problem.epilogue.statements(params),
        problem.book,
        f"qcut::{function}<{x}, {problem.bits}, {problem.slots}, {flag(problem.offsets)}, Tile, Epilogue{last}>(\n"
        f"      {tokens}, units, norms, {problem.fold}, d, m, n, units_k, ldd, book, args{rows});",
        device_code=include(f"{header}.cuh"),
        block=block,
        ctas_per_sm=ctas_per_sm,
        waits=True,
        smem_bytes=max(smem_bytes, architecture(arch).sm_smem_bytes // 2) if alone else smem_bytes,
        cluster=cluster,
    )
