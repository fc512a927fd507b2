"""W8A16 on ``wgmma`` for sm_90a: from some tens of tokens to prefill, weights converted in registers.

``D = act((sum_k a[m, k] * b[n, k]) * s_w[n] + bias[n]) (+ residual)``, the sum in float32. Device code:
``include/qcut/gemm/w8a16_wgmma.cuh``; host code, which makes the tokens' tensor map: ``w8a16_launcher.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from qcut.emitters.core.arch import architecture
from qcut.emitters.core.constraints import SPLITS, Constraint
from qcut.emitters.core.family import Family
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.core.text import include
from qcut.emitters.gemm.problem import HOST_M, ONE_WEIGHT, GemmProblem
from qcut.emitters.gemm.w8a16 import PROBLEM_CONSTRAINTS

TOKENS = (32, 64, 96, 128, 160, 192, 256)
"""Tokens that a tile may hold."""
GROUP_ROWS = 64
"""Rows of weights of a warpgroup."""
UNIT_COLUMNS = 128
"""Columns of weights that a warp loads at a time."""
BOX_TOKENS = 32
"""Tokens of one copy in a partial tile."""
COPY_REGISTERS = 32
"""Registers of a thread of the copying warpgroup after ``setmaxnreg``."""
_ARCH = architecture("sm_90a")
_OTHER_REGISTERS = 26
"""Registers of a multiplying thread for addresses, counters and bounds."""
_UNIT_REGISTERS = 16
"""Registers of a multiplying thread for scales of units, besides their sums."""


@dataclass(frozen=True)
class W8A16WgmmaTile:
    """How a CTA and its cluster share a product.

    Attributes:
        tokens: tokens of a CTA's tile, one of `TOKENS`.
        groups: warpgroups of a CTA that multiply, 64 rows of weights each. One more copies tokens.
        splits: CTAs of a cluster, which divide K: 1, 2, 4 or 8.
        stages: stages of the tokens' pipeline, 64 columns each.
        prefetch: units of 128 columns of weights that a warp has in flight.
        ctas: CTAs of a multiprocessor that registers are kept for.
    """

    tokens: int
    groups: int
    splits: int = 1
    stages: int = 8
    prefetch: int = 1
    ctas: int = 1

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 128 * (self.groups + 1)

    @property
    def rows(self) -> int:
        """Rows of weights of a CTA's tile."""
        return GROUP_ROWS * self.groups

    @property
    def name(self) -> str:
        """``t{tokens}_g{groups}_s{stages}_p{prefetch}``, then splits and CTAs where they are not 1."""
        splits = f"_k{self.splits}" if self.splits > 1 else ""
        ctas = f"_x{self.ctas}" if self.ctas > 1 else ""
        return f"t{self.tokens}_g{self.groups}_s{self.stages}_p{self.prefetch}{splits}{ctas}"


def registers(problem: GemmProblem, tile: W8A16WgmmaTile) -> int:
    """Estimate a multiplying thread's registers: sums, two converted parts, weights in flight, and the rest."""
    sums = tile.tokens // 2
    if problem.epilogue.col_scale == "per_unit":
        sums += tile.tokens // 2 + _UNIT_REGISTERS
    return sums + 32 + 16 * tile.prefetch + _OTHER_REGISTERS


def register_shares(tile: W8A16WgmmaTile) -> tuple[int, int]:
    """Registers of a thread that copies and of one that multiplies; zeros where both keep those of the launch."""
    if tile.groups == 1:
        return 0, 0
    free = (tile.groups + 1) * _at_launch(tile) - COPY_REGISTERS
    return COPY_REGISTERS, min(240, free // tile.groups // 8 * 8)


def _at_launch(tile: W8A16WgmmaTile) -> int:
    return min(255, _ARCH.registers // (tile.threads * tile.ctas)) // 8 * 8


def smem_bytes(problem: GemmProblem, tile: W8A16WgmmaTile) -> int:
    """Dynamic shared memory of a CTA. The kernel's text asserts that the device code's own count is the same."""
    sums = 4 * tile.tokens * (tile.rows + 4)
    return max(tile.stages * 128 * tile.tokens, sums) + 16 * tile.stages + 8 * tile.rows


CONSTRAINTS = (
    *PROBLEM_CONSTRAINTS,
    HOST_M,
    ONE_WEIGHT,
    Constraint("architecture", "is sm_90a: no other has wgmma", lambda p, t, arch: arch == "sm_90a"),
    Constraint("alignment_k", "is a multiple of 8: a tensor map's rows", lambda p, t, arch: p.alignment_k % 8 == 0),
    Constraint("alignment_n", "is at least 1", lambda p, t, arch: p.alignment_n >= 1),
    Constraint("tokens", f"are one of {TOKENS}", lambda p, t, arch: t.tokens in TOKENS),
    Constraint("groups", "are 1 to 4", lambda p, t, arch: 1 <= t.groups <= 4),
    SPLITS,
    Constraint("stages", "are 2 to 32: one to read and one to fill", lambda p, t, arch: 2 <= t.stages <= 32),
    Constraint("prefetch", "is 1 to 8 units", lambda p, t, arch: 1 <= t.prefetch <= 8),
    Constraint("ctas", "of a multiprocessor are 1 or 2", lambda p, t, arch: t.ctas in (1, 2)),
    Constraint(
        "registers",
        "sums, converted weights and those in flight fit a thread's share",
        lambda p, t, arch: registers(p, t) <= (register_shares(t)[1] or _at_launch(t)),
    ),
    Constraint(
        "shared_memory",
        f"the stages, or the sums in their place, fit {_ARCH.smem_bytes} bytes, with two CTAs half of the SM's",
        lambda p, t, arch: smem_bytes(p, t) <= min(_ARCH.smem_bytes, _ARCH.sm_smem_bytes // t.ctas - 1024),
    ),
)
"""Constraints of the family; each takes (problem, tile, arch)."""


def ctas(tile: W8A16WgmmaTile, m: int, n: int) -> int:
    """CTAs of a launch: a cluster for every tile of rows of weights and every tile of tokens."""
    return -(-n // tile.rows) * -(-m // tile.tokens) * tile.splits


_SHAPES = (
    (64, 12, 4, ((1, 2), (2, 1), (2, 2), (2, 4))),
    (64, 12, 3, ((3, 4),)),
    (96, 12, 4, ((1, 4), (2, 1), (2, 2), (2, 4))),
    (96, 12, 3, ((3, 4),)),
    (128, 10, 4, ((2, 1), (2, 2), (2, 4), (2, 8))),
    (128, 12, 2, ((3, 4),)),
    (160, 10, 4, ((2, 2),)),
    (192, 8, 4, ((1, 2), (2, 1), (2, 2), (2, 4))),
    (256, 6, 1, ((2, 1), (2, 2))),
)
"""Of the menu: tokens, stages, units of weights in flight; groups and splits. The fastest of some shape on an H200."""


class W8A16Wgmma(Family[GemmProblem, W8A16WgmmaTile]):
    """16-bit tokens and weights of a byte on ``wgmma``.

    Arguments are ``problem.params()`` in order; m, n, k >= 1, k a multiple of 8. b: int8 or e4m3 ``[n, ldb]``, 16-byte
    aligned, ldb a multiple of 16 and at least k. a: rows start at multiples of 16 bytes. D is stored in pieces of up to
    four elements that ``problem.alignment_n`` allows. b is read before the kernel waits for its predecessor; all else
    is read after.

    Exactness: weights to 16 bits is exact and every product is exact in float32; products are added in an order that K
    and the tile fix, with error at most ``K * 2**-23 * sum_k |a * b|`` before the scale. A row's result does not depend
    on the other rows; the same inputs give the same bits.

    Source: PTX ISA, ``wgmma.mma_async``, ``cp.async.bulk.tensor``, ``mbarrier``, ``barrier.cluster``.
    """

    name = "w8a16_wgmma"
    tile_type = W8A16WgmmaTile
    constraints = CONSTRAINTS
    smem_bytes = staticmethod(smem_bytes)

    def threads(self, tile: W8A16WgmmaTile) -> int:
        """One warpgroup for each group of rows, and the one that copies."""
        return tile.threads

    def default_tiles(self, problem: GemmProblem, arch: str) -> tuple[W8A16WgmmaTile, ...]:
        """Return the menu: the tiles that were among the fastest at some shape."""
        tiles = tuple(
            W8A16WgmmaTile(tokens, groups, splits, stages, prefetch)
            for tokens, stages, prefetch, shapes in _SHAPES
            for groups, splits in shapes
        )
        if problem.epilogue.col_scale != "per_unit":
            return tiles
        # The sums of units take the registers of weights in flight.
        fitted = (
            replace(tile, prefetch=prefetch) for tile in tiles for prefetch in range(min(2, tile.prefetch), 0, -1)
        )
        legal = [tile for tile in fitted if self.is_legal(problem, tile, arch)]
        return tuple({replace(tile, prefetch=1): tile for tile in reversed(legal)}.values())

    def _source(self, name: str, problem: GemmProblem, tile: W8A16WgmmaTile, arch: str) -> KernelSource:
        return KernelSource(
            name=name,
            text=_device_text(name, problem, tile),
            entry=name,
            params=problem.params(),
            arch=arch,
            toolchain="nvcc",
            host_text=_host_text(problem, tile),
            includes=("qcut", "cuda"),
            waits=True,
        )


W8A16_WGMMA = W8A16Wgmma()


def _device_text(name: str, problem: GemmProblem, tile: W8A16WgmmaTile) -> str:
    params = problem.params()
    shape = (tile.tokens, tile.groups, tile.splits, tile.stages, tile.prefetch)
    sizes = ", ".join(map(str, (*shape, *register_shares(tile))))
    align_d = gcd(problem.alignment_n * problem.epilogue.out.bits // 8, 16)
    dims = f"__cluster_dims__({tile.splits}, 1, 1) " if tile.splits > 1 else ""
    statements = (
        f"using Tile = qcut::W8A16WgmmaTile<{sizes}>;",
        f'static_assert(Tile::kBytes == {smem_bytes(problem, tile)}, "the launch\'s shared memory");',
        f'static_assert(Tile::kBoxTokens == {BOX_TOKENS}, "the boxes of the launcher\'s map");',
        *(f"const auto {param.name} = params.call.{param.name};" for param in params if param.name not in ("a", "lda")),
        *problem.epilogue.statements(params),
        f"qcut::w8a16_wgmma<Tile, {problem.a.cpp}, Epilogue, {align_d}>"
        "(params.tiles, params.parts, b, d, m, n, k, ldb, ldd, args);",
    )
    return (
        f"{include('gemm/w8a16_wgmma.cuh')}\n"
        f"struct Call {{\n{''.join(f'  {param.declaration};' + chr(10) for param in params)}}};\n"
        "struct Params {\n  qcut::TensorMap tiles, parts;\n  Call call;\n};\n\n"
        f'extern "C" __global__ void {dims}__launch_bounds__({tile.threads}, {tile.ctas})\n'
        f"{name}(const __grid_constant__ Params params) {{\n{''.join(f'  {line}' + chr(10) for line in statements)}}}\n"
    )


def _host_text(problem: GemmProblem, tile: W8A16WgmmaTile) -> str:
    kinds = {"ptr": "void*", "i32": "int", "i64": "long long", "f32": "float"}
    fields = "".join(f"  {kinds[param.kind]} {param.name};\n" for param in problem.params())
    element = "FLOAT16" if problem.a is DType.F16 else "BFLOAT16"
    shape = f"kTokens = {tile.tokens}, kBoxTokens = {BOX_TOKENS}, kRows = {tile.rows}, kSplits = {tile.splits}"
    return (
        f"{include('gemm/w8a16_launcher.cuh')}\n"
        "namespace {\n"
        f"struct Call {{\n{fields}}};\n"
        "struct Tile {\n"
        f"  static constexpr CUtensorMapDataType kElement = CU_TENSOR_MAP_DATA_TYPE_{element};\n"
        f"  static constexpr int {shape};\n"
        f"  static constexpr int kThreads = {tile.threads}, kBytes = {smem_bytes(problem, tile)};\n"
        "};\n"
        "using Launcher = qcut::W8A16Launcher<Call, Tile>;\n"
        "}  // namespace\n\n"
        'extern "C" int qcut_launch(void const* args, void* function, void* stream, int flags) {\n'
        "  return Launcher::launch(args, function, stream, flags);\n"
        "}\n\n"
        'extern "C" long qcut_query(int what, void const*) { return Launcher::query(what); }\n'
    )
