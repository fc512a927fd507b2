"""Kernels of layers in integers as text and as binaries: parameters, refusals, no floats, no spills."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qcut.dispatch.few_tokens import few_tokens
from qcut.dispatch.gemm import select_gemm
from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import best_tile
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.decoder.split_halves import SplitHalves, emit_split_halves
from qcut.emitters.families import INT8_CUTLASS, INT8_DP4A, INT8_MMA, INT8_STREAM, INT8_WMMA
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from qcut.emitters.stream.w8a8 import W8A8Problem, W8A8Tile
from tests.support.compiled import build, in_turns
from tests.support.sass import instructions

BYTES, WORDS = Epilogue(DType.S8, rescale=True), Epilogue(DType.S16, halves=True, rescale=True)
LARGE, SPLIT = TileConfig((128, 256, 64), (64, 64, 64), 4), TileConfig((16, 64, 128), (16, 16, 128), 5, splits=4)


def sources(arch: str) -> list[KernelSource]:
    found = [emit_split_halves(SplitHalves(arch, aligned)) for aligned in (True, False)]
    for epilogue in (BYTES, WORDS):
        problem = GemmProblem(epilogue=epilogue)
        tiles = [tile for tile in INT8_MMA.default_tiles(GemmProblem(), arch) if INT8_MMA.is_legal(problem, tile, arch)]
        large = max(tiles, key=lambda tile: (tile.warp_shape[0] * tile.warp_shape[1], tile.threads))
        found += [
            INT8_MMA.emit(problem, large, arch),
            INT8_WMMA.emit(problem, INT8_WMMA.default_tiles(GemmProblem(), arch)[0], arch),
        ]
        if arch == "sm_90a":
            found.append(INT8_MMA.emit(problem, SPLIT, arch))
        for m, n, k in ((1, 14336, 4096), (8, 4096, 14336), (16, 1280, 1280)):
            if m <= 8 or epilogue is BYTES:
                few = W8A8Problem("given", epilogue.out, epilogue)
                found.append(INT8_STREAM.emit(few, best_tile(INT8_STREAM, few, m, n, k, Target(arch, 108)), arch))
    return found


def test_texts_take_bias_multiplier_and_shift() -> None:
    vectors = ["bias", "multiplier", "shift"]
    eight = INT8_MMA.emit(GemmProblem(epilogue=BYTES), LARGE, "sm_80")
    assert eight.name == "qcut_int8_mma_sm80_s8xs8_s8_rescale_128x256x64_w64x64_s4_multistage"
    assert [p.name for p in eight.params][8:] == ["ldd", *vectors, "zero_point", "relu"]
    assert "using Epilogue = qcut::IntegerEpilogue<int8_t>;" in eight.text
    assert "#include <qcut/gemm/integers.cuh>" in eight.text
    sixteen = INT8_MMA.emit(GemmProblem(epilogue=WORDS), LARGE, "sm_80")
    assert [p.name for p in sixteen.params][8:] == ["ldd", "tokens", *vectors, "relu"]
    assert "using Epilogue = qcut::OfHalves<qcut::IntegerEpilogue<short>>;" in sixteen.text
    assert "args.tokens = tokens;" in sixteen.text
    few = INT8_STREAM.emit(W8A8Problem("given", DType.S16, WORDS), W8A8Tile(7, 16, tokens=1), "sm_80")
    assert [p.name for p in few.params][8:] == ["ldd", "tokens", *vectors, "relu"]
    assert "qcut::integer_stream<Tile, true, Epilogue>(a, b, d, tokens," in few.text
    assert "OfHalves" not in few.text
    assert "args.tokens" not in few.text


@pytest.mark.parametrize(
    "make",
    [
        lambda: Epilogue(DType.S16),
        lambda: Epilogue(DType.S16, rescale=True),
        lambda: Epilogue(DType.S8, halves=True, rescale=True),
        lambda: Epilogue(DType.F16, rescale=True),
        lambda: replace(BYTES, bias=True),
        lambda: replace(BYTES, activation=Activation.RELU),
        lambda: replace(BYTES, wrap=True),
        lambda: INT8_CUTLASS.emit(
            GemmProblem(epilogue=BYTES), INT8_CUTLASS.default_tiles(GemmProblem(), "sm_80")[0], "sm_80"
        ),
        lambda: INT8_DP4A.emit(
            GemmProblem(epilogue=BYTES), INT8_DP4A.default_tiles(GemmProblem(), "sm_80")[0], "sm_80"
        ),
        lambda: INT8_STREAM.emit(W8A8Problem("rows", DType.F16, BYTES), W8A8Tile(1, 8), "sm_80"),
        lambda: INT8_STREAM.emit(W8A8Problem("given", DType.S8, BYTES, absmax=True), W8A8Tile(1, 8), "sm_80"),
    ],
)
def test_what_no_kernel_rescales_is_refused(make) -> None:
    with pytest.raises(EmitError, match=r"rescale|s16"):
        make()


def test_dispatch_finds_kernels_of_few_tokens_and_of_many() -> None:
    for gpu in (Target("sm_90a", 132, "NVIDIA H200"), Target("sm_80", 108)):
        for epilogue, most in ((BYTES, 16), (WORDS, 8)):
            problem = GemmProblem(epilogue=epilogue)
            assert few_tokens(problem, most, 4096, 4096, gpu, "given") is not None
            assert few_tokens(problem, most + 1, 4096, 4096, gpu, "given") is None
            for m in (64, 512, 4096):
                choice = select_gemm(problem, epilogue.rows(m), 4096, 4096, gpu)
                assert choice.family in ("int8_mma", "int8_wmma")
                assert "integers alone" in choice.reason


def test_wide_warps_are_left_out_where_their_columns_would_spill() -> None:
    for arch, legal in (("sm_80", True), ("sm_90a", True), ("sm_100", False), ("sm_120", False)):
        assert INT8_MMA.is_legal(GemmProblem(epilogue=BYTES), LARGE, arch) == legal


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_binaries_spill_nothing_and_hold_no_floats(arch: str) -> None:
    for binary in build(*in_turns(sources, arch)):
        assert binary.resources is not None
        assert binary.resources.spill_store_bytes == binary.resources.spill_load_bytes == 0, binary.name
        found = instructions(binary.cubin)
        # Quotients of integers go through conversions and a reciprocal, but no arithmetic does.
        assert not any(name.startswith(("FADD", "FMUL", "FFMA", "DADD", "DMUL", "I2F.S64")) for name in found), (
            binary.name
        )
