"""Rows of the conformance suite: products of many tokens with int8 weights."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, get_args

from qcut.emitters.codebook.wgmma import CodebookWgmmaTile
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.families import (
    FP8_CUTLASS,
    FP8_MMA,
    INT8_CUTLASS,
    INT8_DP4A,
    INT8_MMA,
    INT8_WGMMA,
    INT8_WMMA,
    W8A16_CUTLASS,
    W8A16_MMA,
    W8A16_WGMMA,
)
from qcut.emitters.gemm import dp4a, fp8, int8_wgmma, mma, w8a16, w8a16_wgmma
from qcut.emitters.gemm.cutlass import fp8 as fp8_cutlass
from qcut.emitters.gemm.cutlass import w8a16 as w8a16_cutlass
from qcut.emitters.gemm.dp4a import Dp4aTile
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from qcut.emitters.gemm.w8a16_wgmma import W8A16WgmmaTile
from qcut.emitters.gemm.wmma import Int8Wmma, SharedLayout
from tests.emitters.conformance.row import COPY, Row, product_of

ARCH = "sm_90a"
F16, BF16, F32, S8, S16, S32 = DType.F16, DType.BF16, DType.F32, DType.S8, DType.S16, DType.S32
DYNAMIC = Epilogue(row_scale="per_token", col_scale="per_channel", bias=True)
EVERYTHING = Epilogue(
    BF16, "per_token", "per_channel", "per_token", bias=True, activation=Activation.GELU_ERF, residual=True
)
REQUANTIZE = Epilogue(S8, "none", "per_tensor", "per_tensor", activation=Activation.SILU)
STATIC = Epilogue(S8, col_scale="per_channel", bias=True)
HALVES = replace(DYNAMIC, halves=True)
RESCALED, RESCALED_HALVES = Epilogue(S8, rescale=True), Epilogue(S16, halves=True, rescale=True)
RAW = (Epilogue(S32), Epilogue(S8, wrap=True))
INT8 = GemmProblem(epilogue=DYNAMIC)
LARGE = TileConfig((128, 256, 64), (64, 64, 64), 4)
MIDDLE = TileConfig((128, 128, 64), (64, 64, 64), 3)
SMALL = TileConfig((16, 64, 128), (16, 16, 128), 5)
SPLIT = replace(SMALL, splits=4)
LAYOUTS = tuple(
    {"layout_a": a, "layout_b": b, "layout_d": d}
    for a, b, d in product(("row", "column"), ("row", "column"), ("row", "column"))
)
NTN: Any = {"layout_a": "column", "layout_b": "row", "layout_d": "column"}


def layouts_of(epilogue: Epilogue, **alignments: int) -> list[GemmProblem]:
    return [GemmProblem(epilogue=epilogue, **layouts, **alignments) for layouts in LAYOUTS]  # type: ignore[arg-type]


# ── tensor cores, a warp at a time ───────────────────────────────────────────────────────────────


def mma_sources(arch: str) -> Iterator[KernelSource]:
    static = GemmProblem(epilogue=STATIC)
    kernels = [(static, tile) for tile in INT8_MMA.default_tiles(GemmProblem(), arch)]
    kernels += [(problem, LARGE) for problem in layouts_of(STATIC)]
    kernels += [(p, SMALL) for align in (1, 4) for p in layouts_of(STATIC, alignment_k=align, alignment_n=align)]
    kernels += [(GemmProblem(epilogue=epilogue), MIDDLE) for epilogue in (*RAW, EVERYTHING)]
    kernels += [(INT8, LARGE), (GemmProblem(epilogue=REQUANTIZE), SMALL)]
    kernels += [(GemmProblem(epilogue=EVERYTHING, alignment_n=1), MIDDLE)]
    kernels += [(GemmProblem(epilogue=DYNAMIC, alignment_k=1, alignment_n=1), SMALL)]
    halves = [HALVES, replace(HALVES, out=BF16, residual=True)]
    kernels += [(GemmProblem(epilogue=epilogue), LARGE) for epilogue in halves]
    for epilogue in (RESCALED, RESCALED_HALVES):
        problem = GemmProblem(epilogue=epilogue)
        tiles = [tile for tile in INT8_MMA.default_tiles(GemmProblem(), arch) if not refuses(problem, tile, arch)]
        kernels.append((problem, max(tiles, key=lambda t: (t.warp_shape[0] * t.warp_shape[1], t.threads))))
    if arch == ARCH:
        kernels += [(GemmProblem(epilogue=epilogue), SPLIT) for epilogue in (HALVES, RESCALED, RESCALED_HALVES)]
    kernels += [(replace(problem, device_m=True), SMALL) for problem in layouts_of(DYNAMIC)[:2]]
    yield from {s.name: s for s in (INT8_MMA.emit(problem, tile, arch) for problem, tile in kernels)}.values()


def refuses(problem: GemmProblem, tile: TileConfig, arch: str) -> bool:
    return not all(constraint.holds(problem, tile, arch) for constraint in mma.CONSTRAINTS)


def mma_instructions(source: KernelSource) -> Iterator[str]:
    """Integer kernels use no float; hi/lo splits are combined exactly."""
    yield product_of(source)
    if re.search(r"_k16?n|_s8xs8_s8_sn_b_\d", source.name) and "k1n1" not in source.name:
        yield from (r"LDSM\.16\.M88\.4$", COPY)
    if "rescale" in source.name:  # quotients go through conversions and a reciprocal
        yield "!FADD|FMUL|FFMA|DADD|DMUL|I2F.S64"
    elif "halves" in source.name:
        yield r"I2F\.S64"


TENSOR_CORE_REFUSALS = {
    "operands": [(GemmProblem(a=F16, epilogue=DYNAMIC), LARGE, "sm_80")],
    "architecture": [(INT8, LARGE, "sm_75")],
    "alignments": [(replace(INT8, alignment_n=0), LARGE, "sm_80")],
    "schedule": [(INT8, replace(LARGE, schedule="pingpong"), ARCH)],
    "cluster_shape": [(INT8, replace(LARGE, cluster_shape=(2, 1)), ARCH)],
    "epilogue_tile": [(INT8, replace(LARGE, epilogue_tile=(64, 32)), ARCH)],
    "block_k": [(INT8, TileConfig((128, 128, 32), (64, 64, 32), 3), "sm_80")],
    "warp_k": [(INT8, TileConfig((128, 128, 64), (64, 64, 32), 3), "sm_80")],
    "warp_shape": [
        (INT8, TileConfig((128, 128, 64), (48, 64, 64), 3), "sm_80"),
        (INT8, TileConfig((24, 128, 64), (24, 64, 64), 3), "sm_80"),
        (INT8, TileConfig((128, 128, 64), (0, 0, 0), 3), "sm_80"),
        (INT8, TileConfig((128, 128, 64), (64, 8, 64), 3), "sm_80"),
    ],
    "contiguous_warp": [
        (INT8, TileConfig((64, 256, 64), (32, 128, 64), 3), "sm_80"),
        (replace(INT8, layout_d="column"), TileConfig((256, 64, 64), (128, 32, 64), 3), "sm_80"),
        (replace(INT8, layout_b="row"), TileConfig((128, 256, 64), (128, 128, 64), 2), "sm_80"),
    ],
    "warps": [(INT8, TileConfig((64, 64, 64), (64, 64, 64), 3), "sm_80")],
    "stages": [
        (INT8, replace(LARGE, stages=6), "sm_80"),
        (INT8, replace(LARGE, stages=1), "sm_80"),
        (replace(INT8, layout_b="row"), TileConfig((16, 256, 64), (16, 64, 64), 0), "sm_80"),
    ],
    "registers": [
        (INT8, TileConfig((256, 256, 64), (64, 64, 64), 2), "sm_80"),
        (INT8, TileConfig((256, 128, 64), (128, 64, 64), 3), "sm_80"),
    ],
    "copy_runs": [(replace(INT8, layout_a="column"), TileConfig((96, 64, 64), (48, 32, 64), 3), "sm_80")],
    "splits": [(INT8, replace(SMALL, splits=3), ARCH)],
    "clusters": [(INT8, SPLIT, "sm_80")],
    "shared_memory": [(INT8, TileConfig((128, 256, 128), (64, 64, 128), 4), "sm_80")],
}

WMMA_TILE = TileConfig((64, 64, 64), (32, 32, 64), 3)
SHARED: tuple[SharedLayout, ...] = get_args(SharedLayout)


def wmma_sources(arch: str) -> Iterator[KernelSource]:
    static = GemmProblem(epilogue=STATIC)
    found = [INT8_WMMA.emit(static, tile, arch) for tile in INT8_WMMA.default_tiles(GemmProblem(), arch)]
    found += [Int8Wmma(shared).emit(static, WMMA_TILE, arch) for shared in SHARED]
    problems = layouts_of(EVERYTHING) + layouts_of(EVERYTHING, alignment_k=1, alignment_n=1)
    problems += [GemmProblem(epilogue=epilogue) for epilogue in RAW]
    found += [INT8_WMMA.emit(problem, WMMA_TILE, arch) for problem in problems]
    for epilogue in (HALVES, RESCALED, RESCALED_HALVES):
        found.append(
            INT8_WMMA.emit(GemmProblem(epilogue=epilogue), INT8_WMMA.default_tiles(GemmProblem(), arch)[0], arch)
        )
    return iter({source.name: source for source in found}.values())


def wmma_instructions(source: KernelSource) -> Iterator[str]:
    yield r"IMMA\.16816\.S8\.S8$"
    yield from list(mma_instructions(source))[-1:] if re.search("rescale|halves", source.name) else ()


# ── without tensor cores ─────────────────────────────────────────────────────────────────────────

BIASED = GemmProblem(epilogue=Epilogue(S8, "per_token", "per_channel", bias=True))
SIMT = Dp4aTile(128, 128, 32, 64, 32, 1, 8, 8)
SHALLOW = Dp4aTile(64, 128, 8, 32, 64, 2, 4, 8)


def dp4a_sources(arch: str) -> Iterator[KernelSource]:
    tiles = list(INT8_DP4A.default_tiles(GemmProblem(), arch))
    if arch == ARCH:
        tiles += random.Random(3).sample(list(INT8_DP4A.search_space(BIASED, arch)), 12)
    kernels = [(BIASED, tile) for tile in tiles]
    for align in (16, 4, 1):
        aligned = layouts_of(EVERYTHING, alignment_k=align, alignment_n=align)
        kernels += [(problem, tile) for problem in aligned for tile in (SIMT, SHALLOW)]
    for epilogue in (*RAW, Epilogue(F32, residual=True)):
        kernels += [(GemmProblem(epilogue=epilogue), SIMT), (GemmProblem(epilogue=epilogue, **NTN), SIMT)]
    return iter({s.name: s for s in (INT8_DP4A.emit(p, t, arch) for p, t in kernels)}.values())


DP4A_REFUSALS = {
    "operands": [(replace(BIASED, a=F16), SIMT, "sm_80")],
    "halves": [(replace(BIASED, epilogue=Epilogue(F16, halves=True)), SIMT, "sm_80")],
    "rescale": [(replace(BIASED, epilogue=RESCALED), SIMT, "sm_80")],
    "device_m": [(replace(BIASED, device_m=True), SIMT, "sm_80")],
    "alignments": [(replace(BIASED, alignment_n=0), SIMT, "sm_80")],
    "architecture": [(BIASED, SIMT, "sm_75")],
    "power_of_two": [
        (BIASED, replace(SIMT, bn=96), "sm_80"),
        *(
            (BIASED, replace(SIMT, **{field: size}), ARCH)
            for field, size in product(("bm", "bn", "bk", "wm", "wn", "wniter", "tm", "tn"), (-8, 0, 12))
        ),
    ],
    "block_k": [(BIASED, replace(SIMT, bk=128), "sm_80")],
    "thread_tile": [(BIASED, Dp4aTile(128, 128, 32, 64, 32, 1, 16, 2), "sm_80")],
    "warp_m": [(BIASED, replace(SIMT, bm=32), "sm_80")],
    "warp_n": [(BIASED, replace(SIMT, bn=16), "sm_80")],
    "threads": [(BIASED, replace(SIMT, bm=256, bn=512), "sm_80")],
    "wniter": [(BIASED, replace(SIMT, wniter=8), "sm_80")],
    "wmiter": [(BIASED, replace(SIMT, wniter=2, tm=16), "sm_80")],
    "lanes": [(BIASED, Dp4aTile(64, 256, 32, 32, 256, 1, 4, 4), "sm_80")],
    "accumulators": [(BIASED, replace(SIMT, wm=128, wn=64), "sm_80")],
    "registers": [(BIASED, Dp4aTile(64, 64, 64, 64, 64, 1, 16, 8), "sm_80")],
    "shared_memory": [(BIASED, Dp4aTile(1024, 16, 64, 128, 16, 1, 8, 8), "sm_86")],
}

# ── float tokens ─────────────────────────────────────────────────────────────────────────────────

GELU = Epilogue(col_scale="per_channel", bias=True, activation=Activation.GELU_TANH)
HALF = GemmProblem(a=F16, epilogue=GELU)
BRAIN = GemmProblem(a=BF16, epilogue=replace(EVERYTHING, zero_point="none", row_scale="none"))


def w8a16_sources(arch: str) -> Iterator[KernelSource]:
    yield from (W8A16_MMA.emit(problem, tile, arch) for problem in (HALF, BRAIN) for tile in (LARGE, SMALL))
    unaligned = replace(HALF, alignment_k=1, alignment_n=1)
    yield from (W8A16_MMA.emit(replace(unaligned, b=b), MIDDLE, arch) for b in (S8, DType.E4M3))
    yield from (W8A16_MMA.emit(replace(problem, b=DType.E4M3), LARGE, arch) for problem in (HALF, BRAIN))
    for problem in (HALF, replace(BRAIN, alignment_k=1, alignment_n=1)):
        units = with_units(problem)
        yield from (W8A16_MMA.emit(units, tile, arch) for tile in W8A16_MMA.default_tiles(units, arch)[::3])


def with_units(problem: GemmProblem) -> GemmProblem:
    """A product with e4m3 weights that have scales of units."""
    return replace(problem, b=DType.E4M3, epilogue=replace(problem.epilogue, col_scale="per_unit"))


def float_refusals(half: GemmProblem, tile: Any) -> dict[str, list[Any]]:
    """What no family of float tokens takes."""
    return {
        "operands": [(INT8, tile, ARCH), (replace(half, a=F32), tile, ARCH)],
        "layouts": [(replace(half, layout_a="column"), tile, ARCH)],
        "zero_point": [(replace(half, epilogue=replace(half.epilogue, zero_point="per_token")), tile, ARCH)],
        "raw_output": [(replace(half, epilogue=Epilogue(S32)), tile, ARCH)],
    }


W8A16_REFUSALS = {
    name: [(replace(HALF, **changes), tile, arch) for changes, tile, arch in cases]
    for name, cases in {
        "architecture": [({}, LARGE, "sm_75")],
        "alignments": [({"alignment_k": 0}, MIDDLE, ARCH)],
        "one_cta": [({}, SPLIT, ARCH)],
        "experts": [({"experts": True, "epilogue": Epilogue(col_scale="per_channel")}, LARGE, ARCH)],
    }.items()
}
for _name in set(TENSOR_CORE_REFUSALS) - {*W8A16_REFUSALS, "operands", "copy_runs"}:
    W8A16_REFUSALS[_name] = [
        (HALF, tile, arch) for problem, tile, arch in TENSOR_CORE_REFUSALS[_name] if problem is INT8
    ]

BIAS = Epilogue(col_scale="per_channel", bias=True)
VECTORS = GemmProblem(a=F16, epilogue=BIAS, alignment_k=8)
NARROW = GemmProblem(a=BF16, epilogue=replace(GELU, out=BF16, residual=True), alignment_k=8, alignment_n=1)
GROUPS = W8A16WgmmaTile(64, 2, stages=12, prefetch=4)


def w8a16_wgmma_sources(arch: str) -> Iterator[KernelSource]:
    """A tile of each width of tokens and number of groups of the menu, and other types and epilogues."""
    if arch == ARCH:
        shapes = {
            (tile.tokens, tile.groups): tile for tile in W8A16_WGMMA.default_tiles(GemmProblem(DType.F16), "sm_90a")
        }
        yield from (W8A16_WGMMA.emit(VECTORS, tile, arch) for tile in shapes.values())
        clusters = (W8A16WgmmaTile(64, 1, 4, 12, 2, 2), W8A16WgmmaTile(128, 2, 2, 10, 4))
        yield from (W8A16_WGMMA.emit(NARROW, tile, arch) for tile in clusters)
        yield W8A16_WGMMA.emit(replace(VECTORS, epilogue=Epilogue(F32)), GROUPS, arch)
        yield from (W8A16_WGMMA.emit(replace(VECTORS, a=a, b=DType.E4M3), GROUPS, arch) for a in (F16, BF16))
        for units in (with_units(VECTORS), with_units(replace(VECTORS, a=BF16))):
            yield from (W8A16_WGMMA.emit(units, tile, arch) for tile in W8A16_WGMMA.default_tiles(units, arch)[::2])


def w8a16_wgmma_instructions(source: KernelSource) -> Iterator[str]:
    tokens = re.search(r"_t(\d+)_", source.name)
    assert tokens is not None
    yield rf"HGMMA\.64x{tokens[1]}x16\.F32" + (r"\.BF16" if "_bf16x" in source.name else "$")
    yield "UTMALDG"


WGMMA_REFUSALS = {
    **float_refusals(VECTORS, GROUPS),
    "device_m": [(replace(VECTORS, device_m=True), GROUPS, ARCH)],
    "experts": [(replace(VECTORS, experts=True), GROUPS, ARCH)],
    "architecture": [(VECTORS, GROUPS, "sm_80")],
    "alignment_k": [(replace(VECTORS, alignment_k=4), GROUPS, ARCH)],
    "alignment_n": [(replace(VECTORS, alignment_n=0), GROUPS, ARCH)],
    "tokens": [(VECTORS, replace(GROUPS, tokens=48), ARCH)],
    "groups": [(VECTORS, replace(GROUPS, groups=5), ARCH)],
    "splits": [(VECTORS, replace(GROUPS, splits=3), ARCH)],
    "stages": [(VECTORS, replace(GROUPS, stages=1), ARCH)],
    "prefetch": [(VECTORS, replace(GROUPS, prefetch=9), ARCH)],
    "ctas": [(VECTORS, replace(GROUPS, ctas=3), ARCH)],
    "registers": [(VECTORS, replace(GROUPS, tokens=256, prefetch=3), ARCH)],
    "shared_memory": [(VECTORS, replace(GROUPS, stages=32), ARCH)],
}

# ── e4m3 tokens ──────────────────────────────────────────────────────────────────────────────────

FP8 = GemmProblem(DType.E4M3, DType.E4M3, DYNAMIC)
FP8_TILE = TileConfig((64, 128, 128), (32, 32, 128), 3)


def fp8_mma_sources(arch: str) -> Iterator[KernelSource]:
    if not architecture(arch).e4m3:
        return
    yield from (FP8_MMA.emit(FP8, tile, arch) for tile in FP8_MMA.default_tiles(FP8, arch))
    static = Epilogue(BF16, col_scale="per_channel", activation=Activation.GELU_TANH)
    yield FP8_MMA.emit(replace(FP8, epilogue=static, alignment_k=1, alignment_n=1), FP8_TILE, arch)
    yield FP8_MMA.emit(replace(FP8, epilogue=replace(DYNAMIC, out=F32, residual=True)), FP8_TILE, arch)


FP8_MMA_REFUSALS: dict[str, list[Any]] = {
    name: [(replace(FP8, epilogue=problem.epilogue), tile, arch) for problem, tile, arch in cases if problem == INT8]
    for name, cases in TENSOR_CORE_REFUSALS.items()
    if name not in ("operands", "copy_runs", "alignments", "shared_memory")
} | {
    "operands": [(replace(HALF, b=DType.E4M3), FP8_TILE, ARCH), (INT8, FP8_TILE, ARCH)],
    "layouts": [(replace(FP8, layout_a="column"), FP8_TILE, ARCH)],
    "device_m": [(replace(FP8, device_m=True), FP8_TILE, ARCH)],
    "experts": [(replace(FP8, experts=True), FP8_TILE, ARCH)],
    "alignments": [(replace(FP8, alignment_n=0), FP8_TILE, ARCH)],
    "e4m3": [(FP8, FP8_TILE, "sm_80"), (FP8, FP8_TILE, "sm_100")],
    "scales": [
        (replace(FP8, epilogue=epilogue), FP8_TILE, ARCH)
        for epilogue in (Epilogue(S32), Epilogue(zero_point="per_token"), Epilogue(col_scale="per_unit"))
    ],
    "two_sums": [(FP8, LARGE, ARCH), (FP8, TileConfig((128, 128, 128), (32, 64, 128), 3), ARCH)],
    "shared_memory": [(FP8, TileConfig((128, 128, 128), (32, 64, 128), 4), "sm_89")],
}

# ── CUTLASS ──────────────────────────────────────────────────────────────────────────────────────

FULL = Epilogue(F16, "per_token", "per_channel", "per_token", bias=True)
MULTISTAGE = TileConfig((128, 128, 64), (64, 64, 64), stages=4)
PINGPONG = TileConfig((128, 128, 128), cluster_shape=(2, 1), schedule="pingpong")
MIXED = w8a16_cutlass.MENU[-1]
FP8_PROMPT = fp8_cutlass.MENU[-1]


def cutlass_sources(arch: str) -> Iterator[KernelSource]:
    gelu = replace(FULL, out=S8, activation=Activation.GELU_TANH)
    epilogue, tile = (gelu, MULTISTAGE) if arch == "sm_80" else (FULL, PINGPONG)
    yield INT8_CUTLASS.emit(GemmProblem(epilogue=epilogue), tile, arch)


def cutlass_texts(arch: str) -> Iterator[KernelSource]:
    yield from (INT8_CUTLASS.emit(BIASED, tile, arch) for tile in INT8_CUTLASS.default_tiles(GemmProblem(), arch))
    if arch == ARCH:
        halves = (HALVES, replace(HALVES, activation=Activation.SILU))
        yield from (INT8_CUTLASS.emit(GemmProblem(epilogue=e), PINGPONG, arch) for e in halves)


def cutlass_instructions(source: KernelSource) -> tuple[str, ...]:
    """Contraction is off: a fused multiply-add would round once where the reference rounds twice."""
    if source.arch == "sm_80":
        return (r"IMMA\.16832\.S8\.S8", "LDGSTS")
    return (r"IGMMA\.64x128x32\.S8\.S8", "UTMALDG", "UTMASTG", "SYNCS", "USETMAXREG", "!FFMA")


def cutlass_case(arch: str, tile: dict[str, Any], **problem: Any) -> tuple[GemmProblem, TileConfig, str]:
    base = MULTISTAGE if arch != ARCH else PINGPONG
    return replace(GemmProblem(epilogue=FULL), **problem), replace(base, **tile), arch


CUTLASS_REFUSALS = {
    "operands are s8": [cutlass_case(ARCH, {}, a=F16)],
    "rows of A and B are multiples of 16 bytes": [cutlass_case(ARCH, {}, alignment_k=8)],
    "rows of D": [cutlass_case(ARCH, {}, alignment_n=4)],
    "contiguous along K, D is row-major": [
        cutlass_case(ARCH, {}, **{f"layout_{x}": y}) for x, y in zip("abd", ("column", "row", "column"), strict=True)
    ],
    "raw accumulators": [cutlass_case(ARCH, {}, epilogue=epilogue) for epilogue in RAW],
    "rescale: ": [cutlass_case("sm_80", {}, epilogue=RESCALED)],
    "device_m: ": [cutlass_case(ARCH, {}, device_m=True)],
    "halves: ": [
        cutlass_case("sm_80", {}, epilogue=HALVES),
        cutlass_case(ARCH, {}, epilogue=replace(HALVES, residual=True)),
        cutlass_case(ARCH, {}, epilogue=replace(HALVES, out=S8)),
    ],
    "stream_k schedule": [cutlass_case(ARCH, {"splits": 2}), cutlass_case("sm_80", {"splits": 2})],
    "M is 64, 128 or 256": [cutlass_case(ARCH, {"threadblock_shape": (96, 128, 128)})],
    "wgmma width": [cutlass_case(ARCH, {"threadblock_shape": (128, 120, 128)})],
    "accumulators leave registers": [cutlass_case(ARCH, {"threadblock_shape": (128, 256, 128)})],
    "128 rows": [cutlass_case(ARCH, {"threadblock_shape": (64, 128, 128), "schedule": "cooperative"})],
    "cluster sides": [cutlass_case(ARCH, {"cluster_shape": (3, 1)})],
    "epilogue_tile": [cutlass_case(ARCH, {"epilogue_tile": tile}) for tile in ((32, 64), (64, 48))],
    "fixes the warp shape": [cutlass_case(ARCH, {"warp_shape": (64, 64, 64)})],
    "exists only on sm_90a": [(GemmProblem(epilogue=FULL), PINGPONG, "sm_80")],
    "at least 3 stages": [cutlass_case("sm_80", {"stages": 2})],
    "warp_shape is given": [cutlass_case("sm_80", {"warp_shape": (0, 0, 0)})],
    "divides": [cutlass_case("sm_80", {"warp_shape": shape}) for shape in ((48, 64, 64), (64, 64, 32))],
    "16x8x32": [cutlass_case("sm_80", {"warp_shape": (8, 64, 64)})],
    "1, 2, 4 or 8 warps": [cutlass_case("sm_80", {"warp_shape": (16, 16, 64)})],
    "fit shared memory": [cutlass_case("sm_86", {"stages": 7})],
    "clusters exist": [cutlass_case("sm_80", {"cluster_shape": (2, 1)})],
}


def w8a16_cutlass_sources(arch: str) -> Iterator[KernelSource]:
    if architecture(arch).wgmma:
        yield W8A16_CUTLASS.emit(VECTORS, MIXED, arch)


def w8a16_cutlass_texts(arch: str) -> Iterator[KernelSource]:
    if architecture(arch).wgmma:
        silu = Epilogue(BF16, col_scale="per_channel", activation=Activation.SILU)
        yield W8A16_CUTLASS.emit(replace(VECTORS, a=BF16, epilogue=silu), MIXED, arch)
        yield W8A16_CUTLASS.emit(replace(VECTORS, b=DType.E4M3), MIXED, arch)
        tiles = {*w8a16_cutlass.MENU, *W8A16_CUTLASS.search_space(VECTORS, arch)} - {MIXED}
        yield from (W8A16_CUTLASS.emit(VECTORS, tile, arch) for tile in sorted(tiles, key=str))


def mixed_instructions(product: str) -> tuple[str, ...]:
    return (product, "UTMALDG", "UTMASTG", "PRMT", "ACQBULK", "!FFMA")


def transposed_refusals(problem: Any, tile: TileConfig, k: int) -> dict[str, list[Any]]:
    """Of CUTLASS's kernels that compute the transpose of D, with K of a stage."""
    changes: dict[str, list[dict[str, Any]]] = {
        "schedule": [{"schedule": "multistage"}, {"schedule": "stream_k"}, {"warp_shape": (64, 64, 64)}],
        "splits": [{"splits": 2}],
        "threadblock_shape": [{"threadblock_shape": (120, 128, k)}, {"threadblock_shape": (128, 96, k)}],
        "cooperative": [{"threadblock_shape": (128, 64, k), "schedule": "cooperative"}],
        "registers": [{"threadblock_shape": (256, 256, k)}],
        "cluster_shape": [{"cluster_shape": (4, 4)}],
        "epilogue_tile": [{"epilogue_tile": (64, 64)}],
        "k": [{"threadblock_shape": (128, 128, 32)}],
    }
    cases = {name: [(problem, replace(tile, **change), ARCH) for change in each] for name, each in changes.items()}
    return {"architecture": [(problem, tile, "sm_75")], "wgmma": [(problem, tile, "sm_80")], **cases}


def fp8_cutlass_sources(arch: str) -> Iterator[KernelSource]:
    if architecture(arch).wgmma:
        yield FP8_CUTLASS.emit(FP8, FP8_PROMPT, arch)


def fp8_cutlass_texts(arch: str) -> Iterator[KernelSource]:
    if architecture(arch).wgmma:
        static = Epilogue(BF16, col_scale="per_channel", activation=Activation.SILU)
        yield FP8_CUTLASS.emit(replace(FP8, epilogue=static), FP8_PROMPT, arch)
        yield FP8_CUTLASS.emit(replace(FP8, epilogue=replace(DYNAMIC, out=F32)), FP8_PROMPT, arch)
        tiles = {*fp8_cutlass.MENU, *FP8_CUTLASS.search_space(FP8, arch), *FP8_CUTLASS.fast_space(FP8, arch)}
        yield from (FP8_CUTLASS.emit(FP8, tile, arch) for tile in sorted(tiles - {FP8_PROMPT}, key=str))


FP8_CUTLASS_REFUSALS = {
    **transposed_refusals(FP8, FP8_PROMPT, 128),
    "operands": [(VECTORS, FP8_PROMPT, ARCH), (INT8, FP8_PROMPT, ARCH)],
    "layouts": [(replace(FP8, layout_a="column"), FP8_PROMPT, ARCH)],
    "device_m": [(replace(FP8, device_m=True), FP8_PROMPT, ARCH)],
    "experts": [(replace(FP8, experts=True), FP8_PROMPT, ARCH)],
    "alignment_k": [(replace(FP8, alignment_k=8), FP8_PROMPT, ARCH)],
    "alignment_n": [(replace(FP8, alignment_n=4), FP8_PROMPT, ARCH)],
    "epilogue": [
        (replace(FP8, epilogue=epilogue), FP8_PROMPT, ARCH)
        for epilogue in (
            Epilogue(col_scale="per_channel", residual=True),
            Epilogue(zero_point="per_token"),
            Epilogue(S8, col_scale="per_channel"),
        )
    ],
    "sums": [
        (FP8, replace(FP8_PROMPT, threadblock_shape=(256, 128, 128)), ARCH),
        (FP8, replace(FP8_PROMPT, threadblock_shape=(256, 256, 128), fast=True), ARCH),
    ],
}
del FP8_CUTLASS_REFUSALS["registers"]

W8A16_CUTLASS_REFUSALS = {
    **transposed_refusals(VECTORS, MIXED, 64),
    "operands": [(replace(VECTORS, a=S8), MIXED, ARCH)],
    "layouts": [(replace(VECTORS, layout_a="column"), MIXED, ARCH)],
    "device_m": [(replace(VECTORS, device_m=True), MIXED, ARCH)],
    "experts": [(replace(VECTORS, experts=True), MIXED, ARCH)],
    "alignment_k": [(replace(VECTORS, alignment_k=4), MIXED, ARCH)],
    "alignment_n": [(replace(VECTORS, alignment_n=4), MIXED, ARCH)],
    "epilogue": [
        (replace(VECTORS, epilogue=epilogue), MIXED, ARCH)
        for epilogue in (
            Epilogue(col_scale="per_channel", residual=True),
            Epilogue(row_scale="per_token"),
            Epilogue(S8, col_scale="per_channel"),
        )
    ],
}

# ── int8 weights of experts on a warpgroup's tensor core ─────────────────────────────────────────

ROUTED_INT8 = GemmProblem(epilogue=replace(BIAS, out=F16, row_scale="per_token"), experts=True)
ROUTED_HALF = GemmProblem(a=F16, epilogue=Epilogue(F16, col_scale="per_channel"), experts=True)
PROMPT = CodebookWgmmaTile(128, 4, 1, lead=2)


def int8_wgmma_sources(arch: str) -> Iterator[KernelSource]:
    """The menus of int8 and of 16-bit tokens, and other types and epilogues."""
    if arch != ARCH:
        return
    kernels = [(problem, tile) for problem in (ROUTED_INT8, ROUTED_HALF) for tile in INT8_WGMMA.menu(problem, arch)]
    single = replace(BIAS, out=F32, row_scale="per_token", activation=Activation.SILU)
    brain = replace(ROUTED_HALF, a=BF16, epilogue=replace(BIAS, out=BF16), alignment_n=1)
    kernels += [(replace(ROUTED_INT8, epilogue=single, alignment_n=1), PROMPT), (brain, PROMPT)]
    kernels += [(replace(problem, b=DType.E4M3), PROMPT) for problem in (ROUTED_HALF, brain)]
    kernels += [(with_units(problem), PROMPT) for problem in (ROUTED_HALF, brain)]
    yield from (INT8_WGMMA.emit(*kernel, arch) for kernel in kernels)


def int8_wgmma_instructions(source: KernelSource) -> Iterator[str]:
    tokens = re.search(r"_128x(\d+)_", source.name)
    assert tokens is not None
    yield ("IGMMA" if "_s8xs8_" in source.name else "HGMMA") + rf"\.64x{tokens[1]}x"
    yield "UBLKCP"
    yield COPY
    yield ("" if "_c2_" in source.name else "!") + r".*MULTICAST"


INT8_WGMMA_REFUSALS: dict[str, list[Any]] = {
    "experts": [(replace(ROUTED_INT8, experts=False), PROMPT, ARCH)],
    "device_m": [(replace(ROUTED_INT8, device_m=True), PROMPT, ARCH)],
    "epilogue": [
        (replace(ROUTED_INT8, epilogue=BIAS), PROMPT, ARCH),
        (replace(ROUTED_HALF, epilogue=replace(BIAS, row_scale="per_token")), PROMPT, ARCH),
        (replace(ROUTED_INT8, epilogue=replace(ROUTED_INT8.epilogue, zero_point="per_token")), PROMPT, ARCH),
    ],
    "out": [(replace(ROUTED_INT8, epilogue=replace(ROUTED_INT8.epilogue, out=S8)), PROMPT, ARCH)],
    "architecture": [(ROUTED_INT8, PROMPT, "sm_80")],
    "alignment_n": [(replace(ROUTED_INT8, alignment_n=0), PROMPT, ARCH)],
    "tokens": [(ROUTED_INT8, replace(PROMPT, tokens=80), ARCH)],
    "cluster": [(ROUTED_INT8, replace(PROMPT, cluster=4), ARCH)],
    "splits": [(ROUTED_INT8, replace(PROMPT, splits=3), ARCH)],
    "one_cluster": [(ROUTED_INT8, replace(PROMPT, cluster=2, splits=2), ARCH)],
    "one_part": [(ROUTED_INT8, replace(PROMPT, splits=2), ARCH)],
    "stages": [(ROUTED_INT8, replace(PROMPT, stages=1), ARCH)],
    "lead": [(ROUTED_INT8, replace(PROMPT, lead=5), ARCH)],
    "pairs": [(ROUTED_HALF, replace(PROMPT, pairs=True), ARCH)],
    "units": [(with_units(ROUTED_HALF), replace(PROMPT, tokens=160), ARCH)],
    "three_stages": [(ROUTED_HALF, replace(PROMPT, tokens=256, stages=2, lead=1), ARCH)],
    "shared_memory": [(ROUTED_HALF, replace(PROMPT, stages=8), ARCH)],
}

ROWS = {
    "int8_cutlass": Row(
        INT8_CUTLASS.emit,
        cutlass_sources,
        refusals=CUTLASS_REFUSALS,
        legal=(BIASED, MULTISTAGE, "sm_80"),
        instructions=cutlass_instructions,
        texts=cutlass_texts,
    ),
    "int8_mma": Row(
        INT8_MMA.emit,
        mma_sources,
        mma.CONSTRAINTS,
        TENSOR_CORE_REFUSALS,
        legal=(INT8, LARGE, "sm_80"),
        instructions=mma_instructions,
    ),
    "int8_wmma": Row(
        INT8_WMMA.emit,
        wmma_sources,
        INT8_WMMA.constraints,
        TENSOR_CORE_REFUSALS,
        legal=(INT8, WMMA_TILE, "sm_80"),
        instructions=wmma_instructions,
    ),
    "int8_dp4a": Row(
        INT8_DP4A.emit,
        dp4a_sources,
        dp4a.CONSTRAINTS,
        DP4A_REFUSALS,
        legal=(BIASED, SIMT, "sm_80"),
        instructions=lambda source: (r"IDP\.4A\.S8\.S8$", r"LDS\.128$", "STS", "!IMMA"),
    ),
    "int8_wgmma": Row(
        INT8_WGMMA.emit,
        int8_wgmma_sources,
        int8_wgmma.CONSTRAINTS,
        INT8_WGMMA_REFUSALS,
        legal=(ROUTED_INT8, PROMPT, ARCH),
        instructions=int8_wgmma_instructions,
    ),
    "w8a16_mma": Row(
        W8A16_MMA.emit,
        w8a16_sources,
        w8a16.CONSTRAINTS,
        {**W8A16_REFUSALS, **float_refusals(HALF, MIDDLE)},
        legal=(HALF, MIDDLE, "sm_80"),
        implied=("copy_runs",),
        instructions=lambda source: (product_of(source), "PRMT" if "_f16x" in source.name else r"HFMA2\.BF16_V2"),
    ),
    "w8a16_wgmma": Row(
        W8A16_WGMMA.emit,
        w8a16_wgmma_sources,
        w8a16_wgmma.CONSTRAINTS,
        WGMMA_REFUSALS,
        legal=(VECTORS, GROUPS, ARCH),
        instructions=w8a16_wgmma_instructions,
    ),
    "w8a16_cutlass": Row(
        W8A16_CUTLASS.emit,
        w8a16_cutlass_sources,
        w8a16_cutlass.CONSTRAINTS,
        W8A16_CUTLASS_REFUSALS,
        legal=(VECTORS, MIXED, ARCH),
        implied=("shared_memory",),
        instructions=lambda source: mixed_instructions(r"HGMMA\.64x256x16\.F32"),
        texts=w8a16_cutlass_texts,
    ),
    "fp8_mma": Row(
        FP8_MMA.emit,
        fp8_mma_sources,
        fp8.CONSTRAINTS,
        FP8_MMA_REFUSALS,
        legal=(FP8, FP8_TILE, ARCH),
        implied=("copy_runs",),
        instructions=lambda source: (r"HMMA\.16816\.F32$", r"F2FP\.F16\.E4M3"),  # of mma.sync on sm_90a
    ),
    "fp8_cutlass": Row(
        FP8_CUTLASS.emit,
        fp8_cutlass_sources,
        fp8_cutlass.CONSTRAINTS,
        FP8_CUTLASS_REFUSALS,
        legal=(FP8, FP8_PROMPT, ARCH),
        implied=("shared_memory",),
        instructions=lambda source: (r"QGMMA\.64x192x32\.F32\.E4M3\.E4M3", "UTMALDG", "UTMASTG", "ACQBULK", "!FFMA"),
        texts=fp8_cutlass_texts,
    ),
}
