"""The WMMA family as text and as binaries: shared layouts, constraints, instructions, no spills."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import get_args

import pytest

from qcut.emitters.core.arch import ARCHITECTURES
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.families import INT8_MMA, INT8_WMMA
from qcut.emitters.gemm import mma as mma_gemm
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from qcut.emitters.gemm.wmma import Int8Wmma, SharedLayout
from tests.support.compiled import build, in_turns
from tests.support.sass import instructions

STATIC = Epilogue(DType.S8, col_scale="per_channel", bias=True)
EVERYTHING = Epilogue(
    DType.BF16, "per_token", "per_channel", "per_token", bias=True, activation=Activation.GELU_ERF, residual=True
)
INT8 = GemmProblem(epilogue=STATIC)
LARGE = TileConfig((128, 256, 64), (64, 64, 64), 4)
MIDDLE = TileConfig((64, 64, 64), (32, 32, 64), 3)
SMALL = TileConfig((16, 64, 128), (16, 16, 128), 5)
SHARED: tuple[SharedLayout, ...] = get_args(SharedLayout)


def menu_sources(arch: str) -> list[KernelSource]:
    return [INT8_WMMA.emit(INT8, tile, arch) for tile in INT8_WMMA.default_tiles(GemmProblem(), arch)]


def variant_sources(arch: str) -> list[KernelSource]:
    sources = [Int8Wmma(shared).emit(INT8, MIDDLE, arch) for shared in SHARED]
    for a in ("row", "column"):
        for b in ("row", "column"):
            for d in ("row", "column"):
                problem = GemmProblem(epilogue=EVERYTHING, layout_a=a, layout_b=b, layout_d=d)
                sources.append(INT8_WMMA.emit(problem, MIDDLE, arch))
                sources.append(INT8_WMMA.emit(replace(problem, alignment_k=1, alignment_n=1), MIDDLE, arch))
    raw = (Epilogue(DType.S32), Epilogue(DType.S8, wrap=True))
    return sources + [INT8_WMMA.emit(GemmProblem(epilogue=e), MIDDLE, arch) for e in raw]


# ── text ─────────────────────────────────────────────────────────────────────────────────────────


def test_text_is_mmas_with_another_core():
    wmma, mma = INT8_WMMA.emit(INT8, SMALL, "sm_80"), INT8_MMA.emit(INT8, SMALL, "sm_80")
    renamed = wmma.text.replace("int8_wmma_", "int8_mma_").replace("gemm/wmma.cuh", "gemm/mma.cuh")
    renamed = renamed.replace("wmma_gemm", "mma_gemm")
    assert renamed.replace("qcut::BlockedLayout, ", "") == mma.text
    assert (wmma.params, wmma.block) == (mma.params, mma.block)


def test_the_shared_layout_is_named_unless_it_is_the_default():
    blocked, padded, linear = (Int8Wmma(s).emit(INT8, MIDDLE, "sm_80") for s in SHARED)
    assert blocked == INT8_WMMA.emit(INT8, MIDDLE, "sm_80")
    assert (padded.name, linear.name) == (f"{blocked.name}_padded", f"{blocked.name}_linear")
    assert "qcut::wmma_gemm<qcut::LinearLayout, Tile, A, B, Epilogue, 16, false>(" in linear.text
    assert blocked.smem_bytes == linear.smem_bytes == 3 * 64 * 128
    assert padded.smem_bytes == 3 * 80 * 128


def test_names_are_unique_and_text_repeats():
    first, second = (menu_sources("sm_90a") + variant_sources("sm_90a") for _ in range(2))
    assert first == second
    assert len({s.name for s in first}) == len({s.text for s in first}) == len(first)


def test_staging_counts_its_padding():
    assert INT8_WMMA.smem_bytes(INT8, TileConfig((128, 128, 64), (32, 32, 64), 2)) == 16 * 16 * (32 + 8) * 4
    assert INT8_WMMA.smem_bytes(INT8, TileConfig((128, 128, 64), (32, 32, 64), 3)) == 3 * 64 * 256
    assert INT8_WMMA.smem_bytes(INT8, replace(MIDDLE, splits=2)) == max(3 * 64 * 128, 4 * 32 * (32 + 8) * 4)


# ── constraints ──────────────────────────────────────────────────────────────────────────────────


def test_constraints_are_those_of_mma():
    assert [c.name for c in INT8_WMMA.constraints] == [c.name for c in mma_gemm.CONSTRAINTS]


@pytest.mark.parametrize(
    ("problem", "tile", "name"),
    [
        (replace(INT8, a=DType.F16), MIDDLE, "operands"),
        (INT8, replace(MIDDLE, stages=1), "stages"),
        (INT8, replace(MIDDLE, splits=2), "clusters"),
        (replace(INT8, layout_d="column"), TileConfig((128, 64, 64), (128, 32, 64), 3), "contiguous_warp"),
        (INT8, TileConfig((128, 256, 128), (64, 64, 128), 4), "shared_memory"),
    ],
)
def test_illegal_gemm_is_refused_by_name(problem: GemmProblem, tile: TileConfig, name: str):
    [constraint] = [c for c in INT8_WMMA.constraints if c.name == name]
    with pytest.raises(EmitError, match=f"^qcut_int8_wmma_[a-z0-9_]+: {re.escape(f'{name}: {constraint.reason}')}$"):
        INT8_WMMA.emit(problem, tile, "sm_80")


def test_padding_counts_against_shared_memory():
    tile = TileConfig((128, 128, 128), (64, 32, 128), 5)
    assert INT8_WMMA.emit(INT8, tile, "sm_80").smem_bytes == 5 * 256 * 128
    with pytest.raises(EmitError, match=r"_padded: shared_memory: "):
        Int8Wmma("padded").emit(INT8, tile, "sm_80")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_menu_is_legal_and_in_the_search_space(arch: str):
    tiles = INT8_WMMA.default_tiles(GemmProblem(), arch)
    assert {16, 128} <= {t.threadblock_shape[0] for t in tiles}
    assert set(tiles) <= set(INT8_WMMA.search_space(GemmProblem(), arch))
    for tile in tiles:
        INT8_WMMA.validate(INT8, tile, arch)


# ── binaries ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_tile_of_the_menu_compiles_for_the_tensor_core(arch: str):
    for binary in build(*in_turns(menu_sources, arch)):
        resources = binary.resources
        assert resources is not None, binary.name
        assert resources.stack_bytes == resources.spill_store_bytes == resources.spill_load_bytes == 0, binary.name
        found = instructions(binary.cubin)
        assert {"IMMA.16816.S8.S8", "LDSM.16.M88.2"} <= found, binary.name
        assert any(name.startswith("LDGSTS.E.BYPASS") for name in found), binary.name
        assert not any(name.startswith(("LDL", "STL")) for name in found), binary.name


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_layouts_and_epilogues_compile_without_spills(arch: str):
    for binary in build(*in_turns(variant_sources, arch)):
        resources = binary.resources
        assert resources is not None, binary.name
        assert resources.stack_bytes == resources.spill_store_bytes == resources.spill_load_bytes == 0, binary.name
