"""`qcut.ops.activation` on CUDA."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qcut.backends.cuda.codebook import rotate_apart, rotated, rotates_rows
from qcut.backends.cuda.launch.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, pdl, target
from qcut.backends.cuda.launch.streams import current_stream
from qcut.backends.cuda.operands import is_aligned
from qcut.emitters.codebook.rotate_rows import RowsRotation
from qcut.emitters.decoder.activate import ActivateRows
from qcut.ops.activation import ActivateRotatedOp, GeluTanhOp, SiluMulOp
from qcut.ops.registry import serves


@serves(SiluMulOp)
def silu_mul(call: SiluMulOp) -> Tensor:
    call.check()
    return _launch(*_gate(call), call.absmax, call.gate, call.up)


@serves(GeluTanhOp)
def gelu_tanh(call: GeluTanhOp) -> Tensor:
    call.check()
    return _launch("gelu_tanh", (), call.absmax, call.x)


@serves(ActivateRotatedOp)
def activate_rotated(call: ActivateRotatedOp) -> tuple[Tensor, Tensor]:
    call.check()
    kind, gate = ("gelu_tanh", ()) if call.up is None else _gate(call)
    columns, dtype = call.x.shape[1], call.x.dtype
    rotation = RowsRotation(DTYPES[call.out_dtype], min(call.group_size, columns), len(call.seeds), call.in_rows)
    device = call.x.get_device()
    gpu = target(device)
    if not rotates_rows(gpu, ActivateRows.rotating, kind, DTYPES[dtype], gpu.arch, columns, rotation):
        y = _launch(kind, gate, None, call.x, *(() if call.up is None else (call.up,)))
        return rotate_apart(call.rotation(y))
    blocks, scale = rotated(call.rotation(call.x))
    if len(call.x) == 0:
        return blocks, scale
    given, strides, aligned = _rows(call.x, *(() if call.up is None else (call.up,)))
    signs = call.operands.contiguous()
    early_read = call.early_read and signs is call.operands
    key = (kind, dtype, aligned, columns, device, rotation, early_read)
    plan = _plans[key]
    scales = (scale.data_ptr(),) if rotation.quantized else ()
    rotation_args = (signs.data_ptr(), blocks.shape[1] if call.in_rows else 32 * signs.shape[1])
    args = (*(t.data_ptr() for t in given), blocks.data_ptr(), *scales, *strides, columns, *gate, *rotation_args)
    plan.launch(len(call.x), args, current_stream(device))
    return blocks, scale


def _gate(call: SiluMulOp | ActivateRotatedOp) -> tuple[str, tuple[float, ...]]:
    """The kind of kernel, and the numbers that it takes."""
    if (call.alpha, call.limit, call.plus_one) == (1.0, 0.0, False):
        return "silu_mul", ()
    return "clamped_silu_mul", (call.alpha, call.limit or math.inf, int(call.plus_one))


def _rows(*operands: Tensor) -> tuple[list[Tensor], list[int], bool]:
    """Rows of any strides, copied where elements of a row lie apart; their strides, and whether vectors are aligned."""
    given = [t if t.stride(1) == 1 else t.contiguous() for t in operands]
    columns, size = given[0].shape[1], given[0].element_size()
    strides = [t.stride(0) for t in given]
    return given, strides, is_aligned(*given) and all(n * size % 16 == 0 for n in (columns, *strides))


def _launch(kind: str, gate: tuple[float, ...], absmax: Tensor | None, *operands: Tensor) -> Tensor:
    """Queue the kernel on rows of any strides."""
    given, strides, aligned = _rows(*operands)
    (m, columns), dtype = given[0].shape, given[0].dtype
    y = torch.empty((m, columns), dtype=dtype, device=given[0].device)
    if y.numel() == 0:
        return y
    device = y.get_device()
    key = (kind, dtype, aligned, columns, device)
    plan = _plans[key]
    largest = 0 if absmax is None else absmax.data_ptr()
    args = (*(t.data_ptr() for t in given), y.data_ptr(), largest, *strides, columns, *gate)
    plan.launch(m, args, current_stream(device))
    return y


@PlanCache
def _plans(
    kind: str,
    dtype: torch.dtype,
    aligned: bool,
    columns: int,
    device: int,
    rotation: RowsRotation | None = None,
    early_read: bool = True,
) -> LaunchPlan:
    arch = target(device).arch
    if rotation is None:
        desc = ActivateRows(kind, DTYPES[dtype], arch, aligned)
    else:
        desc = ActivateRows.rotating(kind, DTYPES[dtype], arch, columns, rotation, aligned=aligned)
    early = early_read and pdl(device)
    return LaunchSpec(desc.emit(), lambda m: desc.grid(m, columns), pdl=early).load(device)
