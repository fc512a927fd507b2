"""Products of e4m3 tokens and weights, without quantizing tokens: qcut's, and row-wise ``torch._scaled_mm``.

`benchmarks.layers.linear` measures them next to whole layers of ``fp8_dynamic``. Tokens are quantized beforehand, with
a scale each. ``_fast`` lets the tensor core add all products with its own bits, as ``use_fast_accum`` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

import qcut
from benchmarks.harness import Variant
from benchmarks.layers.gemm import require_close
from benchmarks.layers.shapes import Shape
from qcut import jit
from qcut.emitters.core.source import DType
from qcut.layers.float8 import Float8TokensLinear
from qcut.numerics import float8

if TYPE_CHECKING:
    from qcut.backends.cuda.launch.plans import LaunchSpec
    from qcut.emitters.core.source import KernelSource


class TorchFloat8(nn.Module):
    """A layer of e4m3 tokens and weights by torch: row-wise ``torch._scaled_mm`` after a compiled quantization.

    Args:
        linear: on a GPU with products of e4m3, of whole 16 channels and columns.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        q, scale = float8.quantize_tokens_ref(linear.weight.detach(), linear.in_features)
        self.register_buffer("codes", q)
        self.register_buffer("scale", scale[None])
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().bfloat16())

    def dequantized_weight(self) -> Tensor:
        """float64 ``[N, K]``."""
        return cast(Tensor, self.codes).double() * cast(Tensor, self.scale).double().t()

    def forward(self, x: Tensor) -> Tensor:
        """bfloat16 ``[M, N]`` of bfloat16 ``[M, K]``: row-wise scales give no other type."""
        q, scale = _compiled()(x)
        weight, columns, bias = (cast(Tensor, part) for part in (self.codes, self.scale, self.bias))
        return torch._scaled_mm(q, weight.t(), scale_a=scale, scale_b=columns, bias=bias, out_dtype=x.dtype)


@cache
def _compiled() -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    return torch.compile(_quantized, dynamic=True)


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    largest = x.abs().amax(1, keepdim=True).float()
    scale = torch.where(largest > 0, largest / 448, 1.0)
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


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


def prebuild(schemes: Iterable[str], shapes: Sequence[Shape]) -> None:
    """Build, in parallel, the kernels of layers with weights of e4m3, and those of `products`.

    Raises:
        BuildError: the first kernel that does not compile.
    """
    from qcut.backends.cuda.launch.plans import m_bucket
    from qcut.backends.cuda.linear import LinearLayer

    sources: list[KernelSource] = []
    for scheme in schemes:
        for m, n, k in ((m_bucket(shape.m), shape.n, shape.k) for shape in shapes):
            if scheme.startswith("fp8"):
                layer = LinearLayer(scheme, torch.float16, m, n, k, True, "none", True)
                sources += layer.sources(torch.cuda.current_device())
            if scheme == "fp8_dynamic" and n % 16 == k % 16 == 0:
                specs = (_chosen(m, n, k, fast=fast)[1] for fast in (False, True))
                sources += [spec.source for spec in specs if spec is not None]
    for built in jit.build_many(sources, progress=sys.stderr.isatty()).values():
        if isinstance(built, Exception):
            raise built


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


def _chosen(m: int, n: int, k: int, *, fast: bool) -> tuple[DType, LaunchSpec | None]:
    """The tokens and the kernel that dispatch chooses; with ``fast`` the same tile, None if there is no such tile."""
    from qcut.backends.cuda.gemm import chosen_spec, fp8_spec, has_cutlass
    from qcut.backends.cuda.launch.plans import target
    from qcut.backends.cuda.linear import linear_problem
    from qcut.dispatch import gemm as dispatch
    from qcut.emitters.families import FP8_CUTLASS

    gpu = target(torch.cuda.current_device())
    problem = linear_problem(DType.BF16, n, k, True, "none", "fp8_dynamic")
    if not fast:
        return fp8_spec(problem, m, n, k, gpu)
    problem, choice = dispatch.select_fp8(problem, m, n, k, gpu, nvcc=has_cutlass())
    if choice.family != FP8_CUTLASS.name:
        return problem.a, None
    return problem.a, chosen_spec(replace(choice, tile=replace(choice.tile, fast=True)), problem, n, gpu)


def _qcut(
    layers: Sequence[Float8TokensLinear], q: Tensor, scale: Tensor, *, fast: bool
) -> Callable[[int], Tensor] | None:
    """A call for each layer by the kernel of `_chosen`; None: there is none."""
    from qcut.backends.cuda.launch.plans import m_bucket

    (m, k), n, device = q.shape, layers[0].out_features, torch.cuda.current_device()
    tokens, spec = _chosen(m_bucket(m), n, k, fast=fast)
    if spec is None:
        return None
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
