"""Kernels of int16 tokens as text and as binaries: parameters, refusals, rows and tokens of a launch, no spills."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from qcut.dispatch.few_tokens import few_tokens
from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import best_tile
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.decoder.quantize import QuantizePerToken, emit_quantize_per_token
from qcut.emitters.families import INT8_CUTLASS, INT8_DP4A, INT8_MMA, INT8_STREAM, INT8_WMMA
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from qcut.emitters.stream.w8a8 import W8A8Problem, W8A8Tile
from tests.support.compiled import build, in_turns
from tests.support.sass import instructions

PLAIN = Epilogue(DType.F16, row_scale="per_token", col_scale="per_channel", bias=True, halves=True)
PROBLEM = GemmProblem(epilogue=PLAIN)
LARGE, SPLIT = TileConfig((128, 256, 64), (64, 64, 64), 4), TileConfig((16, 64, 128), (16, 16, 128), 5, splits=4)
PINGPONG = next(tile for tile in INT8_CUTLASS.default_tiles(GemmProblem(), "sm_90a") if tile.schedule == "pingpong")


def sources(arch: str) -> list[KernelSource]:
    """Every kind of kernel that NVRTC builds."""
    gpu = Target(arch, 108)
    found = [
        emit_quantize_per_token(QuantizePerToken.for_shape(DType.F16, arch, 4096, 4096, halves=True)),
        emit_quantize_per_token(QuantizePerToken(DType.F32, arch, 256, 0, aligned=False, halves=True)),
        INT8_MMA.emit(PROBLEM, LARGE, arch),
        INT8_MMA.emit(replace(PROBLEM, epilogue=replace(PLAIN, out=DType.BF16, residual=True)), LARGE, arch),
        INT8_WMMA.emit(PROBLEM, INT8_WMMA.default_tiles(GemmProblem(), arch)[0], arch),
    ]
    for kind, x, m, n, k in (
        ("floats", DType.F16, 1, 14336, 4096),
        ("floats", DType.F32, 8, 1280, 5120),
        ("given", DType.BF16, 8, 14336, 4096),
        ("rows", DType.F16, 2, 4096, 14336),
    ):
        few = W8A8Problem(kind, x, replace(PLAIN, out=x))  # type: ignore[arg-type]
        found.append(INT8_STREAM.emit(few, best_tile(INT8_STREAM, few, m, n, k, gpu), arch))
    return [*found, INT8_MMA.emit(PROBLEM, SPLIT, arch)] if arch == "sm_90a" else found


def test_texts_take_tokens_and_rows() -> None:
    gemm = INT8_MMA.emit(PROBLEM, LARGE, "sm_80")
    assert gemm.name == "qcut_int8_mma_sm80_s8xs8_f16_halves_sm_sn_b_128x256x64_w64x64_s4_multistage"
    assert [p.name for p in gemm.params] == [
        *("a", "b", "d", "m", "n", "k", "lda", "ldb", "ldd", "tokens", "row_scale", "col_scale", "bias")
    ]
    assert "qcut::OfHalves<qcut::Epilogue<__half," in gemm.text
    assert "args.tokens = tokens;" in gemm.text
    assert "#include <qcut/gemm/halves.cuh>" in gemm.text
    few = INT8_STREAM.emit(W8A8Problem("floats", DType.F16, PLAIN), W8A8Tile(7, 16, 2, tokens=1), "sm_80")
    assert [p.name for p in few.params][8:] == ["ldd", "tokens", "col_scale", "bias"]
    assert "qcut::int16x8_stream<" in few.text
    assert "OfHalves" not in few.text
    quantize = emit_quantize_per_token(QuantizePerToken(DType.F16, "sm_80", 128, 4, halves=True))
    assert quantize.name.endswith("_t128v4_halves")
    assert "qcut::quantize_halves<__half, 128, 1, 4, true>" in quantize.text


def test_rows_of_tokens_come_in_blocks() -> None:
    assert [PLAIN.rows(m) for m in (0, 1, 8, 9, 16, 17)] == [0, 16, 16, 32, 32, 48]
    assert [replace(PLAIN, halves=False).rows(m) for m in (0, 1, 9)] == [0, 1, 9]


def test_cutlass_leaves_d_to_the_visitor_node() -> None:
    for activation, place in ((Activation.NONE, 0), (Activation.SILU, 4)):
        source = INT8_CUTLASS.emit(replace(PROBLEM, epilogue=replace(PLAIN, activation=activation)), PINGPONG, "sm_90a")
        assert source.text.count("using ElementD = void;") == 1
        assert re.search(
            rf"Sm90DequantizeHalves<\s*[^<>]*, cutlass::half_t, cute::Int<{place}>, true, true, true", source.text
        )
        assert source.host_text is not None
        assert "{a.d, a.ldd, a.tokens, (float const*)a.row_scale, (float const*)a.col_scale, (float const*)a.bias}" in (
            source.host_text
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda: Epilogue(DType.S32, halves=True),
        lambda: replace(PLAIN, zero_point="per_token"),
        lambda: GemmProblem(epilogue=PLAIN, layout_a="column"),
        lambda: GemmProblem(DType.F16, epilogue=PLAIN),
        lambda: INT8_DP4A.emit(PROBLEM, INT8_DP4A.default_tiles(GemmProblem(), "sm_80")[0], "sm_80"),
        lambda: INT8_CUTLASS.emit(PROBLEM, INT8_CUTLASS.default_tiles(GemmProblem(), "sm_80")[0], "sm_80"),
        lambda: INT8_CUTLASS.emit(GemmProblem(epilogue=replace(PLAIN, residual=True)), PINGPONG, "sm_90a"),
        lambda: INT8_CUTLASS.emit(GemmProblem(epilogue=replace(PLAIN, out=DType.S8)), PINGPONG, "sm_90a"),
    ],
)
def test_what_no_kernel_combines_is_refused(make) -> None:
    with pytest.raises(EmitError, match="halves"):
        make()


def test_few_tokens_are_streamed() -> None:
    gpu = Target("sm_90a", 132)
    for m in (1, 8):
        few = few_tokens(PROBLEM, m, 14336, 4096, gpu, "given")
        assert few is not None
        assert (few.tile.splits, few.tile.common_sums) == (1, False)
    assert few_tokens(PROBLEM, 9, 14336, 4096, gpu, "given") is None
    assert few_tokens(PROBLEM, 9, 1280, 1280, gpu, "given") is None


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_binaries_spill_nothing(arch: str) -> None:
    for binary in build(*in_turns(sources, arch)):
        assert binary.resources is not None
        assert binary.resources.spill_store_bytes == binary.resources.spill_load_bytes == 0, binary.name
        found = instructions(binary.cubin)
        if "quantize" not in binary.name:
            assert "I2F.S64" in found, f"{binary.name} combines no halves"
