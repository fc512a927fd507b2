"""The prompt kernel on codebook weights: int8 tokens bitwise, 16-bit tokens against float64 by a derived bound."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut import jit
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.codebook.wgmma import CodebookWgmmaTile
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType
from qcut.emitters.families import CODEBOOK_WGMMA
from qcut.numerics.codebook import layout as codebook_layout
from qcut.numerics.codebook import lloyd_max, pairs, products
from qcut.numerics.codebook.layout import Geometry
from tests.gpu.support.launching import Guarded, arch, launch, strided
from tests.gpu.support.oracles import DEVICE, TORCH_DTYPE, Gemm, assert_same, full_range, half_ulp, smooth

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("wgmma exists only on sm_90a", allow_module_level=True)

PLAIN = Epilogue(col_scale="per_channel", bias=True)
INT8 = CodebookProblem(DType.S8, epilogue=replace(PLAIN, row_scale="per_token"))
HALF = CodebookProblem(DType.F16, epilogue=PLAIN)
BRAIN = CodebookProblem(DType.BF16, epilogue=replace(PLAIN, out=DType.BF16))
SHALLOW = CodebookWgmmaTile(64, 2, 2, lead=1)
WIDE = CodebookWgmmaTile(256, 3, 2, lead=1)
MIDDLE = CodebookWgmmaTile(128, 3, 2, lead=2)
TILES = (
    SHALLOW,
    CodebookWgmmaTile(64, 5, 1, lead=4),
    MIDDLE,
    CodebookWgmmaTile(128, 2, 1, lead=1),
    WIDE,
    CodebookWgmmaTile(256, 2, 1, lead=1),
    CodebookWgmmaTile(64, 3, 1, splits=4),
    CodebookWgmmaTile(128, 3, 1, splits=2),
    CodebookWgmmaTile(256, 2, 1, splits=8),
    CodebookWgmmaTile(96, 4, 1, lead=2),
    CodebookWgmmaTile(160, 3, 2, lead=1, fine=True),
    CodebookWgmmaTile(192, 3, 1, splits=2),
)
PAIRS = (
    CodebookWgmmaTile(64, 5, 1, lead=4, pairs=True, fine=True),
    CodebookWgmmaTile(96, 3, 1, splits=4, pairs=True),
    CodebookWgmmaTile(160, 3, 2, lead=1, pairs=True),
    CodebookWgmmaTile(256, 2, 2, lead=1, pairs=True, fine=True),
)
"""Tiles with a table of pairs, for 16-bit tokens."""
CASES = [
    (problem, tile) for problem in (INT8, HALF) for tile in (*TILES, *CODEBOOK_WGMMA.default_tiles(problem, "sm_90a"))
]
CASES += [(HALF, tile) for tile in PAIRS]
IN_PAIRS = tuple(replace(problem, pairs=True) for problem in (INT8, HALF, BRAIN))
"""Codebooks of pairs, which need the table."""
CASES += [
    (problem, tile) for problem in IN_PAIRS for tile in (*PAIRS, *CODEBOOK_WGMMA.default_tiles(problem, "sm_90a"))
]
SHAPES = (
    (1, 16, 1),
    (7, 64, 2),
    (8, 200, 3),
    (9, 256, 7),
    (63, 520, 5),
    (64, 64, 40),
    (65, 256, 9),
    (127, 200, 4),
    (130, 520, 3),
    (255, 256, 6),
    (256, 16, 11),
    (257, 520, 2),
    (300, 200, 13),
)
"""M, N, units: tiles and their neighbours, fewer units than stages and many more, N inside a tile and over several."""
EPILOGUES = (
    Epilogue(col_scale="per_channel"),
    Epilogue(DType.F32, col_scale="per_channel", bias=True, residual=True),
    Epilogue(DType.BF16, col_scale="per_channel", residual=True),
    Epilogue(col_scale="per_channel", bias=True, activation=Activation.RELU),
    Epilogue(col_scale="per_channel", bias=True, activation=Activation.GELU_TANH, residual=True),
    Epilogue(DType.BF16, col_scale="per_channel", activation=Activation.SILU),
)


def of_tokens(problem: CodebookProblem, epilogue: Epilogue) -> CodebookProblem:
    """The problem with an epilogue, and a scale for each token where they are int8."""
    return replace(problem, epilogue=replace(epilogue, row_scale=problem.epilogue.row_scale))


@dataclass
class Case:
    """Operands on the CPU, the epilogue's arguments, and what must come out."""

    problem: CodebookProblem
    x: Tensor
    n: int
    units: Tensor
    norms: Tensor
    values: Tensor
    gemm: Gemm

    @classmethod
    def random(cls, problem: CodebookProblem, m: int, n: int, units_k: int, seed: int = 0) -> Case:
        """Random indices; norms of ordinary size, and rows of zeros, of one tiny norm, and of float16's largest."""
        gen = torch.Generator().manual_seed(seed + 7)
        geometry = Geometry(128 * units_k, 128 // problem.slots, "none")
        assert geometry.units == units_k
        indices = torch.randint(0, 2**problem.bits, (n, geometry.k), generator=gen, dtype=torch.uint8)
        norms = (torch.rand(n, geometry.groups, generator=gen) + 0.5).half()
        if n > 4:
            norms[1] = 0
            norms[2, 0] *= 2.0**-12
            norms[3] = 65504
        packed = codebook_layout.pack_norms(norms, codebook_layout.row_exponents(norms), geometry)
        dtype = TORCH_DTYPE[problem.x]
        values = pairs.codebook() if problem.pairs else lloyd_max.codebook(problem.bits)
        values = values.to(torch.float16 if dtype is torch.int8 else dtype)
        units = codebook_layout.pack_units(indices, problem.bits, geometry)
        if dtype is torch.int8:
            x = full_range(m, geometry.k, seed=seed)
            fold = codebook_layout.fold_scales(packed, values)
            weight = codebook_layout.int8_weight(units, problem.bits, packed, values, fold)[:n]
        else:
            x = torch.randn(m, geometry.k, generator=gen).to(dtype)
            x[0] *= 100
            weight = torch.zeros(n, geometry.k, dtype=torch.int8)
        left = x if dtype is torch.int8 else torch.zeros(m, geometry.k, dtype=torch.int8)
        gemm = Gemm.of(problem.epilogue, left, weight, seed)
        if dtype is not torch.int8:  # only the epilogue's arguments
            gemm.args["col_scale"] = (torch.rand(n, generator=gen) + 0.5) / geometry.k**0.5
        return cls(problem, x, n, units, packed, values, gemm)

    def run(self, tile: CodebookWgmmaTile, sm_count: int | None = None, pdl: bool = False) -> Tensor:
        """Launch twice into guarded memory; both results must agree.

        Rows of the last block of tokens that are none hold NaN; so do the codebook's values that no index names.
        """
        problem, m, n = self.problem, len(self.x), self.n
        source = CODEBOOK_WGMMA.emit(problem, tile, arch())
        if sm_count is None:
            sm_count = torch.cuda.get_device_properties(0).multi_processor_count
        x = codebook_layout.to_blocks(self.x)
        if m % 8:
            x[:, -1, m % 8 :] = 127 if x.dtype is torch.int8 else float("nan")
        book = torch.full((16,), float("nan"))
        book[: 2**problem.bits] = self.values.flatten()[: 2**problem.bits]
        words = products.pack_book(self.values.float() if problem.pairs else book, self.values.dtype)
        ldd = (-(-n // problem.alignment_n) + 1) * problem.alignment_n
        arguments: dict[str, Any] = {
            "x": x,
            "units": self.units,
            "norms": self.norms,
            "m": m,
            "n": n,
            "units_k": self.units.shape[1],
            "ldd": ldd,
            **{p.name: w for p, w in zip(problem.book_params, words, strict=True)},
            **{p.name: self.gemm.args[p.name] for p in problem.epilogue.params()},
        }
        if problem.x is DType.S8:
            arguments["fold"] = codebook_layout.fold_scales(self.norms, self.values)
        if problem.epilogue.residual:
            arguments["residual"] = strided(arguments["residual"], ldd)
        on_device = {key: v.to(DEVICE) if isinstance(v, Tensor) else v for key, v in arguments.items()}
        results = []
        for _ in range(2):
            d = Guarded(m, ldd, TORCH_DTYPE[problem.epilogue.out])
            on_device["d"] = d.tensor
            launch(
                source,
                CODEBOOK_WGMMA.grid(tile, n, sm_count)(m),
                *(on_device[p.name] for p in problem.params()),
                pdl=pdl,
            )
            results.append(d.take(n))
        assert_same(results[0], results[1])
        return results[0]

    def check(self, got: Tensor) -> None:
        """Bitwise for int8 tokens (except smooth activations), else within `exact`'s bound."""
        if self.problem.x is DType.S8:
            self.gemm.check(got)
            return
        exact, bound = self.exact(got.dtype)
        error = (got.double() - exact).abs()
        worst = (error - bound).argmax()
        assert bool((error <= bound).all()), f"error {error.flatten()[worst]} over bound {bound.flatten()[worst]}"

    def exact(self, out: torch.dtype) -> tuple[Tensor, Tensor]:
        """The float64 result, and how far the kernel's may be from it.

        Weights: ``norm * value`` rounded to the tokens' type, 2**-11 of it for float16, or half its smallest spacing;
        bfloat16 rounds the norm, too: twice 2**-8, and their product. Sums: float32, truncated, K of them at most.
        Epilogue: two operations of 2**-24 each; activations have slopes below 1.13 and 2**-21 of their argument; the
        residual's sum rounds once more; then the output's rounding.
        """
        args, epilogue = self.gemm.args, self.problem.epilogue
        weight = codebook_layout.rotated_weight(self.units, self.problem.bits, self.norms, self.values)[: self.n]
        x = self.x.double()
        size = x.abs() @ weight.abs().T
        relative = 2.0**-11 if self.x.dtype is torch.float16 else 2.0**-7 + 2.0**-16
        slack = size * (relative + x.shape[1] * 2.0**-23)
        if self.x.dtype is torch.float16:
            slack = slack + x.abs().sum(1, keepdim=True) * 2.0**-25
        scale = args["col_scale"].double()
        v, slack = (x @ weight.T) * scale, slack * scale
        slack = slack + (v.abs() + slack) * 2.0**-24
        if epilogue.bias:
            v = v + args["bias"].double()
            slack = slack + (v.abs() + slack) * 2.0**-24
        if epilogue.activation is Activation.RELU:
            v = v.clamp(min=0)
        elif epilogue.activation is not Activation.NONE:
            slack = slack * 1.13 + (v.abs() + slack) * 2.0**-21
            v = smooth(v, epilogue.activation)
        if epilogue.residual:
            v = v + args["residual"].double()
            slack = slack + (v.abs() + slack) * 2.0**-24
        return v, slack + half_ulp(v.abs() + slack, out)


def aligned(problem: CodebookProblem, n: int) -> CodebookProblem:
    """The problem with the alignment that n has: 8 or 1."""
    return replace(problem, alignment_n=8 if n % 8 == 0 else 1)


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    cases = list(CASES)
    cases += [(aligned(problem, 1), tile) for problem in (INT8, HALF) for tile in (MIDDLE, TILES[6])]
    cases += [(of_tokens(problem, epilogue), MIDDLE) for problem in (INT8, HALF) for epilogue in EPILOGUES]
    cases += [(replace(problem, slots=slots), PAIRS[2]) for problem in IN_PAIRS for slots in (2, 4)]
    built = jit.build_many([CODEBOOK_WGMMA.emit(*case, arch()) for case in cases], progress=False)
    errors = [result for result in built.values() if isinstance(result, Exception)]
    assert not errors, errors[0]


@pytest.mark.parametrize(("problem", "tile"), CASES, ids=lambda v: v.name)
def test_tiles(problem: CodebookProblem, tile: CodebookWgmmaTile) -> None:
    for m, n, units_k in SHAPES:
        case = Case.random(problem, m, n, units_k, seed=m)
        case.check(case.run(tile))


@pytest.mark.parametrize("tile", [MIDDLE, TILES[6]], ids=lambda t: t.name)
@pytest.mark.parametrize("problem", [INT8, HALF], ids=lambda p: p.x.value)
def test_unaligned_channels(problem: CodebookProblem, tile: CodebookWgmmaTile) -> None:
    for m, n, units_k in ((1, 1, 1), (9, 63, 3), (64, 65, 2), (130, 130, 4), (17, 257, 5)):
        case = Case.random(aligned(problem, 1), m, n, units_k, seed=n)
        case.check(case.run(tile))


@pytest.mark.parametrize(
    ("problem", "bits", "slots"),
    [
        (INT8, 2, 1),
        (INT8, 3, 2),
        (INT8, 4, 4),
        (INT8, 2, 4),
        (HALF, 2, 2),
        (HALF, 3, 1),
        (HALF, 4, 4),
        (BRAIN, 4, 1),
        (BRAIN, 3, 4),
        (BRAIN, 2, 2),
        (INT8, 4, 8),
        (INT8, 3, 8),
        (HALF, 4, 8),
        (BRAIN, 3, 8),
    ],
    ids=lambda v: v.x.value if isinstance(v, CodebookProblem) else str(v),
)
def test_formats(problem: CodebookProblem, bits: int, slots: int) -> None:
    problem = replace(problem, bits=bits, slots=slots)
    for m, n, units_k in ((130, 200, 3), (64, 264, 10), (5, 64, 1)):
        case = Case.random(problem, m, n, units_k, seed=bits + slots)
        case.check(case.run(MIDDLE))


@pytest.mark.parametrize("slots", [2, 4])
@pytest.mark.parametrize("problem", IN_PAIRS, ids=lambda p: p.x.value)
def test_pairs_with_several_norms(problem: CodebookProblem, slots: int) -> None:
    for m, n, units_k in ((130, 200, 3), (64, 264, 10)):
        case = Case.random(replace(problem, slots=slots), m, n, units_k, seed=slots)
        case.check(case.run(PAIRS[2]))


@pytest.mark.parametrize(
    ("tile", "slots"),
    [(MIDDLE, 2), (WIDE, 2), (TILES[6], 2), (MIDDLE, 8), (TILES[6], 8)],
    ids=lambda v: getattr(v, "name", v),
)
@pytest.mark.parametrize("problem", [HALF, BRAIN], ids=lambda p: p.x.value)
def test_identity_gives_the_weights(problem: CodebookProblem, tile: CodebookWgmmaTile, slots: int) -> None:
    """Each token picks one column: what comes out is the weight as the tensor core took it, bit by bit."""
    problem = replace(problem, slots=slots, epilogue=Epilogue(DType.F32, col_scale="per_channel"))
    case = Case.random(problem, 384, 200, 3)
    dtype = case.x.dtype
    case.x = torch.eye(384).to(dtype)
    case.gemm.args["col_scale"] = torch.ones(200)
    if dtype is torch.bfloat16:
        case.norms = case.norms.to(dtype).half()
    weight = codebook_layout.rotated_weight(case.units, problem.bits, case.norms, case.values)[:200]
    # Adding 0 turns -0 into 0: a sum of zeros need not keep a weight's sign.
    assert_same(case.run(tile) + 0.0, weight.to(dtype).float().t().contiguous() + 0.0)


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda e: e.name)
@pytest.mark.parametrize("problem", [INT8, HALF], ids=lambda p: p.x.value)
def test_epilogues(problem: CodebookProblem, epilogue: Epilogue) -> None:
    for m, n, units_k in ((130, 200, 2), (33, 16, 5)):
        case = Case.random(of_tokens(problem, epilogue), m, n, units_k, seed=n)
        case.check(case.run(MIDDLE))


@pytest.mark.parametrize("tile", [SHALLOW, MIDDLE, WIDE], ids=lambda t: t.name)
@pytest.mark.parametrize("problem", [INT8, HALF], ids=lambda p: p.x.value)
def test_ctas_go_from_tile_to_tile(problem: CodebookProblem, tile: CodebookWgmmaTile) -> None:
    """Any number of CTAs gives the same bits: rings, leads and staging carry over from one tile to the next."""
    for m, n, units_k in ((700, 1160, 2), (520, 520, 1), (300, 2056, 7)):
        case = Case.random(problem, m, n, units_k, seed=m)
        results = [case.run(tile, sm_count) for sm_count in (2, 6, 132)]
        case.check(results[0])
        assert_same(results[0], results[1])
        assert_same(results[0], results[2])


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("problem", [INT8, HALF], ids=lambda p: p.x.value)
def test_every_tile_of_the_menu(problem: CodebookProblem, slots: int) -> None:
    problem = replace(problem, slots=slots)
    case = Case.random(problem, 300, 1544, 20)
    for tile in CODEBOOK_WGMMA.default_tiles(problem, "sm_90a"):
        case.check(case.run(tile))


@pytest.mark.parametrize("tile", [MIDDLE, TILES[6]], ids=lambda t: t.name)
@pytest.mark.parametrize("problem", [INT8, HALF], ids=lambda p: p.x.value)
def test_tokens_are_independent(problem: CodebookProblem, tile: CodebookWgmmaTile) -> None:
    case = Case.random(problem, 137, 264, 6)
    whole = case.run(tile)
    for i in (0, 7, 8, 63, 64, 128, 136):
        args = {key: v[i : i + 1] if key in ("row_scale", "residual") else v for key, v in case.gemm.args.items()}
        alone = replace(case, x=case.x[i : i + 1], gemm=replace(case.gemm, args=args))
        assert_same(alone.run(tile), whole[i : i + 1])


@pytest.mark.parametrize("tile", [MIDDLE, WIDE, TILES[6]], ids=lambda t: t.name)
@pytest.mark.parametrize("problem", [INT8, HALF], ids=lambda p: p.x.value)
def test_dependent_launch_gives_the_same(problem: CodebookProblem, tile: CodebookWgmmaTile) -> None:
    case = Case.random(problem, 257, 520, 9)
    assert_same(case.run(tile, pdl=True), case.run(tile))
