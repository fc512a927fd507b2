"""CUDA implementations of the operators in `qcut.ops.w8a8`, imported at the first CUDA call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qcut.cuda import plans as launch_plans
from qcut.cuda.int8 import _rows, _run, dense
from qcut.cuda.plans import DTYPES, LaunchPlan, m_bucket, target
from qcut.emitters.core.source import DType
from qcut.emitters.stream.w8a8 import Tokens
from qcut.numerics import int8 as numerics
from qcut.ops import w8a8 as w8a8_ops

_Layer = tuple[DType, int, int, bool, str]
"""Type of results, N, K, whether there is a bias, activation."""

_plans: dict[tuple[Any, ...], LaunchPlan | None] = {}


def int8_linear(
    q: Tensor,
    q_scale: Tensor,
    qweight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    dtype: torch.dtype,
    absmax: Tensor | None = None,
) -> Tensor:
    w8a8_ops._check_int8(q, q_scale, qweight, weight_scale, bias, activation, dtype, absmax)
    (m, k), n, device = q.shape, len(qweight), q.get_device()
    y = torch.empty((m, n), dtype=dtype, device=q.device)
    if m == 0:
        return y
    layer = (DTYPES[dtype], n, k, bias is not None, activation)
    few = _few("given", m, layer, device, absmax=absmax is not None)
    plan = few or _gemm(m, layer, device)
    # Kept until the launch is queued.
    tensors = [dense(t) for t in (q, qweight, q_scale, weight_scale, bias) if t is not None]
    a, b, *epilogue = (t.data_ptr() for t in tensors)
    noted = (absmax.data_ptr(),) if absmax is not None and few else ()
    _run(plan, m, (a, b, y.data_ptr(), m, n, k, k, k, n, *epilogue, *noted), device)
    if not noted:
        numerics.raise_absmax(absmax, y)
    return y


def noted_linear(
    x: Tensor, x_absmax: Tensor, qweight: Tensor, weight_scale: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    w8a8_ops._check_noted(x, x_absmax, qweight, weight_scale, bias, activation)
    (m, k), (n, k_padded), device = x.shape, qweight.shape, x.get_device()
    x, stride = _rows(x)
    aligned = (x.data_ptr() | stride * x.element_size()) % 16 == 0
    layer = (DTYPES[x.dtype], n, k, bias is not None, activation)
    plan = _few("rows", m, layer, device, aligned=aligned) if m else None
    if plan is None:
        made: Tensor = torch.ops.qcut.w8a8_linear(x, qweight, weight_scale, bias, activation)
        return made
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    tensors = [dense(t) for t in (qweight, weight_scale, bias) if t is not None]
    b, *vectors = (t.data_ptr() for t in tensors)
    sizes = (m, n, k, stride, k_padded, n)
    _run(plan, m, (x.data_ptr(), b, y.data_ptr(), *sizes, x_absmax.data_ptr(), *vectors), device)
    return y


def _few(
    tokens: Tokens, m: int, layer: _Layer, device: int, *, aligned: bool = True, absmax: bool = False
) -> LaunchPlan | None:
    """The plan for few tokens of this kind, if these are few."""
    key = (tokens, m_bucket(m), layer, device, aligned, absmax)
    if key not in _plans:
        _, n, k, *_ = layer
        problem = launch_plans.linear_problem(*layer, "dynamic")
        few = launch_plans.few_tokens(
            tokens, problem, m_bucket(m), n, k, target(device), aligned=aligned, absmax=absmax
        )
        _plans[key] = None if few is None else launch_plans.few_tokens_plan(*few, n, device)
    return _plans[key]


def _gemm(m: int, layer: _Layer, device: int) -> LaunchPlan:
    key = ("gemm", m_bucket(m), layer, device)
    plan = _plans.get(key)
    if plan is None:
        _, n, k, *_ = layer
        problem = launch_plans.linear_problem(*layer, "dynamic")
        plan = _plans[key] = launch_plans.gemm_plan(problem, m_bucket(m), n, k, device)
    return plan
