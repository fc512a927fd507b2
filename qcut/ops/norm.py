"""The norms between a decoder's layers, each of the sum of a layer's output and the residual."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qcut.errors import ConfigError, ShapeError
from qcut.numerics import int8, routing
from qcut.ops.checks import FLOAT_DTYPES, check_dtype, check_tensor
from qcut.ops.codebook import QuantizeRotatedOp, RotateTokensOp, check_rotated, rotation_of_rows
from qcut.ops.registry import MUTATED, operator


@operator("add_norm", returns="(Tensor, Tensor)")
class AddNormOp(NamedTuple):
    """The sum of a layer's output and the residual, and the norm of the sum.

    rne rounds to the nearest value of x's type, s is ``rne(x + residual)``, or x without a residual::

        rms    y = rne(weight * rne(s * rsqrt(mean(s**2) + eps)))
        layer  y = rne((s - mean(s)) * rsqrt(mean((s - mean(s))**2) + eps) * weight + bias)

    Args:
        x: float16, bfloat16 or float32 ``[M, K]``, K at least 1, of any strides.
        residual: as x, or with ``route_weights`` the results ``[M * k, K]`` of a token's k routes; None: none is added.
        weight: ``[K]`` of x's type.
        bias: ``[K]`` of x's type, only for a LayerNorm; None: none is added.
        layer: whether the norm is a LayerNorm; otherwise it is an RMSNorm.
        eps: added under the root.
        route_weights: float32 ``[M, k]``; the residual then is `qcut.ops.routing.SumRoutesOp` of all routes.

    Returns:
        s ``[M, K]``, or an empty tensor ``[0]`` without a residual, and y ``[M, K]``; contiguous, of x's type.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument is not as above.
        ConfigError: an RMSNorm is given a bias.

    Exactness: s is bitwise. Sums over K are float32, in an order that differs between devices: their error is at most
    ``K * 2**-24`` of the sum of their terms' magnitudes.
    """

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None
    layer: bool
    eps: float
    route_weights: Tensor | None = None
    early_read: bool = False

    def check(self) -> None:
        _check_norm("add_norm", self)

    def fake(self) -> tuple[Tensor, Tensor]:
        return self.x.new_empty(self.x.shape if self.residual is not None else (0,)), self.x.new_empty(self.x.shape)

    def cpu(self) -> tuple[Tensor, Tensor]:
        x = self.x.contiguous()  # results are contiguous on every device
        residual = self.residual
        if residual is not None and self.route_weights is not None:
            experts = torch.zeros(self.route_weights.shape, dtype=torch.int32, device=x.device)
            residual = routing.sum_routes(residual.contiguous(), self.route_weights, experts, 1, None)
        total = x.new_empty(0) if residual is None else x + residual.contiguous()
        s = x if residual is None else total
        if self.layer:
            return total, F.layer_norm(s, (s.shape[1],), self.weight, self.bias, self.eps)
        f = s.float()
        return total, self.weight * (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + self.eps)).to(s.dtype)


@operator("add_norm_int8", returns="(Tensor, Tensor, Tensor)")
class AddNormInt8Op(NamedTuple):
    """The sum of a layer's output and the residual, and its norm quantized by rows for int8 products.

    s and y are those of `AddNormOp`; ``scale[m] = max_k |f32(y[m, k])| / 127``, or 1 where that is 0, and
    ``q = clamp(rne(f32(y) / scale[m]), -127, 127)``.

    Args:
        x: float16, bfloat16 or float32 ``[M, K]``, K at least 1, of any strides.
        residual: as x, or with ``route_weights`` the results ``[M * k, K]`` of a token's k routes; None: none is added.
        weight: ``[K]`` of x's type.
        bias: ``[K]`` of x's type, only for a LayerNorm; None: none is added.
        layer: whether the norm is a LayerNorm; otherwise it is an RMSNorm.
        eps: added under the root.
        k_padded: columns of q, a multiple of 16, K or more; those past K are 0.
        plain: as x, contiguous, to which y is written, too; None: not wanted.
        route_weights: see `AddNormOp`.

    Returns:
        s ``[M, K]`` of x's type, or an empty tensor ``[0]`` without a residual; q int8 ``[M, k_padded]``; scale float32
        ``[M]``. All are contiguous.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument is not as above.
        ConfigError: an RMSNorm is given a bias.

    Exactness: q and scale are bitwise `qcut.numerics.int8.quantize_per_token_ref` of y of `AddNormOp` on the same
        device, and ``plain`` is y.
    """

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None
    layer: bool
    eps: float
    k_padded: int
    plain: Annotated[Tensor | None, MUTATED] = None
    route_weights: Tensor | None = None
    early_read: bool = False

    @property
    def unquantized(self) -> AddNormOp:
        """The same norm without its quantization."""
        return AddNormOp(*self[:6], self.route_weights, self.early_read)

    def check(self) -> None:
        _check_norm("add_norm_int8", self)
        _check_plain("add_norm_int8", self)
        k = self.x.shape[1]
        if self.k_padded < k or self.k_padded % 16:
            raise ShapeError(f"qcut::add_norm_int8: k_padded is {self.k_padded}; allowed: a multiple of 16 from {k} on")

    def fake(self) -> tuple[Tensor, Tensor, Tensor]:
        total, _ = self.unquantized.fake()
        m = len(self.x)
        q = self.x.new_empty((m, self.k_padded), dtype=torch.int8)
        return total, q, self.x.new_empty(m, dtype=torch.float32)

    def cpu(self) -> tuple[Tensor, Tensor, Tensor]:
        total, y = self.unquantized.cpu()
        if self.plain is not None:
            self.plain.copy_(y)
        return total, *int8.quantize_per_token_ref(y, self.k_padded)


@operator("add_norm_rotated", returns="(Tensor, Tensor, Tensor)")
class AddNormRotatedOp(NamedTuple):
    """The sum of a layer's output and the residual, and its norm rotated for products with codebook or int8 weights.

    s and y are those of `AddNormOp`; y is rotated by `RotateTokensOp` with ``hadamard``, or by `QuantizeRotatedOp`.

    Args:
        x: float16 or bfloat16 ``[M, K]``, of any strides, K a multiple of the group.
        residual: as x, or with ``route_weights`` the results ``[M * k, K]`` of a token's k routes; None: none is added.
        weight: ``[K]`` of x's type.
        bias: ``[K]`` of x's type, only for a LayerNorm; None: none is added.
        layer: whether the norm is a LayerNorm; otherwise it is an RMSNorm.
        eps: added under the root.
        operands: int32 ``[passes, Kp / 32]``, signs of the rotation, as `qcut.numerics.codebook.tokens.operands` makes
            them.
        group_size: columns of a group: 32, 64 or 128, or K or more where K is one of those.
        seeds: one for each pass, at least one.
        out_dtype: int8, or x's type.
        plain: as x, contiguous, to which y is written, too; None: not wanted.
        route_weights: see `AddNormOp`.
        in_rows: return int8 rows ``[M, K]`` as `QuantizeRotatedOp` does, in place of blocks; only with int8, one seed.

    Returns:
        s ``[M, K]`` of x's type, or an empty tensor ``[0]`` without a residual; blocks and scales of y, as
        `RotateTokensOp` returns them, or rows and scales.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument is not as above.
        ConfigError: an RMSNorm is given a bias; another group, no seed, or several in rows.
        QuantizationError: K beyond the exact range of products of int8 rows.

    Exactness: blocks, or rows, and scales are bitwise those operators' of `AddNormOp`'s y on the same device, and
        ``plain`` is y.
    """

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None
    layer: bool
    eps: float
    operands: Tensor
    group_size: int
    seeds: list[int]
    out_dtype: torch.dtype
    plain: Annotated[Tensor | None, MUTATED] = None
    route_weights: Tensor | None = None
    in_rows: bool = False
    early_read: bool = False

    @property
    def unrotated(self) -> AddNormOp:
        """The same norm without its rotation."""
        return AddNormOp(*self[:6], self.route_weights, self.early_read)

    def rotation(self, y: Tensor) -> RotateTokensOp | QuantizeRotatedOp:
        """The rotation of the norm y."""
        return rotation_of_rows(y, *self[6:10], self.in_rows, self.early_read)

    def check(self) -> None:
        _check_norm("add_norm_rotated", self)
        _check_plain("add_norm_rotated", self)
        check_rotated("add_norm_rotated", self.x, *self[6:10], self.in_rows)

    def fake(self) -> tuple[Tensor, Tensor, Tensor]:
        total, y = self.unrotated.fake()
        return total, *self.rotation(y).fake()

    def cpu(self) -> tuple[Tensor, Tensor, Tensor]:
        total, y = self.unrotated.cpu()
        if self.plain is not None:
            self.plain.copy_(y)
        return total, *self.rotation(y).cpu()


def _check_norm(op: str, call: AddNormOp | AddNormInt8Op | AddNormRotatedOp) -> None:
    x, bias = call.x, call.bias
    check_dtype(op, "x", x.dtype, FLOAT_DTYPES)
    if x.dim() != 2 or x.shape[1] < 1:
        raise ShapeError(f"qcut::{op}: x has shape {list(x.shape)}; allowed: [M, K] with K >= 1")
    rows, weights = len(x), call.route_weights
    if weights is not None:
        if call.residual is None or weights.dim() != 2 or len(weights) != rows or weights.shape[1] < 1:
            found = "no residual" if call.residual is None else f"shape {list(weights.shape)}"
            raise ShapeError(f"qcut::{op}: route_weights have {found}; allowed: [{rows}, k] and a residual")
        check_tensor(op, "route_weights", weights, (torch.float32,), weights.shape, x.device)
        rows = weights.numel()
    if call.residual is not None:
        check_tensor(op, "residual", call.residual, (x.dtype,), (rows, x.shape[1]), x.device)
    check_tensor(op, "weight", call.weight, (x.dtype,), x.shape[1:], x.device)
    if bias is not None:
        check_tensor(op, "bias", bias, (x.dtype,), x.shape[1:], x.device)
        if not call.layer:
            raise ConfigError(f"qcut::{op}: an RMS norm has no bias")


def _check_plain(op: str, call: AddNormInt8Op | AddNormRotatedOp) -> None:
    x, plain = call.x, call.plain
    if plain is None:
        return
    check_tensor(op, "plain", plain, (x.dtype,), x.shape, x.device)
    if not plain.is_contiguous():
        raise ShapeError(f"qcut::{op}: plain has strides {list(plain.stride())}; allowed: contiguous")
