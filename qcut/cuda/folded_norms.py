"""`qcut.ops.folded_norms` on CUDA."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from qcut.cuda.gemm import Product
from qcut.cuda.linear import linear_problem
from qcut.cuda.operands import dense, parameters, row_major
from qcut.cuda.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, m_bucket, target
from qcut.emitters.stream.w8a8 import Norm
from qcut.errors import ConfigError
from qcut.numerics import folded_norms as numerics
from qcut.numerics.int8 import raise_absmax
from qcut.ops.folded_norms import NormedLinear, ResidualLinear
from qcut.ops.registry import serves


class FoldedLayer(NamedTuple):
    """A W8A8 layer that takes part in a norm, at up to ``rows`` rows: all that chooses its kernel.

    Attributes:
        norm: the norm, see `qcut.emitters.stream.w8a8`.
        dtype: dtype of rows and result.
        rows: number of rows, a `qcut.cuda.plans.m_bucket`.
        n: number of output channels.
        k: columns of the rows.
        bias: whether a bias is added.
        activation: activation after the bias.
        residual: whether a residual is added.
        absmax: whether largest magnitudes of the result, or of it times the next norm's weight, are wanted.
        aligned: whether rows, and the weight of a norm of theirs, start at multiples of 16 bytes.
        constants: whether the parameters are constants.
    """

    norm: Norm
    dtype: torch.dtype
    rows: int
    n: int
    k: int
    bias: bool
    activation: str
    residual: bool
    absmax: bool
    aligned: bool
    constants: bool = True

    def spec(self, device: int) -> LaunchSpec | None:
        """The launch; None where no kernel serves it."""
        problem = linear_problem(DTYPES[self.dtype], self.n, self.k, self.bias, self.activation, "w8a8")
        problem = replace(problem, epilogue=replace(problem.epilogue, residual=self.residual))
        options = {"aligned": self.aligned, "absmax": self.absmax, "constants": self.constants}
        product = Product(problem, self.rows, self.n, self.k)
        return product.stream_spec("rows", target(device), norm=self.norm, **options)


class FoldedPlan(NamedTuple):
    """Launch plan of a product that takes part in a norm; None where no kernel does."""

    product: LaunchPlan | None


_plans: PlanCache[FoldedPlan] = PlanCache()


def _plan(layer: FoldedLayer, device: int) -> LaunchPlan | None:
    def load() -> FoldedPlan:
        spec = layer.spec(device)
        return FoldedPlan(None if spec is None else spec.load(device))

    return (_plans.get((layer, device)) or _plans.make((layer, device), load)).product


def check_kernels(device: int) -> None:
    """Raise ConfigError where kernels come from a pack: it has none of these, and products would be composed."""
    gpu = target(device)
    if gpu.closed:
        raise ConfigError(
            f"fold_norms: the kernels of {gpu.arch} come from a pack, which has none of folded norms; allowed: an "
            "installation without that pack, which compiles its kernels"
        )


@serves(NormedLinear)
def normed_linear(call: NormedLinear) -> Tensor:
    call.check()
    (m, k), (n, k_padded), device = call.x.shape, call.qweight.shape, call.x.get_device()
    if m == 0:
        return call.fake()
    x, stride = row_major(call.x)
    gain, gain_sums, bias, absmax, constants = dense(call.gain), call.gain_sums, call.bias, call.absmax, call.constants
    if gain_sums is not None and bias is None:
        bias, constants = torch.zeros_like(gain_sums), False  # the kernel just before writes it
    weight = parameters(call.qweight, call.weight_scale, bias)
    of_norm = parameters(gain, gain_sums)
    constants = constants and gain is call.gain and not (weight.copied or of_norm.copied)
    aligned = (x.data_ptr() | stride * x.element_size()) % 16 == 0
    norm: Norm = "rms" if gain_sums is None else "layer"
    options = (bias is not None, call.activation, False, absmax is not None, aligned, constants)
    plan = _plan(FoldedLayer(norm, x.dtype, m_bucket(m), n, k, *options), device)
    if plan is None:
        y = numerics.normed_linear_ref(*call[:9], matmul=_exact_product)
        raise_absmax(absmax, y)
        return y
    y = call.fake()
    b, *vectors = weight.addresses
    noted = () if absmax is None else (absmax.data_ptr(),)
    sizes = (m, n, k, stride, k_padded, n)
    args = (x.data_ptr(), b, y.data_ptr(), *sizes, call.x_absmax.data_ptr(), *vectors, *noted)
    plan.run(m, (*args, *of_norm.addresses, call.eps), device)
    return y


@serves(ResidualLinear)
def residual_linear(call: ResidualLinear) -> Tensor:
    call.check()
    (m, k), (n, k_padded), device = call.x.shape, call.qweight.shape, call.x.get_device()
    if m == 0:
        return call.fake()
    x, stride = row_major(call.x)
    weight = parameters(call.qweight, call.weight_scale, call.bias)
    gain, absmax = parameters(call.gain), call.absmax
    constants = call.constants and not (weight.copied or gain.copied)
    aligned = (x.data_ptr() | stride * x.element_size()) % 16 == 0
    norm: Norm = "none" if call.gain is None else "next"
    options = (call.bias is not None, "none", True, absmax is not None, aligned, constants)
    plan = _plan(FoldedLayer(norm, x.dtype, m_bucket(m), n, k, *options), device)
    if plan is None:
        y = numerics.residual_linear_ref(*call[:6], matmul=_exact_product)
        if call.gain is not None:
            raise_absmax(absmax, y.float() * call.gain.float())
        return y
    y = call.fake()
    b, *vectors = weight.addresses
    noted = () if absmax is None else (absmax.data_ptr(), *gain.addresses)
    sizes = (m, n, k, stride, k_padded, n)
    args = (x.data_ptr(), b, y.data_ptr(), *sizes, call.x_absmax.data_ptr(), *vectors, call.residual.data_ptr())
    plan.run(m, (*args, *noted), device)
    return y


def _exact_product(a: Tensor, b: Tensor) -> Tensor:
    product: Tensor = torch.ops.qcut.gemm_s8(a, b, out_dtype=torch.int32)
    return product
