"""W8A16 for few tokens, bound by memory: float16 or bfloat16 tokens, int8 weights straight into registers.

``D = act((sum_k a[m, k] * b[n, k]) * s_w[n] + bias[n]) (+ residual)``, up to `MAX_TOKENS` rows of a, on
``mma.sync.m16n8k16``. The weights are those of `qcut.emitters.gemm.w8a16`, which takes more rows. Device code:
``include/qcut/stream/w8a16.cuh``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from qcut.emitters.core.arch import CLUSTER_ARCHITECTURES, architecture
from qcut.emitters.core.constraints import ARCHITECTURE, CLUSTERS, SPLITS, Constraint, check, shared_memory
from qcut.emitters.core.names import procedural_name
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.core.text import flag, include, kernel_source
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.stream.int8 import CUT_CONSTRAINTS, UNIT_COLUMNS, Int8StreamTile, register_limit

FAMILY = "w8a16_stream"
MAX_TOKENS = 32
"""The most rows of a that registers hold beside the weights in flight."""
_TOKENS = (8, 16, 32)
_OTHER_REGISTERS = 24
"""Registers of a thread for addresses, counters and bounds."""


class Cut(NamedTuple):
    """How weights are divided: see `Int8StreamTile`."""

    row_tiles: int
    warps: int
    units: int
    prefetch: int
    splits: int


class WeightOnlyTile(Int8StreamTile):
    """A cut whose ``tokens`` are 8, 16 or 32."""


def smem_bytes(problem: GemmProblem, tile: WeightOnlyTile) -> int:
    """Dynamic shared memory of a CTA: the sums of every warp, and scale and bias of each row."""
    rows = 16 * tile.row_tiles
    return 4 * (tile.warps * tile.tokens * (rows + 4) + 2 * rows)


def registers(tile: WeightOnlyTile) -> int:
    """Registers of a thread, about: weights in flight, tokens, sums, and the rest."""
    return 16 * tile.units * (tile.prefetch + tile.tokens // 8) + tile.tokens // 2 + _OTHER_REGISTERS


CONSTRAINTS = (
    Constraint(
        "operands",
        "are f16 or bf16 x s8",
        lambda p, t, arch: p.a in (DType.F16, DType.BF16) and p.b is DType.S8,
    ),
    Constraint("layouts", "are tnt: as tokens and weights come", lambda p, t, arch: p.layouts == "tnt"),
    Constraint("zero_point", "is none: weights are symmetric", lambda p, t, arch: p.epilogue.zero_point == "none"),
    Constraint("raw_output", "sums are float32: D is scaled", lambda p, t, arch: not p.epilogue.is_raw),
    ARCHITECTURE,
    Constraint("alignments", "are at least 1", lambda p, t, arch: min(p.alignment_k, p.alignment_n) >= 1),
    Constraint("tokens", "are 8, 16 or 32: tiles of eight in registers", lambda p, t, arch: t.tokens in _TOKENS),
    *CUT_CONSTRAINTS,
    Constraint(
        "registers",
        f"weights in flight, tokens, sums and {_OTHER_REGISTERS} more fit a thread's 255 and the SM's 65536",
        lambda p, t, arch: registers(t) <= register_limit(t.warps),
    ),
    SPLITS,
    CLUSTERS,
    shared_memory("the sums of a CTA's warps fit what the architecture gives it", smem_bytes),
)
"""What this family can build, on (problem, tile, arch)."""


def validate(problem: GemmProblem, tile: WeightOnlyTile, arch: str) -> None:
    """Check that this family can build the pair.

    Raises:
        EmitError: naming the kernel and the first of `CONSTRAINTS` it breaks.
    """
    check(procedural_name(FAMILY, arch, problem, tile), CONSTRAINTS, problem, tile, arch)


_BYTES_PER_NS = 33.5
"""Of weights that an SM gets where all ask for them: an H200's 4.43 TB/s over 132."""
_SM_BYTES_PER_NS = 70.0
"""The same, where few do."""
_ROUND_NS = 300.0
"""Reading the tokens of other columns."""
_CTA_NS = 300.0
"""Summing the warps and writing, where another CTA follows on the SM."""
_CLUSTER_NS = 700.0
"""Summing over a cluster's CTAs."""
_IN_FLIGHT = 40
"""Units of an SM that keep the memory busy."""


def for_shape(problem: GemmProblem, arch: str, m: int, n: int, k: int, sm_count: int) -> WeightOnlyTile:
    """A tile for a shape: one wave of CTAs where that is possible, few rounds, much in flight.

    Args:
        problem: types and epilogue.
        arch: the kernel's.
        m: tokens, up to `MAX_TOKENS`.
        n: rows of weights.
        k: columns.
        sm_count: of the GPU.

    Raises:
        EmitError: m is more than `MAX_TOKENS`, or `CONSTRAINTS` refuse the problem.
    """
    if not 1 <= m <= MAX_TOKENS:
        raise EmitError(f"weight_only_decode: {m} tokens; allowed are 1 to {MAX_TOKENS}")
    tokens = next(size for size in _TOKENS if m <= size)

    def fits(cut: Cut, ctas: int) -> bool:
        tile = _tile(cut, tokens)
        smem = ctas * smem_bytes(problem, tile)
        return registers(tile) <= register_limit(ctas * cut.warps) and smem <= architecture(arch).smem_bytes

    tile = _tile(best_cut(n, k, arch, sm_count, fits), tokens)
    validate(problem, tile, arch)
    return tile


def _tile(cut: Cut, tokens: int) -> WeightOnlyTile:
    return WeightOnlyTile(cut.row_tiles, cut.warps, cut.units, cut.prefetch, tokens, cut.splits)


def best_cut(n: int, k: int, arch: str, sm_count: int, fits: Callable[[Cut, int], bool]) -> Cut:
    """The cut of weights ``[n, k]`` that a model of the memory takes for the fastest.

    Two CTAs that an SM has at once hide each other's start and end; they are taken where each reads its K in one round.

    Args:
        n: rows of weights.
        k: columns.
        arch: the kernel's.
        sm_count: of the GPU.
        fits: whether registers and shared memory hold it, in so many CTAs.
    """
    best, best_ns = Cut(1, 1, 1, 1, 1), float("inf")
    for splits in (1, 2, 4, 8) if arch in CLUSTER_ARCHITECTURES else (1,):
        # Clusters of 4 and 8 leave some SMs of a GPC without work.
        at_once = {1: sm_count, 2: sm_count // 2, 4: sm_count * 30 // 132, 8: sm_count * 15 // 132}[splits]
        for units in (1, 2):
            for ctas in (1, 2) if splits == 1 else (1,):
                if not at_once or (found := _one_cut(n, k, splits, units, ctas, at_once, fits)) is None:
                    continue
                cut, ns = found
                if ns < best_ns:
                    best, best_ns = cut, ns
    return best


def _one_cut(
    n: int, k: int, splits: int, units: int, ctas: int, at_once: int, fits: Callable[[Cut, int], bool]
) -> tuple[Cut, float] | None:
    """`best_cut` for some splits, units and CTAs of an SM, and its nanoseconds; None where two CTAs are not taken."""
    units_k, tiles_n = -(-k // UNIT_COLUMNS), -(-n // 16)
    most = max((w for w in range(1, 33) if fits(Cut(1, w, units, 1, splits), ctas)), default=1)
    wanted = -(-units_k // (splits * units))
    warps = -(-wanted // -(-wanted // most))  # in equal rounds
    rounds = -(-units_k // (splits * warps * units))
    if ctas > 1 and rounds > 1:
        return None
    for waves in range(1, 1 + tiles_n):
        row_tiles = -(-tiles_n // (waves * at_once * ctas))
        prefetch = min(row_tiles, -(-_IN_FLIGHT // (warps * units * ctas)))
        while prefetch > 1 and not fits(Cut(row_tiles, warps, units, prefetch, splits), ctas):
            prefetch -= 1
        cut = Cut(row_tiles, warps, units, prefetch, splits)
        if fits(cut, ctas):
            break
    unit_bytes = 16 * UNIT_COLUMNS
    of_an_sm = waves * ctas * row_tiles * rounds * units * min(warps, wanted) * unit_bytes
    read_ns = max(tiles_n * units_k * unit_bytes / (_BYTES_PER_NS * at_once * splits), of_an_sm / _SM_BYTES_PER_NS)
    return cut, read_ns + waves * (rounds * _ROUND_NS + _CTA_NS) / ctas + _CLUSTER_NS * (splits > 1)


def emit_weight_only_decode(problem: GemmProblem, tile: WeightOnlyTile, arch: str) -> KernelSource:
    """Text of one kernel.

    Arguments are ``problem.params()`` in order; 1 <= m <= ``tile.tokens``, n, k >= 1. b: int8 ``[n, ldb]``, 16-byte
    aligned, ldb a multiple of 16 and at least k. a: where ``problem.alignment_k`` is a multiple of 8, k is one too and
    rows start at multiples of 16 bytes; otherwise rows are read element by element, for any lda >= k. D is stored
    element by element. b and the vectors of n are read before the kernel waits for its predecessor.

    Exactness: int8 to float is exact and every product is exact in float32; products are added in an order that K and
    the tile alone fix, with error at most ``K * 2**-23 * sum_k |a * b|`` before the scale. A row's result does not
    depend on the other rows; the same inputs give the same bits.

    Raises:
        EmitError: see `validate`.

    Source: PTX ISA, ``mma.sync.m16n8k16``, ``ld.global.nc``, ``griddepcontrol``, ``barrier.cluster``.
    """
    validate(problem, tile, arch)
    name = procedural_name(FAMILY, arch, problem, tile)
    aligned = flag(problem.alignment_k % 8 == 0)
    params = problem.params()
    return kernel_source(
        name,
        arch,
        params,
        f"using Tile = qcut::WeightOnlyTile<{tile.sizes}>;",
        *problem.epilogue.statements(params),
        f"qcut::weight_only_decode<Tile, {problem.a.cpp}, {aligned}, Epilogue>(a, b, d, m, n, k, lda, ldb, ldd, args);",
        device_code=include("stream/w8a16.cuh"),
        block=32 * tile.warps,
        waits=True,
        smem_bytes=smem_bytes(problem, tile),
        cluster=tile.splits,
    )
