"""The W8A16 kernel on wgmma as text and as a binary, its menu, and its index arithmetic restated in numpy."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from qcut import jit
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.families import W8A16_WGMMA
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.gemm.w8a16_wgmma import CONSTRAINTS, W8A16WgmmaTile, ctas, smem_bytes
from tests.support.sass import instructions

ARCH = "sm_90a"
BIAS = Epilogue(col_scale="per_channel", bias=True)
HALF = GemmProblem(a=DType.F16, epilogue=BIAS, alignment_k=8)
FULL = Epilogue(DType.BF16, col_scale="per_channel", bias=True, activation=Activation.GELU_TANH, residual=True)
BRAIN = GemmProblem(a=DType.BF16, epilogue=FULL, alignment_k=8, alignment_n=1)
TILE = W8A16WgmmaTile(64, 2, stages=12, prefetch=4)
SPLIT = W8A16WgmmaTile(64, 1, splits=4, stages=12, prefetch=2, ctas=2)
WIDE = W8A16WgmmaTile(128, 2, 2, stages=10, prefetch=4)


# ── text ─────────────────────────────────────────────────────────────────────────────────────────


def test_text_instantiates_the_header():
    source = W8A16_WGMMA.emit(HALF, WIDE, ARCH)
    name = "qcut_w8a16_wgmma_sm90a_f16xs8_f16_sn_b_k8n16_t128_g2_s10_p4_k2"
    assert source.text == (
        "#include <qcut/gemm/w8a16_wgmma.cuh>\n\n"
        "struct Call {\n  const __half* a;\n  const int8_t* b;\n  __half* d;\n  int m;\n  int n;\n  int k;\n"
        "  int lda;\n  int ldb;\n  int ldd;\n  const float* col_scale;\n  const float* bias;\n};\n"
        "struct Params {\n  qcut::TensorMap tiles, parts;\n  Call call;\n};\n\n"
        'extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)\n'
        f"{name}(const __grid_constant__ Params params) {{\n"
        "  using Tile = qcut::W8A16WgmmaTile<128, 2, 2, 10, 4, 32, 232>;\n"
        f'  static_assert(Tile::kBytes == {smem_bytes(HALF, WIDE)}, "the launch\'s shared memory");\n'
        '  static_assert(Tile::kBoxTokens == 32, "the boxes of the launcher\'s map");\n'
        + "".join(
            f"  const auto {field} = params.call.{field};\n"
            for field in ("b", "d", "m", "n", "k", "ldb", "ldd", "col_scale", "bias")
        )
        + "  using Epilogue = qcut::Epilogue<__half, qcut::ZeroPoint::kNone, false, qcut::ColScale::kPerChannel, true, "
        "qcut::Activation::kNone, false>;\n"
        "  Epilogue::Args args{};\n"
        "  args.col_scale_per_channel = col_scale;\n"
        "  args.bias = bias;\n"
        "  qcut::w8a16_wgmma<Tile, __half, Epilogue, 16>"
        "(params.tiles, params.parts, b, d, m, n, k, ldb, ldd, args);\n"
        "}\n"
    )
    assert (source.name, source.waits, source.params) == (name, True, HALF.params())
    assert "kTokens = 128, kBoxTokens = 32, kRows = 128, kSplits = 2;" in (source.host_text or "")
    assert "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16" in (W8A16_WGMMA.emit(BRAIN, TILE, ARCH).host_text or "")
    assert W8A16_WGMMA.emit(HALF, WIDE, ARCH) == source


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
    "stages": (HALF, replace(TILE, stages=1), ARCH),
    "prefetch": (HALF, replace(TILE, prefetch=9), ARCH),
    "ctas": (HALF, replace(TILE, ctas=3), ARCH),
    "registers": (HALF, replace(TILE, tokens=256, prefetch=3), ARCH),
    "shared_memory": (HALF, replace(TILE, stages=32), ARCH),
}


def test_every_constraint_is_refused_below():
    assert [c.name for c in CONSTRAINTS] == list(REFUSALS)


def test_illegal_kernels_are_refused_by_name():
    for constraint in CONSTRAINTS:
        message = f"{constraint.name}: {constraint.reason}"
        with pytest.raises(EmitError, match=f"^qcut_w8a16_wgmma_[a-z0-9_]+: {re.escape(message)}$"):
            W8A16_WGMMA.emit(*REFUSALS[constraint.name])


def test_a_cluster_for_each_tile_of_rows_and_of_tokens():
    assert ctas(TILE, 64, 14336) == 112
    assert ctas(SPLIT, 65, 1281) == 21 * 2 * 4


def test_the_menu_is_legal_and_has_names_of_its_own():
    menu = W8A16_WGMMA.default_tiles(GemmProblem(DType.F16), "sm_90a")
    for tile in menu:
        W8A16_WGMMA.validate(HALF, tile, ARCH)
        W8A16_WGMMA.validate(BRAIN, tile, ARCH)
    assert len({tile.name for tile in menu}) == len(menu)


# ── binaries ─────────────────────────────────────────────────────────────────────────────────────


def sources() -> list[KernelSource]:
    """A tile of each width of tokens and number of groups of the menu, and other types and epilogues."""
    shapes = {(tile.tokens, tile.groups): tile for tile in W8A16_WGMMA.default_tiles(GemmProblem(DType.F16), "sm_90a")}
    sources = [W8A16_WGMMA.emit(HALF, tile, ARCH) for tile in shapes.values()]
    sources += [W8A16_WGMMA.emit(BRAIN, tile, ARCH) for tile in (SPLIT, WIDE)]
    return [*sources, W8A16_WGMMA.emit(replace(HALF, epilogue=Epilogue(DType.F32)), TILE, ARCH)]


def test_binaries_convert_in_registers_and_multiply_asynchronously():
    if not jit.is_toolchain_available("nvcc"):
        pytest.skip("needs nvcc and g++")
    texts = sources()
    built = jit.build_many(texts, progress=False)
    for source in texts:
        binary = built[source.name]
        assert isinstance(binary, jit.Binary), binary
        resources = binary.resources
        assert resources is not None, source.name
        assert resources.stack_bytes == resources.spill_store_bytes == 0, source.name
        assert "serialized" not in binary.log, source.name
        names = instructions(binary.cubin)
        tokens = re.search(r"_t(\d+)_", source.name)
        assert tokens is not None
        kind = "HGMMA.64x{}x16.F32.BF16" if "_bf16xs8_" in source.name else "HGMMA.64x{}x16.F32"
        assert kind.format(tokens[1]) in names, source.name
        assert any(name.startswith("UTMALDG") for name in names), source.name
        assert any(name.startswith("UCGABAR") for name in names) == ("__cluster_dims__" in source.text), source.name


# ── index arithmetic ─────────────────────────────────────────────────────────────────────────────

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4
Matrix = NDArray[np.int64]


def swizzled(x: Matrix, tokens: int, column: int) -> Matrix:
    """A stage's elements of two bytes as the tensor map's copy leaves them: zeros past the last token and column."""
    stage = np.zeros(64 * tokens, np.int64)
    padded = np.zeros((tokens, column + 64), np.int64)
    padded[: len(x), : x.shape[1]] = x[:, : column + 64]
    for row in range(tokens):
        for chunk in range(8):
            at = 64 * row + 8 * (chunk ^ row % 8)
            stage[at : at + 8] = padded[row, column + 8 * chunk : column + 8 * chunk + 8]
    return stage


def second_operand(stage: Matrix, product: int, tokens: int) -> Matrix:
    """What a descriptor of 32 bytes of each row reads, through the 128-byte swizzle: [tokens, 16]."""
    row, element = np.arange(tokens)[:, None], np.arange(16)[None]
    at = 2 * (16 * product + element) + row // 8 * 1024 + row % 8 * 128
    return stage[(at ^ (at >> 7 & 7) << 4) // 2]


def permuted(low: Matrix, high: Matrix, upper: Matrix) -> Matrix:
    """PRMT of two words' bytes [32, 4]: the upper or the lower halves of both."""
    return np.where(upper[:, None], np.hstack((low[:, 2:], high[:, 2:])), np.hstack((low[:, :2], high[:, :2])))


def exchanged(w: Matrix) -> Matrix:
    """exchange_columns on words [32 lanes, 4, 4 bytes]."""
    upper, odd = (LANES & 2 > 0), (LANES & 1 > 0)

    def pick(condition: NDArray[np.bool_], a: Matrix, b: Matrix) -> Matrix:
        return np.where(condition[:, None], a, b)

    r0, r1 = pick(upper, w[:, 0], w[:, 1])[LANES ^ 2], pick(upper, w[:, 2], w[:, 3])[LANES ^ 2]
    halves = (
        (pick(upper, r0, w[:, 0]), pick(upper, r1, w[:, 2])),
        (pick(upper, w[:, 1], r0), pick(upper, w[:, 3], r1)),
    )
    out = np.zeros_like(w)
    for i, (low, high) in enumerate(halves):
        kept, got = permuted(low, high, odd), permuted(low, high, ~odd)[LANES ^ 1]
        out[:, 2 * i], out[:, 2 * i + 1] = pick(odd, got, kept), pick(odd, kept, got)
    return out


def first_operands(w: Matrix, column: int) -> list[Matrix]:
    """A warp's fragments [16 rows, 16] of the four products of 64 columns."""
    operands = [np.zeros((16, 16), np.int64) for _ in range(4)]
    for row8 in range(2):
        loaded = np.stack([w[G + 8 * row8, column + 16 * T + i] for i in range(16)], 1).reshape(32, 4, 4)
        words = exchanged(loaded)
        for product, a in enumerate(operands):
            for e in range(4):
                a[G + 8 * row8, 8 * (e // 2) + 2 * T + e % 2] = words[:, product, e]
    return operands


def test_index_arithmetic():
    """Tokens as they are copied and weights as lanes exchange them give X W^T; columns past k count for nothing."""
    generator = np.random.default_rng(0)
    m, k = 13, 104
    x = generator.integers(-9, 9, (m, k))
    w = np.full((16, 128), 77)  # the row's end, which zero tokens meet
    w[:, :k] = generator.integers(-128, 128, (16, k))
    sums = np.zeros((16, 16), np.int64)
    for column in (0, 64):
        stage = swizzled(x, 16, column)
        for product, a in enumerate(first_operands(w, column)):
            sums += a @ second_operand(stage, product, 16).T
    np.testing.assert_array_equal(sums[:, :m], w[:, :k] @ x.T)
