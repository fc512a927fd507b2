"""`qcut.ops.norm` on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.backends.cuda.codebook import rotate_apart, rotated, rotates_rows
from qcut.backends.cuda.launch.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, pdl, target
from qcut.backends.cuda.launch.streams import current_stream
from qcut.backends.cuda.operands import int8_rows, is_aligned
from qcut.backends.cuda.quantize import quantize_per_token
from qcut.backends.cuda.routing import sum_routes
from qcut.dispatch.ahead_of_time import norm_columns
from qcut.emitters.codebook.rotate_rows import RowsRotation
from qcut.emitters.decoder.norm import MANY_ROWS, NormRows
from qcut.ops.norm import AddNormInt8Op, AddNormOp, AddNormRotatedOp
from qcut.ops.quantize import QuantizePerTokenOp
from qcut.ops.registry import serves
from qcut.ops.routing import SumRoutesOp


@serves(AddNormOp)
def add_norm(call: AddNormOp) -> tuple[Tensor, Tensor]:
    call.check()
    y = torch.empty(call.x.shape, dtype=call.x.dtype, device=call.x.device)
    return _launch(call, y), y


@serves(AddNormInt8Op)
def add_norm_int8(call: AddNormInt8Op) -> tuple[Tensor, Tensor, Tensor]:
    call.check()
    m, device = call.x.shape[0], call.x.device
    if call.plain is not None and target(call.x.get_device()).ahead_of_time:  # no such kernel is built ahead of time
        total = _launch(call.unquantized, call.plain)
        return total, *quantize_per_token(QuantizePerTokenOp(call.plain, call.k_padded))
    q, scale = int8_rows(m, call.k_padded, device)
    return _launch(call, q, scale), q, scale


@serves(AddNormRotatedOp)
def add_norm_rotated(call: AddNormRotatedOp) -> tuple[Tensor, Tensor, Tensor]:
    call.check()
    (m, k), gpu = call.x.shape, target(call.x.get_device())
    rotation = RowsRotation(DTYPES[call.out_dtype], min(call.group_size, k), len(call.seeds), call.in_rows)
    shape = DTYPES[call.x.dtype], call.layer, gpu.arch, k
    if not rotates_rows(gpu, NormRows.for_shape, *shape, many=m >= MANY_ROWS, rotation=rotation):
        y = torch.empty(call.x.shape, dtype=call.x.dtype, device=call.x.device) if call.plain is None else call.plain
        return _launch(call.unrotated, y), *rotate_apart(call.rotation(y))
    blocks, scale = rotated(call.rotation(call.x))
    return _launch(call, blocks, scale if rotation.quantized else None, rotation), blocks, scale


def _launch(
    call: AddNormOp | AddNormInt8Op | AddNormRotatedOp,
    y: Tensor,
    scale: Tensor | None = None,
    rotation: RowsRotation | None = None,
) -> Tensor:
    """Write the norm to y, and the scales of an int8 norm to ``scale``; return the sum."""
    plain = None if isinstance(call, AddNormOp) else call.plain
    given, residual, weight, bias, layer, eps = call[:6]
    route_weights = call.route_weights
    if residual is not None and route_weights is not None and target(given.get_device()).ahead_of_time:
        experts = torch.zeros(route_weights.shape, dtype=torch.int32, device=given.device)
        residual, route_weights = sum_routes(SumRoutesOp(residual, route_weights, experts, 1, None)), None
    (m, k), dtype, device = given.shape, given.dtype, given.get_device()
    total = torch.empty(given.shape if residual is not None else (0,), dtype=dtype, device=given.device)
    if m == 0:
        return total
    x, weight = given.contiguous(), weight.contiguous()
    if residual is not None:
        residual = residual.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    signs = call.operands.contiguous() if isinstance(call, AddNormRotatedOp) else None
    # A copy is written by the kernel just before.
    early_read = call.early_read and weight is call.weight and bias is call.bias
    if isinstance(call, AddNormRotatedOp):
        early_read = early_read and signs is call.operands
    aligned = k * x.element_size() % 16 == 0 and is_aligned(x, residual, weight, bias, y, plain)
    quantized = scale is not None and rotation is None
    key = (dtype, layer, k, residual is not None, quantized, m >= MANY_ROWS, aligned, rotation, plain is not None)
    routes = None if route_weights is None else route_weights.contiguous()
    plan = _plans[(*key, routes is not None, early_read, device)]
    sums = () if residual is None else (residual.data_ptr(), total.data_ptr())
    biases = ((0 if bias is None else bias.data_ptr()),) if layer else ()
    results = (y.data_ptr(),) if scale is None else (y.data_ptr(), scale.data_ptr())
    sizes = (k, k, y.shape[1]) if quantized else (k, k)
    in_rows = rotation is not None and rotation.in_rows
    rotation_args = () if signs is None else (signs.data_ptr(), y.shape[1] if in_rows else 32 * signs.shape[1])
    plains = () if plain is None else (plain.data_ptr(),)
    routed = () if routes is None else (routes.data_ptr(), routes.shape[1])
    args = (x.data_ptr(), *sums, weight.data_ptr(), *biases, *results, *sizes, eps, *rotation_args, *plains, *routed)
    plan.launch(m, args, current_stream(device))
    return total


@PlanCache
def _plans(
    dtype: torch.dtype,
    layer: bool,
    k: int,
    residual: bool,
    quantized: bool,
    many: bool,
    aligned: bool,
    rotation: RowsRotation | None,
    plain: bool,
    routes: bool,
    early_read: bool,
    device: int,
) -> LaunchPlan:
    flags = {"many": many, "residual": residual, "quantized": quantized, "aligned": aligned, "routes": routes}
    gpu = target(device)
    columns = norm_columns(k, DTYPES[dtype], gpu, aligned=aligned)
    desc = NormRows.for_shape(DTYPES[dtype], layer, gpu.arch, columns, **flags, rotation=rotation, plain=plain)
    return LaunchSpec(desc.emit(), desc.grid, pdl=early_read and pdl(device)).load(device)
