"""The dp4a family as text, as index arithmetic and as binaries: constraints, search space, banks, no spills."""

from __future__ import annotations

import random
import re
from dataclasses import astuple, replace
from itertools import product

import pytest

from qcut import jit
from qcut.emitters.core.arch import ARCHITECTURES
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.families import INT8_DP4A
from qcut.emitters.gemm.dp4a import CONSTRAINTS, Dp4aTile
from qcut.emitters.gemm.problem import GemmProblem
from tests.support.compiled import build, in_turns
from tests.support.sass import instructions

REQUANTIZE = Epilogue(DType.S8, "per_token", "per_channel", bias=True)
EVERYTHING = Epilogue(
    DType.BF16, "per_token", "per_channel", "per_token", bias=True, activation=Activation.GELU_ERF, residual=True
)
INT8 = GemmProblem(epilogue=REQUANTIZE)
LARGE = Dp4aTile(128, 128, 32, 64, 32, 1, 8, 8)
SMALL = Dp4aTile(16, 64, 64, 16, 32, 1, 4, 4)
SHALLOW = Dp4aTile(64, 128, 8, 32, 64, 2, 4, 8)
NTN = {"layout_a": "column", "layout_b": "row", "layout_d": "column"}


def layout_sources(arch: str) -> list[KernelSource]:
    sources = []
    for a, b, d in product(("row", "column"), repeat=3):
        problem = GemmProblem(epilogue=EVERYTHING, layout_a=a, layout_b=b, layout_d=d)
        for align in (16, 4, 1):
            aligned = replace(problem, alignment_k=align, alignment_n=align)
            sources += [INT8_DP4A.emit(aligned, tile, arch) for tile in (LARGE, SHALLOW)]
    for epilogue in (Epilogue(DType.S32), Epilogue(DType.S8, wrap=True), Epilogue(DType.F32, residual=True)):
        sources.append(INT8_DP4A.emit(GemmProblem(epilogue=epilogue), LARGE, arch))
        sources.append(INT8_DP4A.emit(GemmProblem(epilogue=epilogue, **NTN), LARGE, arch))
    return sources


def menu_sources(arch: str) -> list[KernelSource]:
    return [INT8_DP4A.emit(INT8, tile, arch) for tile in INT8_DP4A.default_tiles(GemmProblem(), arch)]


# ── text ─────────────────────────────────────────────────────────────────────────────────────────


def test_text_instantiates_the_header():
    problem = GemmProblem(epilogue=Epilogue(DType.S8, col_scale="per_tensor"), alignment_k=4, alignment_n=12, **NTN)
    source = INT8_DP4A.emit(problem, LARGE, "sm_80")
    assert source.text == (
        "#include <qcut/gemm/dp4a.cuh>\n\n"
        'extern "C" __global__ void __launch_bounds__(256, 2)\n'
        "qcut_int8_dp4a_sm80_s8xs8_s8_st_ntn_k4n12_128x128x32_w64x32_i1_t8x8(\n"
        "    const int8_t* a, const int8_t* b, int8_t* d, int m, int n, int k, int lda, int ldb, int ldd, "
        "float col_scale, float out_inv_scale, float out_zero_point) {\n"
        "  using Tile = qcut::Dp4aTile<128, 128, 32, 64, 32, 1, 8, 8>;\n"
        "  using A = qcut::Operand<int8_t, qcut::Major::kRows, 4>;\n"
        "  using B = qcut::Operand<int8_t, qcut::Major::kRows, 4>;\n"
        "  using Epilogue = qcut::Epilogue<int8_t, qcut::ZeroPoint::kNone, false, qcut::ColScale::kPerTensor, false, "
        "qcut::Activation::kNone, false>;\n"
        "  Epilogue::Args args{};\n"
        "  args.col_scale = col_scale;\n"
        "  args.out_inv_scale = out_inv_scale;\n"
        "  args.out_zero_point = out_zero_point;\n"
        "  qcut::dp4a_gemm<Tile, A, B, Epilogue, 4, true>(\n"
        "      a, b, d, m, n, k, lda, ldb, ldd, args);\n"
        "}\n"
    )
    assert (source.block, source.smem_bytes, source.params) == (256, 2 * 32 * 256, problem.params())


def test_names_are_unique_and_text_repeats():
    first, second = (layout_sources("sm_80") + menu_sources("sm_80") for _ in range(2))
    assert first == second
    assert len({s.name for s in first}) == len({s.text for s in first}) == len(first)


def test_grid_is_one_cta_per_tile():
    assert INT8_DP4A.grid(LARGE, 257)(129) == (6, 1, 1)
    assert INT8_DP4A.grid(SMALL, 64)(1) == (1, 1, 1)


# ── constraints ──────────────────────────────────────────────────────────────────────────────────

REFUSALS = {
    "operands": (replace(INT8, a=DType.F16), LARGE, "sm_80"),
    "halves": (replace(INT8, epilogue=Epilogue(DType.F16, halves=True)), LARGE, "sm_80"),
    "rescale": (replace(INT8, epilogue=Epilogue(DType.S8, rescale=True)), LARGE, "sm_80"),
    "alignments": (replace(INT8, alignment_n=0), LARGE, "sm_80"),
    "architecture": (INT8, LARGE, "sm_75"),
    "power_of_two": (INT8, replace(LARGE, bn=96), "sm_80"),
    "block_k": (INT8, replace(LARGE, bk=128), "sm_80"),
    "thread_tile": (INT8, Dp4aTile(128, 128, 32, 64, 32, 1, 16, 2), "sm_80"),
    "warp_m": (INT8, replace(LARGE, bm=32), "sm_80"),
    "warp_n": (INT8, replace(LARGE, bn=16), "sm_80"),
    "threads": (INT8, replace(LARGE, bm=256, bn=512), "sm_80"),
    "wniter": (INT8, replace(LARGE, wniter=8), "sm_80"),
    "wmiter": (INT8, replace(LARGE, wniter=2, tm=16), "sm_80"),
    "lanes": (INT8, Dp4aTile(64, 256, 32, 32, 256, 1, 4, 4), "sm_80"),
    "accumulators": (INT8, replace(LARGE, wm=128, wn=64), "sm_80"),
    "registers": (INT8, Dp4aTile(64, 64, 64, 64, 64, 1, 16, 8), "sm_80"),
    "shared_memory": (INT8, Dp4aTile(1024, 16, 64, 128, 16, 1, 8, 8), "sm_86"),
}


def test_every_constraint_is_refused_below():
    assert [c.name for c in CONSTRAINTS] == list(REFUSALS)


@pytest.mark.parametrize("name", REFUSALS)
def test_illegal_gemm_is_refused_by_name(name: str):
    problem, tile, arch = REFUSALS[name]
    broken = [c.name for c in CONSTRAINTS[: list(REFUSALS).index(name) + 1] if not c.holds(problem, tile, arch)]
    assert broken == [name]
    [constraint] = [c for c in CONSTRAINTS if c.name == name]
    with pytest.raises(EmitError, match=f"^qcut_int8_dp4a_[a-z0-9_]+: {re.escape(f'{name}: {constraint.reason}')}$"):
        INT8_DP4A.emit(problem, tile, arch)


@pytest.mark.parametrize("field", ["bm", "bn", "bk", "wm", "wn", "wniter", "tm", "tn"])
@pytest.mark.parametrize("size", [-8, 0, 12])
def test_sizes_are_refused_before_anything_divides_by_them(field: str, size: int):
    with pytest.raises(EmitError, match=": power_of_two: "):
        INT8_DP4A.emit(INT8, replace(LARGE, **{field: size}), "sm_90a")


# ── search space ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_search_space_is_what_is_legal_of_the_product(arch: str):
    blocks, warps, lanes = (64, 128, 256), (32, 64, 128, 256), (4, 8, 16, 32)
    sizes = product(blocks, blocks, (8, 16, 32, 64), warps, warps, (1, 2, 4, 8), lanes, lanes)
    legal = [t for t in (Dp4aTile(*s) for s in sizes) if all(c.holds(INT8, t, arch) for c in CONSTRAINTS)]
    assert list(INT8_DP4A.search_space(INT8, arch)) == legal
    assert len(legal) == 2044


def test_legal_tiles_are_covered_exactly():
    """Subtiles and lanes cover a warp's tile once, warps a CTA's, and a thread owns its share."""
    for tile in INT8_DP4A.search_space(INT8, "sm_80"):
        lanes = (tile.wm // tile.wmiter // tile.tm) * (tile.wn // tile.wniter // tile.tn)
        per_thread = tile.wmiter * tile.tm * tile.wniter * tile.tn
        assert lanes == 32
        assert per_thread == tile.accumulators <= 128
        assert tile.threads * per_thread == tile.bm * tile.bn
        assert 32 <= tile.threads <= 1024


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_menu_is_legal(arch: str):
    tiles = INT8_DP4A.default_tiles(GemmProblem(), arch)
    assert {16, 128} <= {t.bm for t in tiles}
    for tile in tiles:
        INT8_DP4A.validate(INT8, tile, arch)


def test_nothing_is_searched_for_what_cannot_be_built():
    assert not list(INT8_DP4A.search_space(replace(INT8, a=DType.BF16), "sm_90a"))


# ── binaries ─────────────────────────────────────────────────────────────────────────────────────


def check_registers(binary: jit.Binary) -> None:
    resources = binary.resources
    assert resources is not None, binary.name
    assert resources.stack_bytes == resources.spill_store_bytes == resources.spill_load_bytes == 0, binary.name


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_menu_compiles_for_dp4a(arch: str):
    for source, binary in zip(menu_sources(arch), build(*menu_sources(arch)), strict=True):
        check_registers(binary)
        threads, ctas = map(int, re.search(r"__launch_bounds__\((\d+), (\d+)\)", source.text).groups())
        assert binary.resources.registers * threads * ctas <= 65_536
        found = instructions(binary.cubin)
        assert {"IDP.4A.S8.S8", "LDS.128", "STS", "LDG.E.128"} <= found, binary.name
        assert not any(name.startswith(("LDL", "STL", "IMMA")) for name in found), binary.name


def test_a_sample_of_legal_tiles_compiles_without_spills():
    tiles = random.Random(3).sample(list(INT8_DP4A.search_space(INT8, "sm_90a")), 12)
    for binary in build(*(INT8_DP4A.emit(INT8, tile, "sm_90a") for tile in tiles)):
        check_registers(binary)
        found = instructions(binary.cubin)
        assert "IDP.4A.S8.S8" in found, binary.name
        assert not any(name.startswith(("LDL", "STL")) for name in found), binary.name


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_layouts_and_epilogues_compile_without_spills(arch: str):
    for binary in build(*in_turns(layout_sources, arch)):
        check_registers(binary)


def test_pieces_are_as_wide_as_the_alignment_allows():
    wide, far, narrow, single = (
        instructions(build(INT8_DP4A.emit(problem, LARGE, "sm_90a"))[0].cubin)
        for problem in (
            INT8,
            replace(INT8, **NTN),
            replace(INT8, alignment_k=8, alignment_n=4),
            replace(INT8, alignment_k=1, alignment_n=1),
        )
    )
    assert {"LDG.E.128", "STG.E.64", "STS"} <= wide
    assert {"LDG.E", "STG.E.64", "STS.128", "PRMT"} <= far
    assert {"LDG.E.64", "STG.E"} <= narrow
    assert "STG.E.U8" in single
    assert not any(name.startswith("LDG.E.128") for name in narrow | single)


def test_tiles_are_described_by_their_sizes():
    tile = Dp4aTile(64, 128, 8, 32, 64, 2, 4, 8)
    assert astuple(tile) == (64, 128, 8, 32, 64, 2, 4, 8)
    assert tile.name == "64x128x8_w32x64_i2_t4x8"
    assert (tile.threadblock_shape, tile.threads, tile.wmiter) == ((64, 128, 8), 128, 1)
