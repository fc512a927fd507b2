"""The few-token W8A8 kernel as text and as a binary: parameters, constraints, choice of tiles, instructions."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from sass import listing

from emitters.epilogue import Activation, Epilogue
from emitters.gemm import K_MAX
from emitters.mma_gemm import SMEM_LIMIT
from emitters.source import DType, EmitError, KernelSource
from emitters.w8a8_decode import (
    CONSTRAINTS,
    MAX_ELEMENTS,
    MAX_TOKENS,
    Prologue,
    W8A8Problem,
    W8A8Tile,
    chunk_columns,
    emit_w8a8_decode,
    for_shape,
    grid,
    is_legal,
    makes_tokens,
    registers,
    smem_bytes,
    validate,
)
from emitters.weight_only_decode import register_limit
from qcut._launch_plans import few_tokens, linear_problem
from qcut.dispatch import target_for
from tests.compiled import build

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32
PLAIN = Epilogue(F16, row_scale="per_token", col_scale="per_channel", bias=True)
PROLOGUES: tuple[Prologue, ...] = ("none", "given", "quantize", "gate", "rms", "layer")
QUANTIZE = W8A8Problem("quantize", F16, PLAIN)
TILE = W8A8Tile(2, 10, prefetch=2, columns=1280)
GPT2 = ((3840, 1280), (1280, 1280), (5120, 1280), (1280, 5120), (50257, 1280))
LLAMA = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (4096, 28672), (128256, 4096))
LLAMA2C = ((864, 288), (288, 768), (512, 288), (1376, 512), (512, 1376))
ODD = ((1, 1), (17, 40), (33, 77), (7, 129), (100, 1000))
SM_COUNT = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90a": 132, "sm_100": 148, "sm_120": 170}


def problem_of(prologue: Prologue, x: DType = F16, *, aligned: bool = True, **changes: Any) -> W8A8Problem:
    return W8A8Problem(prologue, x, replace(PLAIN, out=x, **changes), aligned)


def chosen(problem: W8A8Problem, arch: str, m: int, n: int, k: int) -> KernelSource:
    return emit_w8a8_decode(problem, for_shape(problem, arch, m, n, k, SM_COUNT[arch]), arch)


def sources(arch: str) -> list[KernelSource]:
    """Every prologue and type, in tiles of 3 to 32 warps, of 1 to 8 tokens."""
    found = [
        chosen(problem_of("none", BF16), arch, 8, 4096, 14336),
        chosen(problem_of("quantize", F16, activation=Activation.GELU_TANH), arch, 8, 3840, 1280),
        chosen(problem_of("quantize", F32, aligned=False, bias=False), arch, 2, 33, 77),
        chosen(problem_of("gate", F16), arch, 2, 4096, 14336),
        chosen(problem_of("gate", BF16, aligned=False), arch, 3, 512, 1376),
        chosen(problem_of("rms", F16), arch, 8, 6144, 4096),
        chosen(problem_of("rms", F32), arch, 4, 5120, 1280),
        chosen(problem_of("layer", BF16, aligned=False), arch, 8, 3840, 1280),
        chosen(problem_of("layer", F16, activation=Activation.SILU), arch, 4, 5120, 1280),
        chosen(problem_of("layer", F32), arch, 1, 864, 288),
    ]
    if arch == "sm_90a":
        found.append(emit_w8a8_decode(problem_of("none"), W8A8Tile(4, 28, splits=2), arch))
        found.append(emit_w8a8_decode(problem_of("layer"), W8A8Tile(2, 4, 1, 2, 4, 3072, 8), arch))
    found.append(emit_w8a8_decode(problem_of("given"), W8A8Tile(3, 10, 1, 3, 8), arch))
    return found


# ── text ─────────────────────────────────────────────────────────────────────────────────────────


def test_text_instantiates_the_header() -> None:
    source = emit_w8a8_decode(problem_of("gate", BF16), W8A8Tile(9, 20, 1, 2, 4, 4096, 4), "sm_90a")
    assert source.text == (
        "#include <qcut/w8a8_decode.cuh>\n\n"
        'extern "C" __global__ void __cluster_dims__(4, 1, 1) __launch_bounds__(640)\n'
        "qcut_w8a8_decode_sm90a_gate_bf16_bf16_sm_sn_b_m4_c4096_r9_w20_u1_p2_k4(\n"
        "    const __nv_bfloat16* x, const __nv_bfloat16* other, long long x_stride, long long other_stride, "
        "const int8_t* b, __nv_bfloat16* d, int m, int n, int k, int ldb, int ldd, const float* col_scale, "
        "const float* bias) {\n"
        "  using Tile = qcut::W8A8Tile<__nv_bfloat16, qcut::Prologue::kGate, 9, 20, 1, 2, 4, 4096, 4>;\n"
        "  using Epilogue = qcut::Epilogue<__nv_bfloat16, qcut::ZeroPoint::kNone, true, qcut::ColScale::kPerChannel, "
        "true, qcut::Activation::kNone, false>;\n"
        "  Epilogue::Args args{};\n"
        "  args.col_scale_per_channel = col_scale;\n"
        "  args.bias = bias;\n"
        "  const qcut::TokenSource<__nv_bfloat16> source{x, other, nullptr, nullptr, nullptr, x_stride, other_stride, "
        "0.0f};\n"
        "  qcut::w8a8_decode<Tile, true, Epilogue>(nullptr, 0, source, b, d, m, n, k, ldb, ldd, args);\n"
        "}\n"
    )


def test_text_repeats_and_names_are_unique() -> None:
    first, second = ([s for arch in ("sm_80", "sm_90a") for s in sources(arch)] for _ in range(2))
    assert first == second
    assert len({s.name for s in first}) == len({s.text for s in first}) == len(first)


def test_names_spell_the_kernel() -> None:
    assert QUANTIZE.name == "quantize_f16_f16_sm_sn_b"
    assert problem_of("layer", F32, aligned=False, activation=Activation.SILU).name == "layer_f32_f32_sm_sn_b_silu_u"
    assert TILE.name == "m8_c1280_r2_w10_u1_p2"
    assert W8A8Tile(4, 28, 2, 1, 1, splits=2).name == "m1_r4_w28_u2_p1_k2"
    source = emit_w8a8_decode(QUANTIZE, TILE, "sm_80")
    assert source.name == source.entry == "qcut_w8a8_decode_sm80_quantize_f16_f16_sm_sn_b_m8_c1280_r2_w10_u1_p2"


@pytest.mark.parametrize("source", sources("sm_90a"), ids=lambda s: s.name)
def test_parameters_are_the_signature(source: KernelSource) -> None:
    match = re.search(re.escape(source.entry) + r"\(([^)]*)\)", source.text)
    assert match is not None
    kinds = {"int": "i32", "long long": "i64", "float": "f32"}
    found = []
    for argument in match.group(1).split(","):
        kind, name = argument.strip().rsplit(" ", 1)
        found.append((name, kinds.get(kind, "ptr")))
        assert (found[-1][1] == "ptr") == kind.endswith("*")
    assert found == [(p.name, p.kind) for p in source.params]


def test_only_a_kernel_that_quantizes_nothing_is_given_scales_of_tokens() -> None:
    for prologue in PROLOGUES:
        names = [p.name for p in problem_of(prologue).params()]
        assert ("row_scale" in names) == (prologue in ("none", "given"))
        assert ("a" in names) == ("x" not in names) == (prologue in ("none", "given", "quantize"))
        assert {"sum", "weight", "norm_bias", "eps"} & set(names) == (
            {"sum", "weight", "norm_bias", "eps"} if prologue in ("rms", "layer") else set()
        )


def test_grid_is_a_cluster_for_each_row_of_tiles() -> None:
    assert grid(TILE, 1, 3840) == grid(TILE, 8, 3840) == (120, 1, 1)
    assert grid(W8A8Tile(2, 8, splits=4), 8, 33) == (8, 1, 1)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────

NONE = problem_of("none")
REFUSALS: dict[str, tuple[W8A8Problem, W8A8Tile, str]] = {
    "x": (replace(QUANTIZE, x=DType.S8), TILE, "sm_80"),
    "epilogue": (replace(QUANTIZE, epilogue=replace(PLAIN, zero_point="per_token")), TILE, "sm_80"),
    "output": (replace(QUANTIZE, epilogue=replace(PLAIN, out=DType.S8)), TILE, "sm_80"),
    "architecture": (QUANTIZE, TILE, "sm_75"),
    "tokens": (QUANTIZE, replace(TILE, tokens=16), "sm_80"),
    "columns": (QUANTIZE, replace(TILE, columns=1281), "sm_80"),
    "row_tiles": (QUANTIZE, replace(TILE, row_tiles=0), "sm_80"),
    "warps": (QUANTIZE, replace(TILE, warps=33), "sm_80"),
    "units": (QUANTIZE, replace(TILE, units=0), "sm_80"),
    "prefetch": (QUANTIZE, replace(TILE, prefetch=3), "sm_80"),
    "registers": (QUANTIZE, replace(TILE, warps=32), "sm_80"),
    "splits": (QUANTIZE, replace(TILE, splits=3), "sm_90a"),
    "clusters": (QUANTIZE, replace(TILE, splits=2), "sm_89"),
    "shared_memory": (QUANTIZE, replace(TILE, columns=8192), "sm_80"),
}


def refused(name: str, *arguments: Any) -> None:
    [constraint] = [c for c in CONSTRAINTS if c.name == name]
    with pytest.raises(EmitError, match=f"^qcut_w8a8_decode_[a-z0-9_]+: {re.escape(f'{name}: {constraint.reason}')}$"):
        emit_w8a8_decode(*arguments)


def test_every_constraint_is_refused_below() -> None:
    assert [c.name for c in CONSTRAINTS] == list(REFUSALS)


@pytest.mark.parametrize("name", REFUSALS)
def test_illegal_kernels_are_refused_by_name(name: str) -> None:
    refused(name, *REFUSALS[name])


@pytest.mark.parametrize(
    ("name", "problem", "tile"),
    [
        ("epilogue", replace(QUANTIZE, epilogue=replace(PLAIN, row_scale="none")), TILE),
        ("epilogue", replace(QUANTIZE, epilogue=replace(PLAIN, col_scale="per_tensor")), TILE),
        ("epilogue", replace(QUANTIZE, epilogue=replace(PLAIN, residual=True)), TILE),
        ("epilogue", replace(QUANTIZE, epilogue=Epilogue(DType.S32)), TILE),
        ("columns", NONE, TILE),
        ("columns", QUANTIZE, replace(TILE, columns=0)),
        ("columns", problem_of("quantize", F32), replace(TILE, columns=1344)),
        ("tokens", NONE, W8A8Tile(2, 10, tokens=3)),
        ("warps", QUANTIZE, replace(TILE, warps=0)),
        ("prefetch", QUANTIZE, replace(TILE, prefetch=0)),
    ],
)
def test_the_other_side_of_a_constraint(name: str, problem: W8A8Problem, tile: W8A8Tile) -> None:
    refused(name, problem, tile, "sm_90a")


# ── choice ───────────────────────────────────────────────────────────────────────────────────────


def test_makes_few_and_short_tokens() -> None:
    assert makes_tokens(1, MAX_ELEMENTS)
    assert not makes_tokens(1, MAX_ELEMENTS + 1)
    assert not makes_tokens(2, 16)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("x", [F16, F32], ids=lambda x: x.value)
@pytest.mark.parametrize("prologue", PROLOGUES)
def test_every_shape_that_is_legal_has_a_tile(prologue: Prologue, x: DType, arch: str) -> None:
    problem, legal = problem_of(prologue, x), 0
    for n, k in GPT2 + LLAMA + LLAMA2C + ODD:
        for m in (1, 2, 3, 8):
            if not is_legal(problem, m, k, arch):
                with pytest.raises(EmitError, match="shared_memory"):
                    for_shape(problem, arch, m, n, k, SM_COUNT[arch])
                continue
            tile = for_shape(problem, arch, m, n, k, SM_COUNT[arch])
            validate(problem, tile, arch)
            assert registers(tile) <= register_limit(tile.warps) <= 65_536 // (32 * tile.warps)
            assert smem_bytes(problem, tile) <= SMEM_LIMIT[arch]
            assert m <= tile.tokens < 2 * m
            assert tile.columns == (-(-k // chunk_columns(x)) * chunk_columns(x) if problem.makes else 0)
            assert (tile.warps - 1) * tile.units * tile.splits * 128 < k, "no warp is idle"
            rows = grid(tile, m, n)[0] // tile.splits * 16 * tile.row_tiles
            assert n <= rows < n + 16 * tile.row_tiles
            legal += 1
    assert legal >= 60


def test_the_usual_models_tokens_are_held() -> None:
    """What GPT-2 Large and an 8B Llama ask of a large GPU, at as many tokens as kernels make."""
    for arch in ("sm_90a", "sm_100"):
        for m in range(1, MAX_TOKENS + 1):
            for prologue, k in (("layer", 1280), ("quantize", 5120), ("rms", 4096), ("gate", 14336)):
                assert is_legal(problem_of(prologue), m, k, arch) or not makes_tokens(m, k)
            assert is_legal(problem_of("none"), m, K_MAX, arch)


@pytest.mark.parametrize(
    ("prologue", "x", "m", "k", "arch"),
    [
        ("gate", F16, 5, 9728, "sm_90a"),
        ("gate", F32, 8, 6144, "sm_90a"),
        ("rms", F16, 8, 6144, "sm_80"),
        ("rms", F16, 8, 4096, "sm_89"),
        ("layer", F32, 1, 24576, "sm_90a"),
    ],
)
def test_tokens_that_no_kernel_holds(prologue: Prologue, x: DType, m: int, k: int, arch: str) -> None:
    assert not is_legal(problem_of(prologue, x), m, k, arch)
    with pytest.raises(EmitError, match="shared_memory"):
        for_shape(problem_of(prologue, x), arch, m, 4096, k, SM_COUNT[arch])


@pytest.mark.parametrize("sm_count", [1, 2, 8, 9, 16])
def test_small_gpus_have_tiles(sm_count: int) -> None:
    for prologue, m, k in (("none", 8, 28672), ("rms", 8, 4096), ("gate", 2, 14336)):
        problem = problem_of(prologue)
        validate(problem, for_shape(problem, "sm_90a", m, 4096, k, sm_count), "sm_90a")


@pytest.mark.parametrize("m", [0, MAX_TOKENS + 1])
def test_other_numbers_of_tokens_are_refused(m: int) -> None:
    assert not is_legal(NONE, m, 4096, "sm_90a")
    with pytest.raises(EmitError, match=f"w8a8_decode: {m} tokens; allowed are 1 to 8"):
        for_shape(NONE, "sm_90a", m, 4096, 4096, 132)


@pytest.mark.parametrize("k", [0, K_MAX + 1])
def test_sums_beyond_int32_are_refused(k: int) -> None:
    assert not is_legal(NONE, 1, k, "sm_90a")
    with pytest.raises(EmitError, match=f"w8a8_decode: K is {k}; allowed is 1 to {K_MAX}"):
        for_shape(NONE, "sm_90a", 1, 4096, k, 132)


def test_which_gemms_are_served() -> None:
    gpu = target_for((9, 0), 132, "H100")
    gemm = linear_problem(F16, 4096, 4096, True, "none", "dynamic")
    for m in (1, 8):
        for prologue in ("none", "given", *("quantize",) * (m == 1)):
            few, tile = few_tokens(prologue, gemm, m, 4096, 4096, gpu) or (None, None)
            assert few == W8A8Problem(prologue, F16, gemm.epilogue)
            assert tile == for_shape(few, "sm_90a", m, 4096, 4096, 132)
    assert few_tokens("none", gemm, 1, 4096, MAX_ELEMENTS + 1, gpu) is not None
    assert few_tokens("quantize", gemm, 1, 4096, MAX_ELEMENTS + 1, gpu) is None
    assert few_tokens("quantize", gemm, 2, 4096, 4096, gpu) is None
    assert few_tokens("none", gemm, 9, 4096, 4096, gpu) is None
    for other in (
        replace(gemm, layout_b="row"),
        replace(gemm, layout_d="column"),
        replace(gemm, alignment_k=8),
        replace(gemm, epilogue=Epilogue(F16)),
        replace(gemm, epilogue=Epilogue(DType.S32)),
        replace(gemm, epilogue=replace(gemm.epilogue, residual=True)),
        replace(gemm, epilogue=replace(gemm.epilogue, out=DType.S8)),
        linear_problem(F16, 4096, 4096, True, "none", "static"),
    ):
        assert few_tokens("none", other, 1, 4096, 4096, gpu) is None


# ── binaries ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiles_to_what_the_model_of_its_resources_says(arch: str) -> None:
    texts = sources(arch)
    for source, binary in zip(texts, build(*texts), strict=True):
        resources = binary.resources
        assert resources is not None, source.name
        assert resources.stack_bytes == resources.spill_store_bytes == resources.spill_load_bytes == 0, source.name
        assert resources.registers <= register_limit(source.block // 32), source.name
        assert source.smem_bytes + resources.smem_bytes <= SMEM_LIMIT[arch], source.name


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_binaries_stream_weights_into_the_tensor_core(arch: str) -> None:
    weights = f"LDG.E.NA.LTC{256 if arch == 'sm_90a' else 128}B.128.CONSTANT"
    texts = sources(arch)
    for source, binary in zip(texts, build(*texts), strict=True):
        found = listing(binary.cubin)
        assert weights in found, source.name
        assert "IMMA.16832.S8.S8" in found, source.name
        assert any(name.startswith("UCGABAR") for name in found) == ("__cluster_dims__" in source.text), source.name
        assert not any(name.startswith(("LDL", "STL")) for name in found), source.name
        assert ("ACQBULK" in found) == (arch == "sm_90a"), source.name
        if arch == "sm_90a":  # the wait for the kernel before: a GEMM's b may be what that writes
            waits = found.index("ACQBULK") < found.index(weights)
            assert waits == ("Prologue::kNone" in source.text), source.name
