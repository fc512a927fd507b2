"""The multistage codebook kernel, launched directly: widths, slots, tiles, edges; guards around D."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut import jit
from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import best_tile
from qcut.emitters.codebook.mma import smem_bytes
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType
from qcut.emitters.families import CODEBOOK_MMA
from qcut.emitters.gemm.problem import TileConfig
from qcut.numerics.codebook import layout as codebook_layout
from qcut.numerics.codebook import pairs, products
from qcut.numerics.codebook.layout import Geometry
from tests.gpu.support.launching import Guarded, arch, launch
from tests.gpu.support.oracles import DEVICE, TORCH_DTYPE, Gemm, assert_same, full_range, half_ulp

BIAS = Epilogue(col_scale="per_channel", bias=True)
INT8_BIAS = replace(BIAS, row_scale="per_token")
SMALL = TileConfig((16, 64, 128), (16, 16, 128), 6)
MIDDLE = TileConfig((64, 64, 128), (64, 16, 128), 4)
LARGE = TileConfig((128, 128, 128), (128, 32, 128), 2)
GROUP = {1: 128, 2: 64, 4: 32, 8: 16}
"""Group size that gives so many slots."""
INT8_EPILOGUES = (
    INT8_BIAS,
    Epilogue(DType.F32, "per_token", "per_channel"),
    Epilogue(DType.BF16, "per_token", "per_channel", bias=True, activation=Activation.RELU, residual=True),
    Epilogue(DType.F16, "per_token", "per_channel", bias=True, activation=Activation.GELU_ERF, residual=True),
)


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    """The menus, which most tests share, in parallel."""
    problems = [
        CodebookProblem(x, epilogue=INT8_BIAS if x is DType.S8 else BIAS, pairs=in_pairs)
        for x in (DType.F16, DType.S8)
        for in_pairs in (False, True)
    ]
    sources = [CODEBOOK_MMA.emit(p, tile, arch()) for p in problems for tile in CODEBOOK_MMA.default_tiles(p, arch())]
    errors = [r for r in jit.build_many(sources, progress=False).values() if isinstance(r, Exception)]
    assert not errors, errors[0]


@dataclass
class Weight:
    """Codebook weights with a row of zeros, one of tiny norms and one of the largest."""

    units: Tensor
    norms: Tensor
    values: Tensor
    bits: int
    geometry: Geometry

    @classmethod
    def random(
        cls, n: int, k: int, bits: int, group_size: int, dtype: torch.dtype, seed: int = 0, in_pairs: bool = False
    ) -> Weight:
        gen = torch.Generator().manual_seed(seed)
        geometry = Geometry(k, group_size, "none")
        indices = torch.randint(0, 2**bits, (n, k), generator=gen).to(torch.uint8)
        norms = (torch.rand(n, geometry.groups, generator=gen) + 0.05).half()
        norms[n // 2] = 0
        norms[n // 3] = 2.0**-20
        norms[n // 4, 0] = 65504
        packed = codebook_layout.pack_norms(norms, codebook_layout.row_exponents(norms), geometry)
        values = torch.randn(16, generator=gen).to(dtype)
        if in_pairs:
            values = pairs.with_signs(torch.rand(64, 2, generator=gen) + 0.05).to(dtype)
        return cls(codebook_layout.pack_units(indices, bits, geometry), packed, values, bits, geometry)

    @property
    def fold(self) -> Tensor:
        return codebook_layout.fold_scales(self.norms, self.values)

    def exact(self, n: int) -> Tensor:
        return codebook_layout.rotated_weight(self.units, self.bits, self.norms, self.values)[:n]

    def int8(self, n: int) -> Tensor:
        return codebook_layout.int8_weight(self.units, self.bits, self.norms, self.values, self.fold)[:n]


def run(
    problem: CodebookProblem,
    tile: TileConfig,
    weight: Weight,
    x: Tensor,
    n: int,
    args: dict[str, Any],
    *,
    extra: int = 0,
    pdl: bool = False,
) -> Tensor:
    """Launch twice into guarded memory; both results must agree. Token rows past the last one are NaN or 127."""
    m = len(x)
    blocks = codebook_layout.to_blocks(x)
    if m % 8:
        blocks[:, -1, m % 8 :] = 127 if x.dtype is torch.int8 else float("nan")
    ldd = -(-n // problem.alignment_n) * problem.alignment_n + extra
    book = products.pack_book(weight.values.float(), weight.values.dtype)
    fold = [weight.fold.to(DEVICE)] if problem.x is DType.S8 else []
    values = []
    for param in problem.epilogue.params():
        value = args[param.name]
        if param.name == "residual":
            padded = torch.full((m, ldd), float("nan"), dtype=value.dtype)
            padded[:, :n] = value
            value = padded
        values.append(value.to(DEVICE))
    operands = [blocks.to(DEVICE), weight.units.to(DEVICE), weight.norms.to(DEVICE), *fold]
    source = CODEBOOK_MMA.emit(problem, tile, arch())
    results = []
    for _ in range(2):
        d = Guarded(m, ldd, TORCH_DTYPE[problem.epilogue.out])
        sizes = (m, n, weight.geometry.units, ldd)
        launch(source, CODEBOOK_MMA.grid(tile, n)(m), *operands, d.tensor, *sizes, *book, *values, pdl=pdl)
        results.append(d.take(n))
    assert_same(results[0], results[1])
    return results[0]


def require(problem: CodebookProblem, tile: TileConfig) -> None:
    if smem_bytes(problem, tile) > architecture(arch()).smem_bytes:
        pytest.skip(f"{tile.name} needs more shared memory than {arch()} has")


def check_int8(
    problem: CodebookProblem, tile: TileConfig, m: int, n: int, k: int, *, extra: int = 0, pdl: bool = False
) -> None:
    """Bitwise, on the integers that `int8_weight` says."""
    weight = Weight.random(n, k, problem.bits, GROUP[problem.slots], torch.float16, seed=n, in_pairs=problem.pairs)
    x = full_range(m, weight.geometry.k_padded, seed=m)
    gemm = Gemm.of(problem.epilogue, x, weight.int8(n), seed=m)
    gemm.check(run(problem, tile, weight, x, n, gemm.args, extra=extra, pdl=pdl))


def check_float(
    problem: CodebookProblem, tile: TileConfig, m: int, n: int, k: int, *, extra: int = 0, pdl: bool = False
) -> None:
    """Against float64.

    A weight is rounded once to 11 bits, or as a float16 subnormal to 2**-25; a bfloat16 one twice (norm and product) to
    8. The sum adds K * 2**-23 * sum |x w|, scale, bias and residual 2**-24 of their result each, D its own rounding.
    """
    dtype = TORCH_DTYPE[problem.x]
    weight = Weight.random(n, k, problem.bits, GROUP[problem.slots], dtype, seed=n, in_pairs=problem.pairs)
    gen = torch.Generator().manual_seed(m)
    x = torch.randn(m, weight.geometry.k_padded, generator=gen).to(dtype)
    gemm = Gemm.of(problem.epilogue, torch.zeros(m, 1, dtype=torch.int8), torch.zeros(n, 1, dtype=torch.int8), seed=m)
    got = run(problem, tile, weight, x, n, gemm.args, extra=extra, pdl=pdl)
    w, scale = weight.exact(n), gemm.args["col_scale"].double()
    relative, absolute = (2.0**-11, 2.0**-25) if dtype is torch.float16 else (2.0**-8 + 2.0**-18, 2.0**-133)
    size = x.double().abs() @ w.abs().t()
    slack = (relative + x.shape[1] * 2.0**-23 * (1 + relative)) * size + absolute * x.double().abs().sum(1, True)
    product = x.double() @ w.t() * scale
    exact = product + gemm.args.get("bias", torch.zeros(n)).double()
    bound = slack * scale + 2.0**-23 * (product.abs() + exact.abs())
    if "residual" in gemm.args:
        exact = exact + gemm.args["residual"].double()
        bound += 2.0**-23 * exact.abs()
    error = (got.double() - exact).abs()
    # D is rounded from a value within `bound` of the exact one; its spacing may be twice as wide.
    allowed = bound + half_ulp(exact.abs() + bound, got.dtype)
    worst = (error - allowed).argmax()
    assert bool((error <= allowed).all()), f"error {error.flatten()[worst]} over bound {allowed.flatten()[worst]}"


@pytest.mark.parametrize("in_pairs", [False, True], ids=["values", "pairs"])
@pytest.mark.parametrize("x", [DType.F16, DType.S8], ids=lambda x: x.value)
@pytest.mark.parametrize("tile", CODEBOOK_MMA.default_tiles(CodebookProblem(bits=2), "sm_90a"), ids=lambda t: t.name)
def test_tiles(tile: TileConfig, x: DType, in_pairs: bool) -> None:
    """Fewer units than stages and more; rows and tokens inside a tile and over several."""
    problem = CodebookProblem(x, epilogue=INT8_BIAS if x is DType.S8 else BIAS, pairs=in_pairs)
    require(problem, tile)
    check = check_int8 if x is DType.S8 else check_float
    for n, k in ((8, 40), (72, 384), (328, 1300)):
        for m in (1, 8, 17, 65, 130):
            check(problem, tile, m, n, k, extra=8, pdl=m == 17)


@pytest.mark.parametrize("slots", [1, 2, 4, 8])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_widths_and_slots(bits: int, slots: int) -> None:
    for m, n, k in ((5, 80, 700), (65, 136, 256)):
        check_int8(CodebookProblem(DType.S8, bits, slots, INT8_BIAS), MIDDLE, m, n, k)
        check_float(CodebookProblem(DType.F16, bits, slots, BIAS), MIDDLE, m, n, k)


@pytest.mark.parametrize("slots", [2, 4, 8])
def test_pairs_with_several_norms(slots: int) -> None:
    for m, n, k in ((5, 80, 700), (65, 136, 256)):
        check_int8(CodebookProblem(DType.S8, 4, slots, INT8_BIAS, pairs=True), MIDDLE, m, n, k)
        check_float(CodebookProblem(DType.F16, 4, slots, BIAS, pairs=True), MIDDLE, m, n, k)


@pytest.mark.parametrize("in_pairs", [False, True], ids=["values", "pairs"])
@pytest.mark.parametrize("slots", [1, 4, 8])
def test_bfloat16(slots: int, in_pairs: bool) -> None:
    epilogue = Epilogue(DType.BF16, col_scale="per_channel", bias=True, residual=True)
    for tile in (SMALL, MIDDLE):
        for m, n, k in ((3, 72, 500), (66, 200, 1024)):
            check_float(CodebookProblem(DType.BF16, 4, slots, epilogue, pairs=in_pairs), tile, m, n, k)


@pytest.mark.parametrize("epilogue", INT8_EPILOGUES, ids=lambda e: e.name)
def test_epilogues(epilogue: Epilogue) -> None:
    for m in (1, 16, 33):
        check_int8(CodebookProblem(DType.S8, epilogue=epilogue), SMALL, m, 144, 300, extra=8)


@pytest.mark.parametrize("x", [DType.F16, DType.S8], ids=lambda x: x.value)
def test_ragged_n(x: DType) -> None:
    problem = CodebookProblem(x, epilogue=INT8_BIAS if x is DType.S8 else BIAS, alignment_n=1)
    check = check_int8 if x is DType.S8 else check_float
    for tile in (SMALL, MIDDLE):
        for n in (1, 15, 17, 63, 65, 130):
            check(problem, tile, 9, n, 200, extra=3)


@pytest.mark.parametrize("x", [DType.F16, DType.BF16], ids=lambda x: x.value)
@pytest.mark.parametrize(("bits", "slots"), [(2, 2), (3, 2), (4, 2), (4, 8)])
def test_identity_gives_the_weights(bits: int, slots: int, x: DType) -> None:
    """Value times norm, rounded once (with bfloat16 the norm before), and D is exact."""
    dtype = TORCH_DTYPE[x]
    weight = Weight.random(80, 256, bits, GROUP[slots], dtype)
    problem = CodebookProblem(x, bits, slots, Epilogue(DType.F32, col_scale="per_channel"))
    got = run(problem, MIDDLE, weight, torch.eye(256, dtype=dtype), 80, {"col_scale": torch.ones(80)})
    norms = weight.norms.to(dtype) if x is DType.BF16 else weight.norms
    exact = codebook_layout.rotated_weight(weight.units, bits, norms, weight.values)[:80]
    expected = exact.float().to(dtype).float().t()
    assert_same(got, torch.where(expected == 0, 0.0, expected))


@pytest.mark.parametrize("x", [DType.F16, DType.S8], ids=lambda x: x.value)
def test_a_token_does_not_depend_on_the_others(x: DType) -> None:
    problem = CodebookProblem(x, epilogue=INT8_BIAS if x is DType.S8 else BIAS)
    weight = Weight.random(144, 600, 4, 128, torch.float16)
    k = weight.geometry.k_padded
    tokens = full_range(33, k) if x is DType.S8 else torch.randn(33, k).half()
    if x is DType.F16:
        tokens[7, 100] = float("nan")
    gemm = Gemm.of(problem.epilogue, full_range(33, 1), full_range(144, 1))
    whole = run(problem, MIDDLE, weight, tokens, 144, gemm.args)
    assert whole.isnan().any(1).nonzero().flatten().tolist() == ([7] if x is DType.F16 else [])
    for row in (0, 16, 32):
        args = dict(gemm.args)
        if x is DType.S8:
            args["row_scale"] = args["row_scale"][row : row + 1]
        assert_same(run(problem, MIDDLE, weight, tokens[row : row + 1], 144, args)[0], whole[row])


def test_a_residual_pass_is_more_units() -> None:
    """Two passes of one width side by side along K, their norms relative to the same power of two."""
    first, second = (Weight.random(80, 256, 4, 128, torch.float16, seed=seed) for seed in (1, 2))
    both = replace(
        first,
        units=torch.cat((first.units, second.units), 1),
        norms=torch.cat((first.norms, second.norms), 1),
        geometry=Geometry(512, 128),
    )
    x = full_range(20, 512)
    problem = CodebookProblem(DType.S8, epilogue=INT8_BIAS)
    gemm = Gemm.of(INT8_BIAS, x, both.int8(80))
    gemm.check(run(problem, SMALL, both, x, 80, gemm.args))


@pytest.mark.parametrize("m", [1, 40, 200, 1000])
def test_the_chosen_tile(m: int) -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for problem, check in (
        (CodebookProblem(epilogue=BIAS), check_float),
        (CodebookProblem(DType.S8, epilogue=INT8_BIAS), check_int8),
    ):
        check(problem, best_tile(CODEBOOK_MMA, problem, m, 1280, 128, Target(arch(), sms)), m, 1280, 1280, pdl=True)
