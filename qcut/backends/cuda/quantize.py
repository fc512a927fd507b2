"""`qcut.ops.quantize` on CUDA."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qcut.backends.cuda.launch.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, has_pdl, m_bucket, target
from qcut.backends.cuda.operands import int8_rows, row_major
from qcut.dispatch.gpus import Target
from qcut.emitters.core.family import Grid
from qcut.emitters.core.source import DType
from qcut.emitters.decoder import quantize as kernels
from qcut.ops.quantize import ColSumOp, DequantizeOp, QuantizePerTensorOp, QuantizePerTokenOp
from qcut.ops.registry import serves


def per_token_spec(
    dtype: DType, rows: int, k_padded: int, gpu: Target, *, aligned: bool, halves: bool = False, q: DType = DType.S8
) -> LaunchSpec:
    """The launch of the kernel that quantizes up to ``rows`` tokens with a scale each.

    Args:
        dtype: type of the tokens.
        rows: number of tokens.
        k_padded: columns of the result.
        gpu: the GPU.
        aligned: whether rows, of tokens and of the result, start at multiples of 16 bytes.
        halves: whether tokens become int16, in halves, in place of int8.
        q: type that tokens are stored in: s8, or for e4m3 e4m3 or f16.
    """
    kernel = kernels.QuantizePerToken.for_shape(
        dtype, gpu.arch, rows, k_padded, aligned=aligned, sm_count=gpu.sm_count, halves=halves, q=q
    )
    grid = Grid(kernel.rows, kernel.grid(1, k_padded))
    return LaunchSpec(kernel.emit(), grid, pdl=has_pdl(gpu))


def per_tensor_spec(
    dtype: DType, k_padded: int, gpu: Target, *, aligned: bool, halves: bool = False, q: DType = DType.S8
) -> LaunchSpec:
    """The launch of the kernel that quantizes all tokens with one scale and zero point. Args: see `per_token_spec`."""
    kernel = kernels.QuantizePerTensor.for_shape(dtype, gpu.arch, 1, k_padded, aligned=aligned, halves=halves, q=q)
    grid = Grid(kernel.rows, kernel.grid(1, k_padded))
    return LaunchSpec(kernel.emit(), grid, pdl=has_pdl(gpu))


@PlanCache
def _per_token_plans(dtype: torch.dtype, rows: int, k_padded: int, aligned: bool, device: int) -> LaunchPlan:
    return per_token_spec(DTYPES[dtype], rows, k_padded, target(device), aligned=aligned).load(device)


@PlanCache
def _per_tensor_plans(dtype: torch.dtype, k_padded: int, aligned: bool, device: int) -> LaunchPlan:
    return per_tensor_spec(DTYPES[dtype], k_padded, target(device), aligned=aligned).load(device)


@PlanCache
def _dequantize_plans(dtype: torch.dtype, columns: int, aligned: bool, device: int) -> LaunchPlan:
    kernel = kernels.Dequantize.for_shape(DTYPES[dtype], target(device).arch, 1, columns, aligned=aligned)
    return LaunchSpec(kernel.emit(), lambda m: kernel.grid(m, columns)).load(device)


@PlanCache
def _colsum_plans(aligned: bool, device: int) -> LaunchPlan:
    kernel = kernels.ColSum(target(device).arch, aligned)
    return LaunchSpec(kernel.emit(), lambda rows: kernel.grid(rows, 0)).load(device)


def _is_aligned(x: Tensor, stride: int, k_padded: int) -> bool:
    return x.data_ptr() % 16 == 0 and stride * x.element_size() % 16 == 0 and k_padded % 16 == 0


@serves(QuantizePerTokenOp)
def quantize_per_token(call: QuantizePerTokenOp) -> tuple[Tensor, Tensor]:
    call.check()
    m, k_padded = math.prod(call.x.shape[:-1]), call.k_padded
    q, scale = int8_rows(m, k_padded, call.x.device)
    if m:
        (x, stride), device = row_major(call.x), q.get_device()
        plan = _per_token_plans[x.dtype, m_bucket(m), k_padded, _is_aligned(x, stride, k_padded), device]
        args = (x.data_ptr(), q.data_ptr(), scale.data_ptr(), stride, m, x.shape[-1], k_padded)
        plan.run(m, args, device)
    return q, scale


@serves(QuantizePerTensorOp)
def quantize_per_tensor(call: QuantizePerTensorOp) -> Tensor:
    call.check()
    q = call.fake()
    m, k_padded = q.shape
    if m:
        (x, stride), device = row_major(call.x), q.get_device()
        plan = _per_tensor_plans[x.dtype, k_padded, _is_aligned(x, stride, k_padded), device]
        args = (x.data_ptr(), q.data_ptr(), stride, m, x.shape[-1], k_padded, call.scale, call.zero_point)
        plan.run(m, args, device)
    return q


@serves(DequantizeOp)
def dequantize(call: DequantizeOp) -> Tensor:
    call.check()
    out = call.fake()
    if out.numel():
        (q, stride), device, dtype = row_major(call.q), out.get_device(), call.dtype
        rows, columns = q.shape
        aligned = stride % 8 == 0 and q.data_ptr() % 8 == 0 and columns * out.element_size() % 16 == 0
        plan = _dequantize_plans[dtype, columns, aligned, device]
        scale = call.scale.contiguous()
        plan.run(rows, (q.data_ptr(), scale.data_ptr(), out.data_ptr(), stride, rows, columns), device)
    return out


@serves(ColSumOp)
def colsum(call: ColSumOp) -> Tensor:
    call.check()
    out = call.fake()
    if out.numel():
        (q, stride), device = row_major(call.q), out.get_device()
        n, k = q.shape
        aligned = stride % 16 == 0 and q.data_ptr() % 16 == 0
        plan = _colsum_plans[aligned, device]
        plan.run(n, (q.data_ptr(), out.data_ptr(), stride, n, k), device)
    return out
