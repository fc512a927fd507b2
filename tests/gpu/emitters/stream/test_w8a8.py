"""W8A8 of few tokens: bitwise what quantization and the int8 GEMM give one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import best_tile
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType
from qcut.emitters.families import INT8_STREAM
from qcut.emitters.stream.w8a8 import Tokens, W8A8Problem, W8A8Tile
from qcut.numerics import int8 as numerics
from qcut.schemes import padded_k
from tests.gpu.support.launching import Guarded, arch, launch
from tests.gpu.support.oracles import DEVICE, TORCH_DTYPE, Gemm, assert_same, full_range

PLAIN = Epilogue(DType.F16, row_scale="per_token", col_scale="per_channel", bias=True)
KINDS: tuple[Tokens, ...] = ("none", "given", "rows", "floats")


def problem_of(tokens: Tokens, x: DType = DType.F16, aligned: bool = True, absmax: bool = False) -> W8A8Problem:
    """The problem with results of x's type."""
    return W8A8Problem(tokens, x, replace(PLAIN, out=x), aligned, absmax)


class Case:
    """Operands on the CPU."""

    def __init__(self, problem: W8A8Problem, m: int, n: int, k: int, *, seed: int = 0) -> None:
        self.problem, self.m, self.n, self.k, self.padded = problem, m, n, k, padded_k(k)
        generator = torch.Generator().manual_seed(seed + m)
        self.x = torch.randn(m, k + 8, generator=generator).to(TORCH_DTYPE[problem.x])
        self.x[:, k:] = float("nan")
        self.b = torch.zeros(n, self.padded, dtype=torch.int8)
        self.b[:, :k] = full_range(n, k, seed=seed)

    def run(self, tile: W8A8Tile, pdl: bool = False) -> None:
        """Launch twice into guarded memory; bitwise the oracle's result, and its rows' largest magnitudes."""
        problem, out = self.problem, TORCH_DTYPE[self.problem.epilogue.out]
        rows = self.x[:, : self.k]
        q, row_scale = numerics.quantize_per_token_ref(rows, self.padded)
        gemm = Gemm.of(problem.epilogue, q, self.b, 0)
        if "row_scale" in gemm.args:
            gemm.args["row_scale"] = row_scale
        zero_point = gemm.args.get("zero_point")
        if problem.epilogue.zero_point == "per_tensor":
            gemm.args["zero_point"], zero_point = torch.full((self.m,), 5, dtype=torch.int32), 5
        a, k = (self.x, self.k) if problem.quantizes else (q, self.padded)
        values: dict[str, object] = {"m": self.m, "n": self.n, "k": k, "lda": a.stride(0), "ldb": self.padded}
        values |= {"ldd": self.n + 8, "a": a, "b": self.b, "row_scale": row_scale}
        values |= {"col_scale": gemm.args["col_scale"], "bias": gemm.args.get("bias")}
        values |= {"a_absmax": rows.float().abs().amax(1), "zero_point": zero_point}
        values |= {key: gemm.args[key] for key in ("colsum", "out_inv_scale", "out_zero_point") if key in gemm.args}
        on_device = {key: v.to(DEVICE) if isinstance(v, Tensor) else v for key, v in values.items()}
        results = []
        for start in (0.0, 1e30):
            d, absmax = Guarded(self.m, self.n + 8, out), Guarded(1, self.m, torch.float32)
            absmax.tensor.fill_(start)
            on_device |= {"d": d.tensor, "absmax": absmax.tensor}
            arguments = [on_device[p.name] for p in problem.params()]
            launch(INT8_STREAM.emit(problem, tile, arch()), INT8_STREAM.grid(tile, self.n)(self.m), *arguments, pdl=pdl)
            results.append(d.take(self.n))
            noted = torch.full((self.m,), start)
            if problem.absmax:
                numerics.raise_absmax(noted, results[-1])
            assert_same(absmax.take(self.m)[0], noted)
        assert_same(results[0], results[1])
        gemm.check(results[0])


def tile_of(problem: W8A8Problem, m: int, n: int, k: int) -> W8A8Tile:
    """What the model of the memory chooses, for two SMs: several row tiles for each."""
    return best_tile(INT8_STREAM, problem, m, n, k, Target(arch(), 2))


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("absmax", [False, True])
@pytest.mark.parametrize("tokens", KINDS)
def test_tokens(tokens: Tokens, absmax: bool, m: int) -> None:
    problem = problem_of(tokens, absmax=absmax)
    Case(problem, m, 200, 640).run(tile_of(problem, m, 200, 640))


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("m", [9, 16, 17, 32])
def test_several_tiles_of_tokens(m: int, common: bool) -> None:
    tokens = next(size for size in (16, 32) if m <= size)
    for kind in ("none", "given"):
        for tile in (W8A8Tile(2, 5, 1, 2, tokens), W8A8Tile(3, 2, 2, 1, tokens), W8A8Tile(2, 2, 1, 1, tokens, 4)):
            Case(problem_of(kind, absmax=True), m, 152, 1296).run(replace(tile, common_sums=common))


@pytest.mark.parametrize("out", [DType.F16, DType.S8], ids=lambda out: out.value)
@pytest.mark.parametrize("row_scale", ["none", "per_token"])
@pytest.mark.parametrize("zero_point", ["none", "per_tensor", "per_token"])
def test_zero_points_and_int8(zero_point: str, row_scale: str, out: DType) -> None:
    epilogue = replace(PLAIN, zero_point=zero_point, row_scale=row_scale, out=out)
    for m, tile in ((3, W8A8Tile(3, 4, 1, 2, 4, 2)), (20, W8A8Tile(2, 3, 2, 1, 32)), (8, W8A8Tile(5, 5))):
        for kind in ("none", "given"):
            Case(W8A8Problem(kind, DType.F16, epilogue), m, 100, 640).run(tile, pdl=True)


@pytest.mark.parametrize("k", [1, 16, 77, 128, 1000, 1280, 2064, 5121])
def test_columns(k: int) -> None:
    for tokens in ("rows", "floats"):
        problem = problem_of(tokens, aligned=k % 8 == 0)
        for m in (1, 4):
            Case(problem, m, 72, k).run(tile_of(problem, m, 72, k))


def test_aligned_rows_that_end_within_a_vector() -> None:
    for tokens in ("rows", "floats"):
        problem = problem_of(tokens)
        for k in (251, 1283):
            case = Case(problem, 3, 72, k)
            case.x = torch.nn.functional.pad(case.x[:, :k], (0, -k % 8 + 8), value=float("nan"))
            case.run(tile_of(problem, 3, 72, k))


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("x", [DType.BF16, DType.F32], ids=lambda x: x.value)
@pytest.mark.parametrize("tokens", KINDS)
def test_types(tokens: Tokens, x: DType, aligned: bool) -> None:
    problem = problem_of(tokens, x, aligned, absmax=True)
    Case(problem, 3, 100, 520).run(tile_of(problem, 3, 100, 520))


@pytest.mark.parametrize(
    "epilogue",
    [replace(PLAIN, bias=False), replace(PLAIN, activation=Activation.GELU_TANH), replace(PLAIN, out=DType.F32)],
    ids=lambda e: e.name,
)
def test_epilogues(epilogue: Epilogue) -> None:
    for tokens in KINDS[1:]:
        problem = W8A8Problem(tokens, DType.F16, epilogue, absmax=True)
        Case(problem, 2, 90, 304).run(tile_of(problem, 2, 90, 304))


@pytest.mark.parametrize(
    "tile",
    [
        W8A8Tile(1, 1, tokens=8),
        W8A8Tile(3, 2, 1, 2, tokens=4),
        W8A8Tile(2, 4, 2, 1, tokens=4),
        W8A8Tile(5, 3, 1, 3, tokens=8),
    ],
    ids=lambda t: t.name,
)
def test_tiles_and_rounds(tile: W8A8Tile) -> None:
    for tokens in KINDS:
        Case(problem_of(tokens, absmax=True), 4, 150, 1024).run(tile)


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_clusters(splits: int) -> None:
    for tokens in KINDS:
        Case(problem_of(tokens, absmax=True), 3, 150, 3000).run(W8A8Tile(2, 4, 1, 2, 4, splits))


@pytest.mark.parametrize("tokens", KINDS)
def test_dependent_launch_gives_the_same(tokens: Tokens) -> None:
    problem = problem_of(tokens, absmax=True)
    Case(problem, 2, 200, 640).run(tile_of(problem, 2, 200, 640), pdl=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, 1e-7, 65504.0])
def test_rows_that_have_no_scale_or_an_odd_one(bad: float) -> None:
    for tokens in ("rows", "floats"):
        problem = problem_of(tokens, absmax=True)
        case = Case(problem, 3, 64, 256)
        case.x[1, :256] = bad
        case.run(tile_of(problem, 3, 64, 256))
