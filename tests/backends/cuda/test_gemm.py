"""`qcut.backends.cuda.gemm`: launches of strided operands on a kernel of numpy, and the choice of kernels."""

from __future__ import annotations

import ctypes
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qcut
from qcut import errors
from qcut.backends.cuda import gemm as gemm_cuda
from qcut.backends.cuda.gemm import Operand, Product, chosen_spec
from qcut.backends.cuda.launch.plans import LaunchPlan, PlanCache
from qcut.backends.cuda.linear import linear_problem
from qcut.dispatch import gemm as dispatch
from qcut.dispatch.gemm import Choice
from qcut.dispatch.gpus import Target
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType
from qcut.emitters.gemm.problem import GemmProblem
from qcut.ops.gemm import GemmS8Op
from tests.support.fakes.launches import H200
from tests.support.operands import LAYOUTS, OUT_LAYOUT, SHAPES, operands, stored
from tests.support.oracles import epilogue_oracle, s8


def at(address: int, shape: tuple[int, int], row_major: bool, ld: int, dtype: Any) -> np.ndarray:
    """The matrix at an address, as a kernel sees it."""
    runs, run = shape if row_major else shape[::-1]
    dtype = np.dtype(dtype)
    size = ((runs - 1) * ld + run) * dtype.itemsize
    flat = np.frombuffer((ctypes.c_char * size).from_address(address), dtype)
    matrix = np.lib.stride_tricks.as_strided(flat, (runs, run), (ld * dtype.itemsize, dtype.itemsize))
    return matrix if row_major else matrix.T


NUMPY = {DType.S8: np.int8, DType.S32: np.int32, DType.F16: np.float16, DType.F32: np.float32}
TORCH = {DType.S8: torch.int8, DType.F16: torch.float16, DType.F32: torch.float32}


class NumpyKernel:
    """A launch plan with numpy as its kernel, on the addresses it is given; it checks what the problem promises."""

    def __init__(self, product: Product, choice: Choice | None, launches: list[Any]) -> None:
        self.problem, self.sizes = product.problem, (product.rows, product.n, product.k)
        self.options = {"tensor_cores": product.tensor_cores, "choice": choice}
        self.launches = launches

    def run(self, m: int, args: tuple[Any, ...], device: int) -> None:
        problem, epilogue = self.problem, self.problem.epilogue
        call = {p.name: value for p, value in zip(problem.params(), args, strict=True)}
        self.launches.append((self, call))
        n, k = call["n"], call["k"]
        assert m == call["m"] <= self.sizes[0]
        assert (n, k) == self.sizes[1:]
        a_row, b_row, d_row = (flag == "t" for flag in problem.layouts)
        for address, ld, run in (
            (call["a"], call["lda"], k if a_row else m),
            (call["b"], call["ldb"], n if b_row else k),
        ):
            assert ld >= run
            assert all(value % problem.alignment_k == 0 for value in (address, ld, run))
        assert call["ldd"] == (n if d_row else m)
        assert call["ldd"] % problem.alignment_n == 0
        a = at(call["a"], (m, k), a_row, call["lda"], np.int8)
        b = at(call["b"], (k, n), b_row, call["ldb"], np.int8)
        d = at(call["d"], (m, n), d_row, call["ldd"], NUMPY[epilogue.out])
        exact = a.astype(np.int64) @ b.astype(np.int64)
        d[:] = exact.astype(d.dtype) if epilogue.is_raw else self.fused(exact, call, d_row)

    def fused(self, exact: np.ndarray, call: dict[str, Any], d_row: bool) -> np.ndarray:
        m, n = exact.shape
        out = self.problem.epilogue.out

        def vector(name: str, size: int, dtype: Any = np.float32) -> Tensor | None:
            if name not in call:
                return None
            assert call[name] % 16 == 0
            return torch.from_numpy(at(call[name], (1, size), True, size, dtype)[0].copy())

        residual = None
        if "residual" in call:
            assert call["residual"] % 16 == 0
            residual = torch.from_numpy(at(call["residual"], (m, n), d_row, call["ldd"], NUMPY[out]).copy())
        return epilogue_oracle(
            exact,
            vector("zero_point", m, np.int32),
            vector("colsum", n, np.int32),
            vector("row_scale", m),
            vector("col_scale", n),
            vector("bias", n),
            self.problem.epilogue.activation.value,
            residual,
            TORCH[out],
            call.get("out_inv_scale", 1.0),
            call.get("out_zero_point", 0.0),
        ).numpy()


class Cuda:
    """The CUDA implementation on CPU tensors, its launch plans made of `NumpyKernel`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[NumpyKernel] = []
        self.launches: list[tuple[NumpyKernel, dict[str, Any]]] = []
        monkeypatch.setattr(gemm_cuda, "_plans", PlanCache())
        monkeypatch.setattr(gemm_cuda, "plan_for", self.plan_for)

    def plan_for(self, product: Product, choice: Choice | None, device: int) -> NumpyKernel:
        self.plans.append(NumpyKernel(product, choice, self.launches))
        return self.plans[-1]

    def __call__(self, a: Tensor, b: Tensor, choice: Choice | None = None, **options: Any) -> Tensor:
        return gemm_cuda.gemm_s8(GemmS8Op(a, b, **options), choice)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_a_launch_sees_the_operands_where_they_are(cuda: Cuda, layouts: str) -> None:
    memories = ({}, {"ld": 64}, {"ld": 56, "offset": 16}, {"ld": 53, "offset": 3})
    outputs = ({"out_dtype": torch.int32}, {"out_dtype": torch.int8, "wrap": True}, {"out_dtype": torch.float32})
    for shape, memory, output in itertools.product(SHAPES, memories, outputs):
        a, b = operands(layouts, *shape, **memory)
        options = {**output, "out_layout": OUT_LAYOUT[layouts[2]]}
        got = cuda(a, b, **options)
        plan, call = cuda.launches[-1]
        assert (call["a"], call["b"], call["d"]) == (a.data_ptr(), b.data_ptr(), got.data_ptr()), "something was copied"
        want = qcut.gemm_s8(a, b, **options)
        assert got.stride() == want.stride()
        assert torch.equal(got, want)
        if min(shape) > 1:
            assert plan.problem.layouts == layouts


def test_launch_gets_epilogue_arguments_in_kernel_order(cuda: Cuda) -> None:
    a, b = operands("tn", 6, 10, 33)
    wide = torch.rand(6, 2)
    vectors = {
        "zero_point": torch.arange(-3, 3, dtype=torch.int32),
        "colsum": b.sum(1, dtype=torch.int32),
        "row_scale": wide[:, 1],
        "col_scale": torch.rand(11)[1:] * 1e-3,
        "bias": torch.randn(10),
        "activation": "relu",
    }
    cases = (
        {"residual": torch.randn(6, 10).half(), "out_dtype": torch.float16},
        {"residual": torch.randn(10, 6).t(), "out_dtype": torch.float32},
        {"out_dtype": torch.int8, "out_inv_scale": 3.5, "out_zero_point": -7},
    )
    for case in cases:
        for out_layout in ("row", "column"):
            options = {**vectors, **case, "out_layout": out_layout}
            assert torch.equal(cuda(a, b, **options), qcut.gemm_s8(a, b, **options))


@pytest.mark.parametrize("along_k", [True, False])
def test_alignment_divides_address_leading_dimension_and_extent(along_k: bool) -> None:
    def alignment(extent: int, ld: int, offset: int) -> int:
        rows, columns = (5, extent) if along_k else (extent, 5)
        return Operand.of(stored(rows, columns, along_k, ld=ld, offset=offset)).alignment

    assert alignment(48, 64, 32) == 16
    assert alignment(40, 64, 32) == 8
    assert alignment(48, 52, 32) == 4
    assert alignment(48, 64, 2) == 2
    assert alignment(47, 64, 32) == 1
    if along_k:
        one_row = Operand.of(stored(1, 48, True, ld=57))
        assert one_row.alignment == 16, "one row has no leading dimension to speak of"
        assert one_row.ld == 48


@pytest.mark.parametrize(
    "view",
    [
        lambda q: q[:, ::2],
        lambda q: q[:, :1].expand(-1, 20),
        lambda q: q[:1].expand(6, -1)[:, :20],
        lambda q: q.as_strided((6, 20), (7, 1)),
        lambda q: q.as_strided((6, 20), (1, 5)),
    ],
    ids=["step", "one_column", "one_row", "overlapping_rows", "overlapping_columns"],
)
def test_what_is_contiguous_nowhere_is_copied(cuda: Cuda, view: Any) -> None:
    a, b = view(s8(8, 40)), s8(5, 20)
    assert torch.equal(cuda(a, b, out_dtype=torch.int32), qcut.gemm_s8(a, b, out_dtype=torch.int32))
    _, call = cuda.launches[-1]
    assert call["a"] != a.data_ptr()
    assert call["b"] == b.data_ptr()


def test_plan_serves_calls_with_equal_assumptions(cuda: Cuda) -> None:
    a, b = operands("tn", 32, 48, 64)
    for _ in range(3):
        cuda(a, b)
    cuda(a[:20], b)  # the same bucket of rows
    cuda(s8(32, 80)[:, :64], b)  # another leading dimension
    assert len(cuda.plans) == 1
    choice = Choice("int8_mma", None)
    others = (
        lambda: cuda(stored(32, 64, False), b),
        lambda: cuda(a, stored(48, 64, False)),
        lambda: cuda(a, stored(48, 64, True, offset=1)),
        lambda: cuda(a, b, out_layout="column"),
        lambda: cuda(a[:31], b, out_layout="column"),
        lambda: cuda(a, b, out_dtype=torch.int32),
        lambda: cuda(a, b, out_dtype=torch.int8),
        lambda: cuda(a, b, out_dtype=torch.int8, wrap=True),
        lambda: cuda(a, b, tensor_cores=False),
        lambda: cuda(a, b, choice=choice),
        lambda: cuda(a, b, bias=torch.zeros(48)),
    )
    for expected, other in enumerate(others, 2):
        other()
        other()
        assert len(cuda.plans) == expected
    assert cuda.plans[9].options == {"tensor_cores": False, "choice": None}
    assert cuda.plans[10].options == {"tensor_cores": True, "choice": choice}


def test_no_rows_need_no_kernel(cuda: Cuda) -> None:
    for out_layout, strides in (("row", (7, 1)), ("column", (1, 1))):
        got = cuda(s8(0, 16), s8(7, 16), out_layout=out_layout)
        assert (got.shape, got.stride()) == ((0, 7), strides)
    assert not cuda.plans


def test_refused_before_any_plan_is_made(cuda: Cuda) -> None:
    with pytest.raises(errors.ConfigError, match="out_layout is 'col'"):
        cuda(s8(3, 16), s8(7, 16), out_layout="col")
    with pytest.raises(errors.QuantizationError, match="K is 131072"):
        cuda(s8(1, 131_072), s8(1, 131_072), out_dtype=torch.int32)
    assert not cuda.plans


def test_a_launch_covers_the_result() -> None:
    tile = dispatch.family("int8_mma").menu(GemmProblem(), "sm_90a")[0]
    spec = chosen_spec(Choice("int8_mma", tile), GemmProblem(), 96, Target("sm_90a", 132, "NVIDIA H200"))
    launches: list[Any] = []

    class Kernel:
        def launch(self, *args: Any) -> None:
            launches.append(args)

    LaunchPlan(Kernel(), spec).launch(33, (1, 2), 5)
    bm, bn, _ = tile.threadblock_shape
    tiles = math.ceil(33 / bm) * math.ceil(96 / bn) * tile.splits
    assert launches == [((tiles, 1, 1), (1, 2), 5, True)]


def test_few_tokens_take_the_streaming_kernel() -> None:
    problem = linear_problem(DType.F16, 4096, 4096, True, "none", "w8a8")

    def streamed(problem: GemmProblem, m: int) -> bool:
        return Product(problem, m, 4096, 4096).stream_spec("none", H200) is not None

    for m in (1, 8):
        product = Product(problem, m, 4096, 4096)
        assert streamed(problem, m)
        assert product.spec(H200, cutlass=True) == product.stream_spec("none", H200)
        kernels = {
            spec.source.name for tokens in ("none", "given", "rows") if (spec := product.stream_spec(tokens, H200))
        }
        assert len(kernels) == 3
    assert streamed(problem, 16)
    assert not streamed(problem, 17)
    small = Product(linear_problem(DType.F16, 1280, 1280, True, "none", "w8a8"), 32, 1280, 1280)
    assert small.stream_spec("given", H200) is not None
    assert small._replace(rows=33).stream_spec("given", H200) is None
    for other in (
        replace(problem, layout_b="row"),
        replace(problem, layout_d="column"),
        replace(problem, alignment_k=8),
        replace(problem, epilogue=Epilogue(DType.F16)),
        replace(problem, epilogue=Epilogue(DType.S32)),
        replace(problem, epilogue=replace(problem.epilogue, residual=True)),
    ):
        assert not streamed(other, 1)
    assert streamed(replace(problem, epilogue=replace(problem.epilogue, out=DType.S8)), 1)
    assert streamed(linear_problem(DType.F16, 4096, 4096, True, "none", "w8a8_static"), 1)
