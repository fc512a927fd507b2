"""`qcut.ops.norm` on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.cuda.operands import is_aligned
from qcut.cuda.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, pdl, target
from qcut.cuda.streams import current_stream
from qcut.emitters.decoder.transformer import MANY_ROWS, NormRows, emit_norm
from qcut.ops.norm import AddNorm, AddNormInt8
from qcut.ops.registry import serves

_plans: PlanCache[LaunchPlan] = PlanCache()


@serves(AddNorm)
def add_norm(call: AddNorm) -> tuple[Tensor, Tensor]:
    call.check()
    y = torch.empty(call.x.shape, dtype=call.x.dtype, device=call.x.device)
    return _launch(call, y, None), y


@serves(AddNormInt8)
def add_norm_int8(call: AddNormInt8) -> tuple[Tensor, Tensor, Tensor]:
    call.check()
    m, device = len(call.x), call.x.device
    q = torch.empty((m, call.k_padded), dtype=torch.int8, device=device)
    scale = torch.empty(m, dtype=torch.float32, device=device)
    return _launch(call.unquantized, q, scale), q, scale


def _launch(call: AddNorm, y: Tensor, scale: Tensor | None) -> Tensor:
    """Write the norm to y, and its scales where it is int8; return the sum."""
    (m, k), dtype, device = call.x.shape, call.x.dtype, call.x.get_device()
    total = torch.empty(call.x.shape if call.residual is not None else (0,), dtype=dtype, device=call.x.device)
    if m == 0:
        return total
    # Named, so that copies live until the launch.
    x, weight = call.x.contiguous(), call.weight.contiguous()
    residual = None if call.residual is None else call.residual.contiguous()
    bias = None if call.bias is None else call.bias.contiguous()
    aligned = k * x.element_size() % 16 == 0 and is_aligned(x, residual, weight, bias)
    has_residual, quantized, many = residual is not None, scale is not None, m >= MANY_ROWS
    key = (dtype, call.layer, k, has_residual, quantized, many, aligned, device)
    plan = _plans.get(key)
    if plan is None:

        def make() -> LaunchPlan:
            flags = {"many": many, "residual": has_residual, "quantized": quantized, "aligned": aligned}
            desc = NormRows.for_shape(DTYPES[dtype], call.layer, target(device).arch, k, **flags)
            return LaunchSpec(emit_norm(desc), desc.grid, pdl=pdl(device)).load(device)

        plan = _plans.make(key, make)
    sums = () if residual is None else (residual.data_ptr(), total.data_ptr())
    biases = ((0 if bias is None else bias.data_ptr()),) if call.layer else ()
    results = (y.data_ptr(),) if scale is None else (y.data_ptr(), scale.data_ptr())
    sizes = (k, k) if scale is None else (k, k, y.shape[1])
    args = (x.data_ptr(), *sums, weight.data_ptr(), *biases, *results, *sizes, call.eps)
    plan.launch(m, args, current_stream(device))
    return total
