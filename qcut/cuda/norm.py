"""`qcut.ops.norm` on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.cuda.operands import is_aligned
from qcut.cuda.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, pdl, target
from qcut.cuda.streams import current_stream
from qcut.dispatch.closed import norm_columns
from qcut.emitters.decoder.norm import MANY_ROWS, NormRows, emit_norm
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
    m, device = call.x.shape[0], call.x.device
    q = torch.empty((m, call.k_padded), dtype=torch.int8, device=device)
    scale = torch.empty(m, dtype=torch.float32, device=device)
    return _launch(call, q, scale), q, scale


def _launch(call: AddNorm | AddNormInt8, y: Tensor, scale: Tensor | None) -> Tensor:
    """Write the norm to y, and the scales of an int8 norm to ``scale``; return the sum."""
    given, residual, weight, bias, layer, eps = call[:6]
    (m, k), dtype, device = given.shape, given.dtype, given.get_device()
    total = torch.empty(given.shape if residual is not None else (0,), dtype=dtype, device=given.device)
    if m == 0:
        return total
    x, weight = given.contiguous(), weight.contiguous()
    if residual is not None:
        residual = residual.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    # A copy is written by the kernel just before.
    constants = call.constants and weight is call.weight and bias is call.bias
    aligned = k * x.element_size() % 16 == 0 and is_aligned(x, residual, weight, bias)
    key = (dtype, layer, k, residual is not None, scale is not None, m >= MANY_ROWS, aligned, constants, device)
    plan = _plans.get(key) or _plans.make(key, lambda: _plan(*key))
    sums = () if residual is None else (residual.data_ptr(), total.data_ptr())
    biases = ((0 if bias is None else bias.data_ptr()),) if layer else ()
    results = (y.data_ptr(),) if scale is None else (y.data_ptr(), scale.data_ptr())
    sizes = (k, k) if scale is None else (k, k, y.shape[1])
    args = (x.data_ptr(), *sums, weight.data_ptr(), *biases, *results, *sizes, eps)
    plan.launch(m, args, current_stream(device))
    return total


def _plan(
    dtype: torch.dtype,
    layer: bool,
    k: int,
    residual: bool,
    quantized: bool,
    many: bool,
    aligned: bool,
    constants: bool,
    device: int,
) -> LaunchPlan:
    flags = {"many": many, "residual": residual, "quantized": quantized, "aligned": aligned}
    gpu = target(device)
    desc = NormRows.for_shape(
        DTYPES[dtype], layer, gpu.arch, norm_columns(k, DTYPES[dtype], gpu, aligned=aligned), **flags
    )
    return LaunchSpec(emit_norm(desc), desc.grid, pdl=constants and pdl(device)).load(device)
