"""Candidates of the tuner on the current CUDA device: operands, exact results, launches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from qcut import jit
from qcut.backends.cuda.launch import plans as launch_plans
from qcut.dispatch import gemm as dispatch
from qcut.dispatch.gemm import Choice
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.families import CUTLASS_FAMILIES
from qcut.numerics import int8 as numerics
from qcut.numerics import int16
from qcut.tuning import timing
from qcut.tuning.search import Task

MAX_COPIES = 32
_OUT = {"f16": torch.float16, "s8": torch.int8, "halves": torch.float16}
_OUT_INV_SCALE, _OUT_ZERO_POINT = 0.5, 3
_SENTINEL = 77


@dataclass
class Operands:
    """Full-range operands of one GEMM: A, copies of B, and the exact result for the first copy.

    Attributes:
        a: A as it lies in memory.
        b: copies of B as they lie in memory.
        vectors: zero_point, colsum, row_scale, col_scale, bias, in the order of `Epilogue.params`; those that the
            problem has.
        lds: leading dimensions of A, B and D.
        d: memory that every candidate writes its result to.
        expected: the exact result.
    """

    a: Tensor
    b: list[Tensor]
    vectors: list[Tensor]
    lds: tuple[int, int, int]
    d: Tensor
    expected: Tensor

    @classmethod
    def of(cls, task: Task) -> Operands:
        """Random operands, seeded by the sizes. The exact sums are computed in float64, which every allowed K fits."""
        m, n, k = task.m, task.n, task.k
        generator = torch.Generator("cuda").manual_seed(m * 31 + n * 7 + k)

        def ints(row_major: bool, rows: int, columns: int) -> Tensor:
            shape = (rows, columns) if row_major else (columns, rows)
            return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda", generator=generator)

        if task.out == "halves":
            return cls._of_halves(task, generator)
        along_k_a, along_k_b, row_d = task.layouts[0] == "t", task.layouts[1] == "n", task.layouts[2] == "t"
        a = ints(along_k_a, m, k)
        b = [ints(along_k_b, n, k) for _ in range(min(MAX_COPIES, timing.rotation(n * k)))]
        a_mk, b_nk = a if along_k_a else a.t(), b[0] if along_k_b else b[0].t()
        if task.problem.a is not DType.S8:
            return cls._of_16_bits(a, b, task)
        zero_point = torch.randint(-128, 128, (m,), dtype=torch.int32, device="cuda", generator=generator)
        colsum = b_nk.sum(1, dtype=torch.int32)
        row_scale = torch.rand(m, device="cuda", generator=generator, dtype=torch.float32) * 1e-2
        col_scale = torch.rand(n, device="cuda", generator=generator, dtype=torch.float32) * 1e-2
        bias = torch.randn(n, device="cuda", generator=generator, dtype=torch.float32)
        expected = numerics.gemm_s8_ref(
            a_mk,
            b_nk,
            zero_point=zero_point,
            colsum=colsum,
            row_scale=row_scale,
            col_scale=col_scale,
            bias=bias,
            out_dtype=_OUT[task.out],
            out_inv_scale=_OUT_INV_SCALE if task.out == "s8" else 1.0,
            out_zero_point=_OUT_ZERO_POINT if task.out == "s8" else 0,
        )
        expected = expected if row_d else expected.t().contiguous()
        lds = (k if along_k_a else m, k if along_k_b else n, n if row_d else m)
        return cls(a, b, [zero_point, colsum, row_scale, col_scale, bias], lds, torch.empty_like(expected), expected)

    @classmethod
    def _of_halves(cls, task: Task, generator: torch.Generator) -> Operands:
        """int16 tokens in blocks of rows of their halves, which lie along K as B does."""
        m, n, k = task.m, task.n, task.k

        def ints(dtype: torch.dtype, lo: int, hi: int, rows: int) -> Tensor:
            return torch.randint(lo, hi + 1, (rows, k), dtype=dtype, device="cuda", generator=generator)

        q = ints(torch.int16, -(2**15), int16.LARGEST, m)
        b = [ints(torch.int8, -128, 127, n) for _ in range(min(MAX_COPIES, timing.rotation(n * k)))]
        row_scale = torch.rand(m, device="cuda", generator=generator, dtype=torch.float32) * 1e-4
        col_scale = torch.rand(n, device="cuda", generator=generator, dtype=torch.float32) * 1e-2
        bias = torch.randn(n, device="cuda", generator=generator, dtype=torch.float32)
        expected = numerics.epilogue_ref(
            (q.double() @ b[0].double().t()).float(),
            row_scale=row_scale,
            col_scale=col_scale,
            bias=bias,
            activation="none",
            out_dtype=_OUT[task.out],
        )
        vectors = [row_scale, col_scale, bias]
        return cls(int16.in_blocks(q), b, vectors, (k, k, n), torch.empty_like(expected), expected)

    @classmethod
    def _of_16_bits(cls, a: Tensor, b: list[Tensor], task: Task) -> Operands:
        """Tokens of small integers with sums below ``2**24``: exact in float32 in any order."""
        limit = max(1, min(8, (2**24 - 1) // (128 * task.k)))
        a = a.remainder(2 * limit + 1) - limit
        col_scale = torch.rand(task.n, device="cuda", dtype=torch.float32) * 1e-2
        bias = torch.randn(task.n, device="cuda", dtype=torch.float32)
        expected = numerics.gemm_s8_ref(a, b[0], col_scale=col_scale, bias=bias, out_dtype=_OUT[task.out])
        lds = (task.k, task.k, task.n)
        return cls(a.half(), b, [col_scale, bias], lds, torch.empty_like(expected), expected)


@dataclass
class CudaBench:
    """The current CUDA device as a `qcut.tuning.search.Bench`. Operands are kept until another task needs its own."""

    device: int = field(default_factory=lambda: torch.cuda.current_device())

    def __post_init__(self) -> None:
        self.target = launch_plans.target(self.device)
        self.clock: timing.Clock = timing.CudaClock()
        self._operands: tuple[Task, Operands] | None = None

    def is_alive(self) -> bool:
        """Whether the device finishes what was queued."""
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def variant(
        self, task: Task, name: str, choice: Choice, source: KernelSource, binary: jit.Binary
    ) -> timing.Variant:
        """The kernel on the task's operands, as a variant with a check that compares every element bitwise."""
        x = self._for(task)
        kernel = jit.load(binary, source, self.device)
        grid = dispatch.grid(choice, task.n, self.target.sm_count)(task.rows)
        requantize = (_OUT_INV_SCALE, float(_OUT_ZERO_POINT)) if task.out == "s8" else ()
        vectors = [vector.data_ptr() for vector in x.vectors]
        a, d = x.a.data_ptr(), x.d.data_ptr()
        sizes = (task.rows, task.n, task.k, *x.lds, *((task.m,) if task.out == "halves" else ()))
        args = [[a, b.data_ptr(), d, *sizes, *vectors, *requantize] for b in x.b]
        workspace = None
        if choice.family in CUTLASS_FAMILIES:
            tail = (self.target.sm_count, choice.swizzle, choice.raster, choice.splits)
            bytes_needed = kernel.query(jit.launch.QUERY_WORKSPACE_BYTES, (*args[0], *tail, 0))
            workspace = torch.empty(bytes_needed, dtype=torch.uint8, device="cuda")
            args = [[*arg, *tail, workspace.data_ptr()] for arg in args]
        pdl = architecture(self.target.arch).pdl and source.waits

        def call(i: int) -> Tensor | None:
            kernel.launch(grid, args[i], torch.cuda.current_stream().cuda_stream, pdl)
            return workspace  # which thereby lives as long as the closure

        def check() -> None:
            x.d.fill_(_SENTINEL)
            call(0)
            if not torch.equal(x.d, x.expected):
                wrong = int((x.d != x.expected).sum())
                raise timing.CheckError(f"{wrong} of {x.d.numel()} elements differ at {task.name}")

        return timing.Variant(name, call, len(args), check)

    def _for(self, task: Task) -> Operands:
        if self._operands is None or self._operands[0] != task:
            self._operands = None  # frees the last task's first
            self._operands = task, Operands.of(task)
        return self._operands[1]
