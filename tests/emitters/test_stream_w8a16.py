"""The few-token W8A16 kernel as text and as a binary: parameters, constraints, choice of tiles, instructions."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest

from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import best_tile
from qcut.emitters.core.arch import ARCHITECTURES, architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.families import W8A16_STREAM
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.stream.w8a16 import CONSTRAINTS, MAX_TOKENS, W8A16Tile, smem_bytes
from tests.support.compiled import build
from tests.support.sass import instructions

BIAS = Epilogue(col_scale="per_channel", bias=True)
HALF = GemmProblem(a=DType.F16, epilogue=BIAS)
ONE = W8A16Tile(7, 32)
MANY = W8A16Tile(7, 16, 2, 1, 16)
SHAPES = [(14336, 4096), (4096, 14336), (4096, 4096), (1280, 1280), (5120, 1280), (50257, 1280), (1, 1), (17, 40)]


def sources(arch: str) -> list[KernelSource]:
    full = Epilogue(DType.BF16, col_scale="per_channel", bias=True, activation=Activation.GELU_TANH, residual=True)
    kernels = [
        W8A16_STREAM.emit(HALF, ONE, arch),
        W8A16_STREAM.emit(HALF, MANY, arch),
        W8A16_STREAM.emit(HALF, W8A16Tile(7, 8, 2, 2, 32), arch),
        W8A16_STREAM.emit(HALF, W8A16Tile(3, 10, 1, 3), arch),
        W8A16_STREAM.emit(replace(HALF, a=DType.BF16), ONE, arch),
        W8A16_STREAM.emit(GemmProblem(a=DType.BF16, epilogue=full), MANY, arch),
        W8A16_STREAM.emit(replace(HALF, alignment_k=1, alignment_n=1), W8A16Tile(2, 8, 1, 2), arch),
        W8A16_STREAM.emit(replace(HALF, epilogue=Epilogue(DType.F32)), W8A16Tile(2, 16, 1, 1, 32), arch),
    ]
    if arch == "sm_90a":
        kernels.append(W8A16_STREAM.emit(HALF, W8A16Tile(9, 28, splits=4), arch))
        kernels.append(W8A16_STREAM.emit(replace(HALF, a=DType.BF16), W8A16Tile(3, 10, 1, 3, 32, 2), arch))
    return kernels


def test_text_instantiates_the_header():
    tile = W8A16Tile(9, 28, splits=4)
    source = W8A16_STREAM.emit(replace(HALF, epilogue=Epilogue(DType.BF16)), tile, "sm_90a")
    assert source.text == (
        "#include <qcut/stream/w8a16.cuh>\n\n"
        'extern "C" __global__ void __cluster_dims__(4, 1, 1) __launch_bounds__(896)\n'
        "qcut_w8a16_stream_sm90a_f16xs8_bf16_m8_r9_w28_u1_p1_k4(\n"
        "    const __half* a, const int8_t* b, __nv_bfloat16* d, int m, int n, int k, int lda, int ldb, int ldd) {\n"
        "  using Tile = qcut::W8A16Tile<9, 28, 1, 1, 8, 4>;\n"
        "  using Epilogue = qcut::Epilogue<__nv_bfloat16, qcut::ZeroPoint::kNone, false, qcut::ColScale::kNone, false, "
        "qcut::Activation::kNone, false>;\n"
        "  Epilogue::Args args{};\n"
        "  qcut::w8a16_stream<Tile, __half, true, Epilogue>(a, b, d, m, n, k, lda, ldb, ldd, args);\n"
        "}\n"
    )


def test_names_are_unique_and_text_repeats():
    first, second = ([s for arch in ("sm_80", "sm_90a") for s in sources(arch)] for _ in range(2))
    assert first == second
    assert len({s.name for s in first}) == len({s.text for s in first}) == len(first)


def test_only_whole_vectors_are_read_as_such():
    for alignment, aligned in ((16, "true"), (8, "true"), (4, "false"), (1, "false")):
        text = W8A16_STREAM.emit(replace(HALF, alignment_k=alignment), ONE, "sm_80").text
        assert f"qcut::w8a16_stream<Tile, __half, {aligned}, Epilogue>" in text


def test_grid_is_a_cluster_for_each_row_of_tiles():
    assert W8A16_STREAM.grid(ONE, 14336)(1) == (128, 1, 1)
    assert W8A16_STREAM.grid(W8A16Tile(2, 8, tokens=32, splits=4), 33)(32) == (8, 1, 1)


REFUSALS = {
    "operands": (GemmProblem(epilogue=BIAS), ONE, "sm_80"),
    "layouts": (replace(HALF, layout_a="column"), ONE, "sm_80"),
    "zero_point": (replace(HALF, epilogue=replace(BIAS, zero_point="per_token")), ONE, "sm_80"),
    "raw_output": (replace(HALF, epilogue=Epilogue(DType.S32)), ONE, "sm_80"),
    "architecture": (HALF, ONE, "sm_75"),
    "alignments": (replace(HALF, alignment_k=0), ONE, "sm_80"),
    "tokens": (HALF, replace(ONE, tokens=64), "sm_80"),
    "row_tiles": (HALF, replace(ONE, row_tiles=0), "sm_80"),
    "warps": (HALF, replace(ONE, warps=33), "sm_80"),
    "units": (HALF, replace(ONE, units=0), "sm_80"),
    "prefetch": (HALF, W8A16Tile(2, 4, prefetch=3), "sm_80"),
    "registers": (HALF, replace(ONE, prefetch=2), "sm_80"),
    "splits": (HALF, replace(ONE, splits=3), "sm_90a"),
    "clusters": (HALF, replace(ONE, splits=2), "sm_89"),
    "shared_memory": (HALF, replace(ONE, row_tiles=14), "sm_80"),
}


def test_every_constraint_is_refused_below():
    assert [c.name for c in CONSTRAINTS] == list(REFUSALS)


def test_illegal_kernels_are_refused_by_name():
    for constraint in CONSTRAINTS:
        message = f"{constraint.name}: {constraint.reason}"
        with pytest.raises(EmitError, match=f"^qcut_w8a16_stream_[a-z0-9_]+: {re.escape(message)}$"):
            W8A16_STREAM.emit(*REFUSALS[constraint.name])


# ── choice ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_shape_has_a_tile(arch: str):
    for (n, k), m in product(SHAPES, (1, 8, 9, 16, 17, 32)):
        tile = best_tile(W8A16_STREAM, HALF, m, n, k, Target(arch, 132))
        W8A16_STREAM.validate(HALF, tile, arch)
        assert m <= tile.tokens < max(9, 2 * m)
        assert (tile.warps - 1) * tile.units * tile.splits * 128 < k, "no warp is idle"


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize(("n", "k"), [(14336, 4096), (4096, 4096), (4096, 14336)])
def test_large_layers_are_one_wave_with_enough_in_flight(n: int, k: int, m: int):
    tile = best_tile(W8A16_STREAM, HALF, m, n, k, Target("sm_90a", 132))
    assert 0.85 * 132 <= W8A16_STREAM.grid(tile, n)(m)[0] <= 132
    assert 2048 * tile.warps * tile.units * tile.prefetch >= 48 * 1024


@pytest.mark.parametrize("m", [0, MAX_TOKENS + 1])
def test_other_numbers_of_tokens_are_refused(m: int):
    with pytest.raises(EmitError, match=f"w8a16_stream: {m} tokens; allowed are 1 to 32"):
        best_tile(W8A16_STREAM, HALF, m, 4096, 4096, Target("sm_90a", 132))


def test_a_problem_it_cannot_build_is_refused():
    with pytest.raises(EmitError, match="operands"):
        best_tile(W8A16_STREAM, GemmProblem(epilogue=BIAS), 1, 4096, 4096, Target("sm_80", 132))


# ── binaries ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_chosen_tiles_do_not_spill(arch: str):
    problems = [HALF, replace(HALF, a=DType.BF16)]
    tiles = {best_tile(W8A16_STREAM, HALF, m, n, k, Target(arch, 132)) for n, k in SHAPES[:6] for m in (1, 16, 32)}
    for binary in build(*[W8A16_STREAM.emit(p, t, arch) for p in problems for t in sorted(tiles, key=str)]):
        assert binary.resources is not None, binary.name
        assert binary.resources.spill_store_bytes == binary.resources.stack_bytes == 0, binary.name


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_binaries_stream_weights_into_the_tensor_core(arch: str):
    texts = sources(arch)
    for source, binary in zip(texts, build(*texts), strict=True):
        resources = binary.resources
        assert resources is not None, source.name
        assert resources.stack_bytes == resources.spill_store_bytes == resources.spill_load_bytes == 0, source.name
        assert source.smem_bytes + resources.smem_bytes <= architecture(arch).smem_bytes
        names = instructions(binary.cubin)
        assert f"LDG.E.NA.LTC{256 if arch == 'sm_90a' else 128}B.128.CONSTANT" in names, source.name
        assert ("HMMA.16816.F32.BF16" if "_bf16xs8_" in source.name else "HMMA.16816.F32") in names, source.name
        assert any(name.startswith("UCGABAR") for name in names) == ("__cluster_dims__" in source.text), source.name
        assert ("ACQBULK" in names) == (arch == "sm_90a"), source.name
        assert not any(name.startswith(("LDL", "STL")) for name in names), source.name


def test_shared_memory_holds_every_warps_sums():
    assert smem_bytes(HALF, ONE) == 4 * (32 * 8 * (7 * 16 + 4) + 2 * 7 * 16)
