"""Rows of the conformance suite: products of many tokens with codebook weights, and rotations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from qcut.emitters.codebook import cutlass, mma, rotate, rotate_dense, wgmma
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.codebook.rotate import RotateTokens
from qcut.emitters.codebook.rotate_dense import RotateTokensDense
from qcut.emitters.codebook.wgmma import CodebookWgmmaTile
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.families import CODEBOOK_CUTLASS, CODEBOOK_MMA, CODEBOOK_WGMMA
from qcut.emitters.gemm.problem import TileConfig
from tests.emitters.conformance.gemm import mixed_instructions, transposed_refusals
from tests.emitters.conformance.row import Row, product_of, tokens_of

ARCH = "sm_90a"
F16, BF16, F32, S8 = DType.F16, DType.BF16, DType.F32, DType.S8
SCALED = Epilogue(row_scale="per_token", col_scale="per_channel", bias=True)
FULL = Epilogue(BF16, col_scale="per_channel", bias=True, activation=Activation.GELU_TANH, residual=True)
HALF = CodebookProblem(epilogue=Epilogue(col_scale="per_channel", bias=True))
INT8 = CodebookProblem(S8, epilogue=SCALED)
EXPERTS = replace(HALF, experts=True)
PAIRS, INT8_PAIRS = replace(HALF, pairs=True), replace(INT8, pairs=True)
NARROW = replace(HALF, slots=8), replace(HALF, slots=8, offsets=True), replace(INT8, slots=8)
"""A norm for each 16 columns."""

# ── a warp's tensor core ─────────────────────────────────────────────────────────────────────────

SMALL = TileConfig((16, 64, 128), (16, 16, 128), 6)
MIDDLE = TileConfig((128, 128, 128), (64, 32, 128), 2)
LARGE = TileConfig((128, 128, 128), (128, 32, 128), 3)


def mma_sources(arch: str) -> Iterator[KernelSource]:
    problems = [
        HALF,
        replace(HALF, bits=3, slots=2),
        replace(HALF, bits=2, slots=4, alignment_n=1),
        CodebookProblem(BF16, 4, 1, FULL),
        INT8,
        replace(INT8, bits=3, slots=4),
        replace(INT8, bits=2, slots=2, epilogue=replace(FULL, row_scale="per_token")),
        replace(PAIRS, slots=2),
        INT8_PAIRS,
        *NARROW,
    ]
    kernels = [(problem, tile) for problem in problems for tile in (MIDDLE, LARGE)]
    kernels += [(HALF, SMALL), (INT8, SMALL)]
    menus = (HALF, replace(HALF, x=BF16), INT8, PAIRS, INT8_PAIRS)
    kernels += [(problem, tile) for problem in menus for tile in CODEBOOK_MMA.default_tiles(problem, arch)]
    yield from {s.name: s for s in (CODEBOOK_MMA.emit(*kernel, arch) for kernel in kernels)}.values()


def mma_instructions(source: KernelSource) -> Iterator[str]:
    yield from (product_of(source), r"LDSM\.16\.M88\.4$", r"LDS\.128$", r"LDGSTS\.E\.BYPASS.*\.128(\.ZFILL)?$")
    if "f16xc4p" not in source.name:  # pairs of 16 bits come from the table as they are
        yield "PRMT"


MMA_REFUSALS: dict[str, list[Any]] = {
    "architecture": [(HALF, MIDDLE, "sm_75")],
    "alignment_n": [(replace(HALF, alignment_n=0), MIDDLE, "sm_80")],
    "rotates": [(replace(HALF, rotates=F16), MIDDLE, "sm_80")],
    "experts": [(EXPERTS, MIDDLE, "sm_80")],
    "schedule": [(HALF, replace(MIDDLE, schedule="pingpong"), ARCH)],
    "cluster_shape": [(HALF, replace(MIDDLE, cluster_shape=(2, 1)), ARCH)],
    "epilogue_tile": [(HALF, replace(MIDDLE, epilogue_tile=(64, 32)), ARCH)],
    "one_cta": [(HALF, replace(MIDDLE, splits=2), ARCH)],
    "block_k": [(HALF, TileConfig((128, 128, 64), (64, 32, 64), 2), "sm_80")],
    "warp_k": [(HALF, TileConfig((128, 128, 128), (64, 32, 64), 2), "sm_80")],
    "warp_shape": [(HALF, TileConfig((128, 128, 128), (24, 32, 128), 2), "sm_80")],
    "contiguous_warp": [(HALF, TileConfig((64, 128, 128), (16, 128, 128), 2), "sm_80")],
    "warps": [(HALF, TileConfig((128, 256, 128), (16, 32, 128), 2), "sm_80")],
    "stages": [(HALF, replace(MIDDLE, stages=1), "sm_80")],
    "registers": [(HALF, TileConfig((128, 128, 128), (128, 64, 128), 2), "sm_80")],
    "shared_memory": [(HALF, replace(MIDDLE, stages=5), "sm_80")],
}

# ── a warpgroup's tensor core ────────────────────────────────────────────────────────────────────

TOKENS = CodebookProblem(F16)
BRAIN = CodebookProblem(BF16, bits=3, slots=4, epilogue=FULL)
TOKEN_PAIRS = replace(TOKENS, pairs=True)
PAIR = CodebookWgmmaTile(256, 5, 2, lead=2)
DEEP = CodebookWgmmaTile(256, 3, 2)
SPLIT = CodebookWgmmaTile(64, 4, 1, 4, lead=2)


def wgmma_sources(arch: str) -> Iterator[KernelSource]:
    """Every tile with int8 and float16 tokens, every width and number of slots, other epilogues."""
    if not architecture(arch).wgmma:
        return
    kernels = [
        (problem, tile)
        for problem in (INT8, TOKENS, INT8_PAIRS)
        for tile in CODEBOOK_WGMMA.default_tiles(problem, "sm_90a")
    ]
    kernels += [
        (problem, CODEBOOK_WGMMA.default_tiles(problem, "sm_90a")[0])
        for problem in (TOKEN_PAIRS, replace(INT8_PAIRS, slots=4))
    ]
    for bits, slots in ((2, 1), (2, 4), (3, 2), (4, 4)):
        for problem in (INT8, TOKENS):
            other = replace(problem, bits=bits, slots=slots)
            kernels += [(other, tile) for tile in CODEBOOK_WGMMA.default_tiles(other, "sm_90a")[:3]]
    kernels += [(other, tile) for other in NARROW for tile in CODEBOOK_WGMMA.default_tiles(other, "sm_90a")]
    for problem in (EXPERTS, replace(INT8, experts=True), replace(INT8_PAIRS, experts=True)):
        kernels += [(problem, tile) for tile in CODEBOOK_WGMMA.menu(problem, "sm_90a")]
    full = replace(INT8.epilogue, activation=Activation.SILU, residual=True)
    kernels += [
        (BRAIN, replace(DEEP, tokens=128)),
        (TOKENS, CodebookWgmmaTile(192, 3, 2, lead=1, pairs=True)),
        (BRAIN, CodebookWgmmaTile(96, 3, 1, splits=2, lead=1, pairs=True)),
        (replace(BRAIN, alignment_n=1), SPLIT),
        (replace(INT8, epilogue=replace(full, out=F32), alignment_n=1), PAIR),
        (replace(INT8, epilogue=full, alignment_n=4), PAIR),
    ]
    yield from (CODEBOOK_WGMMA.emit(*kernel, arch) for kernel in kernels)


def wgmma_instructions(source: KernelSource) -> Iterator[str]:
    tokens = re.search(r"_128x(\d+)_", source.name)
    assert tokens is not None
    yield ("IGMMA" if tokens_of(source) == "s8" else "HGMMA") + rf"\.64x{tokens[1]}x"
    yield "UBLKCP"
    yield ("" if "_c2_" in source.name else "!") + r".*MULTICAST"


WGMMA_REFUSALS: dict[str, list[Any]] = {
    "architecture": [(INT8, PAIR, "sm_80")],
    "alignment_n": [(replace(INT8, alignment_n=0), PAIR, ARCH)],
    "rotates": [(replace(TOKENS, rotates=F16), DEEP, ARCH)],
    "tokens": [(INT8, replace(PAIR, tokens=80), ARCH)],
    "cluster": [(INT8, replace(PAIR, cluster=4), ARCH)],
    "splits": [(INT8, replace(SPLIT, splits=3), ARCH)],
    "experts": [(EXPERTS, SPLIT, ARCH)],
    "one_cluster": [(INT8, replace(SPLIT, cluster=2), ARCH)],
    "pairs": [
        (INT8, replace(PAIR, pairs=True), ARCH),
        *((problem, CodebookWgmmaTile(128, 2, 1), ARCH) for problem in (TOKEN_PAIRS, INT8_PAIRS)),
    ],
    "stages": [(INT8, replace(PAIR, stages=1, lead=0), ARCH)],
    "lead": [(INT8, replace(PAIR, lead=5), ARCH)],
    "registers": [(replace(TOKENS, slots=4), DEEP, ARCH)],
    "shared_memory": [(TOKENS, replace(DEEP, stages=4), ARCH)],
}

# ── CUTLASS ──────────────────────────────────────────────────────────────────────────────────────

ONE_NORM = replace(INT8, row_norm=True)
MIXED = cutlass.MENU[-1]


def cutlass_sources(arch: str) -> Iterator[KernelSource]:
    if architecture(arch).wgmma:
        yield CODEBOOK_CUTLASS.emit(ONE_NORM, MIXED, arch)


def cutlass_texts(arch: str) -> Iterator[KernelSource]:
    if architecture(arch).wgmma:
        yield from (CODEBOOK_CUTLASS.emit(ONE_NORM, tile, arch) for tile in cutlass.MENU if tile != MIXED)


CUTLASS_REFUSALS = {
    **transposed_refusals(ONE_NORM, MIXED, 128),
    "tokens": [(HALF, MIXED, ARCH)],
    "weights": [(replace(ONE_NORM, **change), MIXED, ARCH) for change in ({"row_norm": False}, {"bits": 3})],
    "rotates": [(replace(ONE_NORM, rotates=F16), MIXED, ARCH)],
    "alignment_n": [(replace(ONE_NORM, alignment_n=4), MIXED, ARCH)],
    "residual": [(replace(ONE_NORM, epilogue=replace(SCALED, residual=True)), MIXED, ARCH)],
}

# ── rotations ────────────────────────────────────────────────────────────────────────────────────

CONVERSIONS = ((F16, F16), (F16, S8), (BF16, BF16), (BF16, S8), (F32, BF16), (F32, S8))


def rotations(arch: str) -> Iterator[KernelSource]:
    """The heuristics' kernels of many shapes, every template flag among them, and those with the fewest registers."""
    found = []
    shapes = ((1, 4096, 128), (4096, 1280, 32), (4096, 16384, 16384), (1, 20480, 4096), (8, 40, 2))
    for i, (x, out) in enumerate(CONVERSIONS):
        for j, (m, k, group) in enumerate(shapes):
            aligned, passes = i != 3, 1 + (i + j) % 2
            found.append(RotateTokens.for_shape(x, out, "hadamard", arch, m, k, group, passes=passes, aligned=aligned))
            if i == j or j == 0:
                found.append(RotateTokens.for_shape(x, out, "none", arch, m, k, (96, 128)[i % 2], aligned=aligned))
    for x, k, group in ((F32, 16384, 16384), (F32, 20480, 4096), (F16, 14336, 128)):
        found.append(RotateTokens.for_shape(x, S8, "hadamard", arch, 1, k, group, passes=2))
    for x, m, k in ((F16, 4096, 2048), (F32, 8, 768)):
        found.append(RotateTokens.for_shape(x, S8, "hadamard", arch, m, k, 128, routed=True))
        found.append(RotateTokens.for_shape(x, S8, "none", arch, m, k, 128, routed=True, natural=True))
    for x, m, k, group in ((F16, 1, 4096, 128), (BF16, 4096, 1376, 32), (F32, 8, 20480, 128), (F16, 8, 1024, 1024)):
        rows = {"natural": True, "row_major": True, "aligned": x is not BF16}
        found.append(RotateTokens.for_shape(x, S8, "hadamard", arch, m, k, group, **rows))
    found.append(RotateTokens.for_shape(BF16, BF16, "none", arch, 64, 4096, 128, routed=True))
    found.append(RotateTokens.for_shape(F16, F16, "none", arch, 64, 4096, 12, aligned=False))
    yield from {desc.name: desc.emit() for desc in found}.values()


def dense_rotations(arch: str) -> Iterator[KernelSource]:
    for x in (F16, BF16):
        for out, m, group in ((x, 1, 128), (x, 64, 200), (F32, 32, 20), (F32, 130, 1024), (x, 8, 32)):
            yield RotateTokensDense.for_shape(x, out, arch, m, 4096, group, passes=2, aligned=x is F16).emit()


ROTATE_REFUSALS: dict[str, list[Any]] = {
    "kind": [{"kind": "qr"}],
    "input": [{"x": S8}],
    "output": [{"out": BF16}, {"out": F32}],
    "group": [{"group": 0}],
    "hadamard_group": [{"group": 96}, {"group": 32768}],
    "passes": [{"passes": 3}],
    "threads": [{"threads": 48}],
    "rows": [{"threads": 512, "rows": 4}],
    "held": [{"held": False}],
    "pieces": [{"held": False, "out": S8, "group": 1024, "threads": 32}],
    "natural": [{"natural": True}],
    "row_major": [
        {"out": S8, "row_major": True},
        {"out": S8, "row_major": True, "natural": True, "passes": 2},
        {"out": S8, "row_major": True, "natural": True, "routed": True},
        {"out": S8, "row_major": True, "natural": True, "kind": "none"},
    ],
    "aligned": [{"group": 4}],
}
DENSE_REFUSALS: dict[str, list[Any]] = {
    "input": [{"x": F32}],
    "output": [{"out": BF16}],
    "group": [{"group": 1025}],
    "passes": [{"passes": 0}],
    "tokens": [{"tokens": 128}],
    "aligned": [{"group": 20}],
}

ROWS = {
    "codebook_mma": Row(
        CODEBOOK_MMA.emit,
        mma_sources,
        mma.CONSTRAINTS,
        MMA_REFUSALS,
        legal=(HALF, MIDDLE, "sm_80"),
        instructions=mma_instructions,
    ),
    "codebook_wgmma": Row(
        CODEBOOK_WGMMA.emit,
        wgmma_sources,
        wgmma.CONSTRAINTS,
        WGMMA_REFUSALS,
        legal=(INT8, PAIR, ARCH),
        instructions=wgmma_instructions,
        # A few words, once a tile, where float32 results with a residual are written element by element.
        spill=lambda source: 24 if "_f32_" in source.name else 0,
    ),
    "codebook_cutlass": Row(
        CODEBOOK_CUTLASS.emit,
        cutlass_sources,
        cutlass.CONSTRAINTS,
        CUTLASS_REFUSALS,
        legal=(ONE_NORM, MIXED, ARCH),
        implied=("shared_memory",),
        instructions=lambda source: mixed_instructions(r"IGMMA\.64x256x32\.S8\.S8"),
        texts=cutlass_texts,
    ),
    "rotate": Row(
        RotateTokens.emit,
        rotations,
        rotate.CONSTRAINTS,
        ROTATE_REFUSALS,
        legal=RotateTokens(F16, F16, "hadamard", 128, ARCH),
        instructions=lambda source: (r"LDG\.E",),
        # A word or two where 1024 threads hold two passes of a row.
        spill=lambda source: 16 if source.block == 1024 and "p2" in source.name else 0,
    ),
    "rotate_dense": Row(
        RotateTokensDense.emit,
        dense_rotations,
        rotate_dense.CONSTRAINTS,
        DENSE_REFUSALS,
        legal=RotateTokensDense(F16, F16, 128, ARCH),
        instructions=lambda source: (
            r"HMMA\.16816\.F32" + (r"\.BF16$" if "_bf16" in source.name else "$"),
            "LDGSTS",
            "LDSM",
        ),
    ),
}
