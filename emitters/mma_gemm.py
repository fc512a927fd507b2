"""Raw int8 GEMM on ``mma.sync.m16n8k32``: needs NVRTC alone, takes any M, N and K.

``D = epilogue(A B^T)``, A ``[M, K]`` and B ``[N, K]`` int8, both K-contiguous. Device code:
``include/qcut/mma_gemm.cuh`` over ``gemm.cuh`` (tiles, pipeline) and ``epilogue.cuh``. It serves machines without
nvcc or g++, and sizes that the CUTLASS kernels do not take.

This module also holds what the raw families share: tile rules, the launch grid, the epilogue's text.
"""

from __future__ import annotations

from emitters.epilogue import Epilogue
from emitters.gemm import GemmProblem, TileConfig, procedural_name, require
from emitters.source import DType, KernelSource, Param

FAMILY = "mma"
SMEM_LIMIT = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90a": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
}
"""Dynamic shared memory one CTA may use, in bytes (CUDA C++ Programming Guide, compute capabilities)."""
MAX_ACCUMULATORS = 128
"""Accumulator registers per thread; beyond it operands no longer fit beside them."""
VECTOR_N = 8
"""N and leading dimension of D must be multiples of this for 16-byte stores."""

_ACTIVATIONS = {"none": "kNone", "relu": "kRelu", "gelu_erf": "kGeluErf", "gelu_tanh": "kGeluTanh", "silu": "kSilu"}
_MODES = {"none": "kNone", "per_tensor": "kPerTensor", "per_token": "kPerToken", "per_channel": "kPerChannel"}
_PARAM_TYPES = {"i32": "int", "i64": "long long", "f32": "float"}


def validate(problem: GemmProblem, tile: TileConfig, arch: str) -> None:
    """Check that this family can build the pair.

    Raises:
        EmitError: naming the kernel and the constraint: operands not s8 x s8, alignments below 1, or a tile that
            breaks `validate_tile`.
    """
    name = procedural_name(FAMILY, arch, problem, tile)
    require(problem.a is DType.S8 and problem.b is DType.S8, name, "operands are s8 x s8")
    require(min(problem.alignment_k, problem.alignment_n) >= 1, name, "alignments must be at least 1")
    validate_tile(name, problem, tile, arch)


def validate_tile(name: str, problem: GemmProblem, tile: TileConfig, arch: str) -> None:
    """Tile rules of the raw families.

    Whole warps of (16 i) x (16, 32 or 64), 2 to 16 of them; 64 or 128 columns of K; 2 to 5 stages; at most 128
    accumulators per thread; shared memory of one CTA within the architecture's limit.

    Raises:
        EmitError: naming the kernel and the rule.
    """
    bm, bn, bk = tile.threadblock_shape
    wm, wn, wk = tile.warp_shape
    require(arch in SMEM_LIMIT, name, f"architecture {arch!r} is not one of {tuple(SMEM_LIMIT)}")
    require(tile.schedule == "multistage", name, f"schedule {tile.schedule!r}; raw GEMMs are multistage")
    require(tile.cluster_shape == (1, 1), name, "raw GEMMs use no clusters")
    require(tile.epilogue_tile == (0, 0), name, "raw GEMMs have no epilogue tile")
    require(bk in (64, 128), name, f"block K {bk}; allowed are 64 and 128")
    require(wk in (0, bk), name, f"warp K {wk}; allowed are 0 and the block's {bk}")
    require(wm > 0 and wm % 16 == 0 and bm % wm == 0, name, f"warp M {wm} must be a multiple of 16 that divides {bm}")
    require(wn in (16, 32, 64) and bn % wn == 0, name, f"warp N {wn} must be 16, 32 or 64 and divide {bn}")
    warps = (bm // wm) * (bn // wn)
    require(warps in (2, 4, 8, 16), name, f"{warps} warps; allowed are 2, 4, 8 and 16")
    require(2 <= tile.stages <= 5, name, f"{tile.stages} stages; allowed are 2 to 5")
    accumulators = wm * wn // 32
    require(
        accumulators <= MAX_ACCUMULATORS,
        name,
        f"{accumulators} accumulators per thread; allowed are up to {MAX_ACCUMULATORS}",
    )
    used = smem_bytes(problem, tile)
    require(used <= SMEM_LIMIT[arch], name, f"{used} bytes of shared memory; {arch} has {SMEM_LIMIT[arch]}")


def smem_bytes(problem: GemmProblem, tile: TileConfig) -> int:
    """Dynamic shared memory of a CTA: the pipeline, or the epilogue's staging where that is larger."""
    bm, bn, bk = tile.threadblock_shape
    pipeline = tile.stages * bk * (bm * problem.a.bits + bn * problem.b.bits) // 8
    staging = _warps(tile) * 16 * (tile.warp_shape[1] + 8) * 4
    return max(pipeline, staging)


def grid(tile: TileConfig, m: int, n: int) -> tuple[int, int, int]:
    """CTAs of a launch, one per tile of D in one dimension (the kernel orders them for the L2)."""
    bm, bn, _ = tile.threadblock_shape
    return (-(-m // bm) * -(-n // bn), 1, 1)


def default_tiles(arch: str) -> tuple[TileConfig, ...]:
    """A menu from decode (16 rows) to prompts, all legal on `arch`; dispatch or a tuner chooses."""
    shapes = (
        ((16, 32, 128), (16, 16), 5),
        ((16, 64, 128), (16, 16), 5),
        ((16, 128, 128), (16, 32), 5),
        ((32, 64, 128), (16, 32), 5),
        ((64, 64, 128), (32, 32), 4),
        ((64, 128, 128), (32, 64), 3),
        ((128, 128, 64), (64, 64), 4),
        ((128, 128, 128), (64, 32), 3),
        ((128, 256, 64), (64, 64), 4),
        ((256, 128, 64), (64, 64), 4),
    )
    tiles = tuple(TileConfig(block, (*warp, block[2]), stages) for block, warp, stages in shapes)
    problem = GemmProblem()
    return tuple(t for t in tiles if smem_bytes(problem, t) <= SMEM_LIMIT[arch])


def emit_mma_gemm(problem: GemmProblem, tile: TileConfig, arch: str) -> KernelSource:
    """Text of one kernel.

    Arguments are ``problem.params()`` in order; m, n, k >= 1. Where ``problem.alignment_k`` is a multiple of 16, rows
    of A and B start at multiples of 16 bytes (a, b 16-byte aligned, lda, ldb multiples of 16; k itself may be any
    number up to them) and are copied asynchronously; otherwise byte by byte, for any lda, ldb >= k. Where
    ``problem.alignment_n`` is a multiple of 8: n, ldd multiples of 8, d and residual 16-byte aligned; otherwise
    anything. The residual has D's leading dimension.

    Exactness: bitwise equal to ``qcut.numerics.gemm_s8_ref`` for activations none and relu; the others differ by the
    ulps of CUDA's erff, tanhf and expf. Independent of the grid, the tile and the other rows.

    Raises:
        EmitError: see `validate`.

    Source: PTX ISA, ``mma.sync.m16n8k32``, ``ldmatrix``, ``cp.async``.
    """
    validate(problem, tile, arch)
    name = procedural_name(FAMILY, arch, problem, tile)
    return gemm_source(name, problem, tile, arch, header="mma_gemm", function="mma_gemm", aligned_k=16)


def gemm_source(
    name: str, problem: GemmProblem, tile: TileConfig, arch: str, *, header: str, function: str, aligned_k: int
) -> KernelSource:
    """The text both raw GEMMs share: a kernel that fills the epilogue's arguments and calls `function`.

    ``aligned_k`` is the K alignment from which on rows of A can be copied in 16-byte pieces.
    """
    epilogue = problem.epilogue
    bm, bn, bk = tile.threadblock_shape
    block = 32 * _warps(tile)
    aligned = "true" if problem.alignment_k % aligned_k == 0 else "false"
    vector = "true" if problem.alignment_n % VECTOR_N == 0 else "false"
    first = f"{problem.a.cpp}, " if problem.a is not DType.S8 else ""
    assignments = "".join(f"  args.{_field(p, epilogue)} = {p.name};\n" for p in epilogue.params())
    text = (
        f"#include <qcut/{header}.cuh>\n\n"
        f'extern "C" __global__ void __launch_bounds__({block})\n'
        f"{name}(\n    {_signature(problem)}) {{\n"
        f"  using Tile = qcut::Tile<{bm}, {bn}, {bk}, {tile.warp_shape[0]}, {tile.warp_shape[1]}, {tile.stages}>;\n"
        f"  using Epilogue = {epilogue_type(epilogue)};\n"
        "  Epilogue::Args args{};\n"
        f"{assignments}"
        f"  qcut::{function}<{first}Tile, Epilogue, {aligned}, {vector}>(a, b, d, m, n, k, lda, ldb, ldd, args);\n"
        "}\n"
    )
    return KernelSource(
        name=name,
        text=text,
        entry=name,
        params=problem.params(),
        arch=arch,
        block=block,
        smem_bytes=smem_bytes(problem, tile),
        includes=("qcut", "cuda"),
    )


def epilogue_type(epilogue: Epilogue) -> str:
    """The C++ type of an epilogue, ``qcut::Epilogue<...>`` of ``epilogue.cuh``."""
    arguments = (
        epilogue.out.cpp,
        f"qcut::ZeroPoint::{_MODES[epilogue.zero_point]}",
        "true" if epilogue.row_scale != "none" else "false",
        f"qcut::ColScale::{_MODES[epilogue.col_scale]}",
        "true" if epilogue.bias else "false",
        f"qcut::Activation::{_ACTIVATIONS[epilogue.activation.value]}",
        "true" if epilogue.residual else "false",
    )
    return f"qcut::Epilogue<{', '.join(arguments)}>"


def _warps(tile: TileConfig) -> int:
    bm, bn, _ = tile.threadblock_shape
    wm, wn, _ = tile.warp_shape
    return (bm // wm) * (bn // wn)


def _signature(problem: GemmProblem) -> str:
    types = {
        "a": f"const {problem.a.cpp}*",
        "b": f"const {problem.b.cpp}*",
        "d": f"{problem.epilogue.out.cpp}*",
        "colsum": "const int32_t*",
        "zero_point": "const int32_t*",
        "residual": f"const {problem.epilogue.out.cpp}*",
    }
    return ", ".join(
        f"{types.get(p.name, 'const float*') if p.kind == 'ptr' else _PARAM_TYPES[p.kind]} {p.name}"
        for p in problem.params()
    )


def _field(param: Param, epilogue: Epilogue) -> str:
    """The member of ``EpilogueArgs`` that a kernel argument sets."""
    if param.name == "zero_point" and epilogue.zero_point == "per_token":
        return "zero_point_per_token"
    if param.name == "col_scale" and epilogue.col_scale == "per_channel":
        return "col_scale_per_channel"
    return param.name
