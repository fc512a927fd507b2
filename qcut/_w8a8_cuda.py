"""CUDA implementations of the operators in `qcut.w8a8_ops`, imported at the first CUDA call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from emitters.epilogue import Activation, Epilogue
from emitters.w8a8_decode import Prologue, W8A8Problem, for_shape, is_legal, makes_tokens
from qcut import _launch_plans as launch_plans
from qcut import w8a8_ops
from qcut._launch_plans import DTYPES, LaunchPlan, target

_plans: dict[tuple[Any, ...], LaunchPlan | None] = {}
_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream


def norm_w8a8(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    layer: bool,
    eps: float,
    qweight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:
    w8a8_ops._check_norm(x, residual, norm_weight, norm_bias, layer, eps, qweight, weight_scale, bias, activation)
    prologue: Prologue = "layer" if layer else "rms"
    if not _makes_tokens(prologue, x):
        arguments = (x, residual, norm_weight, norm_bias, layer, eps, qweight.shape[1])
        total, q, scale = torch.ops.qcut.add_norm_int8(*arguments)
        return total, _product(q, scale, qweight, weight_scale, bias, activation, x.dtype)
    x, norm_weight = _rows(x), norm_weight.contiguous()
    residual = None if residual is None else _rows(residual)
    norm_bias = None if norm_bias is None else norm_bias.contiguous()
    total = torch.empty(x.shape if residual is not None else (0,), dtype=x.dtype, device=x.device)
    other = x if residual is None else residual
    aligned = _aligned(x, other, norm_weight, norm_bias)
    given = [x, residual, total, norm_weight, norm_bias]
    pointers = (*(0 if t is None else t.data_ptr() for t in given), x.stride(0), other.stride(0), eps)
    return total, _few(prologue, x, aligned, pointers, qweight, weight_scale, bias, activation)


def gate_w8a8(
    gate: Tensor, up: Tensor, qweight: Tensor, weight_scale: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    w8a8_ops._check_gate(gate, up, qweight, weight_scale, bias, activation)
    if not _makes_tokens("gate", gate):
        q, scale = torch.ops.qcut.quantize_per_token(torch.ops.qcut.silu_mul(gate, up), qweight.shape[1])
        return _product(q, scale, qweight, weight_scale, bias, activation, gate.dtype)
    gate, up = _rows(gate), _rows(up)
    pointers = (gate.data_ptr(), up.data_ptr(), gate.stride(0), up.stride(0))
    return _few("gate", gate, _aligned(gate, up), pointers, qweight, weight_scale, bias, activation)


def _makes_tokens(prologue: Prologue, x: Tensor) -> bool:
    """Whether one kernel does it all."""
    m, k = x.shape
    return m > 0 and makes_tokens(m, k) and _has_kernel(prologue, x.dtype, m, k, x.get_device())


@cache
def _has_kernel(prologue: Prologue, x_dtype: torch.dtype, m: int, k: int, device: int) -> bool:
    dtype = DTYPES[x_dtype]
    problem = W8A8Problem(prologue, dtype, Epilogue(dtype, "per_token", "per_channel"))
    return is_legal(problem, m, k, target(device).arch)


def _product(
    q: Tensor,
    scale: Tensor,
    qweight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    dtype: torch.dtype,
) -> Tensor:
    """The product of int8 rows; of few by the kernel that asks for a layer's weights before they are there."""
    (m, k), n, device = q.shape, len(qweight), q.get_device()
    rows = launch_plans.m_bucket(m)
    key = ("given", dtype, rows, n, k, bias is not None, activation, device)
    if key not in _plans:
        problem = launch_plans.linear_problem(DTYPES[dtype], n, k, bias is not None, activation, "dynamic")
        few = launch_plans.few_tokens("given", problem, rows, n, k, target(device))
        _plans[key] = None if few is None else launch_plans.few_tokens_plan(*few, n, device)
    plan = _plans[key]
    if plan is None or m == 0:
        result: Tensor = torch.ops.qcut.gemm_s8(
            q, qweight, row_scale=scale, col_scale=weight_scale, bias=bias, activation=activation, out_dtype=dtype
        )
        return result
    y = torch.empty((m, n), dtype=dtype, device=q.device)
    # Kept until the launch is queued.
    weight, *vectors = (_dense(t) for t in (qweight, weight_scale, bias) if t is not None)
    pointers = (q.data_ptr(), weight.data_ptr(), y.data_ptr())
    epilogue = (scale.data_ptr(), *(t.data_ptr() for t in vectors))
    plan.launch(m, (*pointers, m, n, k, k, k, n, *epilogue), _stream(device))
    return y


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _dense(t: Tensor) -> Tensor:
    return t if t.is_contiguous() and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


def _aligned(*tensors: Tensor | None) -> bool:
    """Whether all rows, and vectors, are multiples of 16 bytes."""
    there = [t for t in tensors if t is not None]
    sizes = [n * t.element_size() for t in there for n in (t.shape[-1], t.stride(0) if t.dim() == 2 else 0)]
    return all(n % 16 == 0 for n in (*sizes, *(t.data_ptr() for t in there)))


def _few(
    prologue: Prologue,
    x: Tensor,
    aligned: bool,
    source: tuple[int | float, ...],
    qweight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    activation: str,
) -> Tensor:
    """The kernel that makes the tokens of ``source``, and multiplies."""
    (m, k), (n, k_padded), device = x.shape, qweight.shape, x.get_device()
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    key = (prologue, x.dtype, aligned, (m - 1).bit_length(), n, k, bias is not None, activation, device)
    plan = _plans.get(key)
    if plan is None:
        gpu, dtype = target(device), DTYPES[x.dtype]
        epilogue = Epilogue(dtype, "per_token", "per_channel", bias=bias is not None, activation=Activation(activation))
        problem = W8A8Problem(prologue, dtype, epilogue, aligned)
        tile = for_shape(problem, gpu.arch, m, n, k, gpu.sm_count)
        plan = _plans[key] = launch_plans.few_tokens_plan(problem, tile, n, device)
    # Kept until the launch is queued.
    vectors = [_dense(t) for t in (qweight, weight_scale, bias) if t is not None]
    weight, scales = vectors[0].data_ptr(), [t.data_ptr() for t in vectors[1:]]
    plan.launch(m, (*source, weight, y.data_ptr(), m, n, k, k_padded, n, *scales), _stream(device))
    return y
