"""Checks that operators share. Every message names the operator, the argument, its value and the values allowed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qcut.errors import ConfigError, DeviceError, DtypeError, QuantizationError, RangeError, ShapeError

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
S8, S32, F32 = (torch.int8,), (torch.int32,), (torch.float32,)
E4M3 = (torch.float8_e4m3fn,)
BYTES = (*S8, *E4M3)
"""Weights that become 16-bit floats in registers."""

_F32_TINY, _F32_MAX = 2.0**-149, (2 - 2.0**-23) * 2.0**127


def flat(x: Tensor) -> Tensor:
    """x ``[..., K]`` as tokens ``[M, K]``."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def check_dtype(op: str, name: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> None:
    """Raises `DtypeError` unless the dtype is one of the allowed dtypes."""
    if dtype not in allowed:
        names = [str(t).removeprefix("torch.") for t in (dtype, *allowed)]
        raise DtypeError(f"qcut::{op}: {name} is {names[0]}; allowed: {', '.join(names[1:])}")


def check_tensor(
    op: str,
    name: str,
    tensor: Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    """Raises `DtypeError`, `ShapeError` or `DeviceError` unless the tensor is as the operator takes it."""
    if tensor.dtype not in dtypes:  # a function call for each tensor would cost more than the comparison
        check_dtype(op, name, tensor.dtype, dtypes)
    if tensor.shape != shape:
        raise ShapeError(f"qcut::{op}: {name} has shape {list(tensor.shape)}; allowed: {list(shape)}")
    if tensor.device != device:
        raise DeviceError(f"qcut::{op}: {name} is on {tensor.device}; the first argument is on {device}")


def check_absmax(op: str, name: str, absmax: Tensor | None, rows: Tensor) -> None:
    """Raises as `check_tensor` does unless absmax is None or float32 ``[M]``; `ShapeError` unless it is contiguous."""
    if absmax is None:
        return
    check_tensor(op, name, absmax, F32, (rows.shape[0],), rows.device)
    if not absmax.is_contiguous():
        raise ShapeError(f"qcut::{op}: {name} has strides {list(absmax.stride())}; allowed: contiguous")


def check_tokens(op: str, x: Tensor) -> None:
    """Raises `DtypeError` or `ShapeError` unless x is of a floating type and ``[..., K]`` with K >= 1."""
    check_dtype(op, "x", x.dtype, FLOAT_DTYPES)
    if x.dim() == 0 or x.shape[-1] < 1:
        raise ShapeError(f"qcut::{op}: x has shape {list(x.shape)}; allowed: [..., K] with K >= 1")


def check_matrix(op: str, name: str, q: Tensor, min_rows: int = 0, dtypes: tuple[torch.dtype, ...] = S8) -> None:
    """Raises `DtypeError` or `ShapeError` unless q is ``[rows, columns]`` with enough rows and a column."""
    check_dtype(op, name, q.dtype, dtypes)
    if q.dim() != 2 or q.shape[0] < min_rows or q.shape[1] < 1:
        allowed = f"[rows, columns] with rows >= {min_rows}, columns >= 1"
        raise ShapeError(f"qcut::{op}: {name} has shape {list(q.shape)}; allowed: {allowed}")


def check_k(op: str, k: int, k_max: int) -> None:
    """Raises `QuantizationError` where int32 sums of K products may overflow."""
    if k > k_max:
        raise QuantizationError(f"qcut::{op}: K is {k}; int32 sums are exact for K <= {k_max}")


def check_indices(op: str, name: str, indices: Tensor, limit: int) -> None:
    """Raises `RangeError` unless all indices, on the CPU, are from 0 to ``limit - 1``."""
    if indices.numel():
        lowest, highest = (int(v) for v in torch.aminmax(indices))
        if lowest < 0 or highest >= limit:
            found = lowest if lowest < 0 else highest
            raise RangeError(f"{op}: {name} holds {found}; allowed: 0 to {limit - 1}")


def check_zero_point(op: str, name: str, zero_point: int) -> None:
    """Raises `ConfigError` unless the zero point is an int8 value."""
    if not -128 <= zero_point <= 127:
        raise ConfigError(f"qcut::{op}: {name} is {zero_point}; allowed: -128 to 127")


def check_scale(op: str, name: str, scale: float) -> None:
    """Raises `ConfigError` unless the scale is positive and finite in float32."""
    if not _F32_TINY <= scale <= _F32_MAX:
        raise ConfigError(f"qcut::{op}: {name} is {scale}; allowed: {_F32_TINY:.2g} to {_F32_MAX:.8g} (float32)")
