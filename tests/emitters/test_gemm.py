"""GEMMs with int8 weights: grids, memory, access widths, hi/lo splits, integer outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from qcut.dispatch.gemm import few_tokens, select_gemm
from qcut.dispatch.gpus import Target
from qcut.emitters.core.arch import ARCHITECTURES
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, EmitError, KernelSource, Param
from qcut.emitters.families import INT8_DP4A, INT8_MMA, INT8_WMMA, W8A16_MMA
from qcut.emitters.gemm import w8a16_wgmma
from qcut.emitters.gemm.dp4a import CONSTRAINTS, Dp4aTile
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from qcut.emitters.gemm.w8a16_wgmma import W8A16WgmmaTile
from qcut.emitters.gemm.wmma import Int8Wmma
from tests.architectures.reading import report_faults
from tests.emitters.conformance.gemm import (
    BIASED,
    GROUPS,
    HALVES,
    LARGE,
    NTN,
    RESCALED,
    RESCALED_HALVES,
    SHARED,
    SIMT,
    SMALL,
    SPLIT,
    STATIC,
    WMMA_TILE,
)
from tests.support.binaries import build, instructions

INT8 = GemmProblem(epilogue=STATIC)
PROBLEM = GemmProblem(epilogue=HALVES)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Epilogue(DType.S32, bias=True), "raw accumulators"),
        (lambda: Epilogue(DType.S8, col_scale="per_tensor", wrap=True), "raw accumulators"),
        (lambda: Epilogue(DType.F16, wrap=True), "low eight bits"),
        (lambda: Epilogue(DType.S32, halves=True), "halves"),
        (lambda: replace(HALVES, zero_point="per_token"), "halves"),
        (lambda: GemmProblem(epilogue=HALVES, layout_a="column"), "halves"),
        (lambda: GemmProblem(DType.F16, epilogue=HALVES), "halves"),
        (lambda: GemmProblem(epilogue=HALVES, device_m=True), "halves"),
        (lambda: GemmProblem(DType.F16, layout_d="column", experts=True), "experts are in layouts tnt"),
        (lambda: GemmProblem(DType.F16, epilogue=Epilogue(residual=True), experts=True), "without a residual"),
        (lambda: Epilogue(DType.S16), "s16"),
        (lambda: Epilogue(DType.S16, rescale=True), "rescale|s16"),
        (lambda: Epilogue(DType.S8, halves=True, rescale=True), "rescale"),
        (lambda: Epilogue(DType.F16, rescale=True), "rescale"),
        (lambda: replace(RESCALED, bias=True), "rescale"),
        (lambda: replace(RESCALED, activation=Activation.RELU), "rescale"),
        (lambda: replace(RESCALED, wrap=True), "rescale"),
    ],
)
def test_epilogues_that_nothing_computes_are_refused(make: Callable[[], object], why: str) -> None:
    with pytest.raises(EmitError, match=why):
        make()


def test_grid_has_a_cta_a_tile_and_split():
    assert INT8_MMA.grid(LARGE, 257)(129) == (4, 1, 1)
    assert INT8_MMA.grid(SPLIT, 65)(17) == (16, 1, 1)
    assert W8A16_MMA.grid(SMALL, 64)(1) == (1, 1, 1)
    assert INT8_DP4A.grid(SIMT, 257)(129) == (6, 1, 1)
    assert w8a16_wgmma.ctas(GROUPS, 64, 14336) == 112
    assert w8a16_wgmma.ctas(W8A16WgmmaTile(64, 1, 4, 12, 2, 2), 65, 1281) == 21 * 2 * 4


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_device_m_adds_a_parameter_and_an_exit(arch: str) -> None:
    """The rest of the text is that of M known on the host."""
    for problem, sizes in ((INT8, "m, n"), (replace(INT8, layout_d="column"), "n, m")):
        host, device = (INT8_MMA.emit(replace(problem, device_m=read), SMALL, arch) for read in (False, True))
        added = f"  m = qcut::device_count(m_count, m);\n  if (!qcut::has_tile<Tile>({sizes})) return;\n"
        assert device.params == (*host.params, Param("m_count", "count"))
        text = device.text.replace(added, "").replace(", const int* m_count", "").replace(device.name, host.name)
        assert text == host.text
    assert not report_faults(device, *build(device), 0)


def test_a_count_needs_its_bound() -> None:
    count = Param("m_count", "count")
    with pytest.raises(EmitError, match="'m_count' has no i32 parameter 'm'"):
        KernelSource("k", "", "k", (Param("m", "f32"), count), "sm_80")
    assert KernelSource("k", "", "k", (Param("m", "i32"), count), "sm_80").struct_format == "@iP"


def test_menus_split_k_only_in_clusters():
    assert {t.splits for t in INT8_MMA.default_tiles(GemmProblem(), "sm_80")} == {1}
    assert {t.splits for t in INT8_MMA.default_tiles(GemmProblem(), "sm_90a")} == {1, 2, 4, 8}


def test_shared_layouts_are_named_except_the_default():
    blocked, padded, linear = (Int8Wmma(s).emit(INT8, WMMA_TILE, "sm_80") for s in SHARED)
    assert blocked == INT8_WMMA.emit(INT8, WMMA_TILE, "sm_80")
    assert (padded.name, linear.name) == (f"{blocked.name}_padded", f"{blocked.name}_linear")
    assert "qcut::wmma_gemm<qcut::LinearLayout, Tile, A, B, Epilogue, 16, false>(" in linear.text
    assert blocked.smem_bytes == linear.smem_bytes == 3 * 64 * 128
    assert padded.smem_bytes == 3 * 80 * 128


def test_padding_counts_against_shared_memory():
    tile = TileConfig((128, 128, 128), (64, 32, 128), 5)
    assert INT8_WMMA.emit(INT8, tile, "sm_80").smem_bytes == 5 * 256 * 128
    with pytest.raises(EmitError, match=r"_padded: shared_memory: "):
        Int8Wmma("padded").emit(INT8, tile, "sm_80")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_search_space_is_every_legal_tile(arch: str):
    blocks, warps, lanes = (64, 128, 256), (32, 64, 128, 256), (4, 8, 16, 32)
    sizes = product(blocks, blocks, (8, 16, 32, 64), warps, warps, (1, 2, 4, 8), lanes, lanes)
    legal = [t for t in (Dp4aTile(*s) for s in sizes) if all(c.holds(BIASED, t, arch) for c in CONSTRAINTS)]
    assert list(INT8_DP4A.search_space(BIASED, arch)) == legal
    assert len(legal) == 2044
    assert not list(INT8_DP4A.search_space(replace(BIASED, a=DType.BF16), arch))


def test_legal_tiles_are_covered_exactly():
    """Subtiles and lanes cover a warp's tile once, warps a CTA's, and a thread owns its share."""
    for tile in INT8_DP4A.search_space(BIASED, "sm_80"):
        lanes = (tile.wm // tile.wmiter // tile.tm) * (tile.wn // tile.wniter // tile.tn)
        per_thread = tile.wmiter * tile.tm * tile.wniter * tile.tn
        assert lanes == 32
        assert per_thread == tile.accumulators <= 128
        assert tile.threads * per_thread == tile.bm * tile.bn
        assert 32 <= tile.threads <= 1024


def test_pieces_are_as_wide_as_the_alignment_allows():
    wide, far, narrow, single = (
        instructions(build(INT8_DP4A.emit(problem, SIMT, "sm_90a"))[0].cubin)
        for problem in (
            BIASED,
            replace(BIASED, **NTN),
            replace(BIASED, alignment_k=8, alignment_n=4),
            replace(BIASED, alignment_k=1, alignment_n=1),
        )
    )
    assert {"LDG.E.128", "STG.E.64", "STS"} <= wide
    assert {"LDG.E", "STG.E.64", "STS.128", "PRMT"} <= far
    assert {"LDG.E.64", "STG.E"} <= narrow
    assert "STG.E.U8" in single
    assert not any(name.startswith("LDG.E.128") for name in narrow | single)


def test_rows_of_tokens_come_in_blocks() -> None:
    assert [HALVES.rows(m) for m in (0, 1, 8, 9, 16, 17)] == [0, 16, 16, 32, 32, 48]
    assert [replace(HALVES, halves=False).rows(m) for m in (0, 1, 9)] == [0, 1, 9]


def test_few_tokens_are_streamed() -> None:
    gpu = Target("sm_90a", 132)
    for m in (1, 8):
        few = few_tokens(PROBLEM, m, 14336, 4096, gpu, "given")
        assert few is not None
        assert (few[1].tile.splits, few[1].tile.common_sums) == (1, False)
    assert few_tokens(PROBLEM, 9, 14336, 4096, gpu, "given") is None
    assert few_tokens(PROBLEM, 9, 1280, 1280, gpu, "given") is None


def test_dispatch_finds_kernels_of_integers_alone() -> None:
    for gpu in (Target("sm_90a", 132, "NVIDIA H200"), Target("sm_80", 108)):
        for epilogue, most in ((RESCALED, 16), (RESCALED_HALVES, 8)):
            problem = GemmProblem(epilogue=epilogue)
            assert few_tokens(problem, most, 4096, 4096, gpu, "given") is not None
            assert few_tokens(problem, most + 1, 4096, 4096, gpu, "given") is None
            for m in (64, 512, 4096):
                choice = select_gemm(problem, epilogue.rows(m), 4096, 4096, gpu)
                assert choice.family in ("int8_mma", "int8_wmma")
                assert "only in integers" in choice.reason


def test_wide_warps_that_would_spill_are_illegal() -> None:
    for arch, legal in (("sm_80", True), ("sm_90a", True), ("sm_100", False), ("sm_120", False)):
        assert INT8_MMA.is_legal(GemmProblem(epilogue=RESCALED), LARGE, arch) == legal
