"""CUDA implementations of the operators in `qcut.ops`, imported at the first CUDA call.

A call is a dictionary look-up, one allocation for the result (and one for quantized activations), and
one or two launches on the current stream. A miss makes a launch plan first (`qcut.cuda.plans`) and, for
a linear operator, hands it to `qcut.cuda.native`, which serves the calls that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from qcut.config import padded_k
from qcut.cuda import native as _native
from qcut.cuda import plans as launch_plans
from qcut.cuda.plans import DTYPES, Kind, LaunchPlan, m_bucket, target
from qcut.dispatch import gemm as dispatch
from qcut.dispatch.gemm import Choice
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.family import Grid
from qcut.emitters.core.source import DType
from qcut.emitters.decoder.quantize import (
    ColSum,
    Dequantize,
    QuantizePerTensor,
    QuantizePerToken,
    emit_colsum,
    emit_dequantize,
    emit_quantize_per_tensor,
    emit_quantize_per_token,
)
from qcut.emitters.gemm.problem import GemmProblem
from qcut.errors import DeviceError, DtypeError, ShapeError

_plans: dict[tuple[Any, ...], Any] = {}
_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream


def _plan(key: tuple[Any, ...], make: Callable[[], LaunchPlan]) -> LaunchPlan:
    with launch_plans.lock:
        plan: LaunchPlan | None = _plans.get(key)
        if plan is None:
            plan = _plans[key] = make()
    return plan


def _run(plan: LaunchPlan, m: int, args: tuple[int | float, ...], device: int) -> None:
    if plan.needs_workspace:
        workspace = torch.empty(plan.workspace_bytes(args), dtype=torch.uint8, device=torch.device("cuda", device))
        plan.launch(m, args, _stream(device), workspace.data_ptr())
    else:
        plan.launch(m, args, _stream(device))


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """x as rows with unit stride along K, and the stride between rows; copies only what has no such view."""
    if not x.is_contiguous():
        if x.dim() == 2 and x.stride(1) == 1:
            return x, x.stride(0)
        x = x.contiguous()
    return x, x.shape[-1]


def _sizes(op: str, x: Tensor) -> tuple[int, int]:
    """Rows and columns of x ``[..., K]``."""
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ShapeError(f"qcut::{op}: x has shape {list(x.shape)}; allowed: [..., K] with K >= 1")
    k = x.shape[-1]
    return x.numel() // k, k


def dense(t: Tensor) -> Tensor:
    """The tensor itself where vector loads may read it, else a copy: a view can start anywhere."""
    return t if t.is_contiguous() and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


def _dense_parameters(*tensors: Tensor | None) -> list[Any] | None:
    """The tensors with copies of those that vector loads cannot read, or None where all are fine."""
    made = [t if t is None else dense(t) for t in tensors]
    return None if all(a is b for a, b in zip(made, tensors, strict=True)) else made


def _is_aligned(x: Tensor, stride: int, k_padded: int) -> bool:
    return x.data_ptr() % 16 == 0 and stride * x.element_size() % 16 == 0 and k_padded % 16 == 0


def _check_devices(op: str, first: Tensor, *others: Tensor | None) -> int:
    device = first.device
    for other in others:
        if other is not None and other.device != device:
            raise DeviceError(f"qcut::{op}: tensors on {device} and {other.device}; all of one call share a device")
    index: int = first.get_device()
    return index


def _float_dtype(op: str, x: Tensor, allowed: tuple[torch.dtype, ...]) -> DType:
    if x.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise DtypeError(f"qcut::{op}: x is {x.dtype}; allowed on CUDA: {names}")
    return DTYPES[x.dtype]


_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


# ── quantize, dequantize, sum ────────────────────────────────────────────────────────────────────


def _per_token_plan(dtype: DType, m: int, k_padded: int, aligned: bool, device: int) -> LaunchPlan:
    key = ("per_token", dtype, m_bucket(m), k_padded, aligned, device)
    plan = _plans.get(key)
    if plan is None:

        def make() -> LaunchPlan:
            gpu = target(device)
            desc = QuantizePerToken.for_shape(
                dtype, gpu.arch, m_bucket(m), k_padded, aligned=aligned, sm_count=gpu.sm_count
            )
            kernel = launch_plans.load(emit_quantize_per_token(desc), device)
            return LaunchPlan(kernel, Grid(desc.rows, desc.grid(1, k_padded)), pdl=architecture(gpu.arch).pdl)

        plan = _plan(key, make)
    return plan


def _per_tensor_plan(dtype: DType, k_padded: int, aligned: bool, device: int) -> LaunchPlan:
    key = ("per_tensor", dtype, k_padded, aligned, device)
    plan = _plans.get(key)
    if plan is None:

        def make() -> LaunchPlan:
            gpu = target(device)
            desc = QuantizePerTensor.for_shape(dtype, gpu.arch, 1, k_padded, aligned=aligned)
            kernel = launch_plans.load(emit_quantize_per_tensor(desc), device)
            return LaunchPlan(kernel, Grid(desc.rows, desc.grid(1, k_padded)), pdl=architecture(gpu.arch).pdl)

        plan = _plan(key, make)
    return plan


def quantize_per_token(x: Tensor, k_padded: int) -> tuple[Tensor, Tensor]:
    dtype = _float_dtype("quantize_per_token", x, _FLOATS)
    m, k = _sizes("quantize_per_token", x)
    if k_padded < k:
        raise ShapeError(f"qcut::quantize_per_token: k_padded is {k_padded}; allowed: at least K = {k}")
    device = x.get_device()
    q = torch.empty((m, k_padded), dtype=torch.int8, device=x.device)
    scale = torch.empty((m,), dtype=torch.float32, device=x.device)
    if m:
        x, stride = _rows(x)
        plan = _per_token_plan(dtype, m, k_padded, _is_aligned(x, stride, k_padded), device)
        _run(plan, m, (x.data_ptr(), q.data_ptr(), scale.data_ptr(), stride, m, k, k_padded), device)
    return q, scale


def quantize_per_tensor(x: Tensor, scale: float, zero_point: int, k_padded: int) -> Tensor:
    dtype = _float_dtype("quantize_per_tensor", x, _FLOATS)
    m, k = _sizes("quantize_per_tensor", x)
    if k_padded < k:
        raise ShapeError(f"qcut::quantize_per_tensor: k_padded is {k_padded}; allowed: at least K = {k}")
    device = x.get_device()
    q = torch.empty((m, k_padded), dtype=torch.int8, device=x.device)
    if m:
        x, stride = _rows(x)
        plan = _per_tensor_plan(dtype, k_padded, _is_aligned(x, stride, k_padded), device)
        _run(plan, m, (x.data_ptr(), q.data_ptr(), stride, m, k, k_padded, scale, zero_point), device)
    return q


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    device = _check_devices("dequantize", q, scale)
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    if out.numel():
        q, stride = _rows(q)
        rows, columns = q.shape
        aligned = stride % 8 == 0 and q.data_ptr() % 8 == 0 and columns * out.element_size() % 16 == 0
        key = ("dequantize", dtype, columns, aligned, device)
        plan = _plans.get(key)
        if plan is None:

            def make() -> LaunchPlan:
                desc = Dequantize.for_shape(DTYPES[dtype], target(device).arch, rows, columns, aligned=aligned)
                return LaunchPlan(launch_plans.load(emit_dequantize(desc), device), lambda m: desc.grid(m, columns))

            plan = _plan(key, make)
        _run(plan, rows, (q.data_ptr(), scale.contiguous().data_ptr(), out.data_ptr(), stride, rows, columns), device)
    return out


def colsum(q: Tensor) -> Tensor:
    device = q.get_device()
    q, stride = _rows(q)
    n, k = q.shape
    out = torch.empty((n,), dtype=torch.int32, device=q.device)
    if n:
        aligned = stride % 16 == 0 and q.data_ptr() % 16 == 0
        key = ("colsum", aligned, device)
        plan = _plans.get(key)
        if plan is None:

            def make() -> LaunchPlan:
                desc = ColSum(target(device).arch, aligned)
                return LaunchPlan(launch_plans.load(emit_colsum(desc), device), lambda rows: desc.grid(rows, 0))

            plan = _plan(key, make)
        _run(plan, n, (q.data_ptr(), out.data_ptr(), stride, n, k), device)
    return out


# ── GEMM ─────────────────────────────────────────────────────────────────────────────────────────


class _Operand(NamedTuple):
    """An int8 matrix ``[rows, K]`` as kernels take it.

    Attributes:
        q: the matrix, or a copy of one that is contiguous along neither side.
        along_k: whether runs of contiguous elements go along K; otherwise along the rows' index.
        ld: elements from one run to the next.
        alignment: 16, 8, 4, 2 or 1: all runs start and end at multiples of so many bytes.
    """

    q: Tensor
    along_k: bool
    ld: int
    alignment: int


def _operand(q: Tensor) -> _Operand:
    (rows, k), (row_stride, k_stride) = q.shape, q.stride()
    for along_k, step, run, ld, runs in ((True, k_stride, k, row_stride, rows), (False, row_stride, rows, k_stride, k)):
        if (step == 1 or run == 1) and (ld >= run or runs == 1):
            ld = padded_k(run) if runs == 1 else ld
            return _Operand(q, along_k, ld, dispatch.alignment_of(q.data_ptr() | ld | run))
    return _operand(q.contiguous())


def gemm_problem(a: Tensor, b: Tensor, epilogue: Epilogue, out_layout: Literal["row", "column"]) -> GemmProblem:
    """What the product of these operands asks of a kernel; D is contiguous."""
    left, right = _operand(a), _operand(b)
    return GemmProblem(
        epilogue=epilogue,
        alignment_k=min(left.alignment, right.alignment),
        alignment_n=dispatch.alignment_of(len(b) if out_layout == "row" else len(a)),
        layout_a="row" if left.along_k else "column",
        layout_b="column" if right.along_k else "row",
        layout_d=out_layout,
    )


def gemm_s8(
    a: Tensor,
    b: Tensor,
    *,
    zero_point: Tensor | None = None,
    colsum: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_inv_scale: float = 1.0,
    out_zero_point: int = 0,
    out_layout: Literal["row", "column"] = "row",
    wrap: bool = False,
    tensor_cores: bool = True,
    choice: Choice | None = None,
) -> Tensor:
    """The operator; with ``choice``, on that kernel whatever dispatch thinks of it."""
    from qcut.ops.int8 import _check_gemm_s8, _gemm_s8_out

    out_dtype = out_dtype or torch.float16
    _check_gemm_s8(
        a,
        b,
        zero_point=zero_point,
        colsum=colsum,
        row_scale=row_scale,
        col_scale=col_scale,
        bias=bias,
        activation=activation,
        residual=residual,
        out_dtype=out_dtype,
        out_inv_scale=out_inv_scale,
        out_zero_point=out_zero_point,
        out_layout=out_layout,
        wrap=wrap,
    )
    (m, k), n, device = a.shape, b.shape[0], a.get_device()
    out = _gemm_s8_out(a, b, out_dtype, out_layout)
    if m == 0:
        return out
    left, right = _operand(a), _operand(b)
    ldd = n if out_layout == "row" else m
    flags = (zero_point is None, row_scale is None, col_scale is None, bias is None, residual is None)
    memory = (left.along_k, left.alignment, right.along_k, right.alignment, out_layout, dispatch.alignment_of(ldd))
    key = ("gemm", out_dtype, wrap, activation, flags, memory, m_bucket(m), n, k, tensor_cores, choice, device)
    plan = _plans.get(key)
    if plan is None:
        epilogue = Epilogue(
            out=DTYPES[out_dtype],
            row_scale="none" if row_scale is None else "per_token",
            col_scale="none" if col_scale is None else "per_channel",
            zero_point="none" if zero_point is None else "per_token",
            bias=bias is not None,
            activation=Activation(activation),
            residual=residual is not None,
            wrap=wrap,
        )
        problem = gemm_problem(left.q, right.q, epilogue, out_layout)

        def make() -> LaunchPlan:
            return launch_plans.gemm_plan(problem, m_bucket(m), n, k, device, tensor_cores=tensor_cores, choice=choice)

        plan = _plan(key, make)
    if residual is not None and out_layout == "column":
        residual = residual.t()
    # In the order of Epilogue.params().
    vectors = (zero_point, colsum, row_scale, col_scale, bias, residual)
    kept = [dense(vector) for vector in vectors if vector is not None]
    requantize = (out_inv_scale, float(out_zero_point)) if out_dtype is torch.int8 and not wrap else ()
    args = (left.q.data_ptr(), right.q.data_ptr(), out.data_ptr(), m, n, k, left.ld, right.ld, ldd)
    _run(plan, m, (*args, *(vector.data_ptr() for vector in kept), *requantize), device)
    return out


# ── linear layers ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _LinearPlan:
    """Launch plans of one layer at one bucket of rows, found again by the addresses of its tensors.

    What a call checks on the CPU is checked here when the plan is made. A later call with the same
    addresses and sizes is the same layer, or another one that took its place in memory.

    Attributes:
        quantize: None where the GEMM takes x as it is (weight-only).
        gemm: its ``min_rows`` are what int8 operands and the result have.
    """

    quantize: LaunchPlan | None
    gemm: LaunchPlan
    n: int
    k_padded: int

    def native(self) -> _native.Plan | None:
        """The plan for C++, or None where Python must launch."""
        quantize = _native.Launch() if self.quantize is None else self.quantize.native()
        gemm = self.gemm.native()
        if quantize is None or gemm is None:
            return None
        return _native.Plan(quantize, gemm, self.k_padded, self.gemm.min_rows)


_OPS: dict[Kind, str] = {"dynamic": "w8a8_linear", "static": "w8a8_static_linear", "weight_only": "w8a16_linear"}
_LINEAR_DTYPES: dict[Kind, tuple[torch.dtype, ...]] = {
    "dynamic": _FLOATS,
    "static": _FLOATS,
    "weight_only": (torch.float16, torch.bfloat16),
}
_MAX_LINEAR_PLANS = 1 << 16
_linear_plans: dict[tuple[Any, ...], _LinearPlan] = {}


def _make_linear(
    kind: Kind, dtype: DType, m: int, k: int, qweight: Tensor, bias: bool, activation: str, aligned: bool
) -> _LinearPlan:
    (n, k_padded), device, rows = qweight.shape, qweight.get_device(), m_bucket(m)
    problem = launch_plans.linear_problem(dtype, n, k, bias, activation, kind)
    if kind == "weight_only":
        problem = replace(problem, alignment_k=8 if aligned and k % 8 == 0 else 1)
        make = partial(launch_plans.weight_only_plan, problem, rows, n, k, device)
        gemm = _plan((kind, problem, rows, n, k, device), make)
        return _LinearPlan(None, gemm, n, k_padded)
    if kind == "dynamic":
        quantize = _per_token_plan(dtype, rows, k_padded, aligned, device)
        given = launch_plans.few_tokens("given", problem, rows, n, k_padded, target(device))
        if given is not None:
            make = partial(launch_plans.few_tokens_plan, *given, n, device)
            return _LinearPlan(quantize, _plan(("few", *given, n, device), make), n, k_padded)
    else:
        quantize = _per_tensor_plan(dtype, k_padded, aligned, device)
    rows = max(rows, launch_plans.TMA_ROWS)
    make = partial(launch_plans.gemm_plan, problem, rows, n, k_padded, device)
    gemm = _plan(("linear", problem, rows, n, k_padded, device), make)
    return _LinearPlan(quantize, gemm, n, k_padded)


def _keep(key: tuple[Any, ...], plan: _LinearPlan) -> None:
    """Remember a plan that has run, here and in C++."""
    library = _native.library()
    if len(_linear_plans) >= _MAX_LINEAR_PLANS:  # a process that loads model after model
        _linear_plans.clear()
        if library is not None:
            library.clear()
    _linear_plans[key] = plan
    if library is None or (native := plan.native()) is None:
        return
    kind, weight, scale, *colsum, bias, n, k, dtype, activation, device, rows, aligned = key
    addresses = (weight, scale, colsum[0] if colsum else 0, bias)
    library.insert(_native.key(_OPS[kind], addresses, n, k, rows, dtype, activation, device, aligned), native)


def _result(x: Tensor, m: int, rows: int, n: int) -> tuple[Tensor, Tensor]:
    """The result ``[..., n]``, and the memory of at least ``rows`` rows it lies in."""
    shape = (*x.shape[:-1], n)
    if rows == m:
        out = x.new_empty(shape)
        return out, out
    memory = x.new_empty((rows, n))
    return memory[:m].view(shape), memory


def _linear(
    kind: Kind,
    x: Tensor,
    parameters: Sequence[Tensor | None],
    activation: str,
    x_range: tuple[float, int] | None = None,
) -> Tensor:
    """The linear operators.

    Args:
        kind: which of them.
        x: as given.
        parameters: weight, its scale, its sums along K (static alone) and the bias.
        activation: as given.
        x_range: scale and zero point of x (static alone).
    """
    m, k = _sizes(_OPS[kind], x)
    x_rows, stride = _rows(x)
    address = x_rows.data_ptr()
    aligned = (address | stride * x.element_size()) & 15 == 0
    device, qweight = x.get_device(), cast(Tensor, parameters[0])
    weight, scale, *colsum, bias = pointers = [0 if t is None else t.data_ptr() for t in parameters]
    key = (kind, *pointers, qweight.shape[0], k, x.dtype, activation, device, m_bucket(m), aligned)
    plan = known = _linear_plans.get(key)
    if plan is None or m == 0:
        from qcut.ops import int8 as ops

        getattr(ops, f"_check_{_OPS[kind]}")(x, *parameters, *(x_range or ()), activation)
        dtype = _float_dtype(_OPS[kind], x, _LINEAR_DTYPES[kind])
        if m == 0:
            return x.new_empty((*x.shape[:-1], qweight.shape[0]))
        if (copies := _dense_parameters(*parameters)) is not None:
            return _linear(kind, x, copies, activation, x_range)
        plan = _make_linear(kind, dtype, m, k, qweight, bias != 0, activation, aligned)
    n, k_padded = plan.n, plan.k_padded
    rows = max(m, plan.gemm.min_rows)
    if plan.quantize is None:
        operands, sizes = (address, weight), (m, n, k, stride, k_padded, n)
        epilogue: tuple[int, ...] = (scale,)
    else:
        # One allocation for all, in x's dtype, which spares a conversion of arguments: int8 rows are multiples of
        # 16 bytes, so the scales behind them are aligned.
        scratch = x.new_empty(rows * (k_padded + 4 * (x_range is None)) // x.element_size())
        q = scratch.data_ptr()
        operands, sizes = (q, weight), (rows, n, k_padded, k_padded, k_padded, n)
        if x_range is None:
            token_scale = q + rows * k_padded
            epilogue = (token_scale, scale)
            _run(plan.quantize, m, (address, q, token_scale, stride, m, k, k_padded), device)
        else:
            epilogue = (x_range[1], *colsum, scale)
            _run(plan.quantize, m, (address, q, stride, m, k, k_padded, *x_range), device)
    out, memory = _result(x, m, rows, n)
    args = (*operands, memory.data_ptr(), *sizes, *epilogue)
    _run(plan.gemm, rows, (*args, bias) if bias else args, device)
    if known is None:
        _keep(key, plan)
    return out


def w8a8_linear(x: Tensor, qweight: Tensor, weight_scale: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return _linear("dynamic", x, (qweight, weight_scale, bias), activation)


def w8a8_static_linear(
    x: Tensor,
    qweight: Tensor,
    col_scale: Tensor,
    colsum: Tensor,
    bias: Tensor | None,
    x_scale: float,
    x_zero_point: int,
    activation: str,
) -> Tensor:
    return _linear("static", x, (qweight, col_scale, colsum, bias), activation, (x_scale, x_zero_point))


def w8a16_linear(x: Tensor, qweight: Tensor, weight_scale: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return _linear("weight_only", x, (qweight, weight_scale, bias), activation)
