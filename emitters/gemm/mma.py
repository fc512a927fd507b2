"""Raw int8 GEMM on ``mma.sync.m16n8k32``: needs NVRTC alone, takes any M, N, K and layout.

``D = epilogue(A B)``, A ``[M, K]`` and B ``[K, N]`` int8. Device code: ``include/qcut/gemm/mma.cuh`` over ``gemm.cuh``
(tiles, pipeline) and ``epilogue.cuh``. It serves machines without nvcc or g++, and what the CUTLASS kernels do not
take: other layouts, odd sizes, raw accumulators.

This module also holds what the raw tensor-core families share: tile constraints, the launch grid, the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import gcd

from qcut.emitters.core.constraints import Constraint, check
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType, KernelSource, Param
from qcut.emitters.gemm.problem import GemmProblem, TileConfig, procedural_name

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
CLUSTER_ARCHITECTURES = ("sm_90a", "sm_100", "sm_120")
_OTHER_REGISTERS = 40
"""What a thread needs beside accumulators and fragments: addresses, counters, bounds."""

_ACTIVATIONS = {"none": "kNone", "relu": "kRelu", "gelu_erf": "kGeluErf", "gelu_tanh": "kGeluTanh", "silu": "kSilu"}
_MODES = {"none": "kNone", "per_tensor": "kPerTensor", "per_token": "kPerToken", "per_channel": "kPerChannel"}
_PARAM_TYPES = {"i32": "int", "i64": "long long", "f32": "float"}


def threads(tile: TileConfig) -> int:
    """Threads of a CTA, whose warps cover its tile once."""
    bm, bn, _ = tile.threadblock_shape
    wm, wn, _ = tile.warp_shape
    return 32 * (bm // wm) * (bn // wn)


def registers(tile: TileConfig) -> int:
    """About what a thread needs: 32-bit accumulators, two buffers of fragments 32 columns deep, and the rest."""
    wm, wn, _ = tile.warp_shape
    return wm * wn // 32 + (wm + wn) // 2 + _OTHER_REGISTERS


def _whole_warps(problem: GemmProblem, tile: TileConfig, arch: str) -> bool:
    pairs = zip(tile.threadblock_shape[:2], tile.warp_shape[:2], strict=True)
    return all(warp > 0 and warp % 16 == 0 and block % warp == 0 for block, warp in pairs)


def _contiguous_warp(problem: GemmProblem, tile: TileConfig, arch: str) -> bool:
    return tile.warp_shape[1 if problem.layout_d == "row" else 0] in (16, 32, 64)


def _copies_whole_runs(problem: GemmProblem, tile: TileConfig, arch: str) -> bool:
    bm, bn, _ = tile.threadblock_shape
    extents = [bm] * (problem.layout_a == "column") + [bn] * (problem.layout_b == "row")
    return all(extent & (extent - 1) == 0 and threads(tile) >= extent // 2 for extent in extents)


def _fits_registers(problem: GemmProblem, tile: TileConfig, arch: str) -> bool:
    return registers(tile) <= min(255, 65_536 // threads(tile))


TILE_CONSTRAINTS = (
    Constraint("architecture", f"allowed are {', '.join(SMEM_LIMIT)}", lambda p, t, arch: arch in SMEM_LIMIT),
    Constraint("alignments", "are at least 1", lambda p, t, arch: min(p.alignment_k, p.alignment_n) >= 1),
    Constraint("schedule", "raw GEMMs are multistage", lambda p, t, arch: t.schedule == "multistage"),
    Constraint("cluster_shape", "is (1, 1): raw GEMMs share no loads", lambda p, t, arch: t.cluster_shape == (1, 1)),
    Constraint("epilogue_tile", "is (0, 0): a warp writes its own tile", lambda p, t, arch: t.epilogue_tile == (0, 0)),
    Constraint(
        "block_k",
        "is 64 or 128: rows of 4 or 8 chunks of 16 bytes, which the swizzle spreads over all banks",
        lambda p, t, arch: t.threadblock_shape[2] in (64, 128),
    ),
    Constraint(
        "warp_k",
        "is 0 or the block's: warps do not split K",
        lambda p, t, arch: t.warp_shape[2] in (0, t.threadblock_shape[2]),
    ),
    Constraint("warp_shape", "is a multiple of 16, the product's rows, and divides the block", _whole_warps),
    Constraint(
        "contiguous_warp",
        "along D's contiguous dimension a warp has 16, 32 or 64 elements: its lanes cover whole rows",
        _contiguous_warp,
    ),
    Constraint(
        "warps",
        "are 2, 4, 8 or 16: copies give each thread the same part of every row",
        lambda p, t, arch: threads(t) in (64, 128, 256, 512),
    ),
    Constraint("stages", "are 2 to 5: one to read and one to fill at least", lambda p, t, arch: 2 <= t.stages <= 5),
    Constraint(
        "registers",
        f"accumulators, two buffers of fragments and {_OTHER_REGISTERS} more fit a thread's 255 and the SM's 65536",
        _fits_registers,
    ),
    Constraint(
        "copy_runs",
        "an operand not contiguous along K has a tile of a power of two rows, two for each thread at most: a step of "
        "the copy is then 8 columns of K or more, after which the swizzle repeats",
        _copies_whole_runs,
    ),
    Constraint(
        "splits", "are 1, 2, 4 or 8: the CTAs of a portable cluster", lambda p, t, arch: t.splits in (1, 2, 4, 8)
    ),
    Constraint(
        "clusters",
        f"splits need thread-block clusters: {', '.join(CLUSTER_ARCHITECTURES)}",
        lambda p, t, arch: t.splits == 1 or arch in CLUSTER_ARCHITECTURES,
    ),
)
"""Tile rules of the raw tensor-core families, on (problem, tile, arch)."""

SHARED_MEMORY = "pipeline and staging of a CTA fit what the architecture gives one: " + ", ".join(
    f"{limit} bytes on {arch}" for arch, limit in SMEM_LIMIT.items()
)
CONSTRAINTS = (
    Constraint("operands", "are s8 x s8", lambda p, t, arch: p.a is DType.S8 and p.b is DType.S8),
    *TILE_CONSTRAINTS,
    Constraint("shared_memory", SHARED_MEMORY, lambda p, t, arch: smem_bytes(p, t) <= SMEM_LIMIT[arch]),
)
"""What this family can build, on (problem, tile, arch)."""


def validate(problem: GemmProblem, tile: TileConfig, arch: str) -> None:
    """Check that this family can build the pair.

    Raises:
        EmitError: naming the kernel and the first of `CONSTRAINTS` it breaks.
    """
    check(procedural_name(FAMILY, arch, problem, tile), CONSTRAINTS, problem, tile, arch)


def smem_bytes(problem: GemmProblem, tile: TileConfig) -> int:
    """Dynamic shared memory of a CTA: the pipeline, or the epilogue's staging where that is larger."""
    bm, bn, bk = tile.threadblock_shape
    pipeline = tile.stages * bk * (bm * problem.a.bits + bn * problem.b.bits) // 8
    return max(pipeline, staging_bytes(problem, tile))


def staging_bytes(problem: GemmProblem, tile: TileConfig, padding: int = 0) -> int:
    """Accumulators in shared memory: 16 rows of each warp at a time, or all where CTAs sum each other's.

    ``padding`` words follow each row.
    """
    rows, width, _ = tile.warp_shape if problem.layout_d == "row" else (tile.warp_shape[1], tile.warp_shape[0], 0)
    return threads(tile) // 32 * (16 if tile.splits == 1 else rows) * (width + padding) * 4


def grid(tile: TileConfig, m: int, n: int) -> tuple[int, int, int]:
    """CTAs of a launch, one per tile of D and part of K in one dimension (the kernel orders them for the L2)."""
    bm, bn, _ = tile.threadblock_shape
    return (-(-m // bm) * -(-n // bn) * tile.splits, 1, 1)


_MENU = (
    ((16, 32, 128), (16, 16), 5),
    ((16, 64, 128), (16, 16), 5),
    ((16, 128, 128), (16, 32), 5),
    ((32, 64, 128), (16, 32), 5),
    ((32, 128, 128), (32, 32), 4),
    ((128, 32, 128), (32, 32), 4),
    ((64, 64, 128), (32, 32), 4),
    ((64, 128, 128), (32, 64), 3),
    ((128, 64, 128), (64, 32), 3),
    ((128, 128, 64), (64, 64), 4),
    ((128, 128, 128), (64, 64), 3),
    ((128, 128, 128), (64, 32), 3),
    ((128, 256, 64), (64, 64), 4),
    ((256, 128, 64), (64, 64), 4),
    ((128, 256, 128), (64, 64), 3),
    ((256, 128, 128), (64, 64), 3),
)
_SPLIT_MENU = (
    ((16, 64, 128), (16, 16), 5, 2),
    ((16, 64, 128), (16, 16), 5, 4),
    ((16, 64, 128), (16, 16), 5, 8),
    ((16, 128, 128), (16, 32), 5, 4),
    ((32, 64, 128), (16, 32), 5, 4),
    ((64, 64, 128), (32, 32), 4, 2),
    ((64, 64, 128), (32, 32), 4, 4),
    ((64, 64, 128), (32, 32), 4, 8),
    ((128, 64, 128), (64, 32), 3, 4),
    ((64, 128, 128), (32, 64), 3, 2),
    ((128, 128, 128), (64, 32), 3, 2),
)
"""For fewer tiles than SMs: decode, tall and flat products."""


def default_tiles(arch: str) -> tuple[TileConfig, ...]:
    """A menu from decode (16 rows) to prompts, all legal on `arch`; dispatch or a tuner chooses.

    Where there are clusters it goes on with tiles whose K several CTAs share.
    """
    tiles = [TileConfig(block, (*warp, block[2]), stages) for block, warp, stages in _MENU]
    tiles += [TileConfig(block, (*warp, block[2]), stages, splits=k) for block, warp, stages, k in _SPLIT_MENU]
    return tuple(tile for tile in tiles if is_legal(CONSTRAINTS, GemmProblem(), tile, arch))


def search_space(problem: GemmProblem, arch: str) -> Iterator[TileConfig]:
    """Every tile a tuner may try, legal for the problem on `arch`."""
    return legal_tiles(CONSTRAINTS, problem, arch)


def legal_tiles(constraints: tuple[Constraint, ...], problem: GemmProblem, arch: str) -> Iterator[TileConfig]:
    """Tiles of powers of two that keep all constraints."""
    blocks = (16, 32, 64, 128, 256)
    for bm, bn, bk, wm, wn in product(blocks, blocks, (64, 128), (16, 32, 64, 128), (16, 32, 64, 128)):
        for stages, splits in product(range(2, 6), (1, 2, 4, 8)):
            tile = TileConfig((bm, bn, bk), (wm, wn, bk), stages, splits=splits)
            if is_legal(constraints, problem, tile, arch):
                yield tile


def is_legal(constraints: tuple[Constraint, ...], problem: GemmProblem, tile: TileConfig, arch: str) -> bool:
    """Whether a tile keeps all constraints."""
    return all(constraint.holds(problem, tile, arch) for constraint in constraints)


def emit_mma_gemm(problem: GemmProblem, tile: TileConfig, arch: str) -> KernelSource:
    """Text of one kernel.

    Arguments are ``problem.params()`` in order; m, n, k >= 1. A leading dimension is the distance between contiguous
    runs (rows of a row-major operand, columns of another one) in elements, at least their length. Where
    ``problem.alignment_k`` is a multiple of 4, runs of A and B start and end at multiples of 4, 8 or 16 bytes, the
    largest that divides it, and are copied asynchronously; otherwise byte by byte, from anywhere. D is stored in
    pieces of up to 16 bytes that ``problem.alignment_n`` elements allow. The residual has D's layout and leading
    dimension.

    Exactness: bitwise equal to ``qcut.numerics.gemm_s8_ref`` for activations none and relu; the others differ by the
    ulps of CUDA's erff, tanhf and expf. Independent of the grid, the tile, the splits and the other rows.

    Raises:
        EmitError: see `validate`.

    Source: PTX ISA, ``mma.sync.m16n8k32``, ``ldmatrix``, ``cp.async``, ``barrier.cluster``, ``mapa``.
    """
    validate(problem, tile, arch)
    name = procedural_name(FAMILY, arch, problem, tile)
    return gemm_source(name, problem, tile, arch, function="mma_gemm", smem=smem_bytes(problem, tile))


HEADERS = {"mma_gemm": "mma", "wmma_gemm": "wmma", "weight_only_gemm": "w8a16"}
"""Device functions of the families that share `gemm_source`, and their headers in ``include/qcut/gemm``."""


def gemm_source(
    name: str, problem: GemmProblem, tile: TileConfig, arch: str, *, function: str, smem: int, first: str = ""
) -> KernelSource:
    """The text the raw tensor-core GEMMs share: a kernel that fills the epilogue's arguments and calls ``function``.

    Column-major D is row-major ``D^T = B^T A^T``: the same function with the operands and their sizes swapped.
    ``first`` precedes the function's template arguments.
    """
    epilogue = problem.epilogue
    swapped = problem.layout_d == "column"
    (bm, bn, bk), (wm, wn, _) = tile.threadblock_shape, tile.warp_shape
    shape = (bn, bm, bk, wn, wm) if swapped else (bm, bn, bk, wm, wn)
    by_k = {"a": problem.layout_a == "row", "b": problem.layout_b == "column"}
    operands = "".join(
        f"  using {x.upper()} = qcut::Operand<{dtype.cpp}, qcut::Major::{'kK' if by_k[x] else 'kRows'}, "
        f"{copy_bytes(dtype, problem.alignment_k)}>;\n"
        for x, dtype in (("a", problem.a), ("b", problem.b))
    )
    align_d = gcd(problem.alignment_n * epilogue.out.bits // 8, 16)
    cluster = f"__cluster_dims__({tile.splits}, 1, 1) " if tile.splits > 1 else ""
    types, call = ("B, A", "b, a, d, n, m, k, ldb, lda") if swapped else ("A, B", "a, b, d, m, n, k, lda, ldb")
    text = (
        f"#include <qcut/gemm/{HEADERS[function]}.cuh>\n\n"
        f'extern "C" __global__ void {cluster}__launch_bounds__({threads(tile)})\n'
        f"{name}(\n    {signature(problem)}) {{\n"
        f"  using Tile = qcut::Tile<{', '.join(map(str, shape))}, {tile.stages}, {tile.splits}>;\n"
        f"{operands}"
        f"  using Epilogue = {epilogue_type(epilogue)};\n"
        f"{argument_setup(epilogue)}"
        f"  qcut::{function}<{first}Tile, {types}, Epilogue, {align_d}, {str(swapped).lower()}>({call}, ldd, args);\n"
        "}\n"
    )
    return KernelSource(
        name=name,
        text=text,
        entry=name,
        params=problem.params(),
        arch=arch,
        block=threads(tile),
        smem_bytes=smem,
        includes=("qcut", "cuda"),
    )


def copy_bytes(dtype: DType, alignment: int) -> int:
    """Largest asynchronous copy, 16, 8 or 4 bytes, that so many elements allow; 1 where there is none."""
    size = gcd(alignment * dtype.bits // 8, 16)
    return size if size >= 4 else 1


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
        *(("true",) if epilogue.wrap else ()),
    )
    return f"qcut::Epilogue<{', '.join(arguments)}>"


def argument_setup(epilogue: Epilogue) -> str:
    """Statements that fill ``args`` of the type ``Epilogue`` from the kernel's arguments."""
    assignments = (f"  args.{_field(p, epilogue)} = {p.name};\n" for p in epilogue.params())
    return "  Epilogue::Args args{};\n" + "".join(assignments)


def signature(problem: GemmProblem) -> str:
    """The kernel's parameters in C++, those of ``problem.params()``."""
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
