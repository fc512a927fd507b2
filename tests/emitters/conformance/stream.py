"""Rows of the conformance suite: products of few tokens with streamed weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import best_tile
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.families import (
    CODEBOOK_EXPERTS,
    CODEBOOK_STREAM,
    CODEBOOK_STREAM_ROUNDS,
    CODEBOOK_STREAM_WGMMA,
    INT8_EXPERTS,
    INT8_STREAM,
    W8A16_STREAM,
)
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.stream import codebook, codebook_experts, codebook_rounds, codebook_wgmma, int8_experts, w8a8, w8a16
from qcut.emitters.stream.codebook import CodebookStreamTile
from qcut.emitters.stream.codebook_rounds import CodebookRoundsTile
from qcut.emitters.stream.codebook_wgmma import CodebookStreamWgmmaTile
from qcut.emitters.stream.experts import ExpertsTile
from qcut.emitters.stream.w8a8 import Tokens, W8A8Problem, W8A8Tile
from qcut.emitters.stream.w8a16 import W8A16Tile
from tests.emitters.conformance.gemm import BIAS, RESCALED, RESCALED_HALVES, ROUTED_INT8, float_refusals, with_units
from tests.emitters.conformance.row import COPY, STREAM, Row, product_of, tokens_of

ARCH = "sm_90a"
F16, BF16, F32, S8, S16 = DType.F16, DType.BF16, DType.F32, DType.S8, DType.S16
SM_COUNT = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90a": 132, "sm_100": 148, "sm_120": 170}

# ── int8 weights and tokens ──────────────────────────────────────────────────────────────────────

PLAIN = Epilogue(F16, row_scale="per_token", col_scale="per_channel", bias=True)


def problem_of(
    tokens: Tokens, x: DType = F16, *, aligned: bool = True, absmax: bool = False, **changes: Any
) -> W8A8Problem:
    return W8A8Problem(tokens, x, replace(PLAIN, out=x, **changes), aligned, absmax)


NONE, TOKEN_ROWS = problem_of("none"), problem_of("rows")
ZERO_POINT = W8A8Problem("given", F16, replace(PLAIN, out=S8, zero_point="per_token"))
NONE_EXPERTS, ROWS_EXPERTS = (replace(problem, experts=True) for problem in (NONE, TOKEN_ROWS))
INT8_TILE = W8A8Tile(2, 10, prefetch=2)


EXPERT_SIZES = ((1536, 2048), (28672, 4096))
"""(N, K) of an expert's weight."""


def int8_sources(arch: str) -> Iterator[KernelSource]:
    """Every token kind and type, in tiles of 1 to 32 warps and 1 to 32 tokens; hi/lo splits; integer outputs."""
    shapes = [
        (problem_of("none", BF16), 8, 4096, 14336),
        (problem_of("given", F16, activation=Activation.GELU_TANH, absmax=True), 8, 5120, 1280),
        (problem_of("given", F32, bias=False), 2, 33, 80),
        (problem_of("rows", F16), 1, 1280, 1280),
        (problem_of("rows", F16), 8, 1280, 1280),
        (problem_of("rows", F16), 2, 4096, 14336),
        (problem_of("rows", F16, absmax=True), 8, 1280, 5120),
        (problem_of("rows", BF16, aligned=False), 3, 512, 1376),
        (problem_of("rows", BF16), 8, 6144, 4096),
        (problem_of("rows", F32), 4, 5120, 1280),
        (problem_of("floats", F16), 1, 14336, 4096),
        (problem_of("floats", F32, aligned=False), 8, 1280, 1280),
        (problem_of("rows", F32, aligned=False, activation=Activation.SILU), 8, 4096, 14336),
        (problem_of("rows", F32, residual=True), 2, 1280, 1280),
        (replace(problem_of("floats", F16), rotates=128), 1, 4096, 14336),
        (replace(problem_of("floats", BF16, bias=False), rotates=64), 1, 5120, 1280),
        (replace(problem_of("floats", BF16), rotates=32), 1, 14336, 4096),
        (problem_of("floats", F16, halves=True), 1, 14336, 4096),
        (problem_of("floats", F32, halves=True), 8, 1280, 5120),
        (problem_of("given", BF16, halves=True), 8, 14336, 4096),
        (problem_of("rows", F16, halves=True), 2, 4096, 14336),
    ]
    for epilogue in (RESCALED, RESCALED_HALVES):
        few = W8A8Problem("given", epilogue.out, epilogue)
        shapes += [(few, 1, 14336, 4096), (few, 8, 4096, 14336)]
    shapes.append((W8A8Problem("given", S8, RESCALED), 16, 1280, 1280))
    shapes += [(NONE_EXPERTS, m, n, k) for m, (n, k) in product((1, 8, 16, 32), EXPERT_SIZES)]
    in_halves = replace(ROWS_EXPERTS, epilogue=replace(PLAIN, halves=True))
    for problem in (ROWS_EXPERTS, in_halves, replace(in_halves, x=F32, aligned=False)):
        shapes += [(problem, m, n, k) for m, (n, k) in product((1, 8), EXPERT_SIZES)]
    kernels = [(p, best_tile(INT8_STREAM, p, m, n, k, Target(arch, SM_COUNT[arch]))) for p, m, n, k in shapes]
    kernels.append((ZERO_POINT, W8A8Tile(7, 16, 2, 1, 16)))
    kernels.append((replace(ZERO_POINT, tokens="none"), W8A8Tile(7, 8, 2, 1, 32, common_sums=True)))
    kernels.append((problem_of("given"), W8A8Tile(3, 10, 1, 3, 8)))
    if arch == ARCH:
        kernels += [(problem, W8A8Tile(4, 28, splits=2)) for problem in (NONE, NONE_EXPERTS)]
        kernels.append((problem_of("rows", absmax=True), W8A8Tile(2, 4, 1, 2, 4, 8)))
    yield from (INT8_STREAM.emit(problem, tile, arch) for problem, tile in kernels)


def int8_instructions(source: KernelSource) -> Iterator[str]:
    yield from (STREAM, r"IMMA\.16832\.S8\.S8$")
    if "rescale" in source.name:
        yield "!FADD|FMUL|FFMA|DADD|DMUL|I2F.S64"
    elif "halves" in source.name:
        yield r"I2F\.S64"


INT8_REFUSALS: dict[str, list[Any]] = {
    "x": [(replace(TOKEN_ROWS, x=S8), INT8_TILE, "sm_80")],
    "epilogue": [
        (problem_of("given", residual=True), INT8_TILE, "sm_80"),
        (replace(TOKEN_ROWS, epilogue=replace(PLAIN, col_scale="per_tensor")), INT8_TILE, ARCH),
        (replace(TOKEN_ROWS, epilogue=Epilogue(DType.S32)), INT8_TILE, ARCH),
    ],
    "rescale": [
        (replace(TOKEN_ROWS, epilogue=RESCALED), INT8_TILE, "sm_80"),
        (W8A8Problem("given", S8, RESCALED, absmax=True), W8A8Tile(1, 8), "sm_80"),
    ],
    "rows": [
        (replace(TOKEN_ROWS, epilogue=replace(PLAIN, zero_point="per_token")), INT8_TILE, "sm_80"),
        (replace(TOKEN_ROWS, epilogue=replace(PLAIN, row_scale="none")), INT8_TILE, ARCH),
        (replace(TOKEN_ROWS, tokens="floats"), replace(INT8_TILE, tokens=16), ARCH),
    ],
    "rotates": [
        (replace(TOKEN_ROWS, rotates=64), W8A8Tile(1, 8), ARCH),
        (replace(problem_of("floats"), rotates=64), W8A8Tile(1, 8, tokens=2), ARCH),
        (replace(problem_of("floats"), rotates=256), W8A8Tile(1, 8), "sm_80"),
        (replace(problem_of("floats", F32), rotates=64), W8A8Tile(1, 8), "sm_80"),
        (replace(problem_of("floats", aligned=False), rotates=64), W8A8Tile(1, 8), ARCH),
        (replace(problem_of("floats", halves=True), rotates=64), W8A8Tile(1, 8), ARCH),
    ],
    "absmax": [(replace(ZERO_POINT, absmax=True), INT8_TILE, "sm_80")],
    "experts": [
        (replace(NONE_EXPERTS, tokens="given"), INT8_TILE, "sm_80"),
        (replace(NONE_EXPERTS, absmax=True), INT8_TILE, ARCH),
        (replace(ROWS_EXPERTS, epilogue=replace(PLAIN, residual=True)), INT8_TILE, ARCH),
        (replace(NONE_EXPERTS, epilogue=replace(PLAIN, halves=True)), INT8_TILE, ARCH),
        (replace(NONE_EXPERTS, epilogue=replace(PLAIN, zero_point="per_token")), INT8_TILE, ARCH),
    ],
    "architecture": [(TOKEN_ROWS, INT8_TILE, "sm_75")],
    "tokens": [(NONE, replace(INT8_TILE, tokens=24), "sm_80"), (NONE, W8A8Tile(2, 10, tokens=3), ARCH)],
    "halves": [(problem_of("none", halves=True), replace(INT8_TILE, tokens=16), "sm_80")],
    "row_tiles": [(TOKEN_ROWS, replace(INT8_TILE, row_tiles=0), "sm_80")],
    "warps": [(TOKEN_ROWS, replace(INT8_TILE, warps=warps), "sm_80") for warps in (0, 33)],
    "units": [(TOKEN_ROWS, replace(INT8_TILE, units=0), "sm_80")],
    "prefetch": [(TOKEN_ROWS, replace(INT8_TILE, prefetch=prefetch), "sm_80") for prefetch in (0, 3)],
    "registers": [(TOKEN_ROWS, replace(INT8_TILE, warps=32), "sm_80")],
    "splits": [(TOKEN_ROWS, replace(INT8_TILE, splits=3), ARCH)],
    "clusters": [(TOKEN_ROWS, replace(INT8_TILE, splits=2), "sm_89")],
    "shared_memory": [(TOKEN_ROWS, replace(INT8_TILE, row_tiles=40), "sm_80")],
}

# ── int8 weights, float tokens ───────────────────────────────────────────────────────────────────

W8A16 = GemmProblem(a=F16, epilogue=Epilogue(col_scale="per_channel", bias=True))
W8A16_EXPERTS = replace(W8A16, experts=True)
ONE, MANY = W8A16Tile(7, 32), W8A16Tile(7, 16, 2, 1, 16)
LAYERS = ((14336, 4096), (4096, 14336), (4096, 4096), (1280, 1280), (5120, 1280), (50257, 1280))


def w8a16_sources(arch: str) -> Iterator[KernelSource]:
    full = Epilogue(BF16, col_scale="per_channel", bias=True, activation=Activation.GELU_TANH, residual=True)
    brain = replace(W8A16, a=BF16)
    kernels = [
        (W8A16, ONE),
        (W8A16, MANY),
        (W8A16, W8A16Tile(7, 8, 2, 2, 32)),
        (W8A16, W8A16Tile(3, 10, 1, 3)),
        (brain, ONE),
        (GemmProblem(a=BF16, epilogue=full), MANY),
        (replace(W8A16, alignment_k=1, alignment_n=1), W8A16Tile(2, 8, 1, 2)),
        (replace(W8A16, epilogue=Epilogue(F32)), W8A16Tile(2, 16, 1, 1, 32)),
    ]
    if arch == ARCH:
        kernels += [(W8A16, W8A16Tile(9, 28, splits=4)), (brain, W8A16Tile(3, 10, 1, 3, 32, 2))]
    tiles = {best_tile(W8A16_STREAM, W8A16, m, n, k, Target(arch, 132)) for (n, k), m in product(LAYERS, (1, 16, 32))}
    kernels += [(problem, tile) for problem in (W8A16, brain) for tile in sorted(tiles, key=str)]
    kernels += [(replace(problem, b=DType.E4M3), tile) for problem in (W8A16, brain) for tile in (ONE, MANY)]
    units = [with_units(problem) for problem in (W8A16, replace(brain, alignment_k=1))]
    kernels += [
        (problem, best_tile(W8A16_STREAM, problem, m, 4096, 4096, Target(arch, 132)))
        for problem in units
        for m in (1, 32)
    ]
    experts = W8A16_EXPERTS, replace(W8A16_EXPERTS, a=BF16, alignment_k=1, alignment_n=1)
    kernels += [
        (problem, best_tile(W8A16_STREAM, problem, m, n, k, Target(arch, 132)))
        for problem, m, (n, k) in product(experts, (1, 8, 16, 32), EXPERT_SIZES)
    ]
    if arch == ARCH:
        kernels.append((W8A16_EXPERTS, W8A16Tile(9, 28, splits=4)))
    yield from {s.name: s for s in (W8A16_STREAM.emit(*kernel, arch) for kernel in kernels)}.values()


W8A16_REFUSALS = {
    **float_refusals(W8A16, ONE),
    "device_m": [(replace(W8A16, device_m=True), ONE, "sm_80")],
    "architecture": [(W8A16, ONE, "sm_75")],
    "alignments": [(replace(W8A16, alignment_k=0), ONE, "sm_80")],
    "tokens": [(W8A16, replace(ONE, tokens=tokens), "sm_80") for tokens in (1, 64)],
    "row_tiles": [(W8A16, replace(ONE, row_tiles=0), "sm_80")],
    "warps": [(W8A16, replace(ONE, warps=33), "sm_80")],
    "units": [(W8A16, replace(ONE, units=0), "sm_80")],
    "prefetch": [(W8A16, W8A16Tile(2, 4, prefetch=3), "sm_80")],
    "registers": [(W8A16, replace(ONE, prefetch=2), "sm_80")],
    "splits": [(W8A16, replace(ONE, splits=3), ARCH)],
    "clusters": [(W8A16, replace(ONE, splits=2), "sm_89")],
    "shared_memory": [(W8A16, replace(ONE, row_tiles=14), "sm_80")],
}

# ── codebook weights ─────────────────────────────────────────────────────────────────────────────

HALF = CodebookProblem()
BRAIN = CodebookProblem(BF16, 3, 4, Epilogue(BF16, col_scale="per_channel", bias=True))
INT8 = CodebookProblem(S8, 2, 2, Epilogue(row_scale="per_token", col_scale="per_channel", residual=True))
GELU = Epilogue(col_scale="per_channel", bias=True, activation=Activation.GELU_TANH, residual=True)
ROTATES = replace(HALF, rotates=F16)
PAIRS = replace(HALF, pairs=True)
MIRRORED = replace(INT8, bits=4, mirrored=True)
INT8_PAIRS = CodebookProblem(S8, 4, 2, Epilogue(row_scale="per_token", col_scale="per_channel"), pairs=True)
QUANTIZES = CodebookProblem(S8, 4, 2, INT8_PAIRS.epilogue, 8, BF16)
NARROW = (
    replace(HALF, slots=8),
    CodebookProblem(BF16, 3, 8, BRAIN.epilogue, offsets=True),
    CodebookProblem(S8, 4, 8, INT8_PAIRS.epilogue),
)
"""A norm for each 16 columns."""
EXPERTS = CodebookProblem(epilogue=Epilogue(col_scale="per_channel", bias=True), experts=True)
EXPERT_TILE = ExpertsTile(8, 4, 8, 2, 1, 2)
SPREAD = ExpertsTile(8, 8, 14, 1, 8, 4)
INT8_TILE_OF_ROUTES = ExpertsTile(8, 12, 16, 1, 1, 2)
WIDE = CodebookStreamTile(1, 7, 32)
FEW = CodebookStreamTile(16, 2, 8, 2)
CLUSTER = CodebookStreamTile(8, 9, 28, 1, 4)
WGMMA = CodebookStreamWgmmaTile(64, 4, 2, 8, 4)
ROUNDS = CodebookRoundsTile(8, 2, 8, 2)


def codebook_sources(arch: str) -> Iterator[KernelSource]:
    """Kernels near their register limit, and one of each type of token."""
    tiles = [(HALF, WIDE), (replace(HALF, epilogue=GELU), CodebookStreamTile(8, 2, 32)), (HALF, FEW)]
    tiles += [(ROTATES, WIDE), (replace(BRAIN, rotates=BF16), CodebookStreamTile(1, 3, 10, 2))]
    tiles += [(QUANTIZES, WIDE), (replace(INT8, rotates=F16), CodebookStreamTile(1, 3, 10, 2, 1))]
    tiles += [(BRAIN, WIDE), (BRAIN, CodebookStreamTile(32, 1, 10)), (INT8, CodebookStreamTile(16, 2, 32))]
    tiles += [(PAIRS, FEW), (INT8_PAIRS, WIDE), (replace(INT8_PAIRS, rotates=BF16), WIDE)]
    tiles += [
        (p, best_tile(CODEBOOK_STREAM, p, m, 4096, 4096, Target(arch, 132)))
        for p, m in product((*NARROW, MIRRORED), (1, 8))
    ]
    sums = replace(EXPERTS, summed=True, early_routes=True)
    int8_sums = replace(INT8_PAIRS, experts=True, summed=True)
    tiles += [
        (sums, CodebookStreamTile(1, 1, 16, 3)),
        (replace(sums, early_routes=False), CodebookStreamTile(1, 4, 24)),
    ]
    tiles += [(int8_sums, CodebookStreamTile(1, 2, 16, 3)), (replace(int8_sums, pairs=False), WIDE)]
    if arch == ARCH:
        tiles += [(sums, CodebookStreamTile(1, 2, 23, 1, 4))]
        tiles += [(HALF, CLUSTER), (INT8_PAIRS, CodebookStreamTile(8, 4, 28, 1, 2))]
        tiles += [(INT8, CodebookStreamTile(8, 4, 28, 2, 2)), (QUANTIZES, CodebookStreamTile(1, 9, 28, 1, 8))]
    yield from (CODEBOOK_STREAM.emit(problem, tile, arch) for problem, tile in tiles)


def codebook_instructions(source: KernelSource) -> Iterator[str]:
    yield from (product_of(source), r"LDSM\.16\.M88\.4$", "PRMT", STREAM)
    rotates = any(param.name == "signs" for param in source.params)
    yield from (r"SHFL\.BFLY", f"!{COPY}") if rotates else (r"!SHFL\.BFLY", COPY)


def experts_sources(arch: str) -> Iterator[KernelSource]:
    """Each type of token and size of tile, late and early routes, near the register limit; a cluster."""
    early = replace(EXPERTS, early_routes=True)
    int8 = replace(INT8_PAIRS, pairs=False, slots=1, experts=True)
    tiles = [(EXPERTS, EXPERT_TILE), (early, EXPERT_TILE), (early, ExpertsTile(1, 12, 8, 2, 1, 3))]
    tiles += [(int8, ExpertsTile(8, 8, 6, 1, 1, 4)), (replace(int8, early_routes=True), EXPERT_TILE)]
    tiles += [(replace(INT8_PAIRS, experts=True), EXPERT_TILE), (replace(PAIRS, experts=True), EXPERT_TILE)]
    tiles += [(replace(BRAIN, experts=True), ExpertsTile(16, 2, 8, 1, 1, 2))]
    tiles += [(int8, ExpertsTile(32, 4, 6, 1, 1, 2))]
    tiles += [(replace(p, experts=True), ExpertsTile(8, 4, 8, 1, 1, 2)) for p in NARROW]
    if arch == ARCH:
        tiles += [(EXPERTS, ExpertsTile(32, 2, 8, 1, 2, 1)), (early, ExpertsTile(8, 8, 6, 1, 1, 4, 2))]
        tiles += [(EXPERTS, SPREAD), (int8, replace(SPREAD, prefetch=2))]
    yield from (CODEBOOK_EXPERTS.emit(problem, tile, arch) for problem, tile in tiles)


def int8_experts_sources(arch: str) -> Iterator[KernelSource]:
    """Each type of token and size of tile, near the register limit; a cluster."""
    half, brain = W8A16_EXPERTS, replace(W8A16_EXPERTS, a=BF16, epilogue=Epilogue(BF16, col_scale="per_channel"))
    single = replace(ROUTED_INT8, epilogue=replace(ROUTED_INT8.epilogue, out=F32, activation=Activation.SILU))
    tiles = [(ROUTED_INT8, INT8_TILE_OF_ROUTES), (ROUTED_INT8, ExpertsTile(1, 12, 8, 2, 1, 2))]
    tiles += [(single, ExpertsTile(8, 12, 6, 1, 1, 2, 2)), (ROUTED_INT8, ExpertsTile(32, 4, 8, 1, 1, 2))]
    tiles += [(half, ExpertsTile(8, 12, 8, 2, 1, 2)), (brain, ExpertsTile(16, 8, 6, 1, 1, 1, 2))]
    tiles += [(half, ExpertsTile(1, 9, 6, 1, 1, 3, 2)), (half, ExpertsTile(32, 4, 6, 1, 1, 1))]
    tiles += [(replace(problem, b=DType.E4M3), ExpertsTile(8, 12, 8, 2, 1, 2)) for problem in (half, brain)]
    tiles += [(with_units(problem), ExpertsTile(8, 12, 8, 2, 1, 1)) for problem in (half, brain)]
    if arch == ARCH:
        tiles += [(ROUTED_INT8, replace(SPREAD, prefetch=2)), (half, replace(SPREAD, prefetch=1))]
        tiles += [(with_units(half), ExpertsTile(8, 12, 7, 2, 8, 2))]
    yield from (INT8_EXPERTS.emit(problem, tile, arch) for problem, tile in tiles)


def rounds_sources(arch: str) -> Iterator[KernelSource]:
    problems = (HALF, BRAIN, INT8, PAIRS, replace(INT8, bits=4, pairs=True))
    for problem in (*problems, replace(HALF, x=BF16), replace(INT8, bits=3, slots=4), *NARROW):
        yield CODEBOOK_STREAM_ROUNDS.emit(
            problem, best_tile(CODEBOOK_STREAM_ROUNDS, problem, 8, 4096, 14336, Target(arch, 108)), arch
        )


def rounds_instructions(source: KernelSource) -> Iterator[str]:
    """Pairs of 16 bits come from the table as they are."""
    yield from (product_of(source), r"LDSM\.16\.M88\.4$", STREAM)
    if "f16xc4p" not in source.name:
        yield "PRMT"


def wgmma_sources(arch: str) -> Iterator[KernelSource]:
    if architecture(arch).wgmma:
        tiles = [(HALF, WGMMA), (HALF, CodebookStreamWgmmaTile(64, 5, 8, 10, 1)), (INT8, WGMMA)]
        tiles += [(BRAIN, CodebookStreamWgmmaTile(32, 2, 2, 5, 4)), (INT8, CodebookStreamWgmmaTile(8, 1, 1, 3, 2))]
        tiles += [(PAIRS, WGMMA), (INT8_PAIRS, WGMMA)]
        tiles += [(p, CODEBOOK_STREAM_WGMMA.default_tiles(p, "sm_90a")[-1]) for p in (HALF, BRAIN, INT8, INT8_PAIRS)]
        tiles += [(p, CodebookStreamWgmmaTile(32, 3, 2, 8, 3)) for p in NARROW]
        yield from (CODEBOOK_STREAM_WGMMA.emit(problem, tile, arch) for problem, tile in tiles)


def wgmma_instructions(source: KernelSource) -> Iterator[str]:
    tokens = re.search(r"_t(\d+)_g", source.name)
    assert tokens is not None
    kind = {"s8": r"IGMMA\.64x{}x32\.S8\.S8$", "f16": r"HGMMA\.64x{}x16\.F32$", "bf16": r"HGMMA\.64x{}x16\.F32\.BF16$"}
    yield from (kind[tokens_of(source)].format(tokens[1]), "UBLKCP", r"WARPGROUP\.DEPBAR\.LE$")


CODEBOOK_REFUSALS: dict[str, list[Any]] = {
    "architecture": [(HALF, FEW, "sm_75")],
    "alignment": [(replace(HALF, alignment_n=0), FEW, "sm_80")],
    "tokens": [(HALF, replace(FEW, tokens=12), "sm_80")],
    "row_tiles": [(HALF, replace(FEW, row_tiles=65), "sm_80")],
    "warps": [(HALF, replace(FEW, warps=33), "sm_80")],
    "units": [(HALF, replace(FEW, units=9), "sm_80")],
    "prefetch": [(HALF, replace(FEW, prefetch=3), "sm_80")],
    "splits": [(HALF, replace(FEW, splits=3), ARCH)],
    "rotates": [(ROTATES, FEW, "sm_80")],
    "experts": [
        (EXPERTS, replace(FEW, tokens=1), "sm_80"),
        (replace(EXPERTS, summed=True), FEW, "sm_80"),
    ],
    "clusters": [(HALF, CLUSTER, "sm_80")],
    "registers": [(HALF, CodebookStreamTile(16, 1, 32), ARCH)],
    "shared_memory": [(HALF, CodebookStreamTile(8, 12, 32), ARCH)],
    "mirrored": [
        (INT8, CodebookStreamTile(8, 1, 8, mirrored=True), ARCH),
        (MIRRORED, CodebookStreamTile(16, 1, 8, mirrored=True), ARCH),
    ],
}
EXPERTS_REFUSALS: dict[str, list[Any]] = {
    "architecture": [(EXPERTS, EXPERT_TILE, "sm_75")],
    "rotates": [(ROTATES, EXPERT_TILE, "sm_80")],
    "experts": [(HALF, EXPERT_TILE, "sm_80"), (replace(EXPERTS, summed=True), EXPERT_TILE, "sm_80")],
    "alignment": [(replace(EXPERTS, alignment_n=0), EXPERT_TILE, "sm_80")],
    "tokens": [(EXPERTS, replace(EXPERT_TILE, tokens=24), "sm_80")],
    "warps": [(EXPERTS, replace(EXPERT_TILE, warps=33), "sm_80")],
    "units": [(EXPERTS, replace(EXPERT_TILE, units=9), "sm_80")],
    "prefetch": [(EXPERTS, replace(EXPERT_TILE, prefetch=5), "sm_80")],
    "row_tiles": [(EXPERTS, replace(EXPERT_TILE, row_tiles=rows), "sm_80") for rows in (3, 34)],
    "splits": [(EXPERTS, replace(EXPERT_TILE, splits=3), ARCH)],
    "clusters": [(EXPERTS, SPREAD, "sm_80")],
    "registers": [(EXPERTS, replace(EXPERT_TILE, warps=16), ARCH)],
    "shared_memory": [(EXPERTS, replace(EXPERT_TILE, row_tiles=32, tokens=16), ARCH)],
    "ctas": [
        (EXPERTS, replace(EXPERT_TILE, units=1, warps=4, ctas=4), ARCH),
        (EXPERTS, replace(SPREAD, warps=4, ctas=2), ARCH),
    ],
}
INT8_EXPERTS_REFUSALS: dict[str, list[Any]] = {
    "experts": [(replace(ROUTED_INT8, experts=False), INT8_TILE_OF_ROUTES, "sm_80")],
    "device_m": [(replace(ROUTED_INT8, device_m=True), INT8_TILE_OF_ROUTES, "sm_80")],
    "epilogue": [(replace(ROUTED_INT8, epilogue=BIAS), INT8_TILE_OF_ROUTES, "sm_80")],
    "out": [(replace(ROUTED_INT8, epilogue=replace(ROUTED_INT8.epilogue, out=S8)), INT8_TILE_OF_ROUTES, "sm_80")],
    "alignment_k": [(replace(W8A16_EXPERTS, alignment_k=1), INT8_TILE_OF_ROUTES, "sm_80")],
    "alignment": [(replace(ROUTED_INT8, alignment_n=0), INT8_TILE_OF_ROUTES, "sm_80")],
    "registers": [(ROUTED_INT8, replace(INT8_TILE_OF_ROUTES, prefetch=4), "sm_80")],
    "shared_memory": [(ROUTED_INT8, replace(INT8_TILE_OF_ROUTES, row_tiles=32), "sm_80")],
    "ctas": [(ROUTED_INT8, replace(SPREAD, warps=4, prefetch=1, ctas=2), ARCH)],
    "architecture": [(ROUTED_INT8, INT8_TILE_OF_ROUTES, "sm_75")],
    "tokens": [(ROUTED_INT8, replace(INT8_TILE_OF_ROUTES, tokens=24), "sm_80")],
    "warps": [(ROUTED_INT8, replace(INT8_TILE_OF_ROUTES, warps=33), "sm_80")],
    "units": [(ROUTED_INT8, replace(INT8_TILE_OF_ROUTES, units=9), "sm_80")],
    "prefetch": [(ROUTED_INT8, replace(INT8_TILE_OF_ROUTES, prefetch=5), "sm_80")],
    "row_tiles": [(ROUTED_INT8, replace(INT8_TILE_OF_ROUTES, row_tiles=rows), "sm_80") for rows in (3, 34)],
    "splits": [(ROUTED_INT8, replace(INT8_TILE_OF_ROUTES, splits=3), ARCH)],
    "clusters": [(ROUTED_INT8, replace(SPREAD, prefetch=2), "sm_80")],
}
ROUNDS_REFUSALS: dict[str, list[Any]] = {
    "architecture": [(HALF, ROUNDS, "sm_75")],
    "alignment": [(replace(HALF, alignment_n=0), ROUNDS, "sm_80")],
    "rotates": [(ROTATES, ROUNDS, "sm_80")],
    "experts": [(EXPERTS, ROUNDS, "sm_80")],
    "tokens": [(HALF, replace(ROUNDS, tokens=24), "sm_80")],
    "row_tiles": [(HALF, replace(ROUNDS, row_tiles=5), "sm_80")],
    "warps": [(HALF, replace(ROUNDS, warps=33), "sm_80")],
    "ctas": [(HALF, replace(ROUNDS, ctas=0), "sm_80")],
    "registers": [(HALF, replace(ROUNDS, row_tiles=4), "sm_80")],
    "shared_memory": [(replace(INT8, bits=4, pairs=True), CodebookRoundsTile(1, 1, 4, 8), "sm_80")],
}
WGMMA_REFUSALS: dict[str, list[Any]] = {
    "architecture": [(HALF, WGMMA, "sm_100")],
    "alignment": [(replace(HALF, alignment_n=0), WGMMA, ARCH)],
    "rotates": [(ROTATES, WGMMA, ARCH)],
    "experts": [(EXPERTS, WGMMA, ARCH)],
    "tokens": [(HALF, replace(WGMMA, tokens=24), ARCH)],
    "groups": [(HALF, replace(WGMMA, groups=9), ARCH)],
    "splits": [(HALF, replace(WGMMA, splits=16), ARCH)],
    "stages": [(HALF, replace(WGMMA, stages=2), ARCH)],
    "prefetch": [(HALF, replace(WGMMA, prefetch=9), ARCH)],
    "registers": [(HALF, replace(WGMMA, groups=8), ARCH)],
    "shared_memory": [(HALF, replace(WGMMA, stages=11), ARCH)],
}

ROWS = {
    "int8_stream": Row(
        INT8_STREAM.emit,
        int8_sources,
        w8a8.CONSTRAINTS,
        INT8_REFUSALS,
        legal=(TOKEN_ROWS, INT8_TILE, "sm_80"),
        instructions=int8_instructions,
    ),
    "w8a16_stream": Row(
        W8A16_STREAM.emit,
        w8a16_sources,
        w8a16.CONSTRAINTS,
        W8A16_REFUSALS,
        legal=(W8A16, ONE, "sm_80"),
        instructions=lambda source: (STREAM, product_of(source)),
    ),
    "codebook_stream": Row(
        CODEBOOK_STREAM.emit,
        codebook_sources,
        codebook.CONSTRAINTS,
        CODEBOOK_REFUSALS,
        legal=(HALF, FEW, "sm_80"),
        instructions=codebook_instructions,
    ),
    "codebook_experts": Row(
        CODEBOOK_EXPERTS.emit,
        experts_sources,
        codebook_experts.CONSTRAINTS,
        EXPERTS_REFUSALS,
        legal=(EXPERTS, EXPERT_TILE, "sm_80"),
        instructions=codebook_instructions,
    ),
    "int8_experts": Row(
        INT8_EXPERTS.emit,
        int8_experts_sources,
        int8_experts.CONSTRAINTS,
        INT8_EXPERTS_REFUSALS,
        legal=(ROUTED_INT8, INT8_TILE_OF_ROUTES, "sm_80"),
        instructions=lambda source: (STREAM, product_of(source), COPY),
    ),
    "codebook_stream_rounds": Row(
        CODEBOOK_STREAM_ROUNDS.emit,
        rounds_sources,
        codebook_rounds.CONSTRAINTS,
        ROUNDS_REFUSALS,
        legal=(HALF, ROUNDS, "sm_80"),
        instructions=rounds_instructions,
    ),
    "codebook_stream_wgmma": Row(
        CODEBOOK_STREAM_WGMMA.emit,
        wgmma_sources,
        codebook_wgmma.CONSTRAINTS,
        WGMMA_REFUSALS,
        legal=(HALF, WGMMA, ARCH),
        instructions=wgmma_instructions,
    ),
}
