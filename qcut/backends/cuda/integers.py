"""`qcut.ops.integers` on CUDA: kernels of int8 products with an epilogue that rescales in 64 bits.

Up to some tokens one kernel streams the weights, and splits int16 tokens as it loads them. For more tokens, int16 is
split into halves first, and a tiled kernel multiplies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qcut.backends.cuda.gemm import Product, chosen_spec
from qcut.backends.cuda.launch.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, has_pdl, m_bucket, target
from qcut.backends.cuda.operands import parameters, row_major
from qcut.dispatch import gemm as dispatch
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.decoder.split_halves import SplitHalves
from qcut.emitters.gemm.problem import GemmProblem
from qcut.numerics import int16
from qcut.ops.checks import flat
from qcut.ops.integers import IntegerLinearOp
from qcut.ops.registry import serves
from qcut.schemes import padded_k


class IntegerLayer(NamedTuple):
    """A layer in integers at up to ``rows`` tokens: all that chooses its kernels.

    Attributes:
        dtype: int8 or int16, of tokens and result.
        rows: number of tokens, a `qcut.dispatch.buckets.m_bucket`.
        n: number of output channels.
        k: columns of the weight.
        aligned: whether rows of tokens have as many columns, and start at multiples of 16 bytes.
        early_read: whether the parameters are ready.
    """

    dtype: torch.dtype
    rows: int
    n: int
    k: int
    aligned: bool
    early_read: bool

    def specs(self, device: int) -> tuple[LaunchSpec | None, LaunchSpec]:
        """The launches of a call: the kernel that splits tokens, or None if none is needed, and the product."""
        gpu, halves = target(device), self.dtype is torch.int16
        epilogue = Epilogue(DTYPES[self.dtype], halves=halves, rescale=True)
        problem = GemmProblem(epilogue=epilogue, alignment_n=dispatch.alignment_of(self.n))
        if self.aligned:
            few = Product(problem, self.rows, self.n, self.k).stream_spec("given", gpu, early_read=self.early_read)
            if few is not None:
                return None, few
        sizes = (epilogue.rows(self.rows), self.n, self.k)
        choice = dispatch.select_gemm(problem, *sizes, gpu, cutlass=False)
        product = chosen_spec(choice, problem, self.n, gpu)
        if not halves:
            return None, product
        split = SplitHalves(gpu.arch, self.aligned)
        k = self.k
        return LaunchSpec(split.emit(), lambda m: split.grid(m, k), pdl=has_pdl(gpu)), product


class IntegerPlan(NamedTuple):
    """Launch plans of a layer: that of the split, or None, and that of the product."""

    split: LaunchPlan | None
    product: LaunchPlan


@PlanCache
def _plans(layer: IntegerLayer, device: int) -> IntegerPlan:
    split, product = layer.specs(device)
    return IntegerPlan(None if split is None else split.load(device), product.load(device))


@serves(IntegerLinearOp)
def integer_linear(call: IntegerLinearOp) -> Tensor:
    call.check()
    y = call.fake()
    n, device, halves = y.shape[-1], call.q.get_device(), call.q.dtype is torch.int16
    k, k_padded = call.q.shape[-1], padded_k(call.q.shape[-1])
    m = call.q.numel() // k
    if m == 0:
        return y
    q, stride = row_major(call.q)
    aligned = k == k_padded and (q.data_ptr() | stride * q.element_size()) % 16 == 0
    if not (aligned or halves):
        padded = q.new_zeros((m, k_padded))
        padded[:, :k] = flat(q)
        q, stride, aligned = padded, k_padded, True
    weight = parameters(call.qweight, call.bias, call.multiplier, call.shift, call.zero_point)
    layer = IntegerLayer(q.dtype, m_bucket(m), n, k_padded, aligned, call.early_read and not weight.copied)
    plan = _plans[layer, device]
    a, rows, (b, *vectors) = q.data_ptr(), m, weight.addresses
    if plan.split is not None:
        rows = int16.rows_of_blocks(m)
        split = q.new_empty((rows, k_padded), dtype=torch.int8)
        plan.split.run(m, (a, split.data_ptr(), stride, m, k, k_padded), device)
        a, stride = split.data_ptr(), k_padded
    epilogue = (*((m,) if halves else ()), *vectors, int(call.relu))
    plan.product.run(m, (a, b, y.data_ptr(), rows, n, k_padded, stride, k_padded, n, *epilogue), device)
    return y
