"""The W8A16 kernel on wgmma as text and as a binary, its menu, and its index arithmetic restated in numpy."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.gemm.w8a16_wgmma import (
    CONSTRAINTS,
    W8A16WgmmaTile,
    default_tiles,
    emit_w8a16_wgmma,
    grid,
    smem_bytes,
    validate,
)
from tests.support.compiled import build
from tests.support.sass import instructions

ARCH = "sm_90a"
BIAS = Epilogue(col_scale="per_channel", bias=True)
HALF = GemmProblem(a=DType.F16, epilogue=BIAS, alignment_k=8)
FULL = Epilogue(DType.BF16, col_scale="per_channel", bias=True, activation=Activation.GELU_TANH, residual=True)
BRAIN = GemmProblem(a=DType.BF16, epilogue=FULL, alignment_k=8, alignment_n=1)
TILE = W8A16WgmmaTile(64, 2, stages=12, prefetch=4)
SPLIT = W8A16WgmmaTile(64, 1, 4, stages=12, prefetch=2, ctas=2)


def sources() -> list[KernelSource]:
    """Every tile of the menu, other types and epilogues."""
    menu = default_tiles()
    widest = {tile.tokens: tile for tile in menu}.values()
    return [
        *(emit_w8a16_wgmma(HALF, tile, ARCH) for tile in menu),
        *(emit_w8a16_wgmma(BRAIN, tile, ARCH) for tile in widest),
        emit_w8a16_wgmma(replace(HALF, epilogue=Epilogue(DType.F32)), SPLIT, ARCH),
    ]


# ── text ─────────────────────────────────────────────────────────────────────────────────────────


def test_text_instantiates_the_header():
    source = emit_w8a16_wgmma(HALF, SPLIT, ARCH)
    name = "qcut_w8a16_wgmma_sm90a_f16xs8_f16_sn_b_k8n16_t64_g1_s12_p2_k4_x2"
    assert source.text == (
        "#include <qcut/gemm/w8a16_wgmma.cuh>\n\n"
        'extern "C" __global__ void __cluster_dims__(4, 1, 1) __launch_bounds__(256, 2)\n'
        f"{name}(\n"
        "    const __half* a, const int8_t* b, __half* d, int m, int n, int k, int lda, int ldb, int ldd, "
        "const float* col_scale, const float* bias) {\n"
        "  using Tile = qcut::W8A16WgmmaTile<64, 1, 4, 12, 2, 8, 0, 0>;\n"
        f'  static_assert(Tile::kBytes == {smem_bytes(SPLIT)}, "the launch\'s shared memory");\n'
        "  using Epilogue = qcut::Epilogue<__half, qcut::ZeroPoint::kNone, false, qcut::ColScale::kPerChannel, true, "
        "qcut::Activation::kNone, false>;\n"
        "  Epilogue::Args args{};\n"
        "  args.col_scale_per_channel = col_scale;\n"
        "  args.bias = bias;\n"
        "  qcut::w8a16_wgmma<Tile, __half, Epilogue, 16>(a, b, d, m, n, k, lda, ldb, ldd, args);\n"
        "}\n"
    )
    assert (source.name, source.block, source.waits, source.params) == (name, 256, True, HALF.params())


def test_names_are_unique_and_text_repeats():
    first, second = sources(), sources()
    assert first == second
    assert len({s.name for s in first}) == len({s.text for s in first}) == len(first)


REFUSALS = {
    "operands": (GemmProblem(epilogue=BIAS), TILE, ARCH),
    "layouts": (replace(HALF, layout_a="column"), TILE, ARCH),
    "zero_point": (replace(HALF, epilogue=replace(BIAS, zero_point="per_token")), TILE, ARCH),
    "raw_output": (replace(HALF, epilogue=Epilogue(DType.S32)), TILE, ARCH),
    "architecture": (HALF, TILE, "sm_80"),
    "alignment_k": (replace(HALF, alignment_k=4), TILE, ARCH),
    "alignment_n": (replace(HALF, alignment_n=0), TILE, ARCH),
    "tokens": (HALF, replace(TILE, tokens=48), ARCH),
    "groups": (HALF, replace(TILE, groups=5), ARCH),
    "splits": (HALF, replace(TILE, splits=3), ARCH),
    "stages": (HALF, replace(TILE, stages=3), ARCH),
    "prefetch": (HALF, replace(TILE, prefetch=9), ARCH),
    "ctas": (HALF, replace(TILE, ctas=3), ARCH),
    "registers": (HALF, replace(TILE, prefetch=8), ARCH),
    "shared_memory": (HALF, replace(TILE, stages=32), ARCH),
}


def test_every_constraint_is_refused_below():
    assert [c.name for c in CONSTRAINTS] == list(REFUSALS)


def test_illegal_kernels_are_refused_by_name():
    for constraint in CONSTRAINTS:
        message = f"{constraint.name}: {constraint.reason}"
        with pytest.raises(EmitError, match=f"^qcut_w8a16_wgmma_[a-z0-9_]+: {re.escape(message)}$"):
            emit_w8a16_wgmma(*REFUSALS[constraint.name])


def test_grid_is_a_cluster_for_each_tile_of_rows_and_of_tokens():
    assert grid(TILE, 14336)(64) == (112, 1, 1)
    assert grid(SPLIT, 1281)(65) == (21 * 4 * 2, 1, 1)


def test_the_menu_is_legal():
    for tile in default_tiles():
        validate(HALF, tile, ARCH)
        validate(BRAIN, tile, ARCH)


# ── binaries ─────────────────────────────────────────────────────────────────────────────────────


def test_binaries_convert_in_registers_and_multiply_asynchronously():
    texts = sources()
    for source, binary in zip(texts, build(*texts), strict=True):
        resources = binary.resources
        assert resources is not None, source.name
        # Addresses of the feeding warps, where sums take half of the registers.
        most = 16 if "_t256_g2" in source.name else 0
        assert max(resources.stack_bytes, resources.spill_store_bytes) <= most, source.name
        assert "serialized" not in binary.log, source.name
        names = instructions(binary.cubin)
        tokens = re.search(r"_t(\d+)_", source.name)
        assert tokens is not None
        kind = "HGMMA.64x{}x16.F32.BF16" if "_bf16xs8_" in source.name else "HGMMA.64x{}x16.F32"
        assert kind.format(tokens[1]) in names, source.name
        assert "FENCE.VIEW.ASYNC.S" in names, source.name  # before the tensor core reads what was stored
        assert any(name.startswith("UCGABAR") for name in names) == ("__cluster_dims__" in source.text), source.name


# ── index arithmetic ─────────────────────────────────────────────────────────────────────────────

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4
Matrix = NDArray[np.int64]


def staged_tokens(x: Matrix, tokens: int, column: int) -> Matrix:
    """A stage's elements of two bytes as a feeding warp stores them: four tokens' 64 columns to a load."""
    m, k = x.shape
    stage = np.full(64 * tokens, 99, np.int64)
    r, piece = LANES // 8, LANES % 8
    t, h = piece // 2, piece % 2
    for i in range(tokens // 4):
        row, at = 4 * i + r, column + 8 * piece
        there = (row < m) & (at < k)
        for j in range(4):
            word = (128 * r + 4 * t + 16 * (4 * h + (j ^ r)) ^ 64 * (i % 2)) + 512 * i
            assert len(set(word // 4 % 32)) == 32, "banks"
            for e in range(2):
                value = x[np.minimum(row, m - 1), np.minimum(at + 2 * j + e, k - 1)]
                stage[word // 2 + e] = np.where(there, value, 0)
    return stage


def second_operand(stage: Matrix, product: int, tokens: int) -> Matrix:
    """What a descriptor of 32 bytes of each row reads, through the 128-byte swizzle: [tokens, 16]."""
    row, element = np.arange(tokens)[:, None], np.arange(16)[None]
    at = 2 * (16 * product + element) + row // 8 * 1024 + row % 8 * 128
    return stage[(at ^ (at >> 7 & 7) << 4) // 2]


def first_operand(w: Matrix, column: int, product: int) -> Matrix:
    """A warp's fragment [16 rows, 16] of a product: lane 4g + t converts four neighbours of its sixteen columns."""
    a = np.zeros((16, 16), np.int64)
    for row8 in range(2):
        for e in range(4):
            value = w[G + 8 * row8, column + 16 * T + 4 * product + e]
            a[G + 8 * row8, 8 * (e // 2) + 2 * T + e % 2] = value
    return a


def test_index_arithmetic():
    """Tokens as they are stored and weights as they are read give X W^T; columns past k count for nothing."""
    generator = np.random.default_rng(0)
    m, k = 13, 104
    x = generator.integers(-9, 9, (m, k))
    w = np.full((16, 128), 77)  # the row's end, which zero tokens meet
    w[:, :k] = generator.integers(-128, 128, (16, k))
    sums = np.zeros((16, 16), np.int64)
    for column in (0, 64):
        stage = staged_tokens(x, 16, column)
        for product in range(4):
            sums += first_operand(w, column, product) @ second_operand(stage, product, 16).T
    np.testing.assert_array_equal(sums[:, :m], w[:, :k] @ x.T)
