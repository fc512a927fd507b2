"""W8A16 on ``wgmma`` for sm_90a: from some tens of tokens to prompts, weights converted in registers.

``D = act((sum_k a[m, k] * b[n, k]) * s_w[n] + bias[n]) (+ residual)``, the sum in float32. Device code:
``include/qcut/gemm/w8a16_wgmma.cuh``. Warpgroups of a CTA multiply 64 rows of weights each; one more feeds tokens to
shared memory. The CTAs of a cluster divide K.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from qcut.emitters.core.arch import architecture
from qcut.emitters.core.constraints import SPLITS, Constraint, check
from qcut.emitters.core.names import procedural_name
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.core.text import include
from qcut.emitters.gemm.problem import GemmProblem

FAMILY = "w8a16_tma"
TOKENS = (32, 64, 128, 256)
"""Tokens that a tile may hold."""
GROUP_ROWS = 64
"""Rows of weights of a warpgroup."""
COPY_REGISTERS = 32
UNIT_COLUMNS = 128
"""Columns of weights that a warp loads at a time."""
_ARCH = architecture("sm_90a")
_OTHER_REGISTERS = 26
"""Registers of a multiplying thread for addresses, counters and bounds."""


@dataclass(frozen=True)
class W8A16WgmmaTile:
    """How a CTA and its cluster share a product.

    Attributes:
        tokens: tokens of a CTA's tile: 32, 64, 128 or 256.
        groups: warpgroups of a CTA, 64 rows of weights each.
        share: CTAs of a cluster that have other rows and the same tokens, and copy these for each other: 1, 2 or 4.
        splits: CTAs of a cluster that divide K: 1, 2, 4 or 8.
        stages: parts of 64 columns whose tokens shared memory holds at once.
        prefetch: units of 128 columns of weights that a warp has in flight.
        ctas: CTAs of a multiprocessor that registers are kept for.
    """

    tokens: int
    groups: int
    share: int = 1
    splits: int = 1
    stages: int = 8
    prefetch: int = 1
    ctas: int = 1

    @property
    def threads(self) -> int:
        """Threads of a CTA: the warpgroups, and the warp that copies tokens."""
        return 128 * (self.groups + 1)

    @property
    def rows(self) -> int:
        """Rows of weights of a CTA's tile."""
        return GROUP_ROWS * self.groups

    @property
    def name(self) -> str:
        """``t{tokens}_g{groups}_s{stages}_p{prefetch}``, then share, splits and CTAs where they are not 1."""
        counts = (("c", self.share), ("k", self.splits), ("x", self.ctas))
        rest = "".join(f"_{letter}{count}" for letter, count in counts if count > 1)
        return f"t{self.tokens}_g{self.groups}_s{self.stages}_p{self.prefetch}{rest}"


def registers(tile: W8A16WgmmaTile) -> int:
    """Estimate a thread's registers: sums, two converted parts, weights in flight, and the rest."""
    return tile.tokens // 2 + 32 + 16 * tile.prefetch + _OTHER_REGISTERS


def _at_launch(tile: W8A16WgmmaTile) -> int:
    return min(255, _ARCH.registers // (tile.threads * tile.ctas)) // 8 * 8


def register_limit(tile: W8A16WgmmaTile) -> int:
    """Registers that a multiplying thread may have: one CTA's copying warps give theirs up."""
    if tile.groups == 1:
        return _at_launch(tile)
    return min(240, ((tile.groups + 1) * _at_launch(tile) - COPY_REGISTERS) // tile.groups // 8 * 8)


def smem_bytes(tile: W8A16WgmmaTile) -> int:
    """Dynamic shared memory of a CTA. The kernel's text asserts that the device code's own count is the same."""
    sums = 4 * tile.tokens * (tile.rows + 4)
    return max(tile.stages * 128 * tile.tokens, sums) + 16 * tile.stages + 8 * tile.rows


CONSTRAINTS = (
    Constraint(
        "operands",
        "are f16 or bf16 x s8",
        lambda p, t, arch: p.a in (DType.F16, DType.BF16) and p.b is DType.S8,
    ),
    Constraint("layouts", "are tnt: as tokens and weights come", lambda p, t, arch: p.layouts == "tnt"),
    Constraint("zero_point", "is none: weights are symmetric", lambda p, t, arch: p.epilogue.zero_point == "none"),
    Constraint("raw_output", "sums are float32: D is scaled", lambda p, t, arch: not p.epilogue.is_raw),
    Constraint("architecture", "is sm_90a: no other has wgmma", lambda p, t, arch: arch == "sm_90a"),
    Constraint(
        "alignment_k", "is a multiple of 8: tokens are read as vectors", lambda p, t, arch: p.alignment_k % 8 == 0
    ),
    Constraint("alignment_n", "is at least 1", lambda p, t, arch: p.alignment_n >= 1),
    Constraint("tokens", "are 32, 64, 128 or 256", lambda p, t, arch: t.tokens in TOKENS),
    Constraint("groups", "are 1 to 4", lambda p, t, arch: 1 <= t.groups <= 4),
    SPLITS,
    Constraint(
        "share",
        "is 1, 2 or 4, with the splits at most 8",
        lambda p, t, arch: t.share in (1, 2, 4) and t.share * t.splits <= 8,
    ),
    Constraint("stages", "are 2 to 32: one to read and one to fill", lambda p, t, arch: 2 <= t.stages <= 32),
    Constraint("prefetch", "is 1 to 8 units", lambda p, t, arch: 1 <= t.prefetch <= 8),
    Constraint("ctas", "of a multiprocessor are 1 or 2", lambda p, t, arch: t.ctas in (1, 2)),
    Constraint(
        "registers",
        "sums, converted weights and those in flight fit a thread's share",
        lambda p, t, arch: registers(t) <= register_limit(t),
    ),
    Constraint(
        "shared_memory",
        f"the stages, or the sums in their place, fit {_ARCH.smem_bytes} bytes, with two CTAs half of the SM's",
        lambda p, t, arch: smem_bytes(t) <= min(_ARCH.smem_bytes, _ARCH.sm_smem_bytes // t.ctas - 1024),
    ),
)
"""What this family can build, on (problem, tile, arch)."""


def validate(problem: GemmProblem, tile: W8A16WgmmaTile, arch: str) -> None:
    """Check that this family can build a kernel for the problem with this tile on this architecture.

    Raises:
        EmitError: a constraint is broken; the message has the kernel's name and the first broken constraint.
    """
    check(procedural_name(FAMILY, arch, problem, tile), CONSTRAINTS, problem, tile, arch)


def emit_w8a16_tma(problem: GemmProblem, tile: W8A16WgmmaTile, arch: str) -> KernelSource:
    """Text of one kernel."""
    validate(problem, tile, arch)
    name = procedural_name(FAMILY, arch, problem, tile)
    params = problem.params()
    sizes = (
        tile.tokens,
        tile.groups,
        tile.share,
        tile.splits,
        tile.stages,
        tile.prefetch,
        *((COPY_REGISTERS, register_limit(tile)) if tile.groups > 1 else (0, 0)),
    )
    align_d = gcd(problem.alignment_n * problem.epilogue.out.bits // 8, 16)
    kinds = {"i32": "int", "i64": "long long", "f32": "float"}
    fields = "".join(f"  {p.cpp or kinds[p.kind]} {p.name};\n" for p in params)
    body = (
        f"  using Tile = qcut::W8A16WgmmaTile<{', '.join(map(str, sizes))}>;\n"
        f'  static_assert(Tile::kBytes == {smem_bytes(tile)}, "the launch\'s shared memory");\n'
        + "".join(
            f"  {line}\n"
            for line in (
                "const Call& call = params.call;",
                *(
                    line.replace(" = ", " = call.") if line.startswith("args.") else line
                    for line in problem.epilogue.statements(params)
                ),
                f"qcut::w8a16_wgmma<Tile, {problem.a.cpp}, Epilogue, {align_d}>(params.tokens, call.b, call.d, call.m, call.n, "
                "call.k, call.ldb, call.ldd, args);",
            )
        )
    )
    cluster = tile.share * tile.splits
    dims = f"__cluster_dims__({cluster}, 1, 1) " if cluster > 1 else ""
    text = (
        f"{include('gemm/w8a16_tma.cuh')}\n"
        f"struct Call {{\n{fields}}};\n"
        "struct Params {\n  qcut::TensorMap tokens;\n  Call call;\n};\n\n"
        f'extern "C" __global__ void {dims}__launch_bounds__({tile.threads}, {tile.ctas})\n'
        f"{name}(const __grid_constant__ Params params) {{\n{body}}}\n"
    )
    flat = {"ptr": "void*", **kinds}
    host_fields = "".join(f"  {flat[p.kind]} {p.name};\n" for p in params)
    cpp_type = "FLOAT16" if problem.a is DType.F16 else "BFLOAT16"
    host = (
        f"{include('gemm/w8a16_launcher.cuh')}\n"
        "namespace {\n"
        f"struct Call {{\n{host_fields}}};\n"
        "struct Tile {\n"
        f"  static constexpr CUtensorMapDataType kType = CU_TENSOR_MAP_DATA_TYPE_{cpp_type};\n"
        f"  static constexpr int kTokens = {tile.tokens}, kRows = {tile.rows}, kShare = {tile.share}, kSplits = {tile.splits};\n"
        f"  static constexpr int kThreads = {tile.threads}, kBytes = {smem_bytes(tile)};\n"
        "};\n"
        "using Launcher = qcut::W8A16Launcher<Call, Tile>;\n"
        "}  // namespace\n\n"
        'extern "C" int qcut_launch(void const* args, void* function, void* stream, int flags) {\n'
        "  return Launcher::launch(args, function, stream, flags);\n"
        "}\n\n"
        'extern "C" long qcut_query(int what, void const*) { return Launcher::query(what); }\n'
    )
    return KernelSource(
        name=name,
        text=text,
        entry=name,
        params=params,
        arch=arch,
        toolchain="nvcc",
        host_text=host,
        includes=("qcut", "cuda"),
        waits=True,
    )
