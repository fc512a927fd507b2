"""The few-token W8A8 kernel as text and as a binary: parameters, constraints, choice of tiles, instructions."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import best_tile
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.families import INT8_STREAM
from qcut.emitters.gemm.problem import K_MAX
from qcut.emitters.stream.int8 import register_limit
from qcut.emitters.stream.w8a8 import (
    CONSTRAINTS,
    MAX_ROWS,
    MAX_TOKENS,
    Tokens,
    W8A8Problem,
    W8A8Tile,
    is_legal,
    registers,
    smem_bytes,
)
from tests.support.compiled import build
from tests.support.sass import listing

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32
PLAIN = Epilogue(F16, row_scale="per_token", col_scale="per_channel", bias=True)
KINDS: tuple[Tokens, ...] = ("none", "given", "rows", "floats")
ROWS = W8A8Problem("rows", F16, PLAIN)
ZERO_POINT = W8A8Problem("given", F16, replace(PLAIN, out=DType.S8, zero_point="per_token"))
TILE = W8A8Tile(2, 10, prefetch=2)
GPT2 = ((3840, 1280), (1280, 1280), (5120, 1280), (1280, 5120), (50257, 1280))
LLAMA = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (4096, 28672), (128256, 4096))
LLAMA2C = ((864, 288), (288, 768), (512, 288), (1376, 512), (512, 1376))
ODD = ((1, 1), (17, 40), (33, 77), (7, 129), (100, 1000))
SM_COUNT = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90a": 132, "sm_100": 148, "sm_120": 170}


def problem_of(
    tokens: Tokens, x: DType = F16, *, aligned: bool = True, absmax: bool = False, **changes: Any
) -> W8A8Problem:
    return W8A8Problem(tokens, x, replace(PLAIN, out=x, **changes), aligned, absmax)


def chosen(problem: W8A8Problem, arch: str, m: int, n: int, k: int) -> KernelSource:
    return INT8_STREAM.emit(problem, best_tile(INT8_STREAM, problem, m, n, k, Target(arch, SM_COUNT[arch])), arch)


def sources(arch: str) -> list[KernelSource]:
    """Every kind of tokens and type, in tiles of 1 to 32 warps, of 1 to 32 tokens."""
    kernels = [
        chosen(problem_of("none", BF16), arch, 8, 4096, 14336),
        chosen(problem_of("given", F16, activation=Activation.GELU_TANH, absmax=True), arch, 8, 5120, 1280),
        chosen(problem_of("given", F32, bias=False), arch, 2, 33, 80),
        chosen(problem_of("rows", F16), arch, 1, 1280, 1280),
        chosen(problem_of("rows", F16), arch, 8, 1280, 1280),
        chosen(problem_of("rows", F16), arch, 2, 4096, 14336),
        chosen(problem_of("rows", F16, absmax=True), arch, 8, 1280, 5120),
        chosen(problem_of("rows", BF16, aligned=False), arch, 3, 512, 1376),
        chosen(problem_of("rows", BF16), arch, 8, 6144, 4096),
        chosen(problem_of("rows", F32), arch, 4, 5120, 1280),
        chosen(problem_of("floats", F16), arch, 1, 14336, 4096),
        chosen(problem_of("floats", F32, aligned=False), arch, 8, 1280, 1280),
        INT8_STREAM.emit(ZERO_POINT, W8A8Tile(7, 16, 2, 1, 16), arch),
        INT8_STREAM.emit(replace(ZERO_POINT, tokens="none"), W8A8Tile(7, 8, 2, 1, 32, common_sums=True), arch),
        chosen(problem_of("rows", F32, aligned=False, activation=Activation.SILU), arch, 8, 4096, 14336),
        chosen(problem_of("rows", F32, residual=True), arch, 2, 1280, 1280),
    ]
    if arch == "sm_90a":
        kernels.append(INT8_STREAM.emit(problem_of("none"), W8A8Tile(4, 28, splits=2), arch))
        kernels.append(INT8_STREAM.emit(problem_of("rows", absmax=True), W8A8Tile(2, 4, 1, 2, 4, 8), arch))
    kernels.append(INT8_STREAM.emit(problem_of("given"), W8A8Tile(3, 10, 1, 3, 8), arch))
    return kernels


# ── text ─────────────────────────────────────────────────────────────────────────────────────────


def test_text_instantiates_the_header() -> None:
    source = INT8_STREAM.emit(problem_of("rows", BF16, absmax=True), W8A8Tile(9, 20, 1, 2, 4, 4), "sm_90a")
    assert source.text == (
        "#include <qcut/stream/w8a8.cuh>\n\n"
        'extern "C" __global__ void __cluster_dims__(4, 1, 1) __launch_bounds__(640, 1)\n'
        "qcut_int8_stream_sm90a_rows_bf16_bf16_sm_sn_b_absmax_m4_r9_w20_u1_p2_k4(\n"
        "    const void* a, const int8_t* b, __nv_bfloat16* d, int m, int n, int k, int lda, int ldb, int ldd, "
        "const float* a_absmax, const float* col_scale, const float* bias, float* absmax) {\n"
        "  using Tile = qcut::W8A8Tile<__nv_bfloat16, qcut::Tokens::kRows, false, 9, 20, 1, 2, 4, 4>;\n"
        "  using Epilogue = qcut::Epilogue<__nv_bfloat16, qcut::ZeroPoint::kNone, true, qcut::ColScale::kPerChannel, "
        "true, qcut::Activation::kNone, false>;\n"
        "  Epilogue::Args args{};\n"
        "  args.col_scale_per_channel = col_scale;\n"
        "  args.bias = bias;\n"
        "  qcut::int8_stream<Tile, true, true, Epilogue>(\n"
        "      a, a_absmax, b, d, absmax, m, n, k, lda, ldb, ldd, args);\n"
        "}\n"
    )


def test_text_repeats_and_names_are_unique() -> None:
    first, second = ([s for arch in ("sm_80", "sm_90a") for s in sources(arch)] for _ in range(2))
    assert first == second
    assert len({s.name for s in first}) == len({s.text for s in first}) == len(first)


def test_names_spell_the_kernel() -> None:
    assert ROWS.name == "rows_f16_f16_sm_sn_b"
    assert problem_of("given", F32, absmax=True, activation=Activation.SILU).name == "given_f32_sm_sn_b_silu_absmax"
    assert problem_of("rows", F32, aligned=False).name == "rows_f32_f32_sm_sn_b_u"
    assert TILE.name == "m8_r2_w10_u1_p2"
    assert W8A8Tile(4, 28, 2, 1, 1, splits=2).name == "m1_r4_w28_u2_p1_k2"
    assert W8A8Tile(4, 28, tokens=16, common_sums=True).name == "m16_r4_w28_u1_p1_c"
    source = INT8_STREAM.emit(ROWS, TILE, "sm_80")
    assert source.name == source.entry == "qcut_int8_stream_sm80_rows_f16_f16_sm_sn_b_m8_r2_w10_u1_p2"


def test_rows_come_with_their_largest_magnitudes_instead_of_scales() -> None:
    for tokens in KINDS:
        for absmax in (False, True):
            names = [p.name for p in problem_of(tokens, absmax=absmax).params()]
            given = tokens in ("none", "given")
            assert ("row_scale" in names, "a_absmax" in names) == (given, tokens == "rows")
            assert (names[-1] == "absmax") == absmax


def test_grid_is_a_cluster_for_each_row_of_tiles() -> None:
    assert INT8_STREAM.grid(TILE, 3840)(1) == INT8_STREAM.grid(TILE, 3840)(8) == (120, 1, 1)
    assert INT8_STREAM.grid(W8A8Tile(2, 8, splits=4), 33)(8) == (8, 1, 1)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────

NONE = problem_of("none")
REFUSALS: dict[str, tuple[W8A8Problem, W8A8Tile, str]] = {
    "x": (replace(ROWS, x=DType.S8), TILE, "sm_80"),
    "epilogue": (problem_of("given", residual=True), TILE, "sm_80"),
    "rescale": (replace(ROWS, epilogue=Epilogue(DType.S8, rescale=True)), TILE, "sm_80"),
    "rows": (replace(ROWS, epilogue=replace(PLAIN, zero_point="per_token")), TILE, "sm_80"),
    "absmax": (replace(ZERO_POINT, absmax=True), TILE, "sm_80"),
    "architecture": (ROWS, TILE, "sm_75"),
    "tokens": (NONE, replace(TILE, tokens=24), "sm_80"),
    "halves": (replace(NONE, epilogue=replace(PLAIN, halves=True)), replace(TILE, tokens=16), "sm_80"),
    "row_tiles": (ROWS, replace(TILE, row_tiles=0), "sm_80"),
    "warps": (ROWS, replace(TILE, warps=33), "sm_80"),
    "units": (ROWS, replace(TILE, units=0), "sm_80"),
    "prefetch": (ROWS, replace(TILE, prefetch=3), "sm_80"),
    "registers": (ROWS, replace(TILE, warps=32), "sm_80"),
    "splits": (ROWS, replace(TILE, splits=3), "sm_90a"),
    "clusters": (ROWS, replace(TILE, splits=2), "sm_89"),
    "shared_memory": (ROWS, replace(TILE, row_tiles=40), "sm_80"),
}


def refused(name: str, *arguments: Any) -> None:
    [constraint] = [c for c in CONSTRAINTS if c.name == name]
    with pytest.raises(EmitError, match=f"^qcut_int8_stream_[a-z0-9_]+: {re.escape(f'{name}: {constraint.reason}')}$"):
        INT8_STREAM.emit(*arguments)


def test_every_constraint_is_refused_below() -> None:
    assert [c.name for c in CONSTRAINTS] == list(REFUSALS)


def test_illegal_kernels_are_refused_by_name() -> None:
    for name, arguments in REFUSALS.items():
        refused(name, *arguments)


@pytest.mark.parametrize(
    ("name", "problem", "tile"),
    [
        ("rows", replace(ROWS, epilogue=replace(PLAIN, row_scale="none")), TILE),
        ("rows", replace(ROWS, tokens="floats"), replace(TILE, tokens=16)),
        ("epilogue", replace(ROWS, epilogue=replace(PLAIN, col_scale="per_tensor")), TILE),
        ("epilogue", replace(ROWS, epilogue=Epilogue(DType.S32)), TILE),
        ("tokens", NONE, W8A8Tile(2, 10, tokens=3)),
        ("warps", ROWS, replace(TILE, warps=0)),
        ("prefetch", ROWS, replace(TILE, prefetch=0)),
    ],
)
def test_the_other_side_of_a_constraint(name: str, problem: W8A8Problem, tile: W8A8Tile) -> None:
    refused(name, problem, tile, "sm_90a")


# ── choice ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("x", [F16, F32], ids=lambda x: x.value)
@pytest.mark.parametrize("tokens", KINDS)
def test_every_shape_has_a_tile(tokens: Tokens, x: DType, arch: str) -> None:
    problem = problem_of(tokens, x)
    for n, k in GPT2 + LLAMA + LLAMA2C + ODD:
        for m in (1, 2, 3, 8) if problem.quantizes else (1, 2, 3, 8, 16, 20):
            assert is_legal(problem, m, k, arch)
            tile = best_tile(INT8_STREAM, problem, m, n, k, Target(arch, SM_COUNT[arch]))
            INT8_STREAM.validate(problem, tile, arch)
            assert registers(problem, tile, arch) <= register_limit(tile.warps) <= 65_536 // (32 * tile.warps)
            assert smem_bytes(problem, tile) <= architecture(arch).smem_bytes
            assert m <= tile.tokens < 2 * m
            assert (tile.warps - 1) * tile.units * tile.splits * 128 < k, "no warp is idle"
            rows = INT8_STREAM.grid(tile, n)(m)[0] // tile.splits * 16 * tile.row_tiles
            assert n <= rows < n + 16 * tile.row_tiles


@pytest.mark.parametrize(
    ("n", "k", "tile"),
    [
        (1280, 1280, "m16_r1_w10_u1_p1_c"),
        (5120, 1280, "m16_r2_w10_u1_p2_c"),
        (4096, 4096, "m16_r2_w32_u1_p1_c"),
        (14336, 4096, "m16_r7_w32_u1_p1_c"),
    ],
)
def test_sixteen_tokens_take_the_tile_that_was_fastest(n: int, k: int, tile: str) -> None:
    assert best_tile(INT8_STREAM, problem_of("given"), 16, n, k, Target("sm_90a", 132)).name == tile


@pytest.mark.parametrize("sm_count", [1, 2, 8, 9, 16])
def test_small_gpus_have_tiles(sm_count: int) -> None:
    for tokens, m, k in (("none", 8, 28672), ("given", 8, 4096), ("rows", 2, 14336)):
        problem = problem_of(tokens)
        INT8_STREAM.validate(problem, best_tile(INT8_STREAM, problem, m, 4096, k, Target("sm_90a", sm_count)), "sm_90a")


@pytest.mark.parametrize(("problem", "most"), [(NONE, MAX_TOKENS), (ROWS, MAX_ROWS)])
def test_other_numbers_of_tokens_are_refused(problem: W8A8Problem, most: int) -> None:
    assert is_legal(problem, most, 4096, "sm_90a")
    for m in (0, most + 1):
        assert not is_legal(problem, m, 4096, "sm_90a")
        with pytest.raises(EmitError, match=f"int8_stream: {m} tokens; allowed are 1 to {most}"):
            best_tile(INT8_STREAM, problem, m, 4096, 4096, Target("sm_90a", 132))


@pytest.mark.parametrize("k", [0, K_MAX + 1])
def test_sums_beyond_int32_are_refused(k: int) -> None:
    assert not is_legal(NONE, 1, k, "sm_90a")
    with pytest.raises(EmitError, match=f"int8_stream: K is {k}; allowed is 1 to {K_MAX}"):
        best_tile(INT8_STREAM, NONE, 1, 4096, k, Target("sm_90a", 132))


# ── binaries ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_binaries_stream_weights_into_the_tensor_core(arch: str) -> None:
    """Within the registers of the model, without spills, and with the loads, products and barriers of the header."""
    weights = f"LDG.E.NA.LTC{256 if arch == 'sm_90a' else 128}B.128.CONSTANT"
    texts = sources(arch)
    for source, binary in zip(texts, build(*texts), strict=True):
        resources = binary.resources
        assert resources is not None, source.name
        assert resources.stack_bytes == resources.spill_store_bytes == resources.spill_load_bytes == 0, source.name
        assert resources.registers <= register_limit(source.block // 32), source.name
        assert source.smem_bytes + resources.smem_bytes <= architecture(arch).smem_bytes, source.name
        names = listing(binary.cubin)
        assert weights in names, source.name
        assert "IMMA.16832.S8.S8" in names, source.name
        assert any(name.startswith("UCGABAR") for name in names) == ("__cluster_dims__" in source.text), source.name
        assert not any(name.startswith(("LDL", "STL")) for name in names), source.name
        assert ("ACQBULK" in names) == (arch == "sm_90a"), source.name
        if arch == "sm_90a":  # the wait for the kernel before: a GEMM's b may be what that writes
            waits = names.index("ACQBULK") < names.index(weights)
            assert waits == ("Tokens::kNone" in source.text), source.name
