"""Products of e4m3 tokens and weights, without quantizing tokens: qcut's, and row-wise ``torch._scaled_mm``.

`benchmarks.layers.linear` measures them next to whole layers of ``fp8_dynamic``. Tokens are quantized beforehand, with
a scale each. ``_fast`` lets the tensor core add all products with its own bits, as ``use_fast_accum`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

import qcut
from benchmarks.harness import Variant
from benchmarks.layers.gemm import require_close
from qcut.layers.float8 import Float8TokensLinear
from qcut.numerics import float8

NAMES = ("torch_scaled_mm", "torch_scaled_mm_fast", "qcut_fp8_product", "qcut_fp8_product_fast")
TOLERANCE = 0.06
"""Largest relative error of a whole result: e4m3 has 3 bits of fraction on each side."""


def products(layers: Sequence[qcut.Linear], x: Tensor, reference: Tensor) -> list[Variant]:
    """Return the products of a layer in copies, each checked against float64.

    Args:
        layers: of the scheme ``fp8_dynamic``, equal, with a bias, on a GPU with products of e4m3.
        x: float16 ``[M, K]``, K and N multiples of 16.
        reference: float64 ``[M, N]``.
    """
    some = cast(Sequence[Float8TokensLinear], layers)
    q, scale = float8.quantize_tokens_ref(x, x.shape[1])
    calls = [make(some, q, scale, fast=fast) for make in (_scaled_mm, _qcut) for fast in (False, True)]
    named = zip(NAMES, calls, strict=True)
    return [_checked(name, call, len(some), reference) for name, call in named if call is not None]


def _checked(name: str, call: Callable[[int], Tensor], copies: int, reference: Tensor) -> Variant:
    return Variant(name, call, copies, lambda: require_close(call(0), reference, TOLERANCE))


def _scaled_mm(
    layers: Sequence[Float8TokensLinear], q: Tensor, scale: Tensor, *, fast: bool
) -> Callable[[int], Tensor]:
    """Row-wise scales give bfloat16 only."""
    rows = scale[:, None]
    weights = [(layer.codes.t(), layer.weight_scale[None], cast(Tensor, layer.bias).bfloat16()) for layer in layers]

    def call(i: int) -> Tensor:
        weight, columns, bias = weights[i]
        return torch._scaled_mm(
            q, weight, scale_a=rows, scale_b=columns, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    return call


def _qcut(
    layers: Sequence[Float8TokensLinear], q: Tensor, scale: Tensor, *, fast: bool
) -> Callable[[int], Tensor] | None:
    """The kernel that dispatch chooses; with ``fast`` the same tile, and None where the family has no such tile."""
    from qcut.backends.cuda.gemm import chosen_spec, fp8_spec, has_cutlass
    from qcut.backends.cuda.launch.plans import m_bucket, target
    from qcut.backends.cuda.linear import linear_problem
    from qcut.dispatch import gemm as dispatch
    from qcut.emitters.core.source import DType
    from qcut.emitters.families import FP8_CUTLASS

    (m, k), n, device = q.shape, layers[0].out_features, torch.cuda.current_device()
    gpu, problem = target(device), linear_problem(DType.BF16, n, k, True, "none", "fp8_dynamic")
    tokens, spec = fp8_spec(problem, m_bucket(m), n, k, gpu)
    if fast:
        problem, choice = dispatch.select_fp8(problem, m_bucket(m), n, k, gpu, nvcc=has_cutlass())
        if choice.family != FP8_CUTLASS.name:
            return None
        spec = chosen_spec(replace(choice, tile=replace(choice.tile, fast=True)), problem, n, gpu)
    plan = spec.load(device)
    given = q if tokens is DType.E4M3 else q.to(torch.float16)
    y = torch.empty(m, n, dtype=torch.bfloat16, device=q.device)

    def call(i: int) -> Tensor:
        layer = layers[i]
        vectors = (scale, layer.weight_scale, cast(Tensor, layer.bias))
        addresses = tuple(vector.data_ptr() for vector in vectors)
        args = (given.data_ptr(), layer.qweight.data_ptr(), y.data_ptr(), m, n, k, k, k, n, *addresses)
        plan.run(m, args, device)
        return y

    return call
