"""The decode kernels on codebook weights: int8 tokens bitwise, 16-bit tokens against float64 by a derived bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut import jit
from qcut.dispatch.codebook import select
from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import best_tile
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.arch import CLUSTER_ARCHITECTURES, architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.family import Family
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.families import CODEBOOK_STREAM, CODEBOOK_STREAM_ROUNDS, CODEBOOK_STREAM_WGMMA
from qcut.emitters.stream import codebook as codebook_stream
from qcut.emitters.stream import codebook_rounds as codebook_stream_rounds
from qcut.emitters.stream import codebook_wgmma as codebook_stream_wgmma
from qcut.emitters.stream.codebook import CodebookStreamTile
from qcut.emitters.stream.codebook_rounds import CodebookRoundsTile
from qcut.emitters.stream.codebook_wgmma import CodebookStreamWgmmaTile
from qcut.numerics import int8 as numerics
from qcut.numerics.codebook import layout as codebook_layout
from qcut.numerics.codebook import lloyd_max, pairs, products
from qcut.numerics.codebook.layout import Geometry
from tests.gpu.support.launching import Guarded, arch, launch, strided
from tests.gpu.support.oracles import DEVICE, TORCH_DTYPE, assert_same, full_range, half_ulp, smooth

Tile = CodebookStreamTile | CodebookRoundsTile | CodebookStreamWgmmaTile

H200 = Target("sm_90a", 132)
PLAIN = Epilogue(DType.F32, col_scale="per_channel")
BASE = CodebookProblem(epilogue=PLAIN, alignment_n=1)
TILES: tuple[Tile, ...] = (
    CodebookStreamTile(1, 7, 32),
    CodebookStreamTile(1, 4, 4, 1, 1, 2),
    CodebookStreamTile(2, 1, 1, 1, 8),
    CodebookStreamTile(4, 2, 4, 2, 2),
    CodebookStreamTile(8, 2, 32),
    CodebookStreamTile(8, 3, 10, 1, 1, 3),
    CodebookStreamTile(8, 5, 10, 1, 4),
    CodebookStreamTile(16, 7, 16, 2),
    CodebookStreamTile(24, 2, 5, 3, 1, 2),
    CodebookStreamTile(32, 1, 10),
    CodebookRoundsTile(1, 4, 4, 2),
    CodebookRoundsTile(2, 1, 1),
    CodebookRoundsTile(4, 3, 2),
    CodebookRoundsTile(8, 2, 8, 2),
    CodebookRoundsTile(16, 1, 16),
    CodebookRoundsTile(16, 4, 8),
    CodebookStreamWgmmaTile(8, 1, 1, 3, 1),
    CodebookStreamWgmmaTile(16, 2, 2, 5, 4),
    CodebookStreamWgmmaTile(32, 3, 4, 8, 4),
    CodebookStreamWgmmaTile(64, 4, 2, 8, 4),
    CodebookStreamWgmmaTile(64, 5, 8, 4, 1),
    CodebookStreamWgmmaTile(96, 1, 4, 4, 2),
    CodebookStreamWgmmaTile(128, 3, 2, 3, 4),
    CodebookStreamWgmmaTile(160, 2, 1, 3, 4),
    CodebookStreamWgmmaTile(192, 1, 8, 3, 4),
)
MMA = CodebookStreamTile(16, 2, 4, 2, 1, 1)
ROUNDS = CodebookRoundsTile(16, 2, 4, 2)
WGMMA = CodebookStreamWgmmaTile(16, 2, 2, 4, 3)
EACH = (MMA, ROUNDS, WGMMA)
"""One tile of each family."""
PROMPT_TILES = (
    CodebookStreamWgmmaTile(64, 3, 4, 5, 4, alone=True),
    CodebookStreamWgmmaTile(64, 2, 2, 6, 4),
    CodebookStreamWgmmaTile(96, 1, 4, 4, 2),
    CodebookStreamWgmmaTile(128, 3, 1, 3, 4),
    CodebookStreamWgmmaTile(192, 2, 2, 3, 2),
)
"""Tiles that a prompt is divided into."""
MIRRORED_BOOKS = {
    "normal": lloyd_max.codebook(4),
    "zeros": torch.tensor([-3.0, -2.0, -1.5, -1.0, -0.7, -0.3, -0.1, -0.0]),
    "subnormal": torch.tensor([-8.0, -7.0, -5.0, -4.0, -3.0, -2.0, -1.0, -0.0]) * 2.0**-24,
    "bits": torch.tensor([-16384.0, -256.0, -255.75, -128.125, -1.0, -0.00390625, -0.0000610352, -0.00000005960464]),
}
"""Values 0 to 7, or all, of codebooks that are mirrored: of zeros of both signs, and of many exponents."""
FORMATS = ((2, 4), (3, 2), (4, 1), (4, 8), (3, 8))
"""(bits, slots)."""
DTYPES = (DType.F16, DType.BF16, DType.S8)
BOOKS = {
    "symmetric": (-2.7, 2.7),
    "integers": (-8, 7),
    "positive": (0.1, 2.7),
}
"""Least and largest of the values, which are evenly spaced."""
EPILOGUES = (
    Epilogue(col_scale="per_channel", bias=True, activation=Activation.GELU_TANH, residual=True),
    Epilogue(DType.BF16, col_scale="per_channel", bias=True, activation=Activation.RELU),
)
SHAPES = ((1280, 10), (448, 112))
"""(N, units) of layers; `for_shape` chooses their tiles."""


def has_tile(tile: Tile) -> bool:
    """Whether the GPU at hand can run a tile."""
    if isinstance(tile, CodebookStreamWgmmaTile):
        return arch() == "sm_90a"
    if isinstance(tile, CodebookRoundsTile):
        return codebook_stream_rounds.smem_bytes(BASE, tile) <= architecture(arch()).smem_bytes
    if tile.splits > 1 and arch() not in CLUSTER_ARCHITECTURES:
        return False
    return codebook_stream.smem_bytes(BASE, tile) <= architecture(arch()).smem_bytes


def family_of(tile: Tile) -> Family[CodebookProblem, Any]:
    if isinstance(tile, CodebookStreamWgmmaTile):
        return CODEBOOK_STREAM_WGMMA
    return CODEBOOK_STREAM_ROUNDS if isinstance(tile, CodebookRoundsTile) else CODEBOOK_STREAM


def emit(problem: CodebookProblem, tile: Tile) -> KernelSource:
    return family_of(tile).emit(problem, tile, arch())


def problem_of(
    x: DType, bits: int = 4, slots: int = 1, epilogue: Epilogue = PLAIN, alignment: int = 1, in_pairs: bool = False
) -> CodebookProblem:
    if x is DType.S8:
        epilogue = replace(epilogue, row_scale="per_token")
    return CodebookProblem(x, bits, slots, epilogue, alignment, pairs=in_pairs)


def menu(x: DType, in_pairs: bool) -> tuple[CodebookStreamWgmmaTile, ...]:
    return CODEBOOK_STREAM_WGMMA.default_tiles(prompt_problem(x, in_pairs), "sm_90a") if arch() == "sm_90a" else ()


def prompt_problem(x: DType, in_pairs: bool) -> CodebookProblem:
    return problem_of(x, epilogue=EPILOGUES[0] if x is DType.F16 else PLAIN, in_pairs=in_pairs)


def format_cases() -> Iterator[tuple[CodebookProblem, Tile]]:
    for x in DTYPES:
        for bits, slots in FORMATS:
            for tile in EACH:
                yield problem_of(x, bits, slots), tile
        for slots in (1, 2, 4):
            for tile in EACH:
                yield problem_of(x, 4, slots, in_pairs=True), tile


def pair_cases() -> Iterator[tuple[CodebookProblem, Tile]]:
    """Tables of pairs filled by every number of warps."""
    for x in (DType.F16, DType.S8):
        problem = problem_of(x, in_pairs=True)
        for tile in TILES:
            if isinstance(tile, CodebookStreamWgmmaTile):
                is_legal = codebook_stream_wgmma.smem_bytes(problem, tile) <= architecture("sm_90a").smem_bytes
                if is_legal:
                    yield problem, tile
            else:
                yield problem, tile


def int8_cases(bits: int) -> Iterator[tuple[CodebookProblem, Tile]]:
    """Tiles of up to sixteen tokens, with one group scale of int8 values and with several."""
    for slots in (1, 4, 8):
        problem = problem_of(DType.S8, bits, slots)
        for tile in TILES:
            if tile.tokens <= 16 and has_tile(tile) and family_of(tile).is_legal(problem, tile, arch()):
                yield problem, tile


def mirrored_int8_cases() -> Iterator[tuple[CodebookProblem, Tile]]:
    """Int8 tokens that are multiplied in two passes, of negative and of positive values."""
    for problem, tile in int8_cases(4):
        if isinstance(tile, CodebookStreamTile):
            mirrored = replace(problem, mirrored=True), replace(tile, mirrored=True)
            if CODEBOOK_STREAM.is_legal(*mirrored, arch()):
                yield mirrored


def epilogue_cases() -> Iterator[tuple[CodebookProblem, Tile]]:
    for epilogue in EPILOGUES:
        for tile in EACH:
            yield problem_of(DType.F16, epilogue=epilogue, alignment=8), tile
    for alignment in (1, 2):
        yield problem_of(DType.F16, epilogue=EPILOGUES[0], alignment=alignment), WGMMA
    residual = Epilogue(DType.F16, col_scale="per_channel", bias=True, residual=True)
    for tile in EACH:
        yield problem_of(DType.S8, epilogue=residual, alignment=8), tile


def chosen_cases() -> Iterator[tuple[CodebookProblem, Tile, int, int, int]]:
    problem = problem_of(DType.F16, alignment=8)
    for n, units in SHAPES:
        for m in (1, 16, 33):
            if arch() != "sm_90a":
                if m <= 16:
                    yield (
                        problem,
                        best_tile(CODEBOOK_STREAM, problem, m, n, 128 * units, Target(arch(), 132)),
                        m,
                        n,
                        units,
                    )
            elif select(problem, m, n, units, H200).family == CODEBOOK_STREAM_WGMMA.name:
                yield problem, best_tile(CODEBOOK_STREAM_WGMMA, problem, m, n, 128 * units, H200), m, n, units
            else:
                yield problem, best_tile(CODEBOOK_STREAM, problem, m, n, 128 * units, H200), m, n, units


def foreign_cases() -> list[tuple[CodebookProblem, Tile, int, int, int]]:
    """Tiles that GPUs with less shared memory, or without clusters, take where their warps cannot hold all tokens."""
    gpus = (Target("sm_80", 108), Target("sm_86", 82), Target("sm_89", 142), Target("sm_120", 170))
    asked = [(gpu, x, units, m) for gpu in gpus for x in DTYPES for units in (32, 112, 224) for m in (1, 8, 16)]
    cases = {}
    for gpu, x, units, m in asked:
        problem = problem_of(x, alignment=8)
        tile = best_tile(CODEBOOK_STREAM_ROUNDS, problem, m, 4096, 128 * units, gpu)
        cases[x, units, tile] = problem, tile, m, 104, units
    return [case for case in cases.values() if has_tile(case[1])]


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    cases = [(BASE, tile) for tile in TILES]
    cases += [
        (problem_of(x, epilogue=EPILOGUES[0] if x is DType.F16 else PLAIN), t) for x in DTYPES for t in PROMPT_TILES
    ]
    cases += [(prompt_problem(x, p), t) for x in DTYPES for p in (False, True) for t in menu(x, p)]
    cases += [
        *pair_cases(),
        *format_cases(),
        *(case for bits in (2, 3, 4) for case in int8_cases(bits)),
        *mirrored_int8_cases(),
        *epilogue_cases(),
        *((p, t) for p, t, *_ in [*chosen_cases(), *foreign_cases()]),
    ]
    sources = {source.name: source for source in (emit(p, t) for p, t in cases if has_tile(t))}
    errors = [r for r in jit.build_many(list(sources.values()), progress=False).values() if isinstance(r, Exception)]
    assert not errors, errors[0]


@dataclass
class Product:
    """One product on the CPU's side, what the kernel is given, and what it must return."""

    problem: CodebookProblem
    x: Tensor
    units: Tensor
    norms: Tensor
    values: Tensor
    n: int
    args: dict[str, Tensor]

    @classmethod
    def random(
        cls,
        problem: CodebookProblem,
        m: int,
        n: int,
        units: int,
        seed: int = 0,
        book: tuple[float, float] | Tensor = BOOKS["symmetric"],
    ) -> Product:
        """Norms of every size: a row of zeros, one with the largest float16 and ``2**-20`` of it, subnormal ones."""
        generator = torch.Generator().manual_seed(seed)
        k, bits, out = 128 * units, problem.bits, TORCH_DTYPE[problem.epilogue.out]
        geometry = Geometry(k, 128 // problem.slots, "none")
        indices = torch.randint(0, 2**bits, (n, k), generator=generator).to(torch.uint8)
        norms = (torch.rand(n, geometry.groups, generator=generator) + 0.05).half()
        norms[n // 2] = 0
        norms[n // 3] = 65504 * 2.0**-20
        norms[n // 3, 0] = 65504
        norms[2 * n // 3] *= 2.0**-18
        dtype = torch.float16 if problem.x is DType.S8 else TORCH_DTYPE[problem.x]
        values = torch.zeros(16, dtype=dtype)
        values[: 2**bits] = (book if isinstance(book, Tensor) else torch.linspace(*book, 2**bits)).to(dtype)
        if problem.pairs:
            values = pairs.codebook().to(dtype)
        floats = torch.randn(m, k, generator=generator).to(dtype)
        x = full_range(m, k, seed=seed) if problem.x is DType.S8 else floats
        spread = k**0.5 * (74 * 64 if problem.x is DType.S8 else 1)
        args = {
            "row_scale": torch.rand(m, generator=generator) + 0.5,
            "col_scale": (torch.rand(n, generator=generator) + 0.5) / spread,
            "bias": torch.randn(n, generator=generator),
            "residual": torch.randn(m, n, generator=generator).to(out),
        }
        used = {p.name for p in problem.epilogue.params()}
        args = {name: value for name, value in args.items() if name in used}
        packed = codebook_layout.pack_norms(norms, codebook_layout.row_exponents(norms), geometry)
        return cls(problem, x, codebook_layout.pack_units(indices, bits, geometry), packed, values, n, args)

    @property
    def units_k(self) -> int:
        return self.units.shape[1]

    def row(self, m: int) -> Product:
        """The product of a single token."""
        by_token = ("row_scale", "residual")
        args = {name: v[m : m + 1] if name in by_token else v for name, v in self.args.items()}
        return replace(self, x=self.x[m : m + 1], args=args)

    def blocks(self) -> Tensor:
        """Tokens in blocks; rows past the last hold NaN, or 127."""
        blocks = codebook_layout.to_blocks(self.x)
        if len(self.x) % 8:
            blocks[:, -1, len(self.x) % 8 :] = 127 if self.problem.x is DType.S8 else float("nan")
        return blocks.to(DEVICE)

    def run(self, tile: Tile, *, pdl: bool = False, extra: int = 0) -> Tensor:
        """Launch twice into guarded memory; both results must agree. ``extra`` elements lie between rows of D.

        Returns:
            ``[M, N]`` on the CPU.
        """
        m, e = len(self.x), self.problem.epilogue
        ctas = family_of(tile).grid(tile, self.n)(m)
        ldd = -(-self.n // self.problem.alignment_n) * self.problem.alignment_n + extra
        fold = codebook_layout.fold_scales(self.norms, self.values)
        words = products.pack_book(self.values.float(), self.values.dtype)
        given: dict[str, Any] = {"x": self.blocks(), "units": self.units, "norms": self.norms, "fold": fold}
        given |= {"m": m, "n": self.n, "units_k": self.units_k, "ldd": ldd, **self.args}
        given |= {f"book{i}": word for i, word in enumerate(words)}
        if "residual" in given:
            given["residual"] = strided(given["residual"], ldd)
        given = {name: v.to(DEVICE) if isinstance(v, Tensor) else v for name, v in given.items()}
        source, results = emit(self.problem, tile), []
        for _ in range(2):
            d = Guarded(m, ldd, TORCH_DTYPE[e.out])
            values = [d.tensor if p.name == "d" else given[p.name] for p in self.problem.params()]
            launch(source, ctas, *values, pdl=pdl)
            results.append(d.take(self.n))
        assert_same(results[0], results[1])
        return results[0]

    def check(self, got: Tensor, tile: Tile) -> None:
        """Hold a result to the oracle."""
        if self.problem.x is DType.S8:
            fold = codebook_layout.fold_scales(self.norms, self.values)
            q = codebook_layout.int8_weight(self.units, self.problem.bits, self.norms, self.values, fold)[: self.n]
            options: dict[str, Any] = {"activation": self.problem.epilogue.activation.value}
            expected = numerics.gemm_s8_ref(self.x, q, **self.args, **options, out_dtype=got.dtype)
            assert_same(got, expected)
            return
        exact, slack = self._oracle(tile)
        bound = slack + half_ulp(exact.abs() + slack, got.dtype)
        error = (got.double() - exact).abs()
        worst = (error - bound).argmax()
        assert bool((error <= bound).all()), f"error {error.flatten()[worst]} over bound {bound.flatten()[worst]}"

    def _oracle(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """The value in float64, and how far float32 sums and rounded weights may be from it.

        A sum of K products errs by ``K 2**-23`` of the sum of their sizes. wgmma's weights are rounded once, by
        ``2**-11`` of themselves in float16, in subnormals by ``2**-25``; in bfloat16 twice, by ``2**-8`` each.
        """
        e = self.problem.epilogue
        w = codebook_layout.rotated_weight(self.units, self.problem.bits, self.norms, self.values)[: self.n]
        x, scale = self.x.double(), self.args["col_scale"].double()
        sizes = x.abs() @ w.abs().t()
        slack = sizes * ((x.shape[1] + 4) * 2.0**-23)
        if isinstance(tile, CodebookStreamWgmmaTile):
            if self.problem.x is DType.F16:
                slack = slack + sizes * 2.0**-11 + x.abs().sum(1, keepdim=True) * 2.0**-25
            else:
                slack = slack + sizes * (2.0**-7 + 2.0**-16)
        v = x @ w.t() * scale
        slack = slack * scale + v.abs() * 2.0**-23
        if e.bias:
            v = v + self.args["bias"].double()
            slack = slack + v.abs() * 2.0**-23
        if e.activation is Activation.RELU:
            v = v.relu()
        elif e.activation is not Activation.NONE:
            # No activation is steeper than 1.13; float32 adds 2**-21 of the argument.
            slack = 1.13 * slack + v.abs() * 2.0**-21
            v = smooth(v, e.activation)
        if e.residual:
            v = v + self.args["residual"].double()
            slack = slack + v.abs() * 2.0**-23
        return v, slack


def require(tile: Tile) -> None:
    if not has_tile(tile):
        pytest.skip(f"{arch()} cannot run {tile.name}")


@pytest.mark.parametrize("tile", TILES, ids=lambda t: t.name)
def test_tiles(tile: Tile) -> None:
    require(tile)
    most = min(tile.capacity, 40) if isinstance(tile, CodebookStreamTile) else 40
    counts = sorted({1, max(1, most // 2), max(1, most - 1), most})
    for i, n in enumerate((1, 15, 17, 63, 65, 130, 657)):
        for units in (counts[i % len(counts)], most):
            m = (tile.tokens, 1, max(1, tile.tokens - 1), max(1, tile.tokens // 2 + 1))[i % 4]
            product = Product.random(BASE, m, n, units, seed=n)
            product.check(product.run(tile, extra=i % 3), tile)


@pytest.mark.parametrize("x", DTYPES, ids=lambda x: x.value)
def test_tiles_with_a_norm_for_each_sixteen_columns(x: DType) -> None:
    problem = problem_of(x, slots=8)
    tiles = [t for t in (*TILES, *EACH) if has_tile(t) and family_of(t).is_legal(problem, t, arch())]
    assert len(tiles) > 6
    for i, tile in enumerate(tiles):
        units = min(tile.capacity, 12) if isinstance(tile, CodebookStreamTile) else 12
        product = Product.random(problem, tile.tokens, (130, 657)[i % 2], units, seed=i)
        product.check(product.run(tile, extra=i % 3, pdl=i % 2 == 0), tile)


@pytest.mark.parametrize("x", DTYPES, ids=lambda x: x.value)
@pytest.mark.parametrize("tile", PROMPT_TILES, ids=lambda t: t.name)
def test_more_tokens_than_a_tile(tile: CodebookStreamWgmmaTile, x: DType) -> None:
    require(tile)
    problem = problem_of(x, epilogue=EPILOGUES[0] if x is DType.F16 else PLAIN)
    for m, n, units in (
        (65, 130, 3),
        (tile.tokens + 1, 17, 9),
        (2 * tile.tokens, 657, 2),
        (3 * tile.tokens - 7, 63, 20),
    ):
        product = Product.random(problem, m, n, units, seed=m)
        product.check(product.run(tile, extra=n % 3), tile)


@pytest.mark.parametrize("in_pairs", [False, True], ids=["values", "pairs"])
@pytest.mark.parametrize("x", DTYPES, ids=lambda x: x.value)
def test_tiles_of_the_menu_for_prompts(x: DType, in_pairs: bool) -> None:
    for tile in menu(x, in_pairs):
        for m, n, units in ((65, 257, 10), (2 * tile.tokens + 3, 130, 3)):
            product = Product.random(prompt_problem(x, in_pairs), m, n, units, seed=m)
            product.check(product.run(tile, pdl=m == 65), tile)


@pytest.mark.parametrize(
    "tile",
    [CodebookStreamTile(32, 1, 10), CodebookRoundsTile(16, 4, 8), CodebookStreamWgmmaTile(64, 4, 2, 8, 4)],
    ids=lambda t: t.name,
)
def test_every_number_of_tokens(tile: Tile) -> None:
    require(tile)
    for m in range(1, tile.tokens + 1):
        product = Product.random(BASE, m, 80, 7, seed=m)
        product.check(product.run(tile), tile)


@pytest.mark.parametrize(("problem", "tile"), list(format_cases()), ids=lambda v: v.name)
def test_formats(problem: CodebookProblem, tile: Tile) -> None:
    require(tile)
    for m, n, units in ((1, 64, 3), (5, 65, 7), (16, 130, 8), (9, 33, 1)):
        product = Product.random(problem, m, n, units, seed=m)
        product.check(product.run(tile), tile)


def check_int8(cases: list[tuple[CodebookProblem, Tile]], book: tuple[float, float] | Tensor) -> None:
    assert len(cases) > 5
    for problem, tile in cases:
        units = min(tile.capacity, 12) if isinstance(tile, CodebookStreamTile) else 12
        for m in {1, max(1, tile.tokens - 1), tile.tokens}:
            product = Product.random(problem, m, 130, units, seed=m, book=book)
            product.check(product.run(tile), tile)


def mirrored_book(name: str) -> Tensor:
    values = MIRRORED_BOOKS[name]
    return values if len(values) == 16 else torch.cat([values, -values.flip(0)])


@pytest.mark.parametrize("book", BOOKS.values(), ids=BOOKS)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_int8_tokens_and_books_of_all_signs(bits: int, book: tuple[float, float]) -> None:
    check_int8(list(int8_cases(bits)), book)


@pytest.mark.parametrize("book", MIRRORED_BOOKS)
def test_int8_tokens_and_mirrored_books(book: str) -> None:
    check_int8(list(mirrored_int8_cases()), mirrored_book(book))


@pytest.mark.parametrize(("problem", "tile"), list(pair_cases()), ids=lambda v: v.name)
def test_pairs(problem: CodebookProblem, tile: Tile) -> None:
    require(tile)
    most = min(tile.capacity, 12) if isinstance(tile, CodebookStreamTile) else 12
    for m, n, units in ((tile.tokens, 130, most), (1, 657, 1)):
        product = Product.random(problem, m, n, units, seed=n)
        product.check(product.run(tile), tile)


@pytest.mark.parametrize(("problem", "tile"), list(epilogue_cases()), ids=lambda v: v.name)
def test_epilogues(problem: CodebookProblem, tile: Tile) -> None:
    require(tile)
    for m, n, units in ((1, 16, 2), (13, 136, 8), (16, 330 // problem.alignment_n * problem.alignment_n, 5)):
        product = Product.random(problem, m, n, units, seed=n)
        product.check(product.run(tile, extra=problem.alignment_n), tile)


@pytest.mark.parametrize("index", range(len(SHAPES) * 3))
def test_chosen_tiles(index: int) -> None:
    cases = list(chosen_cases())
    if index >= len(cases):
        pytest.skip(f"{arch()} has fewer cases")
    problem, tile, m, n, units = cases[index]
    product = Product.random(problem, m, n, units)
    product.check(product.run(tile), tile)


def test_tiles_that_other_gpus_take() -> None:
    for problem, tile, m, n, units in foreign_cases():
        for tokens in {m, max(1, m - 3)}:
            product = Product.random(problem, tokens, n, units, seed=units)
            product.check(product.run(tile, pdl=tokens == m), tile)


@pytest.mark.parametrize(("slots", "in_pairs"), [(1, False), (1, True), (8, False)])
@pytest.mark.parametrize("x", DTYPES, ids=lambda x: x.value)
@pytest.mark.parametrize("tile", EACH, ids=lambda t: t.name)
def test_identity_tokens_give_the_weights(tile: Tile, x: DType, slots: int, in_pairs: bool) -> None:
    """Every column at its place: token i is only column i, and D the weights, rounded as the family rounds them."""
    require(tile)
    product = Product.random(problem_of(x, slots=slots, in_pairs=in_pairs), 16, 130, 2)
    product.args = {name: torch.ones_like(v) for name, v in product.args.items()}
    for first in range(0, 256, 16):
        product.x = torch.eye(256)[first : first + 16].to(product.x.dtype)
        product.check(product.run(tile), tile)


@pytest.mark.parametrize("x", DTYPES, ids=lambda x: x.value)
@pytest.mark.parametrize("tile", EACH, ids=lambda t: t.name)
def test_tokens_are_independent(tile: Tile, x: DType) -> None:
    require(tile)
    product = Product.random(problem_of(x), 13, 130, 8)
    together = product.run(tile)
    for m in (0, 5, 12):
        assert_same(product.row(m).run(tile)[0], together[m])


@pytest.mark.parametrize("tile", [*EACH, TILES[6]], ids=lambda t: t.name)
def test_dependent_launch(tile: Tile) -> None:
    require(tile)
    product = Product.random(BASE, 8, 657, 8)
    assert_same(product.run(tile, pdl=True), product.run(tile))
