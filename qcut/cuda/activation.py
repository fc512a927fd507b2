"""`qcut.ops.activation` on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qcut.cuda import plans as launch_plans
from qcut.cuda.decoder import _aligned, _pdl, _plans, _stream
from qcut.cuda.plans import DTYPES, LaunchPlan, target
from qcut.emitters.decoder.activate import ActivateRows, emit_activation
from qcut.ops.activation import GeluTanh, SiluMul
from qcut.ops.registry import serves


@serves(SiluMul)
def silu_mul(call: SiluMul) -> Tensor:
    call.check()
    return _activate("silu_mul", call.absmax, call.gate, call.up)


@serves(GeluTanh)
def gelu_tanh(call: GeluTanh) -> Tensor:
    call.check()
    return _activate("gelu_tanh", call.absmax, call.x)


def _activate(kind: Any, absmax: Tensor | None, *operands: Tensor) -> Tensor:
    given = [t if t.stride(1) == 1 else t.contiguous() for t in operands]
    (m, columns), dtype = given[0].shape, given[0].dtype
    y = torch.empty((m, columns), dtype=dtype, device=given[0].device)
    if y.numel() == 0:
        return y
    device, size = y.get_device(), y.element_size()
    strides = [t.stride(0) for t in given]
    aligned = _aligned(*given) and all(n * size % 16 == 0 for n in (columns, *strides))
    key = (kind, dtype, aligned, columns, device)
    plan = _plans.get(key)
    if plan is None:
        desc = ActivateRows(kind, DTYPES[dtype], target(device).arch, aligned)
        kernel = launch_plans.load(emit_activation(desc), device)
        plan = LaunchPlan(kernel, lambda rows: desc.grid(rows, columns), pdl=_pdl(device))
        _plans[key] = plan
    noted = 0 if absmax is None else absmax.data_ptr()
    plan.launch(m, (*(t.data_ptr() for t in given), y.data_ptr(), noted, *strides, columns), _stream(device))
    return y
