"""Raw kernels as text and as binaries: parameters, constraints, instructions, no spills."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from qcut.emitters.core.arch import ARCHITECTURES, architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.decoder.quantize import (
    ColSum,
    Dequantize,
    QuantizePerTensor,
    QuantizePerToken,
    emit_colsum,
    emit_dequantize,
    emit_quantize_per_tensor,
    emit_quantize_per_token,
)
from qcut.emitters.families import INT8_MMA, W8A16_MMA
from qcut.emitters.gemm import mma as mma_gemm
from qcut.emitters.gemm.mma import smem_bytes
from qcut.emitters.gemm.problem import GemmProblem, Layout, TileConfig
from tests.support.compiled import build, in_turns
from tests.support.sass import instructions

DYNAMIC = Epilogue(row_scale="per_token", col_scale="per_channel", bias=True)
EVERYTHING = Epilogue(
    DType.BF16, "per_token", "per_channel", "per_token", bias=True, activation=Activation.GELU_ERF, residual=True
)
REQUANTIZE = Epilogue(DType.S8, "none", "per_tensor", "per_tensor", activation=Activation.SILU)
STATIC = Epilogue(DType.S8, col_scale="per_channel", bias=True)
WEIGHT_ONLY = Epilogue(col_scale="per_channel", bias=True, activation=Activation.GELU_TANH)
LARGE = TileConfig((128, 256, 64), (64, 64, 64), 4)
MIDDLE = TileConfig((128, 128, 64), (64, 64, 64), 3)
SMALL = TileConfig((16, 64, 128), (16, 16, 128), 5)
SPLIT = replace(SMALL, splits=4)


def quantize_sources(arch: str) -> list[KernelSource]:
    sources = [emit_colsum(ColSum(arch, aligned)) for aligned in (True, False)]
    for x in (DType.F16, DType.BF16, DType.F32):
        sources += [emit_quantize_per_token(QuantizePerToken(x, arch, *layout)) for layout in ((32, 6), (1024, 4))]
        sources.append(emit_quantize_per_tensor(QuantizePerTensor(x, arch)))
        sources.append(emit_dequantize(Dequantize(x, arch)))
    sources.append(emit_quantize_per_token(QuantizePerToken(DType.F16, arch, 256, 0)))
    sources.append(emit_quantize_per_token(QuantizePerToken(DType.BF16, arch, 256, 2, aligned=False)))
    sources.append(emit_quantize_per_tensor(QuantizePerTensor(DType.F32, arch, aligned=False)))
    sources.append(emit_dequantize(Dequantize(DType.F16, arch, aligned=False)))
    return sources


LAYOUTS: list[tuple[Layout, Layout, Layout]] = [
    (a, b, d) for a in ("row", "column") for b in ("row", "column") for d in ("row", "column")
]


def with_layouts(problem: GemmProblem, layouts: tuple[Layout, Layout, Layout]) -> GemmProblem:
    a, b, d = layouts
    return replace(problem, layout_a=a, layout_b=b, layout_d=d)


def menu_sources(arch: str) -> list[KernelSource]:
    return [
        INT8_MMA.emit(GemmProblem(epilogue=STATIC), tile, arch) for tile in INT8_MMA.default_tiles(GemmProblem(), arch)
    ]


def layout_sources(arch: str) -> list[KernelSource]:
    problems = [with_layouts(GemmProblem(epilogue=STATIC), layouts) for layouts in LAYOUTS]
    sources = [INT8_MMA.emit(problem, LARGE, arch) for problem in problems]
    for align in (1, 4):
        sources += [INT8_MMA.emit(replace(p, alignment_k=align, alignment_n=align), SMALL, arch) for p in problems]
    raw = (Epilogue(DType.S32), Epilogue(DType.S8, wrap=True))
    return sources + [INT8_MMA.emit(replace(problems[0], epilogue=e), MIDDLE, arch) for e in raw]


def int8_sources(arch: str) -> list[KernelSource]:
    return [
        INT8_MMA.emit(GemmProblem(epilogue=DYNAMIC), LARGE, arch),
        INT8_MMA.emit(GemmProblem(epilogue=EVERYTHING), MIDDLE, arch),
        INT8_MMA.emit(GemmProblem(epilogue=REQUANTIZE), SMALL, arch),
        INT8_MMA.emit(GemmProblem(epilogue=EVERYTHING, alignment_n=1), MIDDLE, arch),
        INT8_MMA.emit(GemmProblem(epilogue=DYNAMIC, alignment_k=1, alignment_n=1), SMALL, arch),
    ]


def w8a16_sources(arch: str) -> list[KernelSource]:
    half = GemmProblem(a=DType.F16, epilogue=WEIGHT_ONLY)
    brain = GemmProblem(a=DType.BF16, epilogue=replace(EVERYTHING, zero_point="none", row_scale="none"))
    return [
        W8A16_MMA.emit(half, LARGE, arch),
        W8A16_MMA.emit(half, SMALL, arch),
        W8A16_MMA.emit(replace(half, alignment_k=1, alignment_n=1), MIDDLE, arch),
        W8A16_MMA.emit(brain, LARGE, arch),
        W8A16_MMA.emit(brain, SMALL, arch),
    ]


def all_sources(arch: str) -> list[KernelSource]:
    return quantize_sources(arch) + int8_sources(arch) + w8a16_sources(arch)


# ── text ─────────────────────────────────────────────────────────────────────────────────────────


def test_text_is_short_and_instantiates_the_header():
    source = emit_quantize_per_token(QuantizePerToken(DType.F16, "sm_90a", 128, 4))
    assert source.text == (
        "#include <qcut/decoder/quantize.cuh>\n\n"
        'extern "C" __global__ void __launch_bounds__(128)\n'
        "qcut_quantize_per_token_sm90a_f16_t128v4(const __half* x, int8_t* q, float* scale, long long x_stride, "
        "int m, int k, int k_padded) {\n"
        "  qcut::quantize_per_token<__half, 128, 1, 4, true>(x, q, scale, x_stride, m, k, k_padded);\n"
        "}\n"
    )


def test_gemm_text_sets_exactly_the_epilogue_it_names():
    source = INT8_MMA.emit(GemmProblem(epilogue=REQUANTIZE), SMALL, "sm_80")
    assert source.text == (
        "#include <qcut/gemm/mma.cuh>\n\n"
        'extern "C" __global__ void __launch_bounds__(128)\n'
        "qcut_int8_mma_sm80_s8xs8_s8_zt_st_silu_16x64x128_w16x16_s5_multistage(\n"
        "    const int8_t* a, const int8_t* b, int8_t* d, int m, int n, int k, int lda, int ldb, int ldd, "
        "int zero_point, const int32_t* colsum, float col_scale, float out_inv_scale, float out_zero_point) {\n"
        "  using Tile = qcut::Tile<16, 64, 128, 16, 16, 5, 1>;\n"
        "  using A = qcut::Operand<int8_t, qcut::Major::kK, 16>;\n"
        "  using B = qcut::Operand<int8_t, qcut::Major::kK, 16>;\n"
        "  using Epilogue = qcut::Epilogue<int8_t, qcut::ZeroPoint::kPerTensor, false, "
        "qcut::ColScale::kPerTensor, false, qcut::Activation::kSilu, false>;\n"
        "  Epilogue::Args args{};\n"
        "  args.zero_point = zero_point;\n"
        "  args.colsum = colsum;\n"
        "  args.col_scale = col_scale;\n"
        "  args.out_inv_scale = out_inv_scale;\n"
        "  args.out_zero_point = out_zero_point;\n"
        "  qcut::mma_gemm<Tile, A, B, Epilogue, 16, false>(a, b, d, m, n, k, lda, ldb, ldd, args);\n"
        "}\n"
    )


def test_column_major_output_swaps_the_operands():
    problem = GemmProblem(epilogue=DYNAMIC, layout_a="column", layout_d="column", alignment_k=4, alignment_n=2)
    text = INT8_MMA.emit(problem, SMALL, "sm_80").text
    assert "qcut::Tile<64, 16, 128, 16, 16, 5, 1>" in text
    assert "using A = qcut::Operand<int8_t, qcut::Major::kRows, 4>;" in text
    assert "using B = qcut::Operand<int8_t, qcut::Major::kK, 4>;" in text
    assert "qcut::mma_gemm<Tile, B, A, Epilogue, 4, true>(b, a, d, n, m, k, ldb, lda, ldd, args);" in text


def test_splits_are_a_cluster():
    source = INT8_MMA.emit(GemmProblem(epilogue=DYNAMIC), SPLIT, "sm_90a")
    assert "void __cluster_dims__(4, 1, 1) __launch_bounds__(128)\n" in source.text
    assert "qcut::Tile<16, 64, 128, 16, 16, 5, 4>" in source.text
    assert "_s5_k4_" in source.name


@pytest.mark.parametrize(
    ("epilogue", "name", "type_"),
    [
        (Epilogue(DType.S32), "s32", "int32_t, qcut::ZeroPoint::kNone"),
        (Epilogue(DType.S8, wrap=True), "s8_wrap", "qcut::Activation::kNone, false, true>"),
    ],
)
def test_raw_outputs_take_no_arguments(epilogue: Epilogue, name: str, type_: str):
    source = INT8_MMA.emit(GemmProblem(epilogue=epilogue), SMALL, "sm_80")
    assert f"_s8xs8_{name}_16x64x128" in source.name
    assert type_ in source.text
    assert source.params[-1].name == "ldd"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Epilogue(DType.S32, bias=True),
        lambda: Epilogue(DType.S8, col_scale="per_tensor", wrap=True),
        lambda: Epilogue(DType.F16, wrap=True),
    ],
)
def test_raw_outputs_fuse_nothing(make: Callable[[], Epilogue]):
    with pytest.raises(EmitError, match=r"raw accumulators|low eight bits"):
        make()


def test_names_are_unique_and_text_repeats():
    first, second = ([s for arch in ("sm_80", "sm_90a") for s in all_sources(arch)] for _ in range(2))
    assert first == second
    assert len({s.name for s in first}) == len({s.text for s in first}) == len(first)


# ── layout choices ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("m", [1, 64, 600, 8192])
@pytest.mark.parametrize("k_padded", [16, 1280, 4096, 14336, 32768, 131_072])
@pytest.mark.parametrize("x", [DType.F16, DType.F32])
def test_per_token_layout_covers_the_row(x: DType, k_padded: int, m: int):
    desc = QuantizePerToken.for_shape(x, "sm_90a", m, k_padded)
    emit_quantize_per_token(desc)
    assert desc.vectors == 0 or desc.row_elements >= k_padded
    rows = desc.grid(m, k_padded)[0] * desc.rows
    assert m <= rows < m + desc.rows


def test_few_rows_take_more_threads_than_many():
    few, many = (QuantizePerToken.for_shape(DType.F16, "sm_90a", m, 4096) for m in (1, 8192))
    assert (few.threads, few.vectors) == (512, 1)
    assert (many.threads, many.vectors) == (128, 4)
    some, many = (QuantizePerToken.for_shape(DType.F16, "sm_90a", m, 1280) for m in (1024, 4096))
    assert ((some.threads, some.vectors), (many.threads, many.vectors)) == ((64, 3), (32, 5))


@pytest.mark.parametrize(("m", "k"), [(1, 1), (7, 48), (129, 4096), (3, 131_072)])
def test_elementwise_grid_covers_the_matrix(m: int, k: int):
    for desc in (
        QuantizePerTensor.for_shape(DType.F32, "sm_80", m, k),
        Dequantize.for_shape(DType.BF16, "sm_80", m, k),
    ):
        rows, columns, _ = desc.grid(m, k)
        assert m <= rows * desc.rows < m + desc.rows
        assert k <= columns * desc.row_elements < k + desc.row_elements


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_menus_are_legal(arch: str):
    for problem, family in ((GemmProblem(), INT8_MMA), (GemmProblem(a=DType.BF16), W8A16_MMA)):
        tiles = family.default_tiles(problem, arch)
        assert {16, 128} <= {t.threadblock_shape[0] for t in tiles}
        for tile in tiles:
            family.validate(problem, tile, arch)


def test_grid_is_one_cta_per_tile_and_part_of_k():
    assert INT8_MMA.grid(LARGE, 257)(129) == (4, 1, 1)
    assert INT8_MMA.grid(SPLIT, 65)(17) == (16, 1, 1)
    assert W8A16_MMA.grid(SMALL, 64)(1) == (1, 1, 1)


def test_menus_split_k_only_in_clusters():
    assert {t.splits for t in INT8_MMA.default_tiles(GemmProblem(), "sm_80")} == {1}
    assert {t.splits for t in INT8_MMA.default_tiles(GemmProblem(), "sm_90a")} == {1, 2, 4, 8}


@pytest.mark.parametrize("layouts", LAYOUTS, ids="".join)
def test_search_space_is_legal_and_holds_the_menu(layouts: tuple[Layout, Layout, Layout]):
    problem = with_layouts(GemmProblem(), layouts)
    space = list(INT8_MMA.search_space(problem, "sm_90a"))
    assert len(set(space)) == len(space) > 1000
    for tile in random.Random(0).sample(space, 50):
        INT8_MMA.validate(problem, tile, "sm_90a")
    assert set(INT8_MMA.default_tiles(GemmProblem(), "sm_90a")) <= set(space)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────

INT8 = GemmProblem(epilogue=DYNAMIC)
HALF = GemmProblem(a=DType.F16, epilogue=WEIGHT_ONLY)


REFUSALS = {
    "operands": (HALF, LARGE, "sm_80"),
    "architecture": (INT8, LARGE, "sm_75"),
    "alignments": (replace(INT8, alignment_n=0), LARGE, "sm_80"),
    "schedule": (INT8, replace(LARGE, schedule="pingpong"), "sm_90a"),
    "cluster_shape": (INT8, replace(LARGE, cluster_shape=(2, 1)), "sm_90a"),
    "epilogue_tile": (INT8, replace(LARGE, epilogue_tile=(64, 32)), "sm_90a"),
    "block_k": (INT8, TileConfig((128, 128, 32), (64, 64, 32), 3), "sm_80"),
    "warp_k": (INT8, TileConfig((128, 128, 64), (64, 64, 32), 3), "sm_80"),
    "warp_shape": (INT8, TileConfig((128, 128, 64), (48, 64, 64), 3), "sm_80"),
    "contiguous_warp": (INT8, TileConfig((64, 256, 64), (32, 128, 64), 3), "sm_80"),
    "warps": (INT8, TileConfig((64, 64, 64), (64, 64, 64), 3), "sm_80"),
    "stages": (INT8, replace(LARGE, stages=6), "sm_80"),
    "registers": (INT8, TileConfig((256, 256, 64), (64, 64, 64), 2), "sm_80"),
    "copy_runs": (replace(INT8, layout_a="column"), TileConfig((96, 64, 64), (48, 32, 64), 3), "sm_80"),
    "splits": (INT8, replace(SMALL, splits=3), "sm_90a"),
    "clusters": (INT8, SPLIT, "sm_80"),
    "shared_memory": (INT8, TileConfig((128, 256, 128), (64, 64, 128), 4), "sm_80"),
}


def test_every_constraint_is_refused_below():
    assert [c.name for c in mma_gemm.CONSTRAINTS] == list(REFUSALS)


@pytest.mark.parametrize("name", REFUSALS)
def test_illegal_int8_gemm_is_refused_by_name(name: str):
    [constraint] = [c for c in mma_gemm.CONSTRAINTS if c.name == name]
    with pytest.raises(EmitError, match=f"^qcut_int8_mma_[a-z0-9_]+: {re.escape(f'{name}: {constraint.reason}')}$"):
        INT8_MMA.emit(*REFUSALS[name])


@pytest.mark.parametrize(
    ("problem", "tile"),
    [
        (INT8, TileConfig((24, 128, 64), (24, 64, 64), 3)),
        (INT8, TileConfig((128, 128, 64), (0, 0, 0), 3)),
        (INT8, TileConfig((128, 128, 64), (64, 8, 64), 3)),
        (INT8, replace(LARGE, stages=1)),
        (INT8, TileConfig((256, 128, 64), (128, 64, 64), 3)),
        (replace(INT8, layout_d="column"), TileConfig((256, 64, 64), (128, 32, 64), 3)),
        (replace(INT8, layout_b="row"), TileConfig((16, 256, 64), (16, 64, 64), 0)),
        (replace(INT8, layout_b="row"), TileConfig((128, 256, 64), (128, 128, 64), 2)),
    ],
)
def test_edges_of_constraints_are_refused(problem: GemmProblem, tile: TileConfig):
    with pytest.raises(EmitError):
        INT8_MMA.emit(problem, tile, "sm_80")


@pytest.mark.parametrize(
    ("problem", "tile", "name"),
    [
        (INT8, MIDDLE, "operands"),
        (replace(HALF, a=DType.F32), MIDDLE, "operands"),
        (replace(HALF, layout_a="column"), MIDDLE, "layouts"),
        (replace(HALF, epilogue=replace(WEIGHT_ONLY, zero_point="per_token")), MIDDLE, "zero_point"),
        (replace(HALF, epilogue=Epilogue(DType.S32)), MIDDLE, "raw_output"),
        (replace(HALF, alignment_k=0), MIDDLE, "alignments"),
        (HALF, SPLIT, "one_cta"),
        (HALF, TileConfig((128, 256, 128), (64, 64, 128), 4), "shared_memory"),
    ],
)
def test_illegal_w8a16_mma_is_refused_by_name(problem: GemmProblem, tile: TileConfig, name: str):
    with pytest.raises(EmitError, match=f"^qcut_w8a16_mma_[a-z0-9_]+: {name}: "):
        W8A16_MMA.emit(problem, tile, "sm_90a")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: QuantizePerToken(DType.S8, "sm_80"), "quantize_per_token: float type 's8'"),
        (lambda: QuantizePerToken(DType.F16, "sm_80", threads=48), "48 threads per row; allowed are"),
        (lambda: QuantizePerToken(DType.F16, "sm_80", vectors=7), "7 vectors per thread; allowed are 0 to 6"),
        (lambda: QuantizePerToken(DType.F16, "sm_80", 1024, 5), "5 vectors per thread; allowed are 0 to 4"),
        (lambda: QuantizePerTensor(DType.F16, "sm_80", vectors=0), "0 vectors per thread; allowed are 1 to"),
        (lambda: Dequantize(DType.S32, "sm_80"), "dequantize: float type 's32'"),
        (
            lambda: QuantizePerToken(DType.F16, "sm_80", 32, 1).grid(1, 257),
            "257 columns; this kernel holds rows of up to 256",
        ),
        (lambda: emit_colsum(ColSum("sm_75")), "architecture 'sm_75' is not one of"),
    ],
)
def test_illegal_quantize_layout_is_refused(make: Callable[[], object], why: str):
    with pytest.raises(EmitError, match=re.escape(why)):
        make()


# ── binaries ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    "sources",
    [quantize_sources, int8_sources, menu_sources, layout_sources, w8a16_sources],
    ids=lambda f: f.__name__,
)
def test_compiles_without_spills(sources: Callable[[str], list[KernelSource]], arch: str):
    texts = in_turns(sources, arch)
    for source, binary in zip(texts, build(*texts), strict=True):
        resources = binary.resources
        assert resources is not None, source.name
        assert resources.stack_bytes == resources.spill_store_bytes == resources.spill_load_bytes == 0, source.name
        assert source.smem_bytes + resources.smem_bytes <= architecture(arch).smem_bytes


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_large_tiles_fit_their_occupancy(arch: str):
    problem = GemmProblem(epilogue=DYNAMIC)
    [binary] = build(INT8_MMA.emit(problem, LARGE, arch))
    assert binary.resources is not None
    assert binary.resources.registers * 256 <= 65536
    assert 2 * smem_bytes(problem, MIDDLE) <= architecture(arch).smem_bytes


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_tile_of_the_menu_uses_the_tensor_core(arch: str):
    for binary in build(*in_turns(menu_sources, arch)):
        found = instructions(binary.cubin)
        assert {"IMMA.16832.S8.S8", "LDSM.16.M88.4"} <= found, binary.name
        assert any(name.startswith("LDGSTS.E.BYPASS") for name in found), binary.name
        assert any(name.startswith("UCGABAR") for name in found) == bool(re.search(r"_k\d_multistage$", binary.name))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_binaries_hold_the_instructions_they_were_written_for(arch: str):
    common = {"LDGSTS.E.BYPASS.LTC128B.128", "LDSM.16.M88.4"}
    int8 = instructions(build(int8_sources(arch)[0])[0].cubin)
    assert common | {"IMMA.16832.S8.S8"} <= int8
    half = instructions(build(w8a16_sources(arch)[0])[0].cubin)
    assert common | {"HMMA.16816.F32", "PRMT", "LDS.64"} <= half
    brain = instructions(build(w8a16_sources(arch)[3])[0].cubin)
    assert common | {"HMMA.16816.F32.BF16", "HFMA2.BF16_V2"} <= brain
    token = instructions(build(emit_quantize_per_token(QuantizePerToken(DType.F16, arch, 32, 6)))[0].cubin)
    assert any(name.startswith("LDG.E.128") for name in token)
    assert "STG.E.64" in token
    for name in int8 | half | brain | token:
        assert not name.startswith(("LDL", "STL")), name
