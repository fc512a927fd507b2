"""CUDA implementation of the operator in `qcut.codebook_joined_ops`, imported at the first CUDA call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from emitters.source import EmitError
from qcut import _codebook_cuda as codebook_cuda
from qcut import codebook_joined_ops, dispatch
from qcut._launch_plans import DTYPES, LaunchPlan
from qcut.codebook_dispatch import problem_of

_plans: dict[tuple[Any, ...], LaunchPlan | None] = {}
_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream


def codebook_gemv_of(
    x: Tensor,
    other: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    prologue: str,
    eps: float,
    operands: Tensor,
    group_size: int,
    seeds: Sequence[int],
    units: Tensor,
    norms: Tensor,
    col_scale: Tensor,
    book: Sequence[int],
    bias: Tensor | None,
    bits: int,
    activation: str,
) -> tuple[Tensor, Tensor]:
    product = (operands, group_size, seeds, units, norms, col_scale, book, bias, bits, activation)
    codebook_joined_ops._check(x, other, norm_weight, norm_bias, prologue, eps, *product)
    norm = prologue != "gate"
    n, units_k, device = len(col_scale), units.shape[1], x.get_device()
    key = (prologue, x.dtype, bits, norms.shape[2], bias is not None, activation, n, units_k, len(seeds), device)
    if key not in _plans:
        _plans[key] = _plan(prologue, x.dtype, bits, norms.shape[2], bias is not None, activation, n, units_k, device)
    plan = None if norm and len(seeds) > 1 else _plans[key]
    if plan is None:
        if norm:
            arguments = (x, other, cast(Tensor, norm_weight), norm_bias, prologue == "layer", eps)
            total, y = torch.ops.qcut.add_norm(*arguments)
        else:
            total, y = x.new_empty(0), torch.ops.qcut.silu_mul(x, other)
        return total, codebook_cuda.codebook_gemv(y, *product, None, x.dtype)
    total = x.new_empty(x.shape if norm and other is not None else (0,))
    out = x.new_empty((1, n))
    made = (other, total, norm_weight, norm_bias) if norm else (other,)
    # Named, so that they live until the launch.
    before = [None if t is None else codebook_cuda._aligned(t) for t in (x, *made)]
    tensors = [codebook_cuda._aligned(t) for t in (operands, units, norms)]
    vectors = [codebook_cuda._aligned(t) for t in (col_scale, bias) if t is not None]
    pointers = (*(0 if t is None else t.data_ptr() for t in before), *(t.data_ptr() for t in (*tensors, out)))
    row = (x.shape[1], units_k // len(seeds), *((eps,) if norm else ()))
    plan.launch(1, (*pointers, 1, n, units_k, *row, n, *book, *(t.data_ptr() for t in vectors)), _stream(device))
    return total, out


def _plan(
    prologue: str,
    dtype: torch.dtype,
    bits: int,
    slots: int,
    bias: bool,
    activation: str,
    n: int,
    units: int,
    device: int,
) -> LaunchPlan | None:
    """The kernel's plan; None where K is longer than the warps of one kernel hold."""
    x = DTYPES[dtype]
    kind = cast(Literal["gate", "rms", "layer"], prologue)
    problem = problem_of(x, bits, slots, x, bias, activation, False, dispatch.alignment_of(n), True, kind)
    try:
        return codebook_cuda.gemm_plan(problem, 1, n, units, device)
    except EmitError:
        return None
