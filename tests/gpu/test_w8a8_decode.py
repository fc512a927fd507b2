"""W8A8 of few tokens: bitwise what the norm, the quantization and the int8 GEMM give one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from emitters.epilogue import Activation, Epilogue
from emitters.source import DType
from emitters.transformer import NormRows, emit_norm
from emitters.w8a8_decode import (
    Prologue,
    W8A8Problem,
    W8A8Tile,
    chunk_columns,
    emit_w8a8_decode,
    for_shape,
    grid,
)
from qcut import numerics, ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.config import padded_k
from tests.gpu.launching import Guarded, arch, launch
from tests.gpu.oracles import DEVICE, TORCH_DTYPE, Gemm, assert_same, full_range

PLAIN = Epilogue(DType.F16, row_scale="per_token", col_scale="per_channel", bias=True)
MADE: tuple[Prologue, ...] = ("quantize", "gate", "rms", "layer")
EPS = 1e-5


def problem_of(prologue: Prologue, x: DType = DType.F16, aligned: bool = True) -> W8A8Problem:
    """The problem whose results are of x's type."""
    return W8A8Problem(prologue, x, replace(PLAIN, out=x), aligned)


class Case:
    """Operands on the CPU; the tokens that the kernels before would give."""

    def __init__(self, problem: W8A8Problem, m: int, n: int, k: int, *, residual: bool = True, seed: int = 0) -> None:
        self.problem, self.m, self.n, self.k, self.residual = problem, m, n, k, residual
        generator = torch.Generator().manual_seed(seed + m)
        self.dtype = TORCH_DTYPE[problem.x]
        stride = k + 8
        self.x, self.other = (torch.randn(m, stride, generator=generator).to(self.dtype) for _ in range(2))
        self.x[:, k:] = float("nan")
        self.weight, self.bias = (torch.randn(k, generator=generator).to(self.dtype) for _ in range(2))
        self.padded = padded_k(k)
        self.b = torch.zeros(n, self.padded, dtype=torch.int8)
        self.b[:, :k] = full_range(n, k, seed=seed)
        self.sum: Tensor | None = None

    def tokens(self) -> tuple[Tensor, Tensor]:
        """int8 and scales, on the CPU."""
        x, other = self.x[:, : self.k], self.other[:, : self.k]
        kind = self.problem.prologue
        if kind in ("rms", "layer"):
            rows = self.normed()
        elif kind == "gate":
            silu = torch.ops.qcut.silu_mul(x.to(DEVICE), torch.ones_like(x).to(DEVICE)).cpu()
            rows = (silu.float() * other.float()).to(self.dtype)
        else:
            rows = x
        q, scale = numerics.quantize_per_token_ref(rows, self.padded)
        return q, scale

    def normed(self) -> Tensor:
        """By the kernel that does nothing else."""
        x, other = (t[:, : self.k].contiguous().to(DEVICE) for t in (self.x, self.other))
        layer, aligned = self.problem.prologue == "layer", self.k % 8 == 0
        desc = NormRows.for_shape(self.problem.x, layer, arch(), self.k, residual=self.residual, aligned=aligned)
        y, total = torch.empty_like(x), torch.empty_like(x)
        sums = (other, total) if self.residual else ()
        parameters = (self.weight.to(DEVICE), self.bias.to(DEVICE))[: 1 + layer]
        launch(emit_norm(desc), desc.grid(self.m), x, *sums, *parameters, y, self.k, self.k, EPS)
        torch.cuda.synchronize()
        self.sum = total.cpu() if self.residual else None
        return y.cpu()

    def run(self, tile: W8A8Tile, pdl: bool = False) -> None:
        """Launch twice into guarded memory; bitwise the separate kernels' result and sum."""
        q, row_scale = self.tokens()
        problem, out = self.problem, TORCH_DTYPE[self.problem.epilogue.out]
        gemm = Gemm.of(problem.epilogue, q, self.b, 0)
        gemm.args["row_scale"] = row_scale
        kind = problem.prologue
        values: dict[str, object] = {"m": self.m, "n": self.n, "ldb": self.padded, "ldd": self.n + 8, "eps": EPS}
        values |= {
            "k": self.padded if kind == "none" else self.k,
            "lda": self.padded if kind == "none" else self.x.stride(0),
        }
        values |= {"x_stride": self.x.stride(0), "other_stride": self.other.stride(0), "b": self.b}
        values |= {"x": self.x, "other": self.other, "weight": self.weight, "norm_bias": self.bias}
        values |= {"a": q if kind == "none" else self.x}
        values |= {"row_scale": row_scale, "col_scale": gemm.args["col_scale"], "bias": gemm.args.get("bias")}
        on_device = {key: v.to(DEVICE) if isinstance(v, Tensor) else v for key, v in values.items()}
        norm = kind in ("rms", "layer")
        if norm and not self.residual:
            on_device["other"] = 0
        results, sums = [], []
        for _ in range(2):
            d = Guarded(self.m, self.n + 8, out)
            total = Guarded(self.m, self.k, self.dtype)
            on_device |= {"d": d.tensor, "sum": total.tensor}
            arguments = [on_device[p.name] for p in problem.params()]
            launch(emit_w8a8_decode(problem, tile, arch()), grid(tile, self.m, self.n), *arguments, pdl=pdl)
            results.append(d.take(self.n))
            if norm and self.residual:
                sums.append(total.take(self.k))
        assert_same(results[0], results[1])
        gemm.check(results[0])
        if sums:
            assert self.sum is not None
            assert_same(sums[0], self.sum)


def tile_of(problem: W8A8Problem, m: int, n: int, k: int) -> W8A8Tile:
    """What the model of the memory chooses, for two SMs: several row tiles for each."""
    return for_shape(problem, arch(), m, n, k, 2)


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("prologue", [*MADE, "none"])
def test_tokens(prologue: Prologue, m: int) -> None:
    problem = problem_of(prologue)
    Case(problem, m, 200, 640).run(tile_of(problem, m, 200, 640))


@pytest.mark.parametrize("k", [16, 77, 128, 1000, 1280, 2064])
@pytest.mark.parametrize("prologue", MADE)
def test_columns(prologue: Prologue, k: int) -> None:
    problem = problem_of(prologue, aligned=k % 8 == 0)
    for m in (1, 4):
        Case(problem, m, 72, k).run(tile_of(problem, m, 72, k))


@pytest.mark.parametrize("x", [DType.BF16, DType.F32], ids=lambda x: x.value)
@pytest.mark.parametrize("prologue", MADE)
def test_types(prologue: Prologue, x: DType) -> None:
    problem = problem_of(prologue, x)
    Case(problem, 3, 100, 520).run(tile_of(problem, 3, 100, 520))


@pytest.mark.parametrize("prologue", ["rms", "layer"])
def test_norms_of_no_residual(prologue: Prologue) -> None:
    problem = problem_of(prologue)
    Case(problem, 2, 64, 384, residual=False).run(tile_of(problem, 2, 64, 384))


@pytest.mark.parametrize(
    "epilogue",
    [replace(PLAIN, bias=False), replace(PLAIN, activation=Activation.GELU_TANH), replace(PLAIN, out=DType.F32)],
    ids=lambda e: e.name,
)
def test_epilogues(epilogue: Epilogue) -> None:
    problem = W8A8Problem("quantize", DType.F16, epilogue)
    Case(problem, 2, 90, 304).run(tile_of(problem, 2, 90, 304))


@pytest.mark.parametrize(
    "tile",
    [
        W8A8Tile(1, 1, tokens=8, columns=1024),
        W8A8Tile(3, 2, 1, 2, tokens=4, columns=1024),
        W8A8Tile(2, 4, 2, 1, tokens=4, columns=1024),
        W8A8Tile(5, 3, 1, 3, tokens=8, columns=1280),
    ],
    ids=lambda t: t.name,
)
def test_tiles_and_rounds(tile: W8A8Tile) -> None:
    for prologue in MADE:
        Case(problem_of(prologue), 4, 150, 1024).run(tile)


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_clusters(splits: int) -> None:
    for prologue in ("layer", "none"):
        problem = problem_of(prologue)
        columns = 0 if prologue == "none" else -(-3000 // chunk_columns(DType.F16)) * chunk_columns(DType.F16)
        Case(problem, 3, 150, 3000).run(W8A8Tile(2, 4, 1, 2, 4, columns, splits))


@pytest.mark.parametrize("prologue", MADE)
def test_dependent_launch_gives_the_same(prologue: Prologue) -> None:
    problem = problem_of(prologue)
    Case(problem, 2, 200, 640).run(tile_of(problem, 2, 200, 640), pdl=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_rows_that_have_no_scale(bad: float) -> None:
    problem = problem_of("quantize")
    case = Case(problem, 3, 64, 256)
    case.x[1, :256] = bad
    case.run(tile_of(problem, 3, 64, 256))
