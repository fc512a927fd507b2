"""`qcut.ops.gemm` on CUDA, and the choice of kernels for int8 products, which linear layers share."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from qcut import jit
from qcut.backends.cuda.launch.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, has_pdl, m_bucket, target
from qcut.backends.cuda.operands import dense
from qcut.common.locks import once
from qcut.dispatch import ahead_of_time
from qcut.dispatch import gemm as dispatch
from qcut.dispatch.gemm import Choice
from qcut.dispatch.gpus import Target
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType
from qcut.emitters.families import (
    CUTLASS_FAMILIES,
    FP8_CUTLASS,
    INT8_CUTLASS,
    W8A16_CUTLASS,
    W8A16_MMA,
    W8A16_STREAM,
    W8A16_WGMMA,
)
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from qcut.emitters.stream.w8a8 import Tokens
from qcut.ops.gemm import GemmS8Op
from qcut.ops.registry import serves
from qcut.schemes import padded_k

TMA_ROWS = 64
"""Least rows of a tile that loads A by TMA."""

_OF_BYTES = (INT8_CUTLASS.name, FP8_CUTLASS.name)
"""Families that load by TMA what other kernels of the layer wrote, into memory of whole tiles."""

FALLBACK_ROWS = (64, 512, 4096)
"""Rows that fallbacks are chosen for, so that three kernels serve any number of rows while better ones are built."""

_plans: PlanCache[LaunchPlan] = PlanCache()

# ── kernels ──────────────────────────────────────────────────────────────────────────────────────


@once
def has_cutlass() -> bool:
    """Whether CUTLASS's kernels can be built here. Warns once if they cannot."""
    missing = jit.missing_toolchain("nvcc")
    if missing is not None:
        warnings.warn(
            f"qcut: int8 GEMMs run on the raw kernels instead of CUTLASS's: {missing}",
            RuntimeWarning,
            stacklevel=2,
        )
    return missing is None


class Product(NamedTuple):
    """An int8 product of up to ``rows`` rows: all that chooses its kernel.

    Attributes:
        problem: types, layouts, alignments and epilogue.
        rows: rows of D, and of A where tokens are not in halves.
        n: columns of B and D.
        k: summed over, with the operands' padding.
        tensor_cores: False asks for the dp4a kernels.
    """

    problem: GemmProblem
    rows: int
    n: int
    k: int
    tensor_cores: bool = True

    def spec(self, gpu: Target, *, cutlass: bool | None = None) -> LaunchSpec:
        """The launch that dispatch chooses; ``cutlass`` says whether CUTLASS's kernels serve; None asks."""
        few = self.stream_spec("none", gpu) if self.tensor_cores else None
        if few is not None:
            return few
        if cutlass is None:
            cutlass = ahead_of_time.serves_cutlass(self.problem, gpu, has_cutlass)
        sizes = (self.problem.epilogue.rows(self.rows), self.n, self.k)
        choice = dispatch.select_gemm(self.problem, *sizes, gpu, cutlass=cutlass, tensor_cores=self.tensor_cores)
        spec = chosen_spec(choice, self.problem, self.n, gpu)
        return replace(spec, fallback=lambda: self.fallback(gpu)) if choice.family == INT8_CUTLASS.name else spec

    def fallback(self, gpu: Target) -> LaunchSpec:
        """The launch that serves while nvcc builds the chosen kernel; one of few serves products of any rows."""
        return chosen_spec(self.fallback_choice(gpu), self.problem, self.n, gpu)

    def fallback_choice(self, gpu: Target) -> Choice:
        """The kernel of `fallback`: the best for one of `FALLBACK_ROWS` among those that NVRTC builds."""
        of_a = self.problem.epilogue.rows(self.rows)
        rows = next((rows for rows in FALLBACK_ROWS if of_a <= rows), FALLBACK_ROWS[-1])
        return dispatch.select_gemm(self.problem, rows, self.n, self.k, gpu, cutlass=False)

    def stream_spec(
        self,
        tokens: Tokens,
        gpu: Target,
        *,
        aligned: bool = True,
        absmax: bool = False,
        early_read: bool = False,
        rotates: int = 0,
    ) -> LaunchSpec | None:
        """The launch of the kernel that streams weights past few tokens, or None if it does not serve the product.

        Args:
            tokens: how tokens are given and quantized, see `qcut.emitters.stream.w8a8`.
            gpu: the GPU.
            aligned: whether rows of tokens start at multiples of 16 bytes.
            absmax: whether the kernel also computes the largest magnitude of each row of its result.
            early_read: whether the kernel may begin before its predecessor ends, and read the weight then. A kernel
                that takes tokens as ``none`` reads nothing so early, and always may.
            rotates: columns of a group of the rotation that the kernel applies to its one token; 0: none.
        """
        sizes = (self.rows, self.n, self.k)
        found = dispatch.few_tokens(self.problem, *sizes, gpu, tokens, aligned=aligned, absmax=absmax, rotates=rotates)
        if found is None:
            return None
        problem, tail = ahead_of_time.bounded_problem(found[0], gpu)
        source, grid = dispatch.emit(found[1], problem, gpu.arch), dispatch.grid(found[1], self.n, gpu.sm_count)
        return LaunchSpec(source, grid, tail=tail, pdl=has_pdl(gpu) and (early_read or tokens == "none"))


def w8a16_spec(problem: GemmProblem, rows: int, n: int, k: int, gpu: Target, *, pdl: bool = True) -> LaunchSpec:
    """The launch of a product of 16-bit tokens with int8 weights; ``pdl`` allows an early start."""
    nvcc = architecture(gpu.arch).wgmma and ahead_of_time.serves_cutlass(problem, gpu, has_cutlass)
    choice = dispatch.select_w8a16(problem, rows, n, k, gpu, nvcc=nvcc)
    return _spec_of_bytes(choice, problem, rows, n, k, gpu, pdl)


def fp8_spec(
    problem: GemmProblem, rows: int, n: int, k: int, gpu: Target, *, pdl: bool = True
) -> tuple[DType, LaunchSpec]:
    """The type that tokens of e4m3 have, which is e4m3 or f16, and the launch of their product with e4m3 weights."""
    nvcc = architecture(gpu.arch).wgmma and ahead_of_time.serves_cutlass(problem, gpu, has_cutlass)
    problem, choice = dispatch.select_fp8(problem, rows, n, k, gpu, nvcc=nvcc)
    return problem.a, _spec_of_bytes(choice, problem, rows, n, k, gpu, pdl)


def _spec_of_bytes(
    choice: Choice, problem: GemmProblem, rows: int, n: int, k: int, gpu: Target, pdl: bool
) -> LaunchSpec:
    """The launch of a choice; that of another kernel for the same operands serves while nvcc builds the chosen one."""
    spec = chosen_spec(choice, problem, n, gpu, pdl=pdl)
    if choice.family not in (W8A16_CUTLASS.name, W8A16_WGMMA.name, FP8_CUTLASS.name):
        return spec

    def fallback() -> LaunchSpec:
        sizes = (next((bound for bound in FALLBACK_ROWS if rows <= bound), FALLBACK_ROWS[-1]), n, k)
        if problem.a is DType.E4M3:
            _, other = dispatch.select_fp8(problem, *sizes, gpu, nvcc=False)
        else:
            other = dispatch.select_w8a16(problem, *sizes, gpu, nvcc=False)
        return chosen_spec(other, problem, n, gpu, pdl=pdl)

    return replace(spec, fallback=fallback)


def chosen_spec(choice: Choice, problem: GemmProblem, n: int, gpu: Target, *, pdl: bool = True) -> LaunchSpec:
    """The launch of the kernel that ``choice`` names; ``pdl`` lets it begin before its predecessor ends."""
    problem, tail = ahead_of_time.bounded_problem(problem, gpu, element_stores=choice.family == W8A16_STREAM.name)
    source = dispatch.emit(choice, problem, gpu.arch)
    # Started early, w8a16_mma took 1.7 to 2.4 times as long (14336×4096, M = 64).
    pdl = pdl and has_pdl(gpu) and source.waits and choice.family != W8A16_MMA.name
    grid = dispatch.grid(choice, n, gpu.sm_count)
    of_token = 2 if problem.epilogue.halves else 1  # rows of A for each token
    grid = replace(grid, rows=max(1, grid.rows // of_token))
    if choice.family not in CUTLASS_FAMILIES:
        return LaunchSpec(source, grid, tail=tail, pdl=pdl)
    assert isinstance(choice.tile, TileConfig)
    return LaunchSpec(
        source,
        grid,
        tail=(*tail, gpu.sm_count, choice.swizzle, choice.raster, choice.splits),
        needs_workspace=choice.tile.schedule == "stream_k",
        pdl=pdl,
        row_multiple=max(1, tma_rows(choice.tile) // of_token) if choice.family in _OF_BYTES else 1,
    )


def tma_rows(tile: TileConfig) -> int:
    """The rows of A should be a multiple of this number: a box of TMA that hangs over the edge of A loads slower.

    A row past the edge took 15 cycles of an H200, one that is there 2 (docs/kernel-notes/int8-gemm.md).
    """
    return 1 if tile.schedule == "multistage" else tile.threadblock_shape[0] * tile.cluster_shape[0]


def plan_for(product: Product, choice: Choice | None, device: int) -> LaunchPlan:
    """The launch plan of a product on a device, with the kernel ``choice``; None lets dispatch choose."""
    gpu = target(device)
    if choice is None:
        return product.spec(gpu).load(device)
    return chosen_spec(choice, product.problem, product.n, gpu).load(device)


# ── operands ─────────────────────────────────────────────────────────────────────────────────────


class Operand(NamedTuple):
    """An int8 matrix ``[rows, K]`` as kernels take it.

    Attributes:
        q: the matrix, or a contiguous copy if the matrix is contiguous along neither side.
        along_k: whether contiguous elements run along K; otherwise they run along the rows' index.
        ld: leading dimension: elements from one run to the next.
        alignment: bytes, 16, 8, 4, 2 or 1; all runs start and end at multiples of it.
    """

    q: Tensor
    along_k: bool
    ld: int
    alignment: int

    @classmethod
    def of(cls, q: Tensor) -> Operand:
        """The operand of a matrix with any strides."""
        (rows, k), (row_stride, k_stride) = q.shape, q.stride()
        sides = ((True, k_stride, k, row_stride, rows), (False, row_stride, rows, k_stride, k))
        for along_k, step, run, ld, runs in sides:
            if (step == 1 or run == 1) and (ld >= run or runs == 1):
                ld = padded_k(run) if runs == 1 else ld
                return cls(q, along_k, ld, dispatch.alignment_of(q.data_ptr() | ld | run))
        return cls.of(q.contiguous())


def gemm_problem(a: Tensor, b: Tensor, epilogue: Epilogue, out_layout: Literal["row", "column"]) -> GemmProblem:
    """The description of the product of two operands with a contiguous D, by which kernels are chosen and emitted."""
    return _problem(Operand.of(a), Operand.of(b), epilogue, out_layout)


def _problem(left: Operand, right: Operand, epilogue: Epilogue, out_layout: Literal["row", "column"]) -> GemmProblem:
    return GemmProblem(
        epilogue=epilogue,
        alignment_k=min(left.alignment, right.alignment),
        alignment_n=dispatch.alignment_of(len(right.q) if out_layout == "row" else len(left.q)),
        layout_a="row" if left.along_k else "column",
        layout_b="column" if right.along_k else "row",
        layout_d=out_layout,
    )


# ── the operator ─────────────────────────────────────────────────────────────────────────────────


def _epilogue(call: GemmS8Op) -> Epilogue:
    return Epilogue(
        out=DTYPES[call.dtype],
        row_scale="none" if call.row_scale is None else "per_token",
        col_scale="none" if call.col_scale is None else "per_channel",
        zero_point="none" if call.zero_point is None else "per_token",
        bias=call.bias is not None,
        activation=Activation(call.activation),
        residual=call.residual is not None,
        wrap=call.wrap,
    )


@serves(GemmS8Op)
def gemm_s8(call: GemmS8Op, choice: Choice | None = None) -> Tensor:
    """Compute the operator, with the kernel ``choice`` where one is given, else with the one dispatch chooses."""
    call.check()
    (m, k), n, device = call.a.shape, call.b.shape[0], call.a.get_device()
    out = call.fake()
    if m == 0:
        return out
    left, right = Operand.of(call.a), Operand.of(call.b)
    out_layout = cast(Literal["row", "column"], call.out_layout)
    ldd, residual = n if out_layout == "row" else m, call.residual
    if residual is not None and out_layout == "column":
        residual = residual.t()
    # In the order of Epilogue.params().
    vectors = (call.zero_point, call.colsum, call.row_scale, call.col_scale, call.bias, residual)
    fused = tuple(vector is not None for vector in vectors)
    memory = (left.along_k, left.alignment, right.along_k, right.alignment, out_layout, dispatch.alignment_of(ldd))
    options = (call.dtype, call.wrap, call.activation, call.tensor_cores, choice)
    key = (fused, memory, options, m_bucket(m), n, k, device)
    plan = _plans.get(key)
    if plan is None:
        problem = _problem(left, right, _epilogue(call), out_layout)
        product = Product(problem, m_bucket(m), n, k, call.tensor_cores)
        plan = _plans.make(key, lambda: plan_for(product, choice, device))
    kept = [dense(vector) for vector in vectors if vector is not None]  # until the launch is queued
    requantize = (call.out_inv_scale, float(call.out_zero_point)) if call.dtype is torch.int8 and not call.wrap else ()
    args = (left.q.data_ptr(), right.q.data_ptr(), out.data_ptr(), m, n, k, left.ld, right.ld, ldd)
    plan.run(m, (*args, *(vector.data_ptr() for vector in kept), *requantize), device)
    return out
