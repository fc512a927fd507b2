"""`qcut.ops.linear` on CUDA: linear layers with weights of a byte.

A call is a look-up in a dictionary, one allocation for the result (and one for quantized tokens), and one or two
launches on the current stream. The first call of a layer makes a plan and hands it to
`qcut.backends.cuda.launch.native`. Its C++ serves the calls that follow.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qcut.backends.cuda.codebook import quantize_rotated, rows_of_int8
from qcut.backends.cuda.gemm import TMA_ROWS, Product, fp8_spec, w8a16_spec
from qcut.backends.cuda.launch import native
from qcut.backends.cuda.launch.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, hand_over, m_bucket, target
from qcut.backends.cuda.operands import dense, has_rows, parameters, row_major
from qcut.backends.cuda.quantize import per_tensor_spec, per_token_spec
from qcut.dispatch import gemm as dispatch
from qcut.dispatch.gpus import Target
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.gemm.problem import GemmProblem
from qcut.errors import DtypeError
from qcut.numerics import int8 as numerics
from qcut.numerics import int16
from qcut.ops.checks import check_scale, check_zero_point
from qcut.ops.codebook import W8A8RotatedLinearOp, can_rotate
from qcut.ops.linear import (
    FEW_ELEMENTS,
    FP8DynamicLinearOp,
    FP8StaticLinearOp,
    Int8LinearOp,
    Int16x8LinearOp,
    Int16x8StaticLinearOp,
    LinearWithAbsmaxOp,
    W8A8LinearOp,
    W8A8StaticLinearOp,
    W8A16LinearOp,
)
from qcut.ops.registry import serves
from qcut.schemes import padded_k

# ── what chooses kernels ─────────────────────────────────────────────────────────────────────────


FLOAT_TOKENS = frozenset(("w8a16", "fp8", "fp8_blocks"))
"""Schemes of tokens of 16 bits."""
FP8_TOKENS = frozenset(("fp8_dynamic", "fp8_static"))
"""Schemes of tokens in 8-bit floats."""
_HALVES = (torch.float16, torch.bfloat16)


def float_token_scheme(qweight: Tensor, weight_scale: Tensor) -> str:
    """The scheme of a weight that is multiplied with tokens of 16 bits, or of those of experts."""
    if qweight.dtype is not torch.float8_e4m3fn:
        return "w8a16"  # other dtypes are refused where plans are made
    return "fp8_blocks" if weight_scale.dim() == qweight.dim() else "fp8"


def linear_problem(
    dtype: DType, n: int, k: int, bias: bool, activation: str, scheme: str, *, aligned: bool = True
) -> GemmProblem:
    """The description of a linear layer's product, by which kernels are chosen and emitted.

    Args:
        dtype: type of tokens and result.
        n: number of output channels.
        k: columns of the tokens.
        bias: whether a bias is added.
        activation: activation after the bias.
        scheme: name of a scheme of weights of a byte.
        aligned: whether rows of tokens start at multiples of 16 bytes.
    """
    epilogue = Epilogue(
        out=dtype,
        row_scale="per_token" if scheme in ("w8a8", "int16x8", "fp8_dynamic") else "none",
        col_scale="per_unit" if scheme == "fp8_blocks" else "per_channel",
        zero_point="per_tensor" if scheme == "w8a8_static" else "none",
        bias=bias,
        activation=Activation(activation),
        halves=scheme.startswith("int16x8"),
    )
    alignment_n = dispatch.alignment_of(n)
    if scheme in FLOAT_TOKENS:
        b, alignment_k = DType.S8 if scheme == "w8a16" else DType.E4M3, 8 if aligned and k % 8 == 0 else 1
        return GemmProblem(dtype, b, epilogue, alignment_k, alignment_n)
    bits8 = DType.E4M3 if scheme in FP8_TOKENS else DType.S8
    return GemmProblem(bits8, bits8, epilogue, alignment_n=alignment_n)


class LinearLayer(NamedTuple):
    """A layer with weights of a byte at up to ``rows`` tokens: all that chooses its kernels.

    Attributes:
        scheme: name of a scheme of weights of a byte.
        dtype: dtype of tokens and result.
        rows: number of tokens, a `qcut.dispatch.buckets.m_bucket`.
        n: number of output channels.
        k: columns of the tokens.
        bias: whether a bias is added.
        activation: activation after the bias.
        aligned: whether rows of tokens start at multiples of 16 bytes.
        early_read: whether the parameters are ready, as those of a `qcut.Linear` are.
    """

    scheme: str
    dtype: torch.dtype
    rows: int
    n: int
    k: int
    bias: bool
    activation: str
    aligned: bool
    early_read: bool = True

    def problem(self) -> GemmProblem:
        """The description of the layer's product."""
        dtype = DTYPES[self.dtype]
        return linear_problem(dtype, self.n, self.k, self.bias, self.activation, self.scheme, aligned=self.aligned)

    def specs(self, device: int) -> tuple[LaunchSpec | None, LaunchSpec]:
        """The launches of a call: the kernel that quantizes tokens, or None if none is needed, and the product."""
        return self.typed_specs(device)[1:]

    def typed_specs(self, device: int) -> tuple[DType, LaunchSpec | None, LaunchSpec]:
        """The type of the product's tokens, and `specs`."""
        gpu, dtype, k = target(device), DTYPES[self.dtype], padded_k(self.k)
        problem = self.problem()
        if self.scheme in FLOAT_TOKENS:
            return dtype, None, w8a16_spec(problem, self.rows, self.n, self.k, gpu, pdl=self.early_read)
        if self.scheme in FP8_TOKENS:
            tokens, product = fp8_spec(problem, self.rows, self.n, k, gpu, pdl=self.early_read)
            if self.scheme == "fp8_static":
                return tokens, per_tensor_spec(dtype, k, gpu, aligned=self.aligned, q=tokens), product
            return tokens, per_token_spec(dtype, self.rows, k, gpu, aligned=self.aligned, q=tokens), product
        halves = problem.epilogue.halves
        many = Product(problem, max(self.rows, TMA_ROWS // (1 + halves)), self.n, k)
        if self.scheme.endswith("_static"):
            quantize = per_tensor_spec(dtype, k, gpu, aligned=self.aligned, halves=halves)
        else:
            whole = self._quantizing_spec(gpu)
            if whole is not None:
                return dtype, None, whole
            quantize = per_token_spec(dtype, self.rows, k, gpu, aligned=self.aligned, halves=halves)
        few = Product(problem, self.rows, self.n, k).stream_spec("given", gpu, early_read=self.early_read)
        return DType.S8, quantize, few or many.spec(gpu)

    def _quantizing_spec(self, gpu: Target) -> LaunchSpec | None:
        """The launch of a product that quantizes its token itself; for more than one a kernel of its own is faster."""
        if self.rows > 1 or self.k > FEW_ELEMENTS:
            return None
        product = Product(self.problem(), self.rows, self.n, self.k)
        return product.stream_spec("floats", gpu, aligned=self.aligned, early_read=self.early_read)

    def sources(self, device: int) -> list[KernelSource]:
        """The kernels that a call launches on a device."""
        return [spec.source for spec in self.specs(device) if spec is not None]

    def launches(self, device: int) -> list[LaunchSpec]:
        """The launches of a call on a device, in order."""
        return [spec for spec in self.specs(device) if spec is not None]

    @property
    def operator(self) -> str:
        """The operator that calls it."""
        return f"{'w8a16' if self.scheme in FLOAT_TOKENS else self.scheme}_linear"

    @property
    def calls_native(self) -> bool:
        """Whether C++ serves calls: those of all operators that it knows."""
        return self.operator in native.OPS


# ── plans ────────────────────────────────────────────────────────────────────────────────────────


class LinearPlan(NamedTuple):
    """Launch plans of a layer at one bucket of rows.

    Attributes:
        quantize: launch that quantizes tokens; None if the product takes floating-point tokens.
        product: launch of the product; quantized tokens and the result have its ``rows_for`` rows.
        n: number of output channels.
        k_padded: columns of the weight.
        token_bytes: bytes of an element of the product's tokens.
    """

    quantize: LaunchPlan | None
    product: LaunchPlan
    n: int
    k_padded: int
    token_bytes: int = 1


_called: PlanCache[LinearPlan] = PlanCache(on_clear=functools.partial(native.clear, *native.LINEAR_OPS))
"""Plans by all that a call's checks read, so that a hit needs no checks. Tensors count by dtype, layout and device; no
plan holds an address or depends on one's values."""


def plan_for(layer: LinearLayer, device: int) -> LinearPlan:
    """The plan of a layer on a device, made of the layer's `sources`."""
    return _plans[layer, device]


@PlanCache
def _plans(layer: LinearLayer, device: int) -> LinearPlan:
    """Layers of the same description share a plan."""
    tokens, quantize, product = layer.typed_specs(device)
    first = None if quantize is None else quantize.load(device)
    return LinearPlan(first, product.load(device), layer.n, padded_k(layer.k), tokens.bits // 8)


# ── the operators of float tokens ────────────────────────────────────────────────────────────────


@serves(W8A8LinearOp)
def w8a8_linear(call: W8A8LinearOp) -> Tensor:
    return _linear("w8a8", call, (call.qweight, call.weight_scale, call.bias))


@serves(W8A8StaticLinearOp)
def w8a8_static_linear(call: W8A8StaticLinearOp) -> Tensor:
    return _linear(
        "w8a8_static",
        call,
        (call.qweight, call.col_scale, call.colsum, call.bias),
        (call.x_scale, call.x_zero_point),
    )


@serves(Int16x8LinearOp)
def int16x8_linear(call: Int16x8LinearOp) -> Tensor:
    return _linear("int16x8", call, (call.qweight, call.weight_scale, call.bias))


@serves(Int16x8StaticLinearOp)
def int16x8_static_linear(call: Int16x8StaticLinearOp) -> Tensor:
    return _linear("int16x8_static", call, (call.qweight, call.col_scale, call.bias), (call.x_scale,))


@serves(FP8DynamicLinearOp)
def fp8_dynamic_linear(call: FP8DynamicLinearOp) -> Tensor:
    return _linear("fp8_dynamic", call, (call.qweight, call.weight_scale, call.bias))


@serves(FP8StaticLinearOp)
def fp8_static_linear(call: FP8StaticLinearOp) -> Tensor:
    return _linear("fp8_static", call, (call.qweight, call.col_scale, call.bias), (call.x_scale,))


@serves(W8A16LinearOp)
def w8a16_linear(call: W8A16LinearOp) -> Tensor:
    scheme = float_token_scheme(call.qweight, call.weight_scale)
    return _linear(scheme, call, (call.qweight, call.weight_scale, call.bias))


def _linear(
    scheme: str,
    call: W8A8LinearOp
    | W8A8StaticLinearOp
    | W8A16LinearOp
    | FP8DynamicLinearOp
    | FP8StaticLinearOp
    | Int16x8LinearOp
    | Int16x8StaticLinearOp,
    weights: Sequence[Tensor | None],
    x_range: tuple[float] | tuple[float, int] | None = None,
) -> Tensor:
    """One of the operators of float tokens.

    Args:
        scheme: name of a scheme of weights of a byte.
        call: the operator's arguments.
        weights: weight, its scale, its sums along K (only w8a8_static) and the bias, or dense copies of them.
        x_range: scale and zero point of the tokens (w8a8_static), or only the scale (int16x8_static, fp8_static).
    """
    x, halves = call.x, scheme.startswith("int16x8")
    if x.dim() == 0 or x.shape[-1] == 0:
        call.check()  # raises
    if x_range is not None:  # no part of the key
        check_scale(f"{scheme}_linear", "x_scale", x_range[0])
        for zero_point in x_range[1:]:
            check_zero_point("w8a8_static_linear", "x_zero_point", zero_point)
    k = x.shape[-1]
    m = x.numel() // k
    tokens, stride = row_major(x)
    address = tokens.data_ptr()
    aligned = (address | stride * x.element_size()) & 15 == 0
    device = x.get_device()
    addresses = [0 if t is None else t.data_ptr() for t in weights]
    layouts = [None if t is None else (t.dtype, t.shape, t.stride(), t.get_device()) for t in weights]
    offset = functools.reduce(operator.or_, addresses) & 15
    key = (scheme, x.dtype, m_bucket(m), k, call.activation, call.early_read, aligned, device, offset, *layouts)
    plan = _called.get(key)
    if plan is None or m == 0:
        call.check()
        if scheme in FLOAT_TOKENS and x.dtype is torch.float32:
            raise DtypeError(f"qcut::w8a16_linear: x is {x.dtype}; allowed on CUDA: float16, bfloat16")
        if m == 0:
            return call.fake()
        copies = [None if t is None else dense(t) for t in weights]
        if any(a is not b for a, b in zip(copies, weights, strict=True)):
            return _linear(scheme, call._replace(early_read=False), copies, x_range)  # the kernel just before copies
        options = (call.bias is not None, call.activation, aligned, call.early_read)
        layer = LinearLayer(scheme, x.dtype, m_bucket(m), len(call.qweight), k, *options)
        plan = _called.make(key, lambda: _shared(layer, device))
    n, k_padded = plan.n, plan.k_padded
    weight, scale, *colsum, bias = addresses
    rows = plan.product.rows_for(m)
    if plan.quantize is None:
        operands, sizes = (address, weight), (m, n, k, stride, k_padded, n)
        epilogue: tuple[int, ...] = (m, scale) if halves else (scale,)
    else:
        # One allocation for all, in x's dtype, which spares a conversion of arguments: quantized rows are multiples of
        # 16 bytes, so the scales behind them are aligned.
        q_rows = int16.rows_of_blocks(rows) if halves else rows
        q_bytes = q_rows * k_padded * plan.token_bytes
        scratch = x.new_empty((q_bytes + 4 * rows * (x_range is None)) // x.element_size())
        q = scratch.data_ptr()
        operands, sizes = (q, weight), (q_rows, n, k_padded, k_padded, k_padded, n)
        if x_range is None:
            token_scale = q + q_bytes
            epilogue = (rows, token_scale, scale) if halves else (token_scale, scale)
            plan.quantize.run(m, (address, q, token_scale, stride, m, k, k_padded), device)
        else:
            epilogue = (rows, scale) if halves else (*x_range[1:], *colsum, scale)
            plan.quantize.run(m, (address, q, stride, m, k, k_padded, *x_range), device)
    y, y_rows = _result(x, m, rows, n)
    args = (*operands, y_rows.data_ptr(), *sizes, *epilogue)
    plan.product.run(rows, (*args, bias) if bias else args, device)
    return y


def _shared(layer: LinearLayer, device: int) -> LinearPlan:
    """The plan of a layer, handed to C++."""
    plan = plan_for(layer, device)
    if layer.calls_native:
        key = native.key(
            layer.operator,
            n=layer.n,
            k=layer.k,
            rows=layer.rows,
            dtype=layer.dtype,
            name=layer.activation,
            device=device,
            aligned=layer.aligned,
            early_read=layer.early_read,
            bias=layer.bias,
            e4m3=layer.scheme.startswith("fp8"),
            unit_scales=layer.scheme == "fp8_blocks",
        )
        hand_over(key, [plan.product] if plan.quantize is None else [plan.quantize, plan.product], plan.k_padded)
    return plan


def _result(x: Tensor, m: int, rows: int, n: int) -> tuple[Tensor, Tensor]:
    """A tensor for the result, ``[..., n]``, and the memory of at least ``rows`` rows that holds it."""
    shape = (*x.shape[:-1], n)
    if rows == m:
        y = x.new_empty(shape)
        return y, y
    memory = x.new_empty((rows, n))
    return memory[:m].view(shape), memory


# ── the operators of tokens about which more is known ────────────────────────────────────────────


class Int8Layer(NamedTuple):
    """A W8A8 layer at up to ``rows`` tokens that are int8 already: all that chooses its kernel.

    Attributes:
        dtype: dtype of the result.
        rows: number of tokens, a `qcut.dispatch.buckets.m_bucket`.
        n: number of output channels.
        k: columns of the tokens, a multiple of 16.
        bias: whether a bias is added.
        activation: activation after the bias.
        absmax: whether the caller wants the largest magnitude of each row of the result.
        early_read: whether the parameters are ready.
    """

    dtype: torch.dtype
    rows: int
    n: int
    k: int
    bias: bool
    activation: str
    absmax: bool
    early_read: bool = True

    def spec(self, device: int) -> tuple[LaunchSpec, bool]:
        """The launch, and whether its kernel computes the largest magnitudes."""
        gpu = target(device)
        problem = linear_problem(DTYPES[self.dtype], self.n, self.k, self.bias, self.activation, "w8a8")
        product = Product(problem, self.rows, self.n, self.k)
        few = product.stream_spec("given", gpu, absmax=self.absmax, early_read=self.early_read)
        if few is not None:
            return few, self.absmax
        return product._replace(rows=max(self.rows, TMA_ROWS)).spec(gpu), False


class RotatedLayer(NamedTuple):
    """A layer with rotated int8 tokens at up to ``rows`` tokens: all that chooses its kernels.

    Attributes:
        dtype: dtype of tokens and result.
        rows: number of tokens.
        n: number of output channels.
        k: columns of the tokens.
        group_size: columns of a group.
        bias: whether a bias is added.
        activation: activation after the bias.
    """

    dtype: torch.dtype
    rows: int
    n: int
    k: int
    group_size: int
    bias: bool
    activation: str

    def launches(self, device: int) -> list[LaunchSpec]:
        """The launches of a call on a device, in order: of one token one, where a kernel rotates it."""
        if self.rows == 1 and self.dtype in _HALVES and can_rotate("hadamard", self.group_size, self.k):
            group = min(self.group_size, self.k)
            whole = RotatedToken(self.dtype, self.n, self.k, group, self.bias, self.activation).spec(target(device))
            if whole is not None:
                return [whole]
        aligned = self.k * self.dtype.itemsize % 16 == 0
        rotation = rows_of_int8(self.dtype, self.rows, self.k, self.group_size, aligned, True)
        options = (self.n, padded_k(self.k), self.bias, self.activation, False)
        product, _ = Int8Layer(self.dtype, m_bucket(self.rows), *options).spec(device)
        return [*rotation.specs(target(device)), product]

    def sources(self, device: int) -> list[KernelSource]:
        """The kernels that a call launches on a device."""
        return [spec.source for spec in self.launches(device)]

    @property
    def calls_native(self) -> bool:
        """Whether C++ serves calls: all."""
        return True


class RotatedToken(NamedTuple):
    """A layer with rotated int8 tokens at one token that its product's kernel rotates.

    Attributes:
        dtype: float16 or bfloat16, of token and result.
        n: number of output channels.
        k: columns of the token.
        group: columns of a group, one of those of `qcut.ops.codebook.can_rotate`.
        bias: whether a bias is added.
        activation: activation after the bias.
        early_read: whether weight, bias and signs are ready.
    """

    dtype: torch.dtype
    n: int
    k: int
    group: int
    bias: bool
    activation: str
    early_read: bool = True

    def spec(self, gpu: Target) -> LaunchSpec | None:
        """The launch; None if no kernel rotates the token, or one of its own takes less time."""
        if self.k > FEW_ELEMENTS:
            return None
        problem = linear_problem(DTYPES[self.dtype], self.n, self.k, self.bias, self.activation, "w8a8")
        product = Product(problem, 1, self.n, self.k)
        return product.stream_spec("floats", gpu, early_read=self.early_read, rotates=self.group)


class Int8Plan(NamedTuple):
    """Launch plan of a layer with int8 tokens, and whether its kernel computes the largest magnitudes."""

    product: LaunchPlan
    raises_absmax: bool


class ProductPlan(NamedTuple):
    """Launch plan of a product that quantizes its tokens, or None if no kernel does."""

    product: LaunchPlan | None


def _int8_plan(layer: Int8Layer, device: int) -> Int8Plan:
    """The plan of a layer, handed to C++ unless magnitudes are wanted."""
    spec, raises_absmax = layer.spec(device)
    plan = Int8Plan(spec.load(device), raises_absmax)
    if not layer.absmax:
        key = native.key(
            "int8_linear",
            n=layer.n,
            k=layer.k,
            rows=layer.rows,
            dtype=layer.dtype,
            name=layer.activation,
            device=device,
            early_read=layer.early_read,
            bias=layer.bias,
        )
        hand_over(key, [plan.product])
    return plan


_int8_plans = PlanCache(_int8_plan, on_clear=functools.partial(native.clear, "int8_linear"))


@PlanCache
def _absmax_plans(layer: LinearLayer, device: int) -> ProductPlan:
    product = Product(layer.problem(), layer.rows, layer.n, layer.k)
    spec = product.stream_spec("rows", target(device), aligned=layer.aligned, early_read=layer.early_read)
    return ProductPlan(None if spec is None else spec.load(device))


def _token_plan(layer: RotatedToken, device: int) -> ProductPlan:
    """The plan of a layer, handed to C++ if there is one."""
    spec = layer.spec(target(device))
    if spec is None:
        return ProductPlan(None)
    plan = spec.load(device)
    key = native.key(
        "w8a8_rotated_linear",
        n=layer.n,
        k=layer.k,
        rows=1,
        dtype=layer.dtype,
        name=layer.activation,
        device=device,
        slots=layer.group,
        early_read=layer.early_read,
        bias=layer.bias,
    )
    hand_over(key, [plan])
    return ProductPlan(plan)


_token_plans = PlanCache(_token_plan, on_clear=functools.partial(native.clear, "w8a8_rotated_linear"))


@serves(W8A8RotatedLinearOp)
def w8a8_rotated_linear(call: W8A8RotatedLinearOp) -> Tensor:
    call.check()
    (x, _), (n, k), device = row_major(call.x), call.qweight.shape, call.x.get_device()
    weight, signs = parameters(call.qweight, call.weight_scale, call.bias), dense(call.operands)
    early_read = call.early_read and not weight.copied and signs is call.operands
    options = (call.bias is not None, call.activation, early_read)
    plan = None
    if x.data_ptr() % 16 == 0:
        plan = _token_plans[RotatedToken(x.dtype, n, k, min(call.group_size, k), *options), device].product
    if plan is None:
        return int8_linear(call.product(*quantize_rotated(call.rotation)))
    y = call.fake()
    b, *vectors = weight.addresses
    plan.run(1, (x.data_ptr(), b, y.data_ptr(), 1, n, k, k, k, n, signs.data_ptr(), *vectors), device)
    return y


@serves(Int8LinearOp)
def int8_linear(call: Int8LinearOp) -> Tensor:
    call.check()
    q, bias, absmax = call.q, call.bias, call.absmax
    (m, k), n, device = q.shape, len(call.qweight), q.get_device()
    if m == 0:
        return call.fake()
    weight = parameters(call.qweight, call.weight_scale, bias)
    options = (bias is not None, call.activation, absmax is not None, call.early_read and not weight.copied)
    layer = Int8Layer(call.dtype, m_bucket(m), n, k, *options)
    plan = _int8_plans[layer, device]
    q, q_scale = dense(q), dense(call.q_scale)
    rows = plan.product.rows_for(m)
    if rows != m and not has_rows(rows, q, q_scale):
        rows = m
    memory = torch.empty((rows, n), dtype=call.dtype, device=q.device)
    y, a, (b, *vectors) = memory[:m], q.data_ptr(), weight.addresses
    epilogue = [q_scale.data_ptr(), *vectors]
    if absmax is not None and plan.raises_absmax:
        epilogue.append(absmax.data_ptr())
    plan.product.run(rows, (a, b, memory.data_ptr(), rows, n, k, k, k, n, *epilogue), device)
    if not plan.raises_absmax:
        numerics.raise_absmax(absmax, y)
    return y


@serves(LinearWithAbsmaxOp)
def linear_with_absmax(call: LinearWithAbsmaxOp) -> Tensor:
    call.check()
    (m, k), (n, k_padded), device = call.x.shape, call.qweight.shape, call.x.get_device()
    if m == 0:
        return call.fake()
    x, stride = row_major(call.x)
    aligned = (x.data_ptr() | stride * x.element_size()) % 16 == 0
    weight = parameters(call.qweight, call.weight_scale, call.bias)
    early_read = call.early_read and not weight.copied
    options = (call.bias is not None, call.activation, aligned, early_read)
    layer = LinearLayer("w8a8", x.dtype, m_bucket(m), n, k, *options)
    plan = _absmax_plans[layer, device].product
    if plan is None:
        w8a8 = torch.ops.qcut.w8a8_linear
        y: Tensor = (w8a8.early_read if call.early_read else w8a8.default)(x, *call[2:-1])
        return y
    y = call.fake()
    b, *vectors = weight.addresses
    sizes = (m, n, k, stride, k_padded, n)
    plan.run(m, (x.data_ptr(), b, y.data_ptr(), *sizes, call.x_absmax.data_ptr(), *vectors), device)
    return y
