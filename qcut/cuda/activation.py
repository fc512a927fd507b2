"""`qcut.ops.activation` on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.cuda.operands import is_aligned
from qcut.cuda.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, pdl, target
from qcut.cuda.streams import current_stream
from qcut.emitters.decoder.activate import ActivateRows, emit_activation
from qcut.ops.activation import GeluTanh, SiluMul
from qcut.ops.registry import serves

_plans: PlanCache[LaunchPlan] = PlanCache()


@serves(SiluMul)
def silu_mul(call: SiluMul) -> Tensor:
    call.check()
    return _launch("silu_mul", call.absmax, call.gate, call.up)


@serves(GeluTanh)
def gelu_tanh(call: GeluTanh) -> Tensor:
    call.check()
    return _launch("gelu_tanh", call.absmax, call.x)


def _launch(kind: str, absmax: Tensor | None, *operands: Tensor) -> Tensor:
    """Queue the kernel on rows of any strides, copied where elements of a row lie apart."""
    given = [t if t.stride(1) == 1 else t.contiguous() for t in operands]
    (m, columns), dtype = given[0].shape, given[0].dtype
    y = torch.empty((m, columns), dtype=dtype, device=given[0].device)
    if y.numel() == 0:
        return y
    device, size = y.get_device(), y.element_size()
    strides = [t.stride(0) for t in given]
    aligned = is_aligned(*given) and all(n * size % 16 == 0 for n in (columns, *strides))
    key = (kind, dtype, aligned, columns, device)
    plan = _plans.get(key) or _plans.make(key, lambda: _plan(*key))
    largest = 0 if absmax is None else absmax.data_ptr()
    args = (*(t.data_ptr() for t in given), y.data_ptr(), largest, *strides, columns)
    plan.launch(m, args, current_stream(device))
    return y


def _plan(kind: str, dtype: torch.dtype, aligned: bool, columns: int, device: int) -> LaunchPlan:
    desc = ActivateRows(kind, DTYPES[dtype], target(device).arch, aligned)
    return LaunchSpec(emit_activation(desc), lambda m: desc.grid(m, columns), pdl=pdl(device)).load(device)
